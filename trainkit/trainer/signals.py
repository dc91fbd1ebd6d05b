"""SIGTERM, SIGUSR1 and Ctrl-C while a fit is running: the step is finished and saved before it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainkit.console import notice, prints_here, warn
from trainkit.data.worker_signals import HANDLED
from trainkit.errors import Preempted

__all__ = ["Signals", "requeue"]

_GRACE = 0.05  # seconds in which the signal that ended a worker reaches this process too
_ONE = 1.0  # seconds within which a signal that comes again is the same one


class Signals:
    """Within it signals are noted, not obeyed; the loop looks at `received` when a step is complete.

    Handlers can be set in the main thread only; elsewhere nothing is changed. Those that were there before are called too
    and are restored at the end. A second signal ends the process at once. One that came to another process only is none in
    this sense: what a batch system sends to all need not reach all at the same time. Nor is one that a launcher passes on to
    a process that has got it already.

    Args:
        wake: called when a signal comes, to make the loop look.

    Attributes:
        received: the number of the signal that came, if one did, be it to another process.
        working: the loop runs. Before that there is no step to be finished: a signal ends the fit where it is.
        twice: Ctrl-C came again: nothing more is saved.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.received: int | None = None
        self.working = False
        self.twice = False
        self._wake = wake
        self._process = os.getpid()
        self._first: tuple[int, float] | None = None  # that came to this very process, and when
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                before = signal.getsignal(number)
                if before is not None:  # None: set by a program that Python is embedded in
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def ignore_worker_exits(self) -> None:
        """Take care that loader workers that the same signal ended do not raise in the middle of a step.

        A signal to the whole process group ends the workers as well, and torch then raises from its handler of SIGCHLD,
        wherever the main process is at that moment. Called when the workers may have been started, which is when torch sets
        that handler. What the workers no longer deliver is noticed where it is waited for.
        """
        number = getattr(signal, "SIGCHLD", None)
        before = None if number is None else signal.getsignal(number)
        if number is None or not self._before or number in self._before or not callable(before):
            return

        def noted(received: int, frame: FrameType | None) -> None:
            try:
                before(received, frame)
            except RuntimeError:
                if not self.soon():
                    raise

        self._before[number] = before
        signal.signal(number, noted)

    def soon(self) -> bool:
        """Whether a signal has come, or comes within a moment: workers may notice one before this process does."""
        if self.received is None:
            threading.Event().wait(_GRACE)
        return self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if os.getpid() != self._process:
            _as_before(number, frame, before)
            return
        if self._first is not None:
            if not self._passed_on(number):
                self._end_now(number)
            return
        self._first = number, time.monotonic()
        if self.received is None:
            self.received = number
            self._wake()
        if number == signal.SIGINT and self.working and prints_here():
            # not through logging or print: the signal may have come in the middle of one
            os.write(2, b"\ntrainkit: Ctrl-C: finishing the step and saving. Once more ends at once.\n")
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if not self.working:
            raise self.ending("before the first step")

    def _passed_on(self, number: int) -> bool:
        """Whether a signal that comes again is the one that came, from the launcher, which has got it too."""
        assert self._first is not None
        first, when = self._first
        return number == first != signal.SIGINT and time.monotonic() < when + _ONE and "TORCHELASTIC_RUN_ID" in os.environ

    def _end_now(self, number: int) -> None:
        if number == signal.SIGINT:
            self.twice = True
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def ending(self, when: str) -> BaseException:
        """The exception that ends the fit for the signal that came."""
        if self.received == signal.SIGINT:
            return KeyboardInterrupt()
        name = signal.Signals(self.received or signal.SIGTERM).name
        return Preempted(f"{name} {when}")


def _as_before(number: int, frame: FrameType | None, before: Any) -> None:
    """In a process that was forked during the fit and has inherited the handler: what the signal did before."""
    if callable(before):
        before(number, frame)
    elif before == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


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
