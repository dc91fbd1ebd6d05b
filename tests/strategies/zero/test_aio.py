"""Reads and writes of offloaded tensors through DeepSpeed's own handle: each failure raises an error."""

from __future__ import annotations

import errno
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.errors import OffloadError
from trainkit.strategies.zero.deepspeed_api import import_deepspeed, load
from trainkit.strategies.zero.nvme import disk_checks

pytestmark = pytest.mark.zero

OPTIONS = {"block_size": 65536, "queue_depth": 4, "single_submit": False, "overlap_events": True, "intra_op_parallelism": 1}


@pytest.fixture
def handle() -> Any:
    import_deepspeed(torch.device("cpu"))
    load("AsyncIOBuilder", "pin_memory", "async_io")
    with disk_checks():
        room: Any = importlib.import_module("deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper")
        made = room.AsyncIOBuilder().load().aio_handle(**OPTIONS)
    return made


def locked(handle: Any, numel: int) -> torch.Tensor:
    found: torch.Tensor = handle.new_cpu_locked_tensor(numel, torch.empty(1))
    return found


def test_write_and_read(handle: Any, tmp_path: Path) -> None:
    tensor, again = locked(handle, 2**18), locked(handle, 2**18)
    tensor.copy_(torch.randn(2**18))
    handle.async_pwrite(tensor, str(tmp_path / "file"), 0)
    assert handle.wait() == 1
    handle.async_pread(again, str(tmp_path / "file"), 0)
    assert handle.wait() == 1
    assert torch.equal(again, tensor)
    assert (tmp_path / "file").stat().st_size == 2**20


def test_a_refused_read(handle: Any, tmp_path: Path) -> None:
    """The buffer is not aligned. The read fails, although DeepSpeed reports success."""
    tensor = locked(handle, 2**18)
    tensor.fill_(1.0)
    handle.async_pwrite(tensor, str(tmp_path / "file"), 0)
    handle.wait()
    buffer = locked(handle, 2**18)
    handle.async_pread(buffer[1:-1023], str(tmp_path / "file"), 0)
    with pytest.raises(OffloadError, match="file cannot be read"):
        handle.wait()


def test_a_missing_file(handle: Any, tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="the file was removed, or the disk of nvme_path failed"):
        handle.async_pread(locked(handle, 1024), str(tmp_path / "file"), 0)


def test_a_full_disk(handle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match="no space for 1.0 MiB in .*: the disk of nvme_path is full. Free disk space"):
        handle.async_pwrite(locked(handle, 2**18), str(tmp_path / "file"), 0)


def test_a_file_system_without_preallocation(handle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    handle.async_pwrite(locked(handle, 1024), str(tmp_path / "file"), 0)
    assert handle.wait() == 1


def test_a_folder_that_cannot_be_written(handle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", refused)
    with pytest.raises(OffloadError, match="file cannot be written: Input/output error"):
        handle.async_pwrite(locked(handle, 1024), str(tmp_path / "file"), 0)


def test_deepspeed_is_restored() -> None:
    import_deepspeed(torch.device("cpu"))
    room: Any = importlib.import_module("deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper")
    other: Any = importlib.import_module("deepspeed.runtime.swap_tensor.optimizer_utils")
    before = room.AsyncIOBuilder, other.AIO_ALIGNED_BYTES
    with disk_checks():
        assert (room.AsyncIOBuilder, other.AIO_ALIGNED_BYTES) != before
    assert (room.AsyncIOBuilder, other.AIO_ALIGNED_BYTES) == before
