"""One of the three runs of ``trainkit verify-resume``, in a process of its own: ``python -m trainkit.cli.resume_child``.

The user's script runs unchanged. Only here, and only in this process, ``Trainer`` is made to work in a folder of its own, to
end after so many updates, to note what it does, and to save, die or resume where it is told to.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
import runpy
import signal
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainkit.callback import Callback
from trainkit.cli.resume_records import fingerprint, loss_of
from trainkit.console import notice
from trainkit.loggers.base import Logger
from trainkit.trainer.trainer import Trainer

__all__ = ["END", "FAILURE", "OUTCOME", "RECORDS", "SAVES", "Task", "main"]

RECORDS, OUTCOME, FAILURE, END, SAVES = "records.jsonl", "outcome.json", "failure.txt", "end", "saves"


@dataclass(frozen=True)
class Task:
    """What a run has to do.

    Attributes:
        folder: where it writes its notes.
        root: where the Trainer writes; a run that resumes has that of the run that was killed.
        total: updates until it ends.
        save_at: save after this update, 0: never.
        kill_at: end itself with SIGKILL after this update, 0: never.
        resume_from: the checkpoint to go on from, "" for none.
        seed: of the generators before the script begins. What a script draws without setting a seed differs from start to
            start, so that of a run that resumes is another.
    """

    folder: str
    root: str
    total: int
    save_at: int
    kill_at: int
    resume_from: str
    seed: int

    def write(self, path: Path) -> None:
        """For :func:`main` to read."""
        path.write_text(json.dumps(asdict(self)), "utf-8")


class _Done(SystemExit):
    """The fit that is verified has ended; what the script does after it is not run."""


class _Recorder(Callback):
    """Notes what each micro-batch was and gave, saves, and ends the process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._entry: dict[str, Any] = {}
        self._file: int | None = None

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        """Save in a folder of this process's own."""
        if stage != "fit":
            return
        self._file = os.open(Path(self.task.folder) / RECORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.redirect(trainer)  # those that the module has brought
        trainer._checkpointing.use_folder(Path(self.task.root) / SAVES)

    def redirect(self, trainer: Trainer) -> None:
        """Let the user's ``ModelCheckpoint`` save in a folder of this process's own."""
        for number, callback in enumerate(trainer.checkpoint_callbacks):
            own: Any = callback
            if not own._default_dirpath:
                own.dirpath = str(Path(self.task.root) / f"checkpoints-{number}")

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if self.task.save_at:
            trainer._checkpointing.safe_points.every_n_steps(self.task.save_at, functools.partial(self._save, trainer))

    def _save(self, trainer: Trainer) -> None:
        if trainer.global_step == self.task.save_at:
            folder = Path(self.task.root) / SAVES
            trainer._checkpointing.save(folder, f"step-{trainer.global_step:08d}", saved_by="verify-resume")

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
        # where no loss is returned, what a step has done is seen in the parameters only
        parameters = None if loss else [digests[0] for digests in fingerprint(dict(module.named_parameters())).values()]
        line = json.dumps({**self._entry, "loss": loss, "parameters": parameters}) + "\n"
        assert self._file is not None
        os.write(self._file, line.encode())
        if self.task.kill_at and trainer.global_step >= self.task.kill_at:
            trainer._checkpointing.wait()  # the save that was begun at an earlier step is complete then
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Harness:
    """``Trainer`` as the task wants it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.ended = False

    def install(self) -> None:
        """Put the harness around ``Trainer`` in this process."""
        make, fit = Trainer.__init__, Trainer.fit
        harness, signature = self, inspect.signature(Trainer.fit)

        @functools.wraps(make)
        def make_one(trainer: Trainer, *args: Any, **given: Any) -> None:
            make(trainer, *args, **harness.arguments(given))

        @functools.wraps(fit)
        def fit_once(trainer: Trainer, *args: Any, **given: Any) -> None:
            if harness.ended:
                raise _Done(0)  # a script that went on all the same
            bound = signature.bind(trainer, *args, **given)
            harness.check(trainer, bound.arguments)
            fit(*bound.args, **bound.kwargs)
            harness.finish(trainer)

        trainer_class: Any = Trainer
        trainer_class.__init__, trainer_class.fit = make_one, fit_once

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The user's arguments of ``Trainer`` with ours put in."""
        most = given.get("max_steps", -1)
        shorter = isinstance(most, int) and 0 <= most < self.task.total
        callbacks = given.get("callbacks")
        own = list(callbacks) if isinstance(callbacks, Iterable) else [] if callbacks is None else [callbacks]
        loggers = given.get("logger")
        for logger in loggers if isinstance(loggers, (list, tuple)) else [loggers]:
            if isinstance(logger, Logger):
                logger._save_dir, logger._folder = Path(self.task.root) / "logs", None
        return {
            **given,
            "default_root_dir": self.task.root,
            "max_steps": most if shorter else self.task.total,
            "callbacks": [_Recorder(self.task), *own],
        }

    def check(self, trainer: Trainer, arguments: dict[str, Any]) -> None:
        """Refuse what cannot be verified; let a run that resumes begin at its checkpoint."""
        path, parts = arguments.get("ckpt_path"), arguments.get("restore")
        if trainer.fast_dev_run:
            self.refuse("Trainer(fast_dev_run=...) ends after a few batches and saves nothing. Leave it out.")
        recorders = [callback for callback in trainer.callbacks if isinstance(callback, _Recorder)]
        if not recorders:
            self.refuse("the Trainer's callbacks were replaced after it was made. Give them to Trainer(callbacks=[...]).")
        recorders[0].redirect(trainer)  # before the checkpoint is read
        from_the_start = path in (None, "auto") or (parts is not None and "loop" not in parts and path not in ("last", "best"))
        if not from_the_start:
            self.refuse(
                f"the script calls fit(ckpt_path={str(path)!r}), and so does not begin at step 0. Leave ckpt_path out, or use "
                "'auto', which begins anew where there is no checkpoint."
            )
        if self.task.resume_from or path == "auto":
            for name in ("restore", "overrides", "strict"):
                arguments.pop(name, None)
            arguments["ckpt_path"] = self.task.resume_from or None

    def finish(self, trainer: Trainer) -> None:
        """Keep the end of the run, and end the script."""
        if trainer.global_step >= self.task.total:
            trainer.save_checkpoint(Path(self.task.folder) / END)
        limits = f"max_epochs={trainer.max_epochs}, max_steps={trainer.max_steps}"
        self.end({"step": trainer.global_step, "limits": limits})

    def refuse(self, reason: str) -> None:
        """End the script: it cannot be verified."""
        self.end({"refused": reason})

    def end(self, outcome: Mapping[str, Any]) -> None:
        """Say how it ended, for the process that started this one."""
        self.ended = True
        (Path(self.task.folder) / OUTCOME).write_text(json.dumps(outcome), "utf-8")
        raise _Done(0)


def main(argv: list[str]) -> int:
    """Run a script under a task.

    Args:
        argv: the file of the task, the script, and its arguments.
    """
    task = Task(**json.loads(Path(argv[0]).read_text("utf-8")))
    script = argv[1]
    torch.manual_seed(task.seed)
    np.random.seed(task.seed)
    random.seed(task.seed)
    _Harness(task).install()
    sys.argv = argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next  # the frames before the script's own say nothing to the user
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        (Path(task.folder) / FAILURE).write_text(text, "utf-8", errors="backslashreplace")
        notice("the script failed.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
