"""One of the three runs of `trainkit verify-resume`, in its own process: `python -m trainkit.cli.resume_child`.

The user's script runs unchanged. In this process `Trainer` is patched: it writes to its own folder, ends after a number of
optimizer steps, records each micro-batch, and saves, kills itself or resumes, depending on the task.

It writes a record for each micro-batch, and `trainkit verify-resume` compares the records of two runs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.callback import Callback
from trainkit.cli.user_script import run_script, script_traceback
from trainkit.console import notice
from trainkit.loggers.base import Logger
from trainkit.trainer.trainer import Trainer

__all__ = [
    "END",
    "FAILURE",
    "OUTCOME",
    "RECORDS",
    "SAVES",
    "RunDifference",
    "Task",
    "fingerprint",
    "first_difference",
    "loss_of",
    "main",
    "read_records",
]


RECORDS, OUTCOME, FAILURE, END, SAVES = "records.jsonl", "outcome.json", "failure.txt", "end", "saves"


@dataclass(frozen=True)
class Task:
    """The task of one run.

    Attributes:
        folder: Folder for the records of the run.
        root: Folder for the files of the Trainer; the killed run and the resumed run use the same.
        total: Number of optimizer steps after which the run ends.
        seed: Seeds the generators before the script starts. The seed of the resumed run differs from the others, because
            random numbers that a script draws without a seed differ between its starts.
        save_at: Save after this optimizer step; 0: never.
        kill_at: Kill the process with SIGKILL after this optimizer step; 0: never.
        resume_from: The checkpoint to resume from; "": none.
    """

    folder: str
    root: str
    total: int
    seed: int
    save_at: int = 0
    kill_at: int = 0
    resume_from: str = ""


class _Done(SystemExit):
    """Ends the script after the verified fit; the rest of the script does not run."""


class _Recorder(Callback):
    """Records each micro-batch and its loss, saves, and kills the process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._entry: dict[str, Any] = {}
        self._file: int | None = None

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._file = os.open(Path(self.task.folder) / RECORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.redirect(trainer)  # includes the callbacks of the module
        trainer._save_policy.use_folder(Path(self.task.root) / SAVES)

    def redirect(self, trainer: Trainer) -> None:
        """Let the user's `ModelCheckpoint` save below the root of the task."""
        for number, callback in enumerate(trainer.checkpoint_callbacks):
            checkpoint_callback: Any = callback
            if not checkpoint_callback._default_dirpath:
                checkpoint_callback.dirpath = str(Path(self.task.root) / f"checkpoints-{number}")

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if self.task.save_at:
            trainer._save_policy.safe_points.every_n_steps(self.task.save_at, functools.partial(self._save, trainer))

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step == self.task.save_at:
            folder = Path(self.task.root) / SAVES
            trainer._save_policy.save(folder, f"step-{trainer.global_step:08d}", saved_by="verify-resume")

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._entry = {
            "step": trainer.global_step + 1,
            "epoch": trainer.current_epoch,
            "batch": batch_idx,
            "leaves": fingerprint(batch),
            "rates": [float(group["lr"]) for group in groups if "lr" in group],
        }

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = loss_of(outputs)
        # without a returned loss, only the parameters show what a step did
        parameters = None if loss else [digests[0] for digests in fingerprint(dict(module.named_parameters())).values()]
        line = json.dumps({**self._entry, "loss": loss, "parameters": parameters}) + "\n"
        assert self._file is not None
        os.write(self._file, line.encode())
        if self.task.kill_at and trainer.global_step >= self.task.kill_at:
            trainer._save_policy.wait()  # let the save in the background finish
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _PatchedTrainer:
    """Patches `Trainer` in this process so that it carries out the task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.ended = False

    def install(self) -> None:
        """Replace `Trainer.__init__` and `Trainer.fit`."""
        init, fit = Trainer.__init__, Trainer.fit
        signature = inspect.signature(fit)

        @functools.wraps(init)
        def new_init(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            init(trainer, *args, **self.arguments(kwargs))

        @functools.wraps(fit)
        def new_fit(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if self.ended:
                raise _Done(0)  # the script caught the exception of the first fit
            bound = signature.bind(trainer, *args, **kwargs)
            self.check(trainer, bound.arguments)
            sets_seed = torch.initial_seed() != self.task.seed
            fit(*bound.args, **bound.kwargs)
            if trainer.global_step >= self.task.total:
                trainer.save_checkpoint(Path(self.task.folder) / END)
            limits = f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}"
            self.end({"step": trainer.global_step, "limits": limits, "sets_seed": sets_seed})

        trainer_class: Any = Trainer
        trainer_class.__init__, trainer_class.fit = new_init, new_fit

    def arguments(self, passed: Mapping[str, Any]) -> dict[str, Any]:
        """The user's arguments of `Trainer` with those of the task."""
        max_steps, callbacks = passed.get("max_steps", -1), passed.get("callbacks")
        shorter = isinstance(max_steps, int) and 0 <= max_steps < self.task.total
        user_callbacks = list(callbacks) if isinstance(callbacks, Iterable) else [] if callbacks is None else [callbacks]
        loggers = passed.get("logger")
        for logger in loggers if isinstance(loggers, (list, tuple)) else [loggers]:
            if isinstance(logger, Logger):
                logger._save_dir = Path(self.task.root) / "logs"
                logger._folder = None
        return {
            **passed,
            "default_root_dir": self.task.root,
            "max_steps": max_steps if shorter else self.task.total,
            "restore_best": None,  # the last states are compared
            "callbacks": [_Recorder(self.task), *user_callbacks],
        }

    def check(self, trainer: Trainer, arguments: dict[str, Any]) -> None:
        """Refuse a fit that cannot be verified; let the resumed run start from its checkpoint."""
        path, parts = arguments.get("ckpt_path"), arguments.get("restore")
        if trainer.world_size > 1:
            self.refuse(
                f"it trains on {trainer.world_size} processes, and verify-resume compares one. Set devices=1 for it. To check "
                "several processes, kill and resume the script yourself, and compare the last checkpoints with those of a run "
                "that was not killed: trainkit checkpoint diff A B"
            )
        if trainer.fast_dev_run:
            self.refuse("Trainer(fast_dev_run=...) ends after a few batches and saves nothing. Remove that argument.")
        recorders = [callback for callback in trainer.callbacks if isinstance(callback, _Recorder)]
        if not recorders:
            self.refuse("the Trainer's callbacks were replaced after it was created. Pass them: Trainer(callbacks=[...]).")
        recorders[0].redirect(trainer)  # before the checkpoint is read
        from_the_start = path in (None, "auto") or (parts is not None and "loop" not in parts and path not in ("last", "best"))
        if not from_the_start:
            self.refuse(
                f"the script calls fit(ckpt_path={str(path)!r}), so it does not start at step 0. Remove ckpt_path, or use "
                "ckpt_path='auto', which starts at step 0 if there is no checkpoint."
            )
        if self.task.resume_from or path == "auto":
            for name in ("restore", "overrides", "strict"):
                arguments.pop(name, None)
            arguments["ckpt_path"] = self.task.resume_from or None

    def refuse(self, reason: str) -> None:
        """End the script because it cannot be verified."""
        self.end({"refused": reason})

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Write the outcome for the parent process, and end the script."""
        self.ended = True
        (Path(self.task.folder) / OUTCOME).write_text(json.dumps(outcome), "utf-8")
        raise _Done(0)


def main(argv: list[str]) -> int:
    """Run a task; `argv` contains the file of the task, the script, and the arguments of the script."""
    file, script, *arguments = argv
    task = Task(**json.loads(Path(file).read_text("utf-8")))
    torch.manual_seed(task.seed)
    np.random.seed(task.seed)
    random.seed(task.seed)
    _PatchedTrainer(task).install()
    sys.path.pop(0)  # the working folder, which "python -m" added
    try:
        run_script(script, arguments)
    except Exception as error:
        (Path(task.folder) / FAILURE).write_text(script_traceback(error, script), "utf-8", errors="backslashreplace")
        notice("the script failed.")
        return 1
    return 0


_DEEPEST = 12  # maximum depth of nested containers
_MOST_ROWS = 4096  # larger batches are compared as a whole
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NOT_COMPARED = "not compared"


@dataclasses.dataclass(frozen=True)
class RunDifference:
    """The first difference between two runs.

    Attributes:
        kind: "order", "batch", "rate", "loss" or "length".
        step: The optimizer step, from 1.
        text: The place and the values.
    """

    kind: str
    step: int
    text: str


# ---------------------------------------------------------------------------------------------------------- recording


def fingerprint(batch: Any) -> dict[str, list[str]]:
    """Path of each tensor, array or value in a batch → its digest, then the digest of each sample along dimension 0.

    For a value of an unknown type, there is only the text "not compared" with the type.
    """
    return {path or "batch": _digests(value) for path, value in _leaves(batch, "", 0)}


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    items = None if depth >= _DEEPEST else _items(value)
    if items is None:
        yield path, value
    else:
        for name, item in items:
            yield from _leaves(item, path + name, depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]] | None:
    """The items of a container or an object, each with its relative path; `None` for a value without items."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        plain = all(isinstance(item, _PLAIN) for item in value)
        return None if plain else ((f"[{index}]", item) for index, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name))
    if not isinstance(value, (Tensor, np.ndarray, np.generic, *_PLAIN)) and getattr(value, "__dict__", None):
        return ((f".{name}", item) for name, item in vars(value).items() if not callable(item))
    return None


