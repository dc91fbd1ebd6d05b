"""Signals in the worker processes of a `DataLoader`: a stop request must not end a worker before the step is finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["HANDLED", "ignore_group_signals", "signals_held_back"]

HANDLED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name))
"""The signals that request a fit to stop."""

_GRACE_PERIOD = 30  # seconds that a worker continues after SIGTERM


def ignore_group_signals() -> None:
    """In a worker process of a loader: ignore a signal to the whole process group, which the main process handles.

    The main process still needs the worker's batches to finish its step, and then ends its workers. If it does not, SIGTERM
    ends the worker after 30 seconds, and a second SIGTERM ends it immediately.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGTERM, _end_later)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # blocked by `signals_held_back`


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block these signals. Workers that are started inside inherit that until they install handlers.

    Otherwise a signal to the whole process group would end a worker that was forked a moment ago.
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
