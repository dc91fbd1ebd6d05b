"""What trainkit says to the user: notices (facts worth knowing, on standard error) and warnings (something is likely wrong).

Notices go through ``logging.getLogger("trainkit")`` at level INFO; a program that configures logging gets them its way.
Warnings name the line of the user's own code that led to them. Of several processes the main one speaks, so that nothing is
said as often as there are processes. What a stream cannot show is replaced by characters that it can: no message ends a run.
"""

from __future__ import annotations

import codecs
import logging
import sys
import threading
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

__all__ = [
    "TrainkitWarning",
    "counted",
    "each_once",
    "notice",
    "only_printable",
    "printable",
    "speak",
    "speaks",
    "users_frames",
    "warn",
    "with_article",
]

_PLAIN = {"×": "x", "≥": ">=", "≤": "<=", "→": "->", "…": "...", "·": "*", "–": "-", "—": "-", "’": "'", "“": '"', "”": '"'}
_LIBRARIES = ("trainkit", "torch", "contextlib", "functools", "importlib")  # a warning points to none of their lines
_LOGGER = logging.getLogger("trainkit")


class _Voice(threading.local):
    """Of this process; or of a thread, where threads are what others are processes."""

    main: bool | None = None
    prefix = ""
    told: set[str] | None = None  # the notices of the run that is running


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

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), sys.stderr)


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
    if _voice.told is not None:
        if text in _voice.told:
            return
        _voice.told.add(text)
    if logging.getLogger().handlers or any(handler is not _HANDLER for handler in _LOGGER.handlers):
        _LOGGER.removeHandler(_HANDLER)  # the program has logging of its own by now: it must not say everything twice
    else:
        _LOGGER.addHandler(_HANDLER)
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    _LOGGER.info(text)


@contextmanager
def each_once() -> Iterator[None]:
    """Within it the same notice is printed once: loaders are made for the sanity check, for validation, perhaps each epoch."""
    outer, _voice.told = _voice.told, set()
    try:
        yield
    finally:
        _voice.told = outer


def warn(text: str, everywhere: bool = False) -> None:
    """Warn with :class:`TrainkitWarning`.

    Args:
        text: what is likely wrong.
        everywhere: of several processes each warns, with its rank: for what is wrong with one of them.
    """
    if everywhere:
        text = (_voice.prefix or _prefix) + text
    elif not speaks():
        return
    warnings.warn(printable(text, sys.stderr), TrainkitWarning, stacklevel=_outside())


def _outside() -> int:
    """The ``stacklevel``, for the caller, of the innermost line that is neither trainkit's nor torch's.

    Python 3.12 has ``skip_file_prefixes`` for that; this is the same for every Python. Without such a line, as in a thread of
    ours, the caller of what warns.
    """
    frame, level = sys._getframe(1), 1
    while _is_inside(frame):
        if frame.f_back is None:
            return 3
        frame, level = frame.f_back, level + 1
    return level


def _is_inside(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of trainkit, torch and the like."""
    if trace is None:
        return None
    rest = users_frames(trace.tb_next)
    return rest if _is_inside(trace.tb_frame) else TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: "1 epoch", "2 epochs", "2 batches".

    Args:
        number: how many.
        one: the noun, perhaps with its verb, for a single one.
        many: for several; default: ``one`` with "s" or "es".
    """
    return f"{number} {one if number == 1 else many or one + ('es' if one.endswith(('tch', 's', 'sh', 'x')) else 's')}"


def with_article(noun: str) -> str:
    """A noun, or the name of a class, with "a" or "an": "an EarlyStopping", "an SGD", "a list"."""
    spelled = noun[:2].isupper() and noun[:1] in "FHLMNRSX"  # letter by letter: an "ess"
    return f"{'an' if spelled or noun[:1].lower() in tuple('aeio') else 'a'} {noun}"


def printable(text: str, stream: Any) -> str:
    """A text with what a stream cannot show replaced: by similar characters ("->" for an arrow), else by "?".

    Args:
        text: what is to be written.
        stream: such as ``sys.stdout``.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, "trainkit-plain").decode(encoding)
    except (LookupError, UnicodeError):  # an encoding that Python does not know by this name
        return text


@contextmanager
def only_printable() -> Iterator[None]:
    """Within it all that this process prints is :func:`printable`; for a program that is ours, such as a subcommand."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")]
    before = [(stream, stream.errors) for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="trainkit-plain")
    try:
        yield
    finally:
        for stream, errors in before:
            stream.reconfigure(errors=errors)


def _plain(error: UnicodeError) -> tuple[str, int]:
    """The handler ``trainkit-plain`` of :mod:`codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_alike, error.object[error.start : error.end])), error.end


def _alike(character: str) -> str:
    if character in _PLAIN:
        return _PLAIN[character]
    letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()  # an accent falls off
    return letters if letters.isprintable() and letters else "?"


codecs.register_error("trainkit-plain", _plain)
