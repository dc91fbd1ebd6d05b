"""Reads regular files only, from an untrusted folder: links are not followed, and pipes and devices are not opened."""

from __future__ import annotations

import mmap
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch

from trainkit.checkpoint.checksum import CHECKSUMS, DEFAULT_CHECKSUM
from trainkit.errors import CheckpointError, CorruptCheckpointError

__all__ = ["hash_file", "not_regular", "read_file", "read_small_file", "regular_file"]

_CHUNK_BYTES = 2**20  # bytes read and hashed at a time: small enough to be hashed from the cache
# Python has the name from 3.13 on. Without the flag a file larger than the memory cannot be mapped writable.
_NORESERVE = 0x4000 if platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64") else 0


def not_regular(mode: int) -> str | None:
    """What is wrong with a file of this `st_mode`; None if it is regular."""
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return None if stat.S_ISREG(mode) else f"expected a regular file, found {kinds.get(stat.S_IFMT(mode), 'a device')}"


@contextmanager
def regular_file(path: Path, what: str = "") -> Iterator[FileIO]:
    """Open a regular file, called `what` in messages. `CorruptCheckpointError`: missing, unreadable, not regular."""
    flags = [getattr(os, name, 0) for name in ("O_BINARY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK")]
    what = what or str(path)
    try:
        # This check comes before open(), since opening a device may have side effects.
        if problem := not_regular(os.lstat(path).st_mode):
            raise CorruptCheckpointError(f"{what}: {problem}")
        with FileIO(os.open(path, os.O_RDONLY | sum(flags))) as file:
            if problem := not_regular(os.fstat(file.fileno()).st_mode):
                raise CorruptCheckpointError(f"{what}: was replaced while it was opened: {problem}")
            yield file
    except OSError as error:
        problem = "missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"
        raise CorruptCheckpointError(f"{what}: {problem}") from error


def read_small_file(path: Path, limit: int) -> bytes:
    """The content of a regular file. `CorruptCheckpointError` as above, or for more than `limit` bytes."""
    with regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptCheckpointError(f"{path}: expected at most {limit:,} bytes, found {size:,}")
        return file.read(size)


def hash_file(path: Path, checksum: str, what: str = "") -> tuple[int, str]:
    """The size and the digest of a regular file, which needs little memory. Raises like `regular_file`."""
    hasher, scratch, size = CHECKSUMS[checksum].start(), memoryview(bytearray(_CHUNK_BYTES)), 0
    with regular_file(path, what) as file:
        while read := file.readinto(scratch):
            hasher.update(scratch[:read])
            size += read
    return size, hasher.hexdigest()


def read_file(
    path: Path, size: int, digest: str | None, what: str, mapped: bool = False, *, checksum: str = DEFAULT_CHECKSUM
) -> memoryview:
    """The bytes of a regular file of this size and digest (None: verified elsewhere), writable, aligned for every dtype.

    Mapped bytes are read from the disk when they are used, and changes to them are not written to the disk; the file may be
    removed meanwhile, but must not change. Raises `CorruptCheckpointError` like `regular_file`, and for another size or
    digest; `CheckpointError` if the file does not fit into memory.
    """
    with regular_file(path, what) as file:
        actual_size = os.fstat(file.fileno()).st_size
        if actual_size != size:  # before any memory is allocated
            raise CorruptCheckpointError(f"{what}: expected {size:,} bytes, found {actual_size:,}")
        data = _map(file, size) if mapped and size else None
        try:  # numpy's empty() would request huge pages, which can take seconds.
            data = torch.empty(size, dtype=torch.uint8).numpy().data if data is None else data
        except RuntimeError as error:
            raise CheckpointError(f"{what}: not enough memory for {size:,} bytes") from error
        hasher, scratch = CHECKSUMS[checksum].start(), memoryview(bytearray(_CHUNK_BYTES))
        for start in range(0, 0 if mapped and digest is None else size, _CHUNK_BYTES):
            piece = scratch[: size - start] if mapped else data[start : start + _CHUNK_BYTES]
            if file.readinto(piece) != len(piece):
                raise CorruptCheckpointError(f"{what}: changed while it was read")
            if digest is not None:
                hasher.update(piece)
    if digest not in (None, hasher.hexdigest()):
        title = CHECKSUMS[checksum].title
        raise CorruptCheckpointError(f"{what}: its {title} is {hasher.hexdigest()}, expected {digest}")
    return data


def _map(file: FileIO, size: int) -> memoryview | None:
    """The memory-mapped bytes of an open file; `None` if the file system does not support that."""
    try:
        if _NORESERVE:
            return memoryview(mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE | _NORESERVE))
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))
    except (OSError, MemoryError):
        return None
