"""What a run is made of, in words: `trainer.explain()`, and the table of an evaluation's results."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainkit.console import counted
from trainkit.distributed.parameter_placement import layer_devices
from trainkit.module.activation_checkpointing import checkpointing_choice
from trainkit.trainer.compiled_steps import described_compilation
from trainkit.trainer.run_folder import opens_files, shown_folders

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["end_line", "end_reason", "explain", "folders_line", "results_table"]


def explain(trainer: Trainer, module: TrainModule | None) -> str:
    """Who handles which hook, what runs every how many steps, and how the arguments were resolved."""
    lines = [*_where(trainer, module), *_arithmetic(trainer), *_cadence(trainer), *_hooks(trainer, module)]
    return "\n".join(lines)


def _where(trainer: Trainer, module: TrainModule | None) -> list[str]:
    world, placed = trainer.strategy.data_world, () if module is None else layer_devices(module)
    recomputed = _recomputed(trainer)
    compilation = trainer._run.compilation
    compiled = [] if compilation is None else [described_compilation(compilation, module, trainer.strategy)]
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
        f"  checkpoints    {', '.join(shown_folders(trainer._run)) or 'none'}",
    ]


def _recomputed(trainer: Trainer) -> str:
    """Whose activations are recomputed in the backward pass."""
    chosen, done = checkpointing_choice(trainer._arguments.activation_checkpointing), trainer._run.recomputed
    if chosen is None:
        return ""
    return f"activations of {chosen if done is None else f'{done}{chosen.kept}'}"


def _arithmetic(trainer: Trainer) -> list[str]:
    batches, wanted = trainer.num_training_batches, trainer._arguments.global_batch_size
    window: Any = trainer.accumulate_grad_batches if batches or wanted is None else f"as many as {wanted} samples need"
    schedule = trainer._run.accumulation_schedule
    if schedule is not None:
        window = ", ".join(f"{schedule.scheduling[epoch]} from epoch {epoch} on" for epoch in schedule.epochs)
    lines = ["Batches", f"  micro-batches per optimizer step  {window}"]
    if batches:
        shown = "unknown" if math.isinf(batches) else str(batches)
        lines.append(f"  micro-batches per epoch           {shown}")
        lines.append(f"  optimizer steps in the whole fit  {_shown(trainer.estimated_stepping_batches)}")
    limits = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
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
    steps = trainer.log_every_n_steps
    log = f"{_every(steps, 'optimizer step')}, and at the end of an epoch" if steps else "at the end of an epoch"
    lines = ["When", f"  log            {log}", f"  validate       {validation}"]
    for config in trainer.lr_scheduler_configs:
        every = _every(config.frequency, "optimizer step" if config.interval == "step" else "epoch")
        lines.append(f"  scheduler      {type(config.scheduler).__name__} {every}")
    return lines


def _every(number: int, noun: str) -> str:
    return f"every {noun}" if number == 1 else f"every {counted(number, noun)}"


def _shown(number: int | float) -> str:
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
        reasons.append(f"max_steps={trainer.max_steps} reached")
    elif -1 < trainer.max_epochs <= trainer.current_epoch:
        reasons.append(f"max_epochs={trainer.max_epochs} reached")
    if trainer.should_stop and not trainer.fast_dev_run:
        named = [(type(callback).__name__, _reason_of(callback)) for callback in trainer.callbacks]
        asked = [f"{name}: {reason.removesuffix(' Training stops.').rstrip('.')}" for name, reason in named if reason]
        reasons += asked or ([] if reasons else ["trainer.should_stop was set"])
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
        f" No optimizer step was made: {counted(progress.overflows, 'step')} "
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
