"""Where each rank's part of a sharded tensor lies, and how parts are gathered and filled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fsdp.fsdp_runs import joined_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard  # what `fully_shard` makes of a tensor-parallel parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainkit.strategies.fsdp.shards import Shards, _senders, own_range

STRIDED = (_StridedShard(0, split_factor=2), Shard(0))
# mesh → placements over its dimensions
MESHES: dict[tuple[int, ...], list[tuple[Placement, ...]]] = {
    (4,): [(Shard(0),), (Shard(1),)],
    (2, 2): [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Replicate()), STRIDED],
    (2, 2, 2): [(Replicate(), *STRIDED), (Replicate(), Shard(0), Shard(1))],
}
SHAPES = [(8, 4), (7, 3), (5, 2), (3, 5), (1, 1), (0, 3), (6, 3, 2)]


@contextmanager
def rank_of(rank: int, sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Within it this process is a rank of a mesh, without communication."""
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        dist.destroy_process_group()


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


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
                place = tuple(slice(start, end) for start, end in own_range(tensor))
                assert torch.equal(whole[place], tensor.to_local()), (rank, placements, shape)
                count[place] += 1
                empty += whole.numel() > 0 and tensor.to_local().numel() == 0
    assert empty
    for (placements, shape), count in covered.items():
        copies = math.prod(size for size, placement in zip(sizes, placements, strict=True) if placement == Replicate())
        assert torch.equal(count, torch.full(shape, float(copies)))


def test_senders() -> None:
    """Of the ranks with one part, the owner sends it if it has it; ranks without values send nothing."""
    first, second, none = ((0, 2), (0, 3)), ((2, 4), (0, 3)), ((4, 4), (0, 3))
    assert _senders([first, second, none], 0) == _senders([first, second, none], 2) == [0, 1]
    copies = [first, second, first, second]
    assert [_senders(copies, owner) for owner in range(4)] == [[0, 1], [0, 1], [1, 2], [0, 3]]
    assert _senders([none, none], 1) == []
    assert _senders([()], 0) == [0]  # a scalar


@pytest.mark.world_size(4)
def test_round_trips() -> None:
    """Load a whole tensor and gather it, on each mesh; also state of another dtype than the parameter's."""
    world = joined_fsdp().world
    for sizes in MESHES:
        if math.prod(sizes) > world.size:
            continue
        mesh = init_device_mesh("cpu", sizes)
        cases = [(numbered(shape), placements) for placements in MESHES[sizes] for shape in ((7, 3), (3, 5), (8, 4))]
        zeros = [distribute_tensor(torch.zeros_like(whole), mesh, places, src_data_rank=None) for whole, places in cases]
        shards = Shards(zeros, world)
        for (whole, _), parameter in zip(cases, zeros, strict=True):
            assert parameter in shards
            assert whole not in shards
            state = torch.empty_like(parameter, dtype=torch.float32)
            for tensor in (parameter, state):
                shards.load(tensor, parameter, whole)
                assert torch.equal(tensor.full_tensor(), whole.to(tensor.dtype))
                assert torch.equal(shards.whole(tensor, parameter), whole.to(tensor.dtype))
                stored = shards.sharded_tensor(tensor, parameter)
                assert (stored.shape, stored.dtype, stored.is_meta) == (whole.shape, tensor.dtype, True)
                for owner in (None, *range(4)):
                    found = stored.collect(owner)
                    if owner in (None, world.rank):
                        assert found is not None
                        assert torch.equal(found, whole.to(tensor.dtype))
                    else:
                        assert found is None


@pytest.mark.world_size(4)
def test_tensor_parallel_and_sharded_over_the_same_dimension() -> None:
    """`fully_shard` cuts the rows that a tensor-parallel rank has: the ranks are not in the order of the rows."""
    world = joined_fsdp().world
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module, whole = nn.Module(), numbered((7, 3))
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(0)], src_data_rank=None))
    fully_shard(module, mesh=mesh["data"])
    parameter: Any = module.weight
    assert own_range(parameter) == (((0, 2), (4, 6), (2, 4), (6, 7))[world.rank], (0, 3))
    shards = Shards([parameter], world)
    assert torch.equal(shards.whole(parameter, parameter), whole)
    shards.load(parameter, parameter, -whole)
    assert torch.equal(shards.whole(parameter, parameter), -whole)
