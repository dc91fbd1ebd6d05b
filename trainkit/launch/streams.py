"""``Streams``: what worker processes write, on this process's ``sys.stdout`` and ``sys.stderr``, which need not be files."""

from __future__ import annotations

import codecs
import contextlib
import contextvars
import string
import subprocess
import sys
import threading
import time
from typing import IO, Any

__all__ = ["Streams"]

_CHUNK = 65536
_LAST = 10.0  # seconds that what is written has to get out when the workers have ended
_NAMES = ("stdout", "stderr")


class Streams:
    """Passes on what workers write to their standard output and standard error.

    That of the first worker comes as it is written, progress bars that return to the start of a line included; of the others,
    and of all with a template, come whole lines, and of a line that is written again and again the last state.

    Args:
        template: what each line begins with, as of torch elastic's: ``${role_name}``, ``${rank}`` and ``${local_rank}`` are
            replaced.
    """

    def __init__(self, template: str | None = None) -> None:
        self._template = template
        self._targets = {name: _Target(getattr(sys, name)) for name in _NAMES}
        self._threads: list[threading.Thread] = []

    @staticmethod
    def needed() -> bool:
        """Whether workers would write elsewhere by themselves: in a notebook, and where output is captured."""
        return any(_number(getattr(sys, name)) != number for number, name in enumerate(_NAMES, 1))

    @staticmethod
    def seen() -> dict[str, bool]:
        """By name, whether what is written over itself is seen so: on a terminal and in a notebook, not in a file."""
        streams = {name: getattr(sys, name) for name in _NAMES}
        return {
            name: _of_notebook(stream) or (stream is not None and bool(stream.isatty())) for name, stream in streams.items()
        }

    def take(self, local_rank: int, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Pass on what a process writes, until it and all that it has started have ended."""
        prefix = ""
        if self._template is not None:
            values = {"role_name": "trainkit", "rank": rank, "local_rank": local_rank}
            prefix = string.Template(self._template).safe_substitute(values)
        for name, target in self._targets.items():
            pipe = getattr(process, name)
            live = local_rank == 0 and not prefix
            # a notebook finds the cell that a thread prints for in the context
            work = contextvars.copy_context().run
            arguments = (_pass_on, pipe, target, prefix, live)
            thread = threading.Thread(target=work, args=arguments, name=f"trainkit-{name}-{rank}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wait until all is out; not for long for what the workers may have left running."""
        deadline = time.monotonic() + _LAST
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for target in self._targets.values():
            target.flush()


class _Target:
    """A stream of this process; to be written to from any thread."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._open = False  # the first worker is in the middle of a line

    def chunk(self, text: str) -> None:
        """As it is."""
        with self._lock:
            self._write(text)
            self._open = not text.endswith("\n")

    def lines(self, text: str) -> None:
        """Whole lines, not within one of another process."""
        with self._lock:
            self._write(f"\n{text}" if self._open else text)
            self._open = False

    def flush(self) -> None:
        """Let all be seen."""
        with contextlib.suppress(Exception):
            self._stream.flush()

    def _write(self, text: str) -> None:
        with contextlib.suppress(Exception):  # whatever has become of the stream, the workers must not wait for room
            self._stream.write(text)
            if not _of_notebook(self._stream):  # which sees to that itself, and not for each chunk
                self._stream.flush()


def _pass_on(pipe: IO[bytes], target: _Target, prefix: str, live: bool) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    line = ""
    with pipe:
        while data := pipe.read1(_CHUNK):  # type: ignore[attr-defined]
            text = decoder.decode(data)
            if live and text:
                target.chunk(text)
                continue
            *whole, line = (line + text).split("\n")
            line = _last_state(line, unfinished=True)
            if whole:
                target.lines("".join(f"{prefix}{_last_state(one)}\n" for one in whole))
    rest = line + decoder.decode(b"", final=True)
    if rest and live:
        target.chunk(rest)
    elif rest:
        target.lines(f"{prefix}{_last_state(rest)}\n")


def _last_state(line: str, unfinished: bool = False) -> str:
    """What a line shows that was written over itself."""
    tail = line.rstrip("\r")
    shown = tail.rpartition("\r")[2]
    return shown + line[len(tail) :] if unfinished else shown


def _of_notebook(stream: Any) -> bool:
    return "ipykernel" in type(stream).__module__


def _number(stream: Any) -> int:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return -1
