"""What a run is made of and how it ended, in words and in its folder: `trainer.explain()`, results, the record of a start."""

from __future__ import annotations

import math
import os
import platform
import re
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainkit._version import __version__
from trainkit.console import quantity, warn
from trainkit.distributed.parameter_placement import layer_devices
from trainkit.errors import ConfigurationError, Preempted
from trainkit.launch.starting import folder_at_start, start_command
from trainkit.loggers.run_files import STARTS, append_record, utc_now
from trainkit.masking import mask_arguments, mask_text
from trainkit.module.activation_checkpointing import checkpointing_choice
from trainkit.trainer.best_weights import describe_best
from trainkit.trainer.run_folder import folder_of_fit, list_folders, opens_files
from trainkit.trainer.setup import describe_compilation

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.run import Run
    from trainkit.trainer.trainer import Trainer

__all__ = ["StartRecord", "end_line", "end_reason", "explain", "folders_line", "results_table"]


def explain(trainer: Trainer, module: TrainModule | None) -> str:
    """Who handles which hook, what runs every how many steps, and how the arguments were resolved."""
    lines = [*_where(trainer, module), *_arithmetic(trainer), *_cadence(trainer), *_hooks(trainer, module)]
    return "\n".join(lines)


def _where(trainer: Trainer, module: TrainModule | None) -> list[str]:
    world, placed = trainer.strategy.data_world, () if module is None else layer_devices(module)
    recomputed = _recomputation(trainer)
    compilation = trainer._run.compilation
    compiled = [] if compilation is None else [describe_compilation(compilation, module, trainer.strategy)]
    folders = [type(one).__name__ + (f" in {one.root_dir}" if one.root_dir else "") for one in trainer.loggers]
    return [
        "Where",
        f"  strategy       {trainer.strategy!r}",
        f"  processes      {world.size}" + (f", each with {world.devices} devices" if world.devices > 1 else ""),
        *([f"  devices        {', '.join(map(str, placed))} (placed by hand)"] if placed else []),
        *(f"  {label:<15}{text}" for label, text in trainer.strategy.description().items()),
        f"  precision      {trainer.precision}",
        *([f"  recomputed     {recomputed}"] if recomputed else []),
        *(f"  compile        {what}" for what in compiled),
        f"  seed           {trainer.seed}",
        f"  folder         {trainer._arguments.default_root_dir}",
        f"  loggers        {', '.join(folders) or 'none'}",
        f"  checkpoints    {', '.join(list_folders(trainer._run)) or 'none'}",
    ]


def _recomputation(trainer: Trainer) -> str:
    """Whose activations are recomputed in the backward pass."""
    chosen, done = checkpointing_choice(trainer._arguments.activation_checkpointing), trainer._run.recomputed
    if chosen is None:
        return ""
    return f"activations of {chosen if done is None else f'{done}{chosen.policy_note}'}"


def _arithmetic(trainer: Trainer) -> list[str]:
    batches, samples = trainer.num_training_batches, trainer._arguments.global_batch_size
    window: Any = trainer.accumulate_grad_batches if batches or samples is None else f"as many as {samples} samples need"
    schedule = trainer._run.accumulation_schedule
    if schedule is not None:
        window = ", ".join(f"{schedule.scheduling[epoch]} from epoch {epoch} on" for epoch in schedule.epochs)
    lines = ["Batches", f"  micro-batches per optimizer step  {window}"]
    if batches:
        shown = "unknown" if math.isinf(batches) else str(batches)
        lines.append(f"  micro-batches per epoch           {shown}")
        lines.append(f"  optimizer steps in the whole fit  {_format_number(trainer.estimated_stepping_batches)}")
    limits = {"max_epochs": trainer._arguments.fractional_epochs or trainer.max_epochs, "max_steps": trainer.max_steps}
    lines += [f"  {name:<34}{'no limit' if value == -1 else value}" for name, value in limits.items()]
    return lines


