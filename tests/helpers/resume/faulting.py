"""What the fault tests share: processes that are watched, signalled and killed."""

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
    """A forked process that is watched from here: `with Child(work) as child`; what is left of it is killed at the end.

    Args:
        work: called in it. What it returns is `answer`.
        name: of its files in the working directory: `<name>.log`, its output, and `<name>.json`, its answer.
        group: give it a process group of its own.
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
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(self.pid, self.pid)

    def _be_the_child(self, work: Callable[[], Any]) -> None:
        if self.group:
            os.setpgid(0, 0)
        self._speak_to_the_log()
        self._answer.write_text(json.dumps(work()))

    def _speak_to_the_log(self) -> None:
        """Output, warnings and signals as in a script, not as pytest has set them."""
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        faulthandler.enable(sys.stderr)
        logging.getLogger().handlers.clear()
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *_: print(f"{category.__name__}: {message}", file=sys.stderr)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch sets its own with the first workers, and only once
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
        """Whether it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    @property
    def code(self) -> int:
        """Its exit code, or minus the signal that ended it; waits for its end."""
        self.until(lambda: self.ended, "its end")
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)

    @property
    def answer(self) -> Any:
        """What its work returned; waits for its end."""
        assert self.code == 0, self.output
        return json.loads(self._answer.read_text())

    @property
    def output(self) -> str:
        """What it has printed until now."""
        return self.log.read_text() if self.log.exists() else ""

    def signal(self, number: int) -> None:
        """Send a signal, to its group if it has one."""
        (os.killpg if self.group else os.kill)(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until the condition holds; returns what it returned.

        Raises:
            AssertionError: the process has ended, or too much time has passed; with all that it has printed.
        """
        end = time.monotonic() + PATIENCE
        while True:
            ended = self.ended  # before the condition: what it did last counts
            if result := condition():
                return result
            if ended:
                raise AssertionError(f"it ended ({self.code}) before {what}:\n{self.output}")
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGABRT)  # prints its stacks
                self.status = os.waitpid(self.pid, 0)[1]
                raise AssertionError(f"{PATIENCE:g} s have passed before {what}:\n{self.output}")
            time.sleep(0.0005)


def tell(value: Any, name: str = "events") -> None:
    """From a child: add a line to a file; it is there even if the process is killed right after this."""
    descriptor = os.open(f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(descriptor, json.dumps(value).encode() + b"\n")
    os.close(descriptor)


def told(name: str = "events") -> list[Any]:
    """What was told until now."""
    path = Path(f"{name}.jsonl")
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def checkpoints(folder: str | Path) -> list[str]:
    """The names of the good checkpoints in a folder, the newest first; none may be bad."""
    found = list_checkpoints(folder)
    assert not [one.problem for one in found if one.problem is not None]
    return [one.path.name for one in found]


def saved_in(folder: str | Path) -> Path:
    """The folder of the checkpoints of the newest run below a folder."""
    return candidates(*folders_below(folder))[0].path.parent


def left_over(folder: str | Path) -> list[str]:
    """What lies in a folder of checkpoints that no user should see there: unfinished saves and removals."""
    return sorted(name for name in os.listdir(folder) if name.startswith(".") and name != LOCK)


def rows(folder: str) -> list[dict[str, Any]]:
    """What the logger of a `resuming.Run` has written, in one file for all its processes."""
    [path] = Path(folder).rglob("metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


class Ballast(Callback):
    """A state that makes each save take a while."""

    def __init__(self, numbers: int = 2_000_000) -> None:
        self.numbers = torch.arange(numbers, dtype=torch.float32)

    def state_dict(self) -> dict[str, Tensor]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["numbers"].equal(self.numbers)


class Rows(Callback):
    """Logs each validation batch, so that a validation that is repeated could write a row twice."""

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        module.log("validated", float(batch[0].mean()), on_step=True)


@dataclass
class Watched(Run):
    """A run whose saves take a while."""

    more: list[Callback] = field(default_factory=list)

    def callbacks(self) -> list[Callback]:
        return [Ballast(), Rows(), *self.more]


class At(Callback):
    """Does something in a hook, the first time that `step` optimizer steps have been made."""

    def __init__(self, hook: str, act: Callable[[], Any], step: int = 0, batch_idx: int | None = None) -> None:
        self.act, self.step, self.batch_idx = act, step, batch_idx
        setattr(self, hook, self._call)

    def _call(self, trainer: Any, *given: Any) -> None:
        here = self.batch_idx is None or given[3] == self.batch_idx  # (module, outputs, batch, batch_idx) of …_batch_end
        if trainer.global_step >= self.step and here and not trainer.sanity_checking:
            self.step = sys.maxsize
            self.act()


def send(number: int) -> Callable[[], None]:
    """Sends a signal to this very process, which Python handles before the call returns."""
    return lambda: os.kill(os.getpid(), number)
