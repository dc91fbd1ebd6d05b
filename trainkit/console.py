"""What trainkit says to the user: notices (facts worth knowing, on standard error) and warnings (something is likely wrong).

Notices go through ``logging.getLogger("trainkit")`` at level INFO; a program that configures logging gets them its way.
Of several processes the main one speaks, so that nothing is said as often as there are processes.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings

__all__ = ["TrainkitWarning", "notice", "speak", "speaks", "warn"]

_LOGGER = logging.getLogger("trainkit")


class _Voice(threading.local):
    """Of this process; or of a thread, where threads are what others are processes."""

    main: bool | None = None
    prefix = ""


_main = True  # this process speaks for all
_prefix = ""  # of what each process says for itself
_voice = _Voice()


class TrainkitWarning(UserWarning):
    """Something that trainkit can go on with, but that the user most likely did not mean."""


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever ``sys.stderr`` is at the time, so that redirection and capture work."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_HANDLER = _StandardError()
_HANDLER.setFormatter(logging.Formatter("trainkit: %(message)s"))


def speak(main: bool = True, rank: int | None = None, *, thread: bool = False) -> None:
    """Say whether this process speaks for all; called when it has become one of several, or is alone again.

    Args:
        main: it does: notices and warnings of the other processes are not shown.
        rank: its number among several; ``None``: it is alone.
        thread: of this thread.
    """
    global _main, _prefix
    prefix = "" if rank is None else f"[rank {rank}] "
    if thread:
        _voice.main, _voice.prefix = main, prefix
    else:
        _main, _prefix = main, prefix


def speaks() -> bool:
    """Whether this process speaks for all."""
    return _main if _voice.main is None else _voice.main


def notice(text: str, everywhere: bool = False) -> None:
    """Print one line ``trainkit: …`` on standard error, unless the program has silenced the logger.

    Args:
        text: the line.
        everywhere: as of :func:`warn`.
    """
    if everywhere:
        text = (_voice.prefix or _prefix) + text
    elif not speaks():
        return
    if logging.getLogger().handlers or any(handler is not _HANDLER for handler in _LOGGER.handlers):
        _LOGGER.removeHandler(_HANDLER)  # the program has logging of its own by now: it must not say everything twice
    else:
        _LOGGER.addHandler(_HANDLER)
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    _LOGGER.info(text)


def warn(text: str, everywhere: bool = False) -> None:
    """Warn with :class:`TrainkitWarning`.

    Args:
        text: what is likely wrong.
        everywhere: of several processes each warns, with its rank: for what is wrong with one of them.
    """
    if everywhere:
        warnings.warn((_voice.prefix or _prefix) + text, TrainkitWarning, stacklevel=3)
    elif speaks():
        warnings.warn(text, TrainkitWarning, stacklevel=3)
