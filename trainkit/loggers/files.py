"""Text files that survive a kill: appended by whole lines, or replaced by a rename."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path

__all__ = ["AppendFile", "complete_lines", "replace_file"]


class AppendFile:
    """A file to which whole lines are appended.

    Opening it removes an incomplete last line, which a kill may leave: half a number reads like a number. `append` flushes,
    so that a kill loses no line; it does not sync to the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def append(self, lines: str) -> None:
        """Write `lines`, each with its line end: all of them, or none and raise `OSError`."""
        before = os.fstat(self._file.fileno()).st_size
        left = memoryview(lines.encode())
        try:
            while left:  # a raw write may take only part of it
                left = left[self._file.write(left) or 0 :]
        except OSError:  # a full disk takes what still fits
            self._file.truncate(before)
            raise

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def __del__(self) -> None:
        # Nothing is buffered here: a logger without finalize() needs no ResourceWarning.
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
    """The lines of a file with their ends, without an incomplete last line."""
    with path.open(encoding="utf-8", newline="") as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def replace_file(path: Path, write: Callable[[TextIOWrapper], object]) -> None:
    """Replace a file atomically by one that `write` fills.

    The new file is synced before the rename, because some file systems otherwise keep the rename and lose the content.
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
