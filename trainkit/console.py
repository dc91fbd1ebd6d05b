"""All output: notices (useful facts, on standard error), warnings (something is likely wrong), and `echo`, which prints.

Notices go through `logging.getLogger("trainkit")` at level INFO, so that a program can configure them. Warnings name the line
of the user's code that caused them. Only the main process prints. Characters that a stream cannot show are replaced. A stream
that cannot be written (a full disk, a pipe without a reader, a closed terminal) loses its output with one warning, and ends
nothing.
"""

from __future__ import annotations

import atexit
import builtins
import codecs
import io
import logging
import os
import sys
import threading
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from trainkit.masking import escape_controls, mask_text

__all__ = [
    "OutputStream",
    "TrainkitWarning",
    "each_once",
    "echo",
    "is_library_frame",
    "join_names",
    "notice",
    "only_printable",
    "printable",
    "prints_here",
    "quantity",
    "set_printing",
    "user_frames",
    "warn",
    "with_article",
]

_PLAIN = {"×": "x", "≥": ">=", "≤": "<=", "→": "->", "…": "...", "·": "*", "–": "-", "—": "-", "’": "'", "“": '"', "”": '"'}
_LIBRARIES = ("trainkit", "torch", "contextlib", "functools", "importlib")  # warnings do not name their lines
_LOGGER = logging.getLogger("trainkit")


class _ThreadState(threading.local):
    """What a thread prints, if threads act as ranks."""

    main: bool | None = None
    prefix = ""
    printed: set[str] | None = None  # the notices of the current run


_main = True  # whether this process prints
_prefix = ""  # The prefix of messages that each process prints.
_thread = _ThreadState()
_unwritable: set[str] = set()  # the streams that the user was warned about
_flushes_at_exit = False


class TrainkitWarning(UserWarning):
    """trainkit can continue, but the user most likely did not mean this."""


