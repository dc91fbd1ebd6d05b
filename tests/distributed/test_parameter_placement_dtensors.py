"""Where a rank's part of a sharded tensor lies."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from helpers.fsdp.placements import MESHES, STRIDED, numbered
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainkit.distributed.parameter_placement import is_dtensor, own_range, part_at

SHAPES = [(8, 4), (7, 3), (5, 2), (3, 5), (1, 1), (0, 3), (6, 3, 2)]


@contextmanager
def rank_of(rank: int, sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Within it this process is a rank of a mesh, without communication."""
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_own_range(sizes: tuple[int, ...]) -> None:
    """On each rank it is where the local values are in the whole tensor; some ranks have fewer values, or none."""
    cases = [(placements, shape) for placements in MESHES[sizes] for shape in SHAPES]
    if issubclass(_StridedShard, Shard):  # torch 2.9 places unequal parts differently from `fully_shard`
        cases = [(places, shape) for places, shape in cases if places[-2:] != STRIDED or shape[0] % 4 == 0]
    covered = {case: torch.zeros(case[1]) for case in cases}
    empty = 0
    for rank in range(math.prod(sizes)):
        with rank_of(rank, sizes) as mesh:
            for (placements, shape), count in covered.items():
                whole = numbered(shape)
                tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                assert is_dtensor(tensor)
                place = own_range(tensor)
                assert torch.equal(part_at(whole, place), tensor.to_local()), (rank, placements, shape)
                part_at(count, place).add_(1)
                empty += whole.numel() > 0 and tensor.to_local().numel() == 0
    assert empty
    for (placements, shape), count in covered.items():
        copies = math.prod(size for size, placement in zip(sizes, placements, strict=True) if placement == Replicate())
        assert torch.equal(count, torch.full(shape, float(copies)))


def test_nothing_is_imported() -> None:
    """The module of `DTensor` takes about a second to import, and most runs need none."""
    code = (
        "import sys, torch; from trainkit.distributed.parameter_placement import is_dtensor; "
        "assert not is_dtensor(torch.ones(1)); "
        "from trainkit.callbacks import ExponentialMovingAverage; assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
