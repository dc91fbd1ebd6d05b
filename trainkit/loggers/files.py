"""Text files that survive a kill: whole lines handed to the operating system, replacements by rename."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path

__all__ = ["AppendFile", "complete_lines", "replace_file"]


class AppendFile:
    """A file that only grows by whole lines.

    A line that a kill left without its end is cut off on opening: half a number reads like a number. Each ``append``
    reaches the operating system before it returns, so that a killed process loses none; it is not synced to the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def append(self, lines: str) -> None:
        """Write ``lines``, each with its line end: all of them, or none and an ``OSError``."""
        before = os.fstat(self._file.fileno()).st_size
        left = memoryview(lines.encode())
        try:
            while left:  # a raw write may take only part of it
                left = left[self._file.write(left) or 0 :]
        except OSError:  # a full disk takes what still fits
            self._file.truncate(before)
            raise

    def close(self) -> None:
        """Give the descriptor back; may be called again."""
        self._file.close()

    def __del__(self) -> None:
        # A logger dropped without finalize() is no mistake worth a ResourceWarning: nothing is buffered here.
        if hasattr(self, "_file"):
            self._file.close()


def _cut_torn_line(path: Path, block: int = 65536) -> None:
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - block)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)


def complete_lines(path: Path) -> Iterator[str]:
    """The lines of a file with their ends, but for one that a kill left without its end."""
    with path.open(encoding="utf-8", newline="") as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def replace_file(path: Path, write: Callable[[TextIOWrapper], object]) -> None:
    """Let ``write`` fill a new file next to ``path``, then put it in its place: there is always the old or the new one.

    It is synced before the rename, since some file systems otherwise keep the rename and lose the content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
