"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C while a fit is running: the step is finished and saved before it ends."""

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
from trainkit.data.loader_workers import HANDLED
from trainkit.distributed.failure_handling import write_stderr
from trainkit.errors import Preempted

__all__ = ["Signals", "requeue"]

_HANGUP = getattr(signal, "SIGHUP", None)
_GRACE = 0.05  # seconds in which the signal that ended a worker reaches this process too
_REPEATED = 1.0  # seconds within which a launcher may forward a signal that this process has received already


class Signals:
    """Within it signals are only recorded; the loop checks `received` when a step is complete.

    Handlers can be set in the main thread only; in other threads nothing is changed. The handlers from before are called too,
    and are restored at the end. A second signal to this process ends it immediately. A signal that came to another process is
    not counted as the first: a batch system may not reach all processes at the same time. Nor is a signal counted twice if a
    launcher forwards it to a process that has already received it. SIGHUP never counts as the first or the second: when a
    terminal closes, the shell and the kernel both send it, and the system may send SIGTERM too.

    Args:
        notify: called when a signal comes, so that the loop checks.

    Attributes:
        received: the number of the signal that came to this process or, once the ranks have agreed, to another one.
        working: the loop runs. Before that there is no step to finish, and a signal ends the fit immediately.
        twice: Ctrl-C was pressed twice: nothing more is saved.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.received: int | None = None
        self.working = False
        self.twice = False
        self._notify = notify
        self._process = os.getpid()
        self._first: tuple[int, float] | None = None  # number and time of the first one that came to this process
        self._hung_up = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                before = signal.getsignal(number)
                if number == _HANGUP and before == signal.SIG_IGN:  # by nohup: the run outlives its terminal
                    continue
                if before is not None:  # None: set by a program that Python is embedded in
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def ignore_worker_exits(self) -> None:
        """Keep the exit of DataLoader workers, which the same signal may end, from raising in the middle of a step.

        A signal to the whole process group ends the workers as well, and torch then raises from its handler of SIGCHLD,
        wherever the main process is at that moment. Call this after workers may have been started, which is when torch sets
        that handler. Batches that are missing then raise where the loop waits for them.
        """
        number = getattr(signal, "SIGCHLD", None)
        before = None if number is None else signal.getsignal(number)
        if number is None or not self._before or number in self._before or not callable(before):
            return

        def on_worker_exit(received: int, frame: FrameType | None) -> None:
            try:
                before(received, frame)
            except RuntimeError:
                if not self.received_soon():
                    raise

        self._before[number] = before
        signal.signal(number, on_worker_exit)

    def received_soon(self) -> bool:
        """Whether a signal has come or comes within a moment: workers may receive one before this process does."""
        if self.received is None:
            threading.Event().wait(_GRACE)
        return self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if os.getpid() != self._process:
            _handle_in_child(number, frame, before)
            return
        if number == _HANGUP:
            if self._hung_up or self._first is not None:
                return
            self._hung_up = True
        elif self._first is not None:
            if not self._is_forwarded(number):
                self._end_now(number)
            return
        else:
            self._first = number, time.monotonic()
        if self.received is None:
            self.received = number
            self._notify()
        if number == signal.SIGINT and self.working and prints_here():
            # not through logging or print: the signal may have come in the middle of one
            write_stderr("\ntrainkit: Ctrl-C: finishing the step and saving. Press it again to exit immediately.\n")
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if not self.working:
            raise self.ending("before the first step")

    def _is_forwarded(self, number: int) -> bool:
        """Whether a repeated signal is the first one, forwarded by a launcher that has received it too."""
        assert self._first is not None
        first, when = self._first
        return number == first != signal.SIGINT and time.monotonic() < when + _REPEATED and "TORCHELASTIC_RUN_ID" in os.environ

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


def _handle_in_child(number: int, frame: FrameType | None, before: Any) -> None:
    """In a process that was forked during the fit and has inherited the handler, handle a signal as before the fit."""
    if callable(before):
        before(number, frame)
    elif before == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def requeue() -> None:
    """Ask SLURM to run this job again, and print its answer."""
    job = os.environ.get("SLURM_JOB_ID")
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if job is None:
        notice("slurm_requeue=True, but this is not a SLURM job (SLURM_JOB_ID is not set): nothing is requeued.")
        return
    name = f"{array}_{task}" if array and task else job
    try:
        done = subprocess.run(["scontrol", "requeue", name], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        warn(f"scontrol could not ask SLURM to requeue job {name}: {error}. Do it by hand: scontrol requeue {name}")
        return
    if done.returncode:
        warn(f"SLURM refused to requeue job {name}: {done.stderr.strip() or done.stdout.strip()}")
    else:
        notice(f"SLURM will run job {name} again.")
