"""``WorkerOutput``: show what workers print on this process's ``sys.stdout`` and ``sys.stderr``, also in a notebook."""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import string
import sys
import threading
import time
from typing import IO, Any

__all__ = ["WorkerOutput", "is_redirected", "shows_progress"]

_CLOSE_TIMEOUT = 10.0  # seconds for the last output to arrive after the workers have ended
_NAMES = ("stdout", "stderr")


def is_redirected() -> bool:
    """Whether ``sys.stdout`` or ``sys.stderr`` is not the file that workers inherit: in a notebook, under capture."""
    return any(_fileno(getattr(sys, name)) != number for number, name in enumerate(_NAMES, 1))


def shows_progress() -> dict[str, bool]:
    """For each stream, whether it can redraw a line: a terminal or a notebook can, a file cannot."""
    streams = {name: getattr(sys, name) for name in _NAMES}
    return {name: _is_notebook(one) or (one is not None and bool(one.isatty())) for name, one in streams.items()}


class WorkerOutput:
    """Copy the output of workers to the streams of this process.

    Output of local rank 0 appears as it is printed, progress bars included. Other ranks, and all ranks with a template, appear
    line by line; of a line that was redrawn, the last state is shown.

    Args:
        template: prefix of each line, as in torch elastic: ``${role_name}``, ``${rank}`` and ``${local_rank}`` are replaced.
    """

    def __init__(self, template: str | None = None) -> None:
        self._template = None if template is None else string.Template(template)
        self._streams = {name: _Stream(getattr(sys, name)) for name in _NAMES}
        self._threads: list[threading.Thread] = []

    def take(self, local_rank: int, rank: int, process: Any) -> None:
        """Copy the pipes ``stdout`` and ``stderr`` of a process until it, and everything it has started, has ended."""
        values = {"role_name": "trainkit", "rank": rank, "local_rank": local_rank}
        prefix = "" if self._template is None else self._template.safe_substitute(values)
        for name, stream in self._streams.items():
            arguments = (getattr(process, name), stream, prefix, local_rank == 0 and not prefix)
            read = contextvars.copy_context().run  # a notebook finds the cell of a thread by its context
            thread = threading.Thread(target=read, args=(_copy, *arguments), name=f"trainkit-{name}-{rank}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wait for the last output, but not long for processes that workers have left running."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for stream in self._streams.values():
            stream.write("")


class _Stream:
    """A stream that several threads write to."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._lock, self._line_is_open = stream, threading.Lock(), False

    def write(self, text: str, whole_lines: bool = False) -> None:
        """Write text; whole lines begin on a new line. Errors are ignored: workers must not fail because of the display."""
        with self._lock, contextlib.suppress(Exception):
            self._stream.write(f"\n{text}" if whole_lines and self._line_is_open else text)
            self._line_is_open = not text.endswith("\n") if text else self._line_is_open
            if not text or not _is_notebook(self._stream):  # a notebook flushes by itself
                self._stream.flush()


def _copy(pipe: IO[bytes], stream: _Stream, prefix: str, live: bool) -> None:
    decoder, line = codecs.getincrementaldecoder("utf-8")("replace"), ""
    with pipe:
        while data := pipe.read1(65536):  # type: ignore[attr-defined]
            *lines, line = (line + decoder.decode(data)).split("\n")
            if live:
                stream.write("\n".join([*lines, line]))
                line = ""
                continue
            line = _last_state(line)
            if lines:
                stream.write("".join(prefix + _last_state(one).rstrip("\r") + "\n" for one in lines), whole_lines=True)
    line += decoder.decode(b"", final=True)
    if line:
        stream.write(line if live else prefix + _last_state(line).rstrip("\r") + "\n", whole_lines=not live)


def _last_state(line: str) -> str:
    """The line without what was redrawn."""
    return line[line.rstrip("\r").rfind("\r") + 1 :]


def _is_notebook(stream: Any) -> bool:
    return "ipykernel" in type(stream).__module__


def _fileno(stream: Any) -> int:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return -1
