"""Child processes that a test watches, signals and kills, and callbacks for their runs."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.patience import PATIENCE
from helpers.resume.resuming import Run, fork
from torch import Tensor

from trainkit import Callback
from trainkit.checkpoint.folder import candidates, folders_below, list_checkpoints
from trainkit.checkpoint.lock import LOCK

__all__ = ["At", "Child", "Watched", "checkpoints", "left_over", "rows", "saved_in", "send", "tell", "told"]


class Child:
    """A forked process: `with Child(work) as child`. If it still runs at the end of the `with` block, it is killed.

    Args:
        work: Function to call in the process; `answer` is what it returns.
        name: Name of its files in the working directory: `<name>.log` with its output, `<name>.json` with its answer.
        group: Give it its own process group.
    """

    def __init__(self, work: Callable[[], Any], name: str = "child", *, group: bool = False) -> None:
        self.log, self._answer = Path(f"{name}.log").absolute(), Path(f"{name}.json").absolute()
        self._answer.unlink(missing_ok=True)
        self.group = group
        self.status: int | None = None
        self.pid = fork(lambda: self._be_the_child(work))
        if group:
            self._in_its_group()

    def _in_its_group(self) -> None:
        with contextlib.suppress(OSError):  # it has done this itself, or has exited
            os.setpgid(self.pid, self.pid)

    def _be_the_child(self, work: Callable[[], Any]) -> None:
        if self.group:
            os.setpgid(0, 0)
        self._speak_to_the_log()
        self._answer.write_text(json.dumps(work()))

    def _speak_to_the_log(self) -> None:
        """Set output, warnings and signal handlers like in a script, instead of those of pytest."""
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        faulthandler.enable(sys.stderr)
        logging.getLogger().handlers.clear()
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *_: print(f"{category.__name__}: {message}", file=sys.stderr)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch sets its handler with the first workers, only once
        torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = False

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        if self.status is None:
            self.kill()
        if self.group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        """Whether the process has exited."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    @property
    def code(self) -> int:
        """Wait until the process exits; returns its exit code, or the negative number of the signal that ended it."""
        self.until(lambda: self.ended, "its end")
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)

    @property
    def answer(self) -> Any:
        """Wait until the process exits, which must succeed; returns what `work` returned."""
        assert self.code == 0, self.output
        return json.loads(self._answer.read_text())

    @property
    def output(self) -> str:
        """The output of the process so far."""
        return self.log.read_text() if self.log.exists() else ""

    def signal(self, number: int) -> None:
        """Send a signal to the process, or to its process group if it has its own."""
        (os.killpg if self.group else os.kill)(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until the condition holds; returns what it returned.

        Raises:
            AssertionError: The process has exited, or the time is over; the message has the output of the process.
        """
        end = time.monotonic() + PATIENCE
        while True:
            ended = self.ended  # checked before the condition, which may become true right before the exit
            if result := condition():
                return result
            if ended:
                raise AssertionError(f"it ended ({self.code}) before {what}:\n{self.output}")
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGABRT)  # makes it print its stacks
                self.status = os.waitpid(self.pid, 0)[1]
                raise AssertionError(f"{PATIENCE:g} s have passed before {what}:\n{self.output}")
            time.sleep(0.0005)


def tell(value: Any, name: str = "events") -> None:
    """In a child process: append a value as a line to a file, where it survives a kill of the process."""
    descriptor = os.open(f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(descriptor, json.dumps(value).encode() + b"\n")
    os.close(descriptor)


def told(name: str = "events") -> list[Any]:
    """All values that `tell` has written to a file so far."""
    path = Path(f"{name}.jsonl")
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def checkpoints(folder: str | Path) -> list[str]:
    """The names of the checkpoints in a folder, the newest first; all must be valid."""
    found = list_checkpoints(folder)
    assert not [one.problem for one in found if one.problem is not None]
    return [one.path.name for one in found]


def saved_in(folder: str | Path) -> Path:
    """The checkpoint folder of the newest run below a folder."""
    return candidates(*folders_below(folder))[0].path.parent


def left_over(folder: str | Path) -> list[str]:
    """Names of unfinished saves and removals in a checkpoint folder."""
    return sorted(name for name in os.listdir(folder) if name.startswith(".") and name != LOCK)


def rows(folder: str) -> list[dict[str, Any]]:
    """What the logger of a `resuming.Run` has written; all starts must have written to one file."""
    [path] = Path(folder).rglob("metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


class Ballast(Callback):
    """A callback with a large state, so that each save takes a while."""

    def __init__(self, numbers: int = 2_000_000) -> None:
        self.numbers = torch.arange(numbers, dtype=torch.float32)

    def state_dict(self) -> dict[str, Tensor]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["numbers"].equal(self.numbers)


class Rows(Callback):
    """Logs a row for each validation batch: a repeated validation must not log it twice."""

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        module.log("validated", float(batch[0].mean()), on_step=True)


@dataclass
class Watched(Run):
    """A `Run` whose saves take a while, with more callbacks."""

    more: list[Callback] = field(default_factory=list)

    def callbacks(self) -> list[Callback]:
        return [Ballast(), Rows(), *self.more]


class At(Callback):
    """Calls `act` once in a hook, as soon as `step` optimizer steps are done, and only for batch `batch_idx` if given."""

    def __init__(self, hook: str, act: Callable[[], Any], step: int = 0, batch_idx: int | None = None) -> None:
        self.act, self.step, self.batch_idx = act, step, batch_idx
        setattr(self, hook, self._call)

    def _call(self, trainer: Any, *given: Any) -> None:
        here = self.batch_idx is None or given[3] == self.batch_idx  # (module, outputs, batch, batch_idx) of …_batch_end
        if trainer.global_step >= self.step and here and not trainer.sanity_checking:
            self.step = sys.maxsize
            self.act()


def send(number: int) -> Callable[[], None]:
    """Returns a function that sends a signal to its own process; Python runs the handler before the function returns."""
    return lambda: os.kill(os.getpid(), number)
