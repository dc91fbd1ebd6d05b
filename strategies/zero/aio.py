"""Checks for DeepSpeed's reads and writes of offloaded tensors, because DeepSpeed ignores their failures.

DeepSpeed's handle counts completed operations, even failed ones. If a disk was full or failed, training would continue with
whatever data a buffer held. So the handle here allocates the disk blocks of a file before DeepSpeed writes to it, which fails
if the disk is full. Before a read it writes a marker into each block of the buffer; the read must overwrite all markers.
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

_MODULES = ("optimizer_utils", "partitioned_param_swapper")
_ALIGNED = 4096  # bytes; sizes of reads and writes are multiples of it. Disks have blocks of 512 or 4096; DeepSpeed uses 1024
_MARK = 0x7FB5A3C1  # as float32 a NaN that no arithmetic returns


class _Handle:
    """Wraps a handle of DeepSpeed for asynchronous reads and writes, and checks its operations.

    Args:
        handle: DeepSpeed's handle.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._reads: list[tuple[Tensor, str]] = []
        self._known: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        """Start to write a tensor to a file.

        Raises:
            OffloadError: the disk is full.
        """
        if path not in self._known:
            _allocate(path, offset + buffer.numel() * buffer.element_size())
            self._known.add(path)
        return int(self._handle.async_pwrite(buffer, path, offset))

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Start to read a tensor from a file.

        Raises:
            OffloadError: the file does not exist, or is too short.
        """
        marked = buffer.view(-1).view(torch.int32)[:: _ALIGNED // 4]
        marked.fill_(_MARK)
        self._reads.append((marked, path))
        result = int(self._handle.async_pread(buffer, path, offset))
        if result != 0:
            raise unreadable(path)
        return result

    def wait(self) -> int:
        """Wait for all operations that were started.

        Raises:
            OffloadError: a read failed.
        """
        count = int(self._handle.wait())
        reads, self._reads = self._reads, []
        for marked, path in reads:
            if bool((marked == _MARK).any()):
                raise unreadable(path)
        return count


def unreadable(path: str) -> OffloadError:
    """Returns the error for a file that cannot be read."""
    return OffloadError(
        f"{path} cannot be read: the file was removed, or the disk of nvme_path failed (see dmesg). "
        "Resume from the last checkpoint: fit(..., ckpt_path='last'). If the disk failed, use nvme_path on another disk."
    )


def unwritable(path: str, error: OSError, size: int = 0) -> OffloadError:
    """Returns the error for `size` bytes that cannot be written."""
    if error.errno != errno.ENOSPC:
        return OffloadError(
            f"{path} cannot be written: {error.strerror}. Check the disk, or use nvme_path on another disk, and resume from "
            "the last checkpoint: fit(..., ckpt_path='last')."
        )
    return OffloadError(
        f"no space for {size / 2**20:.1f} MiB in {os.path.dirname(path)}: the disk of nvme_path is full. Free disk space, or "
        "use nvme_path on another disk, and resume from the last checkpoint: fit(..., ckpt_path='last')."
    )


def _allocate(path: str, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that allocates blocks at each write
            return
        raise unwritable(path, error, size) from error
    finally:
        os.close(descriptor)


@contextmanager
def checked() -> Iterator[None]:
    """Context manager in which DeepSpeed creates handles with these checks."""
    modules = [importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}") for name in _MODULES]
    users = [importlib.import_module("deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper"), modules[1]]
    aligned, builder = [module.AIO_ALIGNED_BYTES for module in modules], modules[1].AsyncIOBuilder

    def handle(**options: Any) -> _Handle:
        return _Handle(builder().load(verbose=False).aio_handle(**options))

    class Builder:
        def load(self, verbose: bool = False) -> Any:
            return SimpleNamespace(aio_handle=handle)

    try:
        for module in modules:
            module.AIO_ALIGNED_BYTES = _ALIGNED  # type: ignore[attr-defined]
        for module in users:
            module.AsyncIOBuilder = Builder  # type: ignore[attr-defined]
        yield
    finally:
        for module, before in zip(modules, aligned, strict=True):
            module.AIO_ALIGNED_BYTES = before  # type: ignore[attr-defined]
        for module in users:
            module.AsyncIOBuilder = builder  # type: ignore[attr-defined]
