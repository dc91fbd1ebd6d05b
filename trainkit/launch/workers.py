"""The worker processes of one machine: started, watched, signalled, and ended so that nothing of them is left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

__all__ = ["Ended", "Workers", "follow", "signal_name"]

_STEP = 0.05  # seconds between two looks at the processes
_GONE = 0.5  # seconds in which what was killed disappears; who inherits it may let it lie about for longer
_PR_SET_PDEATHSIG = 1
# Reads a line from the agent. If there is none because the agent is no more, whole sessions are killed.
_GUARD = 'read -r line || for group in "$@"; do kill -9 "-$group"; done'
_POSIX = os.name == "posix"


class Ended(NamedTuple):
    """A worker that has ended: its number on this machine, and its exit code, negative for the signal that ended it."""

    local_rank: int
    code: int

    @property
    def exit_code(self) -> int:
        """The code as a shell gives it: 128 + the signal."""
        return self.code if self.code >= 0 else 128 - self.code


class Workers:
    """Processes of one command line, each in a session of its own, so that they can be ended with all that they have started.

    When the process that starts them is killed, nobody would end them: a small guard does then. On Linux the kernel does so
    too, if the guard is gone or not yet there.

    Args:
        command: the program and its arguments.
        environments: the variables of each process, all of them.
        output: takes what they write: it is given the number of each and the process, whose standard output and standard error
            are pipes. Default: they write where this process does.
        follows: they call :func:`follow` themselves. Where this process has threads, a new one that does so before it becomes a
            worker would find their locks as they are at that moment, for good.

    Attributes:
        ended: those that have ended by themselves, in the order in which that was seen.
        killed: the numbers of those that had to be ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        output: Callable[[int, subprocess.Popen[bytes]], None] | None = None,
        *,
        follows: bool = False,
    ) -> None:
        self.ended: list[Ended] = []
        self.killed: list[int] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._all: list[subprocess.Popen[bytes]] = []
        self._guard: subprocess.Popen[bytes] | None = None
        before, pipe = None if follows else _die_with_parent(), None if output is None else subprocess.PIPE
        try:
            for local_rank, variables in enumerate(environments):
                process = subprocess.Popen(
                    command, env=dict(variables), stdout=pipe, stderr=pipe, start_new_session=_POSIX, preexec_fn=before
                )
                self._running[local_rank] = process
                self._all.append(process)
                if output is not None:
                    output(local_rank, process)
            self._guard = _start_guard([process.pid for process in self._all]) if _POSIX else None
        except BaseException:  # no more processes can be had: nobody would know of those that there are
            self.end(0.0)
            raise

    @property
    def pids(self) -> dict[int, int]:
        """The process ids by number."""
        return {local_rank: process.pid for local_rank, process in enumerate(self._all)}

    @property
    def running(self) -> int:
        """How many have not ended."""
        return len(self._running)

    @property
    def failed(self) -> list[Ended]:
        """Those that have ended by themselves with another code than 0."""
        return [one for one in self.ended if one.code != 0]

    def look(self) -> None:
        """Note who has ended. Of several at a time, who was ended by a signal comes first: the others may have followed."""
        now = [Ended(rank, code) for rank, process in self._running.items() if (code := process.poll()) is not None]
        for one in sorted(now, key=lambda one: (one.code >= 0, one.local_rank)):
            del self._running[one.local_rank]
            self.ended.append(one)

    def signal(self, number: int) -> None:
        """Send a signal to each that runs; not to what it has started, which it ends itself."""
        for process in list(self._running.values()):
            process.send_signal(number)

    def freeze(self, number: int) -> None:
        """Send SIGSTOP or SIGCONT to each that runs and to all that it has started."""
        for process in list(self._running.values()):
            _signal_group(process, number)

    def wait(self, until: Callable[[], float]) -> None:
        """Wait for all to end, up to a time on the monotonic clock that is asked for again and again."""
        self.look()
        while self._running and time.monotonic() < until():
            time.sleep(_STEP)
            self.look()

    def end(self, grace: float) -> None:
        """End those that still run: SIGTERM, and SIGKILL after ``grace`` seconds."""
        if self._running:
            last = list(self.ended)
            self.killed += sorted(self._running)
            self.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            self.wait(lambda: deadline)
            for process in self._running.values():
                _signal_group(process, getattr(signal, "SIGKILL", signal.SIGTERM))
            deadline = time.monotonic() + _GONE
            self.wait(lambda: deadline)
            self.ended = last

    def leave(self, sweep: bool) -> None:
        """Be done with them.

        Args:
            sweep: kill what they have left running.
        """
        if _POSIX and sweep:
            for process in self._all:
                _signal_group(process, signal.SIGKILL)
            deadline = time.monotonic() + _GONE
            while time.monotonic() < deadline and any(_signal_group(process, 0) for process in self._all):
                time.sleep(_STEP)
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.communicate(b"done\n")


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Signal a worker and what it has started; whether there was anything to signal."""
    if not _POSIX:
        process.send_signal(number)
        return True
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _start_guard(groups: Sequence[int]) -> subprocess.Popen[bytes] | None:
    command = ["/bin/sh", "-c", _GUARD, "trainkit-guard", *map(str, groups)]
    quiet = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    except OSError:  # a container without a shell
        return None


def follow(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; on Linux.

    Args:
        parent: the process id of the parent; it may have died already.
    """
    if sys.platform.startswith("linux"):
        _follow(ctypes.CDLL(None).prctl, parent)


def _follow(prctl: Callable[[int, int], int], parent: int) -> None:
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _die_with_parent() -> Callable[[], None] | None:
    """What a new process does before it becomes a worker: :func:`follow`."""
    if not sys.platform.startswith("linux"):
        return None
    return partial(_follow, ctypes.CDLL(None).prctl, os.getpid())


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
