"""SIGTERM, SIGUSR1 and Ctrl-C while a fit is running: the step is finished and saved before it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainkit.console import notice, warn
from trainkit.errors import Preempted

__all__ = ["Signals", "requeue"]

_HANDLED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))
_GRACE = 0.05  # seconds in which the signal that ended a worker reaches this process too


class Signals:
    """Within it signals are noted, not obeyed; the loop looks at :attr:`received` when a step is complete.

    Handlers can be set in the main thread only; elsewhere nothing is changed. Those that were there before are called too
    and are put back at the end. A second signal ends the process at once.

    Args:
        wake: called when a signal comes, to make the loop look.

    Attributes:
        received: the number of the signal that came, if one did.
        working: the loop runs. Before that there is no step to be finished: a signal ends the fit where it is.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.received: int | None = None
        self.working = False
        self._wake = wake
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                before = signal.getsignal(number)
                if before is not None:  # None: set by a program that Python is embedded in
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def follow_workers(self) -> None:
        """Take care that loader workers that the same signal ended do not raise in the middle of a step.

        A signal to the whole process group ends the workers as well, and torch then raises from its handler of SIGCHLD,
        wherever the main process is at that moment. Called when the workers may have been started, which is when torch sets
        that handler.
        """
        number = getattr(signal, "SIGCHLD", None)
        before = None if number is None else signal.getsignal(number)
        if number is None or not self._before or number in self._before or not callable(before):
            return

        def noted(received: int, frame: FrameType | None) -> None:
            threading.Event().wait(_GRACE)  # this process's own signal may be a moment behind
            if self.received is None:
                before(received, frame)

        self._before[number] = before
        signal.signal(number, noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if self.received is not None:
            self._end_now(number)
            return
        self.received = number
        self._wake()
        if number == signal.SIGINT and self.working:
            # not through logging or print: the signal may have come in the middle of one
            os.write(2, b"\ntrainkit: Ctrl-C: finishing the step and saving. Once more ends at once.\n")
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if not self.working:
            raise self.ending("before the first step")

    def _end_now(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def ending(self, when: str) -> BaseException:
        """The exception that ends the fit for the signal that came."""
        if self.received == signal.SIGINT:
            return KeyboardInterrupt()
        name = signal.Signals(self.received or signal.SIGTERM).name
        return Preempted(f"{name} {when}")


def requeue() -> None:
    """Ask SLURM to run this job again; what it says goes to the user."""
    job = os.environ.get("SLURM_JOB_ID")
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if job is None:
        notice("slurm_requeue=True, but this is no SLURM job (SLURM_JOB_ID is not set): nothing is requeued.")
        return
    name = f"{array}_{task}" if array and task else job
    try:
        done = subprocess.run(["scontrol", "requeue", name], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        warn(f"SLURM was not asked to requeue job {name}: {error}. Do it by hand: scontrol requeue {name}")
        return
    if done.returncode:
        warn(f"SLURM refused to requeue job {name}: {done.stderr.strip() or done.stdout.strip()}")
    else:
        notice(f"SLURM will run job {name} again.")