class _StandardError(logging.Handler):
    """Writes to the current `sys.stderr`, so that redirection and capture work."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            echo(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # Other handlers do the same: a message may have wrong arguments.
            self.handleError(record)


class OutputStream:
    """Standard output or standard error, for a library that writes to a stream itself, such as tqdm and rich.

    A write that fails is lost with one warning; everything else is that of the stream.

    Args:
        stream: `sys.stdout` or `sys.stderr`.
    """

    def __init__(self, stream: Any) -> None:
        self._wrapped = stream
        _flush_at_exit()

    def write(self, text: str) -> int:
        """Write a text; characters that the stream cannot show are replaced."""
        with _surviving(self._wrapped):
            self._wrapped.write(printable(text, self._wrapped))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with _surviving(self._wrapped):
            self._wrapped.flush()

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":  # A copy that is not initialized yet has no stream.
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __eq__(self, other: object) -> bool:  # tqdm clears the bars of the stream that is written to
        return bool(self._wrapped == getattr(other, "_wrapped", other))

    def __hash__(self) -> int:
        return hash(self._wrapped)


_HANDLER = _StandardError()
_HANDLER.setFormatter(logging.Formatter("trainkit: %(message)s"))


def echo(*values: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False) -> None:
    """Python's `print`, for all that trainkit prints: standard output or error that cannot be written ends nothing.

    What cannot be written is lost, with one warning for each of the two streams. Another `file` is the user's own: its errors
    are raised.

    Args:
        values: As of `print`.
        sep: As of `print`.
        end: As of `print`.
        file: As of `print`.
        flush: As of `print`.
    """
    stream = sys.stdout if file is None else file
    if stream is None:  # a program without a console
        return
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    if not isinstance(stream, OutputStream) and all(stream is not one for one in standard):
        builtins.print(*values, sep=sep, end=end, file=stream, flush=flush)
        return
    text = io.StringIO()
    builtins.print(*values, sep=sep, end=end, file=text)
    output = stream if isinstance(stream, OutputStream) else OutputStream(stream)
    output.write(text.getvalue())
    if flush:
        output.flush()


@contextmanager
def _surviving(stream: Any) -> Iterator[None]:
    """In this context a stream that cannot be written is no error; the user is warned once."""
    try:
        yield
    except OSError as error:
        _warn_unwritable(stream, error)
    except ValueError as error:  # A closed stream raises a ValueError too.
        if not getattr(stream, "closed", False):
            raise
        _warn_unwritable(stream, error)


def _warn_unwritable(stream: Any, error: Exception) -> None:
    name = "error" if stream is sys.stderr or stream is sys.__stderr__ else "output"
    if name in _unwritable:
        return
    _unwritable.add(name)
    warn(
        f"standard {name} cannot be written: {error}. The program continues, and what it prints there is lost. Expected: a "
        "disk with free space, a pipe whose reader runs, or an open terminal. Fix: python train.py > train.log 2>&1",
        everywhere=True,
    )


def _flush_at_exit() -> None:
    """Flush standard output and error at exit, before Python does: where that fails, the exit code would be 120."""
    global _flushes_at_exit
    if not _flushes_at_exit:
        _flushes_at_exit = True
        atexit.register(_flush_standard_streams)


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError) as error:
            try:
                _warn_unwritable(stream, error)
            finally:
                with suppress(OSError, ValueError):  # the buffer still has what cannot be written
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                    stream.flush()


def set_printing(main: bool = True, rank: int | None = None, *, thread: bool = False) -> None:
    """Set whether this process prints; called when it has joined other processes, or is single again.

    Args:
        main: It is the main process: notices and warnings of the others are not shown.
        rank: Its rank; `None`: a single process.
        thread: Set it for this thread only.
    """
    global _main, _prefix
    prefix = "" if rank is None else f"[rank {rank}] "
    if thread:
        _thread.main, _thread.prefix = main, prefix
    else:
        _main, _prefix = main, prefix


def prints_here() -> bool:
    """Whether this process prints for all."""
    return _main if _thread.main is None else _thread.main


def notice(text: str, everywhere: bool = False) -> None:
    """Print one line `trainkit: …` on standard error, unless the program has silenced the logger.

    Args:
        text: The line.
        everywhere: See `warn`.
    """
    if everywhere:
        text = (_thread.prefix or _prefix) + text
    elif not prints_here():
        return
    text = escape_controls(mask_text(text))
    if _thread.printed is not None:
        if text in _thread.printed:
            return
        _thread.printed.add(text)
    if logging.getLogger().handlers or any(handler is not _HANDLER for handler in _LOGGER.handlers):
        _LOGGER.removeHandler(_HANDLER)  # the program configures logging: do not print twice
    else:
        _LOGGER.addHandler(_HANDLER)
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    _LOGGER.info(text)


@contextmanager
def each_once() -> Iterator[None]:
    """In this context the same notice is printed once, even if loaders are created repeatedly."""
    outer, _thread.printed = _thread.printed, set()
    try:
        yield
    finally:
        _thread.printed = outer


def warn(text: str, everywhere: bool = False) -> None:
    """Warn with `TrainkitWarning`.

    Args:
        text: What is likely wrong.
        everywhere: Each process warns, with its rank: for a problem of a single rank.
    """
    if everywhere:
        text = (_thread.prefix or _prefix) + text
    elif not prints_here():
        return
    _flush_at_exit()
    with suppress(OSError):  # a `warnings.showwarning` of the program's may write to standard error that is lost
        warnings.warn(printable(escape_controls(mask_text(text)), sys.stderr), TrainkitWarning, stacklevel=_outside())


def _outside() -> int:
    """The `stacklevel`, for the caller, of the innermost line of the user's code.

    Python 3.12 has `skip_file_prefixes` for this. Without such a line, as in a background thread, the caller of `warn`.
    """
    frame, level = sys._getframe(1), 1
    while is_library_frame(frame):
        if frame.f_back is None:
            return 3
        frame, level = frame.f_back, level + 1
    return level


def is_library_frame(frame: FrameType) -> bool:
    """Whether a frame belongs to trainkit, torch and the like, and not to the user's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of trainkit, torch and the like."""
    if trace is None:
        return None
    rest = user_frames(trace.tb_next)
    return rest if is_library_frame(trace.tb_frame) else TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def quantity(number: int, one: str, many: str = "") -> str:
    """A number with its noun: "1 epoch", "2 epochs", "2 batches".

    Args:
        number: The number.
        one: The singular, perhaps with a verb.
        many: The plural; default: `one` with "s" or "es".
    """
    return f"{number:,} {one if number == 1 else many or one + ('es' if one.endswith(('tch', 's', 'sh', 'x')) else 's')}"


def join_names(names: Sequence[str], most: int = 5) -> str:
    """The first names of a list, separated by commas, and `…` if there are more."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def with_article(noun: str) -> str:
    """A noun, or the name of a class, with "a" or "an": "an EarlyStopping", "an SGD", "a list"."""
    spelled = noun[:2].isupper() and noun[:1] in "FHLMNRSX"  # pronounced letter by letter: an "ess"
    return f"{'an' if spelled or noun[:1].lower() in tuple('aeio') else 'a'} {noun}"


def printable(text: str, stream: Any) -> str:
    """A text for a stream such as `sys.stdout`: replaces characters that it cannot show by similar ones or "?"."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        return text.encode(encoding, "trainkit-plain").decode(encoding)
    except (LookupError, UnicodeError):  # an unknown encoding
        return text


@contextmanager
def only_printable() -> Iterator[None]:
    """In this context all output of this process is `printable`; for subcommands."""
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
    """The handler `trainkit-plain` of `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_alike, error.object[error.start : error.end])), error.end


def _alike(character: str) -> str:
    if character in _PLAIN:
        return _PLAIN[character]
    letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()  # removes accents
    return letters if letters.isprintable() and letters else "?"


codecs.register_error("trainkit-plain", _plain)
