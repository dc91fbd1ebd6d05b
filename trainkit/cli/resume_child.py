"""One of the three runs of `trainkit verify-resume`, in its own process: `python -m trainkit.cli.resume_child`.

The user's script runs unchanged. In this process `Trainer` is patched: it writes to its own folder, ends after a number of
optimizer steps, records each micro-batch, and saves, kills itself or resumes, depending on the task.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainkit.callback import Callback
from trainkit.cli.resume_records import fingerprint, loss_of
from trainkit.cli.user_script import run_script, script_traceback
from trainkit.console import notice
from trainkit.loggers.base import Logger
from trainkit.trainer.trainer import Trainer

__all__ = ["END", "FAILURE", "OUTCOME", "RECORDS", "SAVES", "Task", "main"]

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
            own: Any = callback
            if not own._default_dirpath:
                own.dirpath = str(Path(self.task.root) / f"checkpoints-{number}")

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
        def patched_init(trainer: Trainer, *args: Any, **given: Any) -> None:
            init(trainer, *args, **self.arguments(given))

        @functools.wraps(fit)
        def patched_fit(trainer: Trainer, *args: Any, **given: Any) -> None:
            if self.ended:
                raise _Done(0)  # the script caught the exception of the first fit
            bound = signature.bind(trainer, *args, **given)
            self.check(trainer, bound.arguments)
            sets_seed = torch.initial_seed() != self.task.seed
            fit(*bound.args, **bound.kwargs)
            if trainer.global_step >= self.task.total:
                trainer.save_checkpoint(Path(self.task.folder) / END)
            limits = f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}"
            self.end({"step": trainer.global_step, "limits": limits, "sets_seed": sets_seed})

        trainer_class: Any = Trainer
        trainer_class.__init__, trainer_class.fit = patched_init, patched_fit

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The user's arguments of `Trainer` with those of the task."""
        max_steps, callbacks = given.get("max_steps", -1), given.get("callbacks")
        shorter = isinstance(max_steps, int) and 0 <= max_steps < self.task.total
        own = list(callbacks) if isinstance(callbacks, Iterable) else [] if callbacks is None else [callbacks]
        loggers = given.get("logger")
        for logger in loggers if isinstance(loggers, (list, tuple)) else [loggers]:
            if isinstance(logger, Logger):
                logger._save_dir, logger._folder = Path(self.task.root) / "logs", None
        return {
            **given,
            "default_root_dir": self.task.root,
            "max_steps": max_steps if shorter else self.task.total,
            "callbacks": [_Recorder(self.task), *own],
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
