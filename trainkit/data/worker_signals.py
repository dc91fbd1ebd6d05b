"""Signals and the worker processes of a `DataLoader`: a stop request must not end a worker before the step is finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["HANDLED", "ignore_group_signals", "signals_held_back"]

HANDLED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))
"""The signals that ask a fit to stop."""

_GRACE_PERIOD = 30  # seconds that a worker continues after SIGTERM


def ignore_group_signals() -> None:
    """In a loader's worker process: leave a signal to the whole process group to the main process.

    That one still needs the worker's batches to finish its step, and ends its workers itself. For the case that it does not,
    SIGTERM ends the worker after 30 seconds, and at once when it comes again.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGTERM, _end_later)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # what `signals_held_back` has held back


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Within it these signals wait. Workers that are started in it inherit that, until they have handlers of their own.

    Else a signal to the whole process group would end a worker that has only just been forked.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_later(number: int, frame: FrameType | None) -> None:
    for each in (number, signal.SIGALRM):
        signal.signal(each, signal.SIG_DFL)
    signal.alarm(_GRACE_PERIOD)
