"""Opening what ought to be an ordinary file, in a folder that anybody may have filled."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from trainkit.errors import CorruptCheckpointError

__all__ = ["not_regular", "read_small_file", "regular_file"]


def read_small_file(path: Path, limit: int) -> bytes:
    """The content of an ordinary file of at most ``limit`` bytes; a larger one is not read.

    Raises:
        CorruptCheckpointError: it is missing, cannot be read, is something else than a file, or too large.
    """
    with regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b""
        while size <= limit and len(data) <= limit and (more := file.read(limit + 1 - len(data))):
            data += more
    if max(size, len(data)) > limit:
        raise CorruptCheckpointError(f"{path}: {max(size, len(data)):,} bytes, but at most {limit:,} were expected")
    return data


@contextmanager
def regular_file(path: Path) -> Iterator[FileIO]:
    """An ordinary file to read. A pipe is not waited for, a device not opened, and where a link leads is not read.

    Raises:
        CorruptCheckpointError: it is missing, cannot be read, or is something else.
    """
    flags = os.O_RDONLY
    for name in ("O_BINARY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK"):
        flags |= getattr(os, name, 0)
    try:
        if problem := not_regular(os.lstat(path).st_mode):  # looked at before too: opening a device may set it going
            raise CorruptCheckpointError(f"{path}: {problem}")
        with FileIO(os.open(path, flags)) as file:
            if problem := not_regular(os.fstat(file.fileno()).st_mode):
                raise CorruptCheckpointError(f"{path}: {problem}")
            yield file
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def not_regular(mode: int) -> str | None:
    """What is wrong with a file of this ``st_mode``; None if it is an ordinary one."""
    if stat.S_ISREG(mode):
        return None
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return f"not a regular file, but {kinds.get(stat.S_IFMT(mode), 'a device')}"
