"""DeepSpeed's reads and writes of offloaded tensors, with their failures noticed: DeepSpeed itself looks at none.

Its handle counts the operations that have ended, and not how: where a disk is full, or fails, training would go on with what
happened to be in a buffer. So files get their blocks on the disk before they are written to, which fails if there is no room;
and a buffer that is read into is marked in each block, and the marks have to be gone afterwards.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import OffloadError

__all__ = ["checked", "unreadable", "unwritable"]

_ROOMS = ("optimizer_utils", "partitioned_param_swapper")
_ALIGNED = 4096  # bytes that a read or write is a multiple of: disks have blocks of 512 or of 4096, and DeepSpeed takes 1024
_MARK = 0x7FB5A3C1  # as float32 a NaN that no arithmetic gives


class _Handle:
    """One of DeepSpeed's handles, with checks.

    Args:
        handle: DeepSpeed's.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._reads: list[tuple[Tensor, str]] = []
        self._known: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin to write a tensor into a file.

        Raises:
            OffloadError: there is no room for it.
        """
        if path not in self._known:
            _allocate(path, offset + buffer.numel() * buffer.element_size())
            self._known.add(path)
        return int(self._handle.async_pwrite(buffer, path, offset))

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin to read a tensor from a file.

        Raises:
            OffloadError: there is no such file, or it is too short.
        """
        marked = buffer.view(-1).view(torch.int32)[:: _ALIGNED // 4]
        marked.fill_(_MARK)
        self._reads.append((marked, path))
        result = int(self._handle.async_pread(buffer, path, offset))
        if result != 0:
            raise unreadable(path)
        return result

    def wait(self) -> int:
        """Wait for all that has begun.

        Raises:
            OffloadError: something has not been read.
        """
        count = int(self._handle.wait())
        reads, self._reads = self._reads, []
        for marked, path in reads:
            if bool((marked == _MARK).any()):
                raise unreadable(path)
        return count


def unreadable(path: str) -> OffloadError:
    """What to raise where a file cannot be read."""
    return OffloadError(
        f"{path} could not be read back: somebody has removed it, or the disk that is offloaded to has failed (see dmesg). "
        "Resume from the last checkpoint; if the disk fails, with nvme_path on another one."
    )


def unwritable(path: str, error: OSError, size: int = 0) -> OffloadError:
    """What to raise where ``size`` bytes cannot be written."""
    if error.errno != errno.ENOSPC:
        return OffloadError(f"{path} cannot be written to: {error.strerror}.")
    return OffloadError(
        f"no room for {size / 2**20:.1f} MiB in {os.path.dirname(path)}: the disk that is offloaded to is full. Free some, or "
        "give nvme_path on another disk, and resume from the last checkpoint."
    )


def _allocate(path: str, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that takes blocks when it writes them
            return
        raise unwritable(path, error, size) from error
    finally:
        os.close(descriptor)


@contextmanager
def checked() -> Iterator[None]:
    """Within it DeepSpeed makes handles that check."""
    rooms = [importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}") for name in _ROOMS]
    users = [importlib.import_module("deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper"), rooms[1]]
    aligned, builder = [room.AIO_ALIGNED_BYTES for room in rooms], rooms[1].AsyncIOBuilder

    def handle(**options: Any) -> _Handle:
        return _Handle(builder().load(verbose=False).aio_handle(**options))

    class Builder:
        def load(self, verbose: bool = False) -> Any:
            return SimpleNamespace(aio_handle=handle)

    try:
        for room in rooms:
            room.AIO_ALIGNED_BYTES = _ALIGNED  # type: ignore[attr-defined]
        for room in users:
            room.AsyncIOBuilder = Builder  # type: ignore[attr-defined]
        yield
    finally:
        for room, before in zip(rooms, aligned, strict=True):
            room.AIO_ALIGNED_BYTES = before  # type: ignore[attr-defined]
        for room in users:
            room.AsyncIOBuilder = builder  # type: ignore[attr-defined]