def _digests(value: Any) -> list[str]:
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # as bytes: numpy does not have all of torch's dtypes
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        return _digests_of_rows(f"{tensor.dtype} {tuple(tensor.shape)}", raw, len(tensor) if tensor.dim() else 0)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        raw = np.frombuffer(value.tobytes(), np.uint8)
        return _digests_of_rows(f"{value.dtype} {value.shape}", raw, len(value) if value.ndim else 0)
    if isinstance(value, (list, tuple, np.generic, *_PLAIN)):
        items = value if isinstance(value, (list, tuple)) else ()
        return [_digest(_text((type(value).__name__, value))), *(_digest(_text(item)) for item in items[:_MOST_ROWS])]
    return [f"{_NOT_COMPARED}: {type(value).__name__}"]


def _digests_of_rows(kind: str, raw: np.ndarray[Any, Any], rows: int) -> list[str]:
    if 0 < rows <= _MOST_ROWS and raw.size:
        row_digests = [_digest(np.ascontiguousarray(row)) for row in raw.reshape(rows, -1)]
        return [_digest(_text((kind, row_digests))), *row_digests]
    return [_digest(_text((kind, _digest(raw))))]


def _text(value: Any) -> bytes:
    return repr(value).encode("utf-8", "backslashreplace")


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def loss_of(outputs: Any) -> dict[str, str] | None:
    """The loss that `training_step` returned: its value, and its dtype and bits; `None` without a loss."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    value = loss.detach().cpu().reshape(1)
    return {"value": repr(value.item()), "bits": f"{value.dtype} {value.view(torch.uint8).numpy().tobytes().hex()}"}


# ---------------------------------------------------------------------------------------------------------- comparing


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a run, without an incomplete last line, which a kill may leave."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1]]


def first_difference(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], *, name: str, killed: bool
) -> RunDifference | None:
    """The first micro-batch in which two runs differ.

    Args:
        first: Records of the uninterrupted run, from the first step of `second`.
        second: Records of the other run.
        name: The name of the other run, such as "the resumed run".
        killed: `second` may end earlier.
    """
    for one, other in zip(first, second, strict=False):
        if (difference := _compare(one, other, name)) is not None:
            return difference
    if len(second) > len(first) or (len(second) < len(first) and not killed):
        step = (first if len(first) > len(second) else second)[min(len(first), len(second))]["step"]
        text = f"the uninterrupted run had {len(first)} micro-batches in the compared steps, {name} had {len(second)}"
        return RunDifference("length", step, f"step {step}: {text}")
    return None


def _compare(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> RunDifference | None:
    step = one["step"]
    place = f"step {step} (epoch {one['epoch']}, batch {one['batch']})"
    for key in ("step", "epoch", "batch"):
        if one[key] != other[key]:
            there = f"step {other['step']} (epoch {other['epoch']}, batch {other['batch']})"
            return RunDifference("order", step, f"{place}: {name} was at {there}")
    if (text := _compare_batches(one["leaves"], other["leaves"])) is not None:
        return RunDifference("batch", step, f"{place}: the batch differs: {text}")
    if one["rates"] != other["rates"]:
        return RunDifference("rate", step, f"{place}: the learning rates are {one['rates']}, in {name} {other['rates']}")
    if one["loss"] != other["loss"]:
        values = [record["loss"]["value"] if record["loss"] else "none" for record in (one, other)]
        return RunDifference("loss", step, f"{place}: the loss is {values[0]}, in {name} {values[1]}")
    if one["parameters"] != other["parameters"]:
        return RunDifference("loss", step, f"{place}: the parameters differ after this step")
    return None


def _compare_batches(one: Mapping[str, list[str]], other: Mapping[str, list[str]]) -> str | None:
    for path in {**one, **other}:
        if path not in one or path not in other:
            return f"only one of the batches has {path}"
        if one[path] == other[path]:
            continue
        here, there = one[path][1:], other[path][1:]
        if len(here) != len(there) or not here:
            return f"{path}" if not (here or there) else f"{path} has {len(here)} and {len(there)} samples"
        differing = [index for index, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]]
        if not differing:
            return f"{path} has a different dtype or shape"
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        return f"{path}, sample {differing[0]}{more} of {len(here)}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
