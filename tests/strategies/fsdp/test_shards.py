"""Where each rank's part of a sharded tensor lies, and how parts are gathered and filled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_runs import joined_fsdp
from helpers.fsdp.placements import MESHES, numbered
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from trainkit.distributed.dtensor_parts import own_range
from trainkit.strategies.fsdp.shards import Shards, _senders


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
