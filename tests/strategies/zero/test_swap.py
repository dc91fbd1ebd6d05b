"""`InMemory` and `OnDisk`: ranges of a tensor in memory or in a file."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.errors import OffloadError
from trainkit.strategies.zero import nvme as _zero_nvme
from trainkit.strategies.zero.nvme import InMemory, OnDisk


def test_in_memory() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    part = InMemory(tensor, 5, 8)
    assert part.read().tolist() == [5.0, 6.0, 7.0]
    part.write(torch.tensor([1.0, 2.0, 3.0]))
    assert tensor[1].tolist() == [4.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(torch.arange(16.0).to(dtype).view(torch.uint8).numpy()) + bytes(100))
    part = OnDisk(str(path), dtype, 5, 8)
    assert part.read().tolist() == [5.0, 6.0, 7.0]
    assert part.read().dtype == dtype
    part.write(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert OnDisk(str(path), dtype, 0, 16).read().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, *range(8, 16)]
    assert path.stat().st_size == 16 * dtype.itemsize + 100
    assert OnDisk(str(path), dtype, 3, 3).read().numel() == 0


def test_a_missing_file(tmp_path: Path) -> None:
    part = OnDisk(str(tmp_path / "file"), torch.float32, 0, 4)
    with pytest.raises(OffloadError, match="file cannot be read: the file was removed"):
        part.read()
    with pytest.raises(OffloadError, match="file cannot be written: No such file or directory"):
        part.write(torch.zeros(4))


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(12))
    with pytest.raises(OffloadError, match="file cannot be read"):
        OnDisk(str(tmp_path / "file"), torch.float32, 0, 4).read()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_zero_nvme, "open", full, raising=False)
    with pytest.raises(OffloadError, match="the disk of nvme_path is full"):
        OnDisk(str(tmp_path / "file"), torch.float32, 0, 4).write(torch.zeros(4))
