"""Opening what ought to be an ordinary file, in a folder that anybody may have filled."""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch

from trainkit.errors import CheckpointError, CorruptCheckpointError

__all__ = ["map_file", "not_regular", "read_file", "read_small_file", "regular_file"]

_PIECE = 2**20  # what is read and hashed at a time: small enough to be hashed from the cache
# Linux's, which Python does not name: without it a file that is larger than the memory could not be mapped to be written into.
_NORESERVE = 0x4000 if platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64") else 0


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


def read_file(path: Path, size: int, sha256: str | None, what: str) -> memoryview:
    """Read a whole file, once, and make sure that it is the one that was written.

    Only a regular file is read: a link, a pipe or a device of that name is an error, never followed or waited for.

    Args:
        path: the file.
        size: its size in bytes as it was written. Memory is taken only if the file really has it.
        sha256: its digest, 64 hexadecimal digits; ``None``: another process has verified the file, and only its size is
            looked at.
        what: the file, for the message.

    Returns:
        its bytes, writable and aligned for every dtype; ``tensors_in`` makes views into them.

    Raises:
        CorruptCheckpointError: it is missing, cannot be read, or its size or digest is another.
        CheckpointError: it does not fit into memory.
    """
    with _of_size(path, size, what) as file:
        # not numpy: its empty() asks for huge pages, and putting those together can take seconds
        buffer = torch.empty(size, dtype=torch.uint8).numpy().data
        _read(file, lambda start, end: buffer[start:end], size, sha256, what)
    return buffer


def map_file(path: Path, size: int, sha256: str | None, what: str) -> memoryview:
    """:func:`read_file` for what is larger than the memory may be: the bytes come from the disk when they are used.

    What is written into them is this process's alone, and does not get to the disk. The file must not be changed as long as
    they are used; that it is removed does no harm.
    """
    with _of_size(path, size, what) as file:
        piece = memoryview(bytearray(min(size, _PIECE)))
        if sha256 is not None:
            _read(file, lambda start, end: piece[: end - start], size, sha256, what)
        if not size:
            return piece
        return memoryview(mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE | _NORESERVE))


@contextmanager
def _of_size(path: Path, size: int, what: str) -> Iterator[FileIO]:
    """The file, opened, which has the size that was written; what fails with it within is said of it."""
    try:
        with FileIO(_open_regular(path, what)) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise CorruptCheckpointError(f"{what}: {found:,} bytes, but {size:,} were written")
            yield file
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{what}: missing") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{what}: cannot be read: {error}") from error
    except (MemoryError, RuntimeError) as error:  # the latter is torch's
        raise CheckpointError(f"{what}: {size:,} bytes, for which there is not enough memory") from error


def _read(file: FileIO, into: Callable[[int, int], memoryview], size: int, sha256: str | None, what: str) -> None:
    """Read all of a file, each piece into the memory that there is for it, and look at its digest, if there is one."""
    position, digest = 0, hashlib.sha256()
    while position < size:
        piece = into(position, min(position + _PIECE, size))
        count = file.readinto(piece)
        if not count:
            raise CorruptCheckpointError(f"{what}: ends after {position:,} of {size:,} bytes")
        if sha256 is not None:
            digest.update(piece[:count])
        position += count
    if file.read(1):
        raise CorruptCheckpointError(f"{what}: grows while it is read")
    if sha256 not in (None, digest.hexdigest()):
        raise CorruptCheckpointError(f"{what}: its SHA-256 is {digest.hexdigest()}, but what was written had {sha256}")


def _open_regular(path: Path, what: str) -> int:
    """A descriptor of a regular file. Looked at before and after it is opened: opening a device may set it going."""
    if problem := not_regular(os.lstat(path).st_mode):
        raise CorruptCheckpointError(f"{what}: {problem}")
    flags = os.O_RDONLY
    for name in ("O_BINARY", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY"):
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptCheckpointError(f"{what}: was exchanged for something that is not a regular file")
    return descriptor