def _cadence(trainer: Trainer) -> list[str]:
    arguments = trainer._arguments
    if arguments.val_every_n_steps is not None:
        validation = _every(arguments.val_every_n_steps, "optimizer step")
    elif isinstance(arguments.val_check_interval, int):
        validation = _every(arguments.val_check_interval, "training batch")
    elif isinstance(arguments.val_check_interval, timedelta):
        validation = f"every {arguments.val_check_interval}"
    elif arguments.val_check_interval == 1.0:
        validation = f"at the end of {_every(arguments.check_val_every_n_epoch or 1, 'epoch')}"
    else:
        validation = f"every {arguments.val_check_interval:g} of an epoch"
    validation += ", and after the last optimizer step" if arguments.validate_at_end else ""
    steps = trainer.log_every_n_steps
    log = f"{_every(steps, 'optimizer step')}, and at the end of an epoch" if steps else "at the end of an epoch"
    lines = ["When", f"  log            {log}", f"  validate       {validation}"]
    for config in trainer.lr_scheduler_configs:
        every = _every(config.frequency, "optimizer step" if config.interval == "step" else "epoch")
        lines.append(f"  scheduler      {type(config.scheduler).__name__} {every}")
    if arguments.save_total_limit is not None:
        lines.append(f"  keep           at most {quantity(arguments.save_total_limit, 'checkpoint')}")
    if (best := describe_best(arguments, trainer.callbacks)) is not None:
        lines.append(f"  restore        at the end of the fit the checkpoint with the {best}")
    return lines


def _every(number: int, noun: str) -> str:
    return f"every {noun}" if number == 1 else f"every {quantity(number, noun)}"


def _format_number(number: int | float) -> str:
    return "unknown" if math.isinf(number) else f"{int(number):,}"


def _hooks(trainer: Trainer, module: TrainModule | None) -> list[str]:
    if module is None:
        return ["Callbacks", *(f"  {type(callback).__name__}" for callback in trainer.callbacks)]
    owners = trainer._hook_owners(module)
    width = max(map(len, owners), default=0) + 2
    return ["Hooks, in the order of the calls", *(f"  {name:<{width}}{' -> '.join(o)}" for name, o in owners.items() if o)]


def results_table(stage: str, results: list[dict[str, float]]) -> str:
    """The metrics of an evaluation, with one column for each loader."""
    names = sorted({name for result in results for name in result})
    width = max([len(stage), *map(len, names)]) + 2
    heads = [f"loader {index}" for index in range(len(results))] if len(results) > 1 else ["value"]
    lines = [f"{stage:<{width}}" + "".join(f"{head:>16}" for head in heads)]
    for name in names:
        lines.append(f"{name:<{width}}" + "".join(f"{_cell(result.get(name)):>16}" for result in results))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}"


def end_line(trainer: Trainer) -> str:
    """How far a fit got and what ended it; printed on one line with `folders_line`."""
    where = f"step {trainer.global_step}, epoch {trainer.current_epoch}"
    return f"fit ended at {where}: {end_reason(trainer)}.{_no_step(trainer)}"


def end_reason(trainer: Trainer) -> str:
    """What ended a fit that no exception has ended."""
    reasons: list[str] = []
    if trainer.fast_dev_run:
        reasons.append("fast_dev_run, which writes nothing")
    elif -1 < trainer.max_steps <= trainer.global_step:
        epochs = trainer._arguments.fractional_epochs
        reasons.append(f"max_steps={trainer.max_steps} reached" + (f" (max_epochs={epochs})" if epochs else ""))
    elif -1 < trainer.max_epochs <= trainer.current_epoch:
        reasons.append(f"max_epochs={trainer.max_epochs} reached")
    if trainer.should_stop and not trainer.fast_dev_run:
        named = [(type(callback).__name__, _reason_of(callback)) for callback in trainer.callbacks]
        requests = [f"{name}: {reason.removesuffix(' Training stops.').rstrip('.')}" for name, reason in named if reason]
        reasons += requests or ([] if reasons else ["trainer.should_stop was set"])
    return "; ".join(reasons) or "training was stopped"


def _reason_of(callback: Callback) -> str | None:
    """The text for which a callback has stopped training; `EarlyStopping.stopping_reason` is not a text."""
    return getattr(callback, "stopping_reason_message", getattr(callback, "stopping_reason", None))


