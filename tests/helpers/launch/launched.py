"""Start the script of `disturbed.py` like a user, and watch all processes that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.launch.agents import alive
from helpers.patience import PATIENCE
from helpers.resume.disturbed import SCRIPT, Training, wait_until

__all__ = ["Launched"]


class Launched:
    """The running script: `with Launched(training, "-m", "trainkit", "launch", …) as running`.

    Args:
        training: Arguments of the script.
        launcher: Arguments of Python before the script; without any, the script starts its processes itself.

    Attributes:
        folder: Folder of the run.
        process: The process that was started first; it has its own session.
    """

    def __init__(self, training: Training, *launcher: str) -> None:
        self.folder = Path(training.folder).absolute()
        self.folder.mkdir(exist_ok=True)
        self._seen: set[int] = set()
        command = [sys.executable, *launcher, SCRIPT, str(training)]
        with (self.folder / "output").open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def output(self) -> str:
        """The output of all processes."""
        return (self.folder / "output").read_text()

    def pids(self, attempt: int) -> dict[int, int]:
        """Rank → process id of the training processes of a start that have reported their ids so far."""
        found = self.folder.glob(f"pid-{attempt}-*")
        return {int(path.name.split("-")[2]): int(path.read_text()) for path in found}

    def until(self, condition: Callable[[], Any], what: str) -> bool:
        """Wait until the condition holds or the job ends; returns whether the job still runs."""
        wait_until(lambda: condition() or self.process.poll() is not None, lambda: f"no {what}:\n{self.output}")
        self._seen |= _descendants(self.process.pid)
        return self.process.poll() is None

    def code(self, seconds: float = PATIENCE) -> int:
        """Wait until the job ends; returns its exit code. None of the processes that it has started may remain."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.output}"
            self._seen |= _descendants(self.process.pid)
            time.sleep(0.02)
        left = {pid: command for pid in self._seen if alive(pid) and _is_of_a_job(command := _command(pid))}
        assert not left, f"these are left: {left}\n{self.output}"
        return self.process.returncode

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *error: object) -> None:
        left = _descendants(self.process.pid) | self._seen
        self.process.kill()
        for pid in filter(lambda pid: _is_of_a_job(_command(pid)), left):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return "?"


def _is_of_a_job(command: str) -> bool:
    """Whether a command line is that of a process of the job: another process may have got its process id."""
    return SCRIPT in command or "launch/placeholder.py" in command


def _descendants(pid: int) -> set[int]:
    """The process ids of all children of a process, their children, and so on."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found
