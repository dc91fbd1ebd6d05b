"""`WorkerOutput`: show the output of workers on this process's `sys.stdout` and `sys.stderr`, also in a notebook."""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import io
import re
import string
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["WorkerOutput", "is_redirected", "shows_progress"]

_CLOSE_TIMEOUT = 10.0  # seconds for the last output to arrive after the workers have ended
_NAMES = ("stdout", "stderr")
_REDRAWN = re.compile(r"^.*\r(?=[^\r\n])", re.MULTILINE)  # the earlier states of a line


def is_redirected() -> bool:
    """Whether `sys.stdout` or `sys.stderr` is not the file that workers inherit: in a notebook, under capture."""
    return sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__


def shows_progress() -> dict[str, bool]:
    """For each stream, whether it can redraw a line, as a terminal and a notebook can, but a file cannot."""
    streams = {name: getattr(sys, name) for name in _NAMES}
    return {name: _is_notebook(one) or (one is not None and bool(one.isatty())) for name, one in streams.items()}


class WorkerOutput:
    """Copy the output of workers to the streams of this process.

    Output of local rank 0 appears as it is printed, progress bars included. Other ranks, and all ranks with a template, appear
    line by line; of a line that was redrawn, the last state is shown.

    Args:
        template: prefix of each line, as in torch elastic: `${role_name}`, `${rank}` and `${local_rank}` are replaced.
    """

    def __init__(self, template: str | None = None) -> None:
        self._template = string.Template(template or "")
        self._streams = {name: _Stream(getattr(sys, name)) for name in _NAMES}
        self._threads: list[threading.Thread] = []

    def take(self, local_rank: int, rank: int, process: Any) -> None:
        """Copy the pipes `stdout` and `stderr` of a process until it, and everything it has started, has ended."""
        prefix = self._template.safe_substitute(role_name="trainkit", rank=rank, local_rank=local_rank)
        for name, stream in self._streams.items():
            read = contextvars.copy_context().run  # a notebook finds the cell of a thread by its context
            texts = _read(getattr(process, name))
            copy = (stream.copy, texts) if local_rank == 0 and not prefix else (stream.copy, _by_lines(texts, prefix), True)
            thread = threading.Thread(target=read, args=copy, name=f"trainkit-{name}-{rank}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wait for the last output, but not long for processes that workers have left running."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Stream:
    """A stream that several threads write to."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._lock, self._line_is_open = stream, threading.Lock(), False

    def copy(self, texts: Iterable[str], whole_lines: bool = False) -> None:
        """Write texts; whole lines begin on a new line. Errors are ignored: workers must not fail because of the display."""
        for text in texts:
            with self._lock, contextlib.suppress(Exception):
                self._stream.write(f"\n{text}" if whole_lines and self._line_is_open else text)
                self._line_is_open = not text.endswith("\n")
                if not _is_notebook(self._stream):  # which flushes by itself
                    self._stream.flush()


def _read(pipe: io.BufferedReader) -> Iterator[str]:
    with pipe:
        yield from codecs.iterdecode(iter(lambda: pipe.read1(65536), b""), "utf-8", "replace")


def _by_lines(texts: Iterable[str], prefix: str) -> Iterator[str]:
    rest = ""
    for text in texts:
        *lines, rest = _REDRAWN.sub("", rest + text).split("\n")
        if lines:
            yield "".join(prefix + line.rstrip("\r") + "\n" for line in lines)
    if rest:
        yield prefix + rest.rstrip("\r") + "\n"


def _is_notebook(stream: Any) -> bool:
    return "ipykernel" in type(stream).__module__
