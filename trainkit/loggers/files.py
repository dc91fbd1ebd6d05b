"""Text files that survive a kill: appended by whole lines, or replaced by a rename; and what waits for a full disk.

The folder of a run may be from elsewhere, so that a link in it is not followed, and a pipe is not opened.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Generic, TypeVar

from trainkit.checkpoint.regular_file import not_regular
from trainkit.console import counted, warn

__all__ = ["AppendFile", "Waiting", "is_regular", "open_file", "replace_file"]

_WAITING = 16 * 2**20  # bytes

Record = TypeVar("Record")


class AppendFile:
    """A file to which whole lines are appended.

    Opening it removes an incomplete last line, which a kill may leave: half a number reads like a number. `append` flushes,
    so that a kill loses no line; it does not sync to the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = open_file(path, "ab", buffering=0)
        self._whole: int | None = None  # the size up to which the lines are whole, if part of one could not be removed

    def append(self, lines: str) -> None:
        """Write `lines`, each with its line end: all of them, or none and raise `OSError`."""
        if self._whole is not None:
            self._file.truncate(self._whole)
        before = self._whole = os.fstat(self._file.fileno()).st_size
        left = memoryview(lines.encode())
        try:
            while left:  # a raw write may take only part of it
                left = left[self._file.write(left) or 0 :]
        except OSError:  # a full disk takes what still fits
            self._file.truncate(before)
            self._whole = None
            raise
        self._whole = None

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def __del__(self) -> None:
        # Nothing is buffered here: a logger without finalize() needs no ResourceWarning.
        if hasattr(self, "_file"):
            self._file.close()


class Waiting(Generic[Record]):
    """Records that are not in their file yet. After a write that fails, the newest of about 16 MB are kept.

    Args:
        path: The file.

    Attributes:
        records: The records, the oldest first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: deque[Record] = deque()
        self._sizes: deque[int] = deque()
        self._size = 0
        self._dropped = 0

    def add(self, record: Record, size: int) -> None:
        """Add a record of about this number of bytes."""
        self.records.append(record)
        self._sizes.append(size)
        self._size += size

    @contextmanager
    def written(self) -> Iterator[None]:
        """In this context the records are written: all, or none and it raises `OSError`."""
        try:
            yield
        except OSError:
            self._drop_oldest()
            raise
        self.records.clear()
        self._sizes.clear()
        dropped, self._size, self._dropped = self._dropped, 0, 0
        if dropped:
            warn(f"{self.path} is written again, without {counted(dropped, 'record')} that did not fit into memory.")

    def _drop_oldest(self) -> None:
        before = self._dropped
        while self._size > _WAITING and len(self.records) > 1:
            self.records.popleft()
            self._size -= self._sizes.popleft()
            self._dropped += 1
        if self._dropped and not before:
            warn(f"{self.path}: {_WAITING >> 20} MB wait to be written. From now on the oldest records are dropped.")

    def lost(self, error: OSError) -> OSError:
        """The error of a file that cannot be written to its end."""
        number = len(self.records) + self._dropped
        return OSError(error.errno, f"{error.strerror}; {counted(number, 'record is', 'records are')} missing", str(self.path))


def _cut_torn_line(path: Path, block: int = 65536) -> None:
    try:
        file = open_file(path, "r+b")
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


def is_regular(path: Path) -> bool:
    """Whether there is a regular file, and not a link to one."""
    try:
        return not_regular(os.lstat(path).st_mode) is None
    except OSError:
        return False


def open_file(path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    """Open a regular file in a mode of bytes; one that is missing is created in mode "ab".

    Raises:
        OSError: It is a link, a pipe or a device, or it cannot be opened.
    """
    return open(path, mode, buffering, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    with suppress(FileNotFoundError):
        _check_regular(path, os.lstat(path).st_mode)  # before it is opened, which may have side effects
    descriptor = os.open(path, flags | sum(getattr(os, name, 0) for name in ("O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK")), 0o666)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str, mode: int) -> None:
    if problem := not_regular(mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, problem, path)


def replace_file(path: Path, write: Callable[[TextIOWrapper], object]) -> None:
    """Replace a file atomically by one that `write` fills.

    The new file is synced before the rename, because some file systems otherwise keep the rename and lose the content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # what a killed process has left; a link there is not followed
        with temporary.open("x", encoding="utf-8", newline="") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