def _no_step(trainer: Trainer) -> str:
    """If the loss scaler has skipped every optimizer step of a fit: that, and what to do about it."""
    progress = trainer._run.progress
    if not progress.overflows or progress.global_step > progress.first_step:
        return ""
    return (
        f" No optimizer step was made: {quantity(progress.overflows, 'step')} "
        f"{'was' if progress.overflows == 1 else 'were'} skipped, because the scaled gradients were infinite or NaN. Check "
        "that the loss is finite. If it is, the loss scale is still adapting: train for more steps, or use "
        f"Trainer(precision={'bf' + trainer.precision!r})."
    )


def folders_line(trainer: Trainer) -> str:
    """Where the checkpoints and the logs of a fit are."""
    logs = list(dict.fromkeys(filter(None, (logger.log_dir for logger in trainer.loggers if opens_files(logger)))))
    saved = trainer._save_policy.folders if trainer.checkpoint_callbacks else []
    places = (("Checkpoints", [_from_here(folder) for folder in saved]), ("logs", [_from_here(log) for log in logs]))
    return "; ".join(f"{what} in {', '.join(where)}" for what, where in places if where)


def _from_here(path: str | os.PathLike[str]) -> str:
    """A path relative to the working directory, if it lies below that."""
    full, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(full, here) if full.startswith(here + os.sep) else full


class StartRecord:
    """The record of how a fit was started and how it ended, in the folder of its run; written by the main process.

    `trainkit report` shows from it when a run was interrupted and resumed, where it ran, and the command to continue. A fit
    without a folder of its own (no logger that writes files, no checkpoints in the default folder, `fast_dev_run`) writes
    nothing. A failed write is a warning, and the fit continues.

    Args:
        run: the fit, restored and with its folders.
        ckpt_path: what `fit` was passed.
        began: when `fit` was called.
    """

    def __init__(self, run: Run, ckpt_path: str | os.PathLike[str] | None, began: str) -> None:
        self._folder = folder_of_fit(run) if run.strategy.world.is_main else None
        self._began = began
        if self._folder is not None:
            self._write(self._folder, {"kind": "start", "time": began, **_position(run), **_facts(run, ckpt_path)})

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Record how the fit ended; may be called again, and then does nothing."""
        folder, self._folder = self._folder, None
        if folder is None or not (folder / STARTS).exists():  # the user has removed the folder
            return
        reason = end_reason(trainer) if error is None else _error_name(error)
        about = {"reason": reason, "finished": error is None}
        self._write(folder, {"kind": "end", "time": utc_now(), "started": self._began, **_position(trainer._run), **about})

    def _write(self, folder: Path, record: dict[str, Any]) -> None:
        try:
            append_record(folder, record)
        except OSError as error:
            self._folder = None
            warn(
                f"The {record['kind']} of the fit could not be recorded in {folder / STARTS}: {error}. Training is not "
                "affected, but trainkit report will not show it. Fix: free some space, or make the folder writable"
            )


def _position(run: Run) -> dict[str, int]:
    return {"step": run.progress.global_step, "epoch": run.progress.current_epoch}


def _facts(run: Run, ckpt_path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """How and where the fit was started. Nothing of the environment variables."""
    strategy, saves = run.strategy, run.save_policy
    assert saves is not None  # each fit has them
    try:
        command = mask_arguments(start_command(strategy.world.size))
    except ConfigurationError:  # a notebook, python -c, a test: no command line that can be run again
        command = None
    return {
        "run_id": saves.run_id,
        "ckpt_path": None if ckpt_path is None else mask_text(os.fspath(ckpt_path)),
        "resumed_from": None if saves.resumed_from is None else str(saves.resumed_from),
        "resumed_saved_at": saves.resumed_saved_at,
        "argv": mask_arguments(sys.argv),
        "command": command,
        "folder": os.path.abspath(folder_at_start() or ""),
        "launcher": strategy.world.launcher,
        "host": socket.gethostname(),
        "processes": strategy.world.size,
        "device": _device(strategy.where, strategy.device),
        "strategy": strategy.name,
        "precision": strategy.precision.name,
        "trainkit": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _device(where: str, device: torch.device) -> str:
    return f"{where} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else where


def _error_name(error: BaseException) -> str:
    """What ended a fit, without the message, which may contain data: SIGTERM, KeyboardInterrupt, ValueError."""
    signal = re.search(r"\bSIG[A-Z0-9]+\b", str(error)) if isinstance(error, Preempted) else None
    return type(error).__name__ if signal is None else signal[0]
