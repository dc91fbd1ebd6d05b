"""Parts of sharded parameters: where they lie in the whole tensor, and gathered for a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_runs import joined_fsdp
from helpers.runs.replicas import Net
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainkit.callbacks._averaged_weights import local_part, part_of, wrap_part
from trainkit.distributed.parameter_placement import is_dtensor
from trainkit.tagged_json.tensors import ShardedTensor


class Parallel(Net):
    def parallelize(self, mesh: Any) -> None:
        parallelize_module(self, mesh["tensor"], {"first": ColwiseParallel(), "last": RowwiseParallel()})


@torch.no_grad()
def check(**options: Any) -> None:
    """The parts of other tensors are placed like those of the parameters, and rank 1 gathers them."""
    width = 6  # no multiple of 4: some parts are larger than others
    strategy, values = joined_fsdp(**options), Parallel(width).double().state_dict()
    module, rank = strategy.prepare_module(Parallel(width).double()), strategy.world.rank
    for name, parameter in module.named_parameters():
        assert is_dtensor(parameter)
        part = part_of(values[name], parameter)
        assert torch.equal(part, local_part(parameter))
        stored = wrap_part(part.float() * 2, parameter, rank)
        assert isinstance(stored, ShardedTensor)
        assert (stored.shape, stored.dtype) == (parameter.shape, torch.float32)
        for owner in (1, None):
            whole = stored.collect(owner)
            assert (whole is None) == (owner not in (None, rank))
            assert whole is None or torch.equal(whole, values[name].float() * 2)
    local_part(module.first.bias).fill_(3.0)  # the same memory
    changed: Any = wrap_part(local_part(module.first.bias), module.first.bias, rank)
    assert changed.collect(None).eq(3).all()
    strategy.teardown()


@pytest.mark.world_size(2)
def test_parts_of_sharded_parameters() -> None:
    check()
    plain = torch.ones(3)
    assert not is_dtensor(plain)
    assert local_part(plain) is part_of(plain, plain) is wrap_part(plain, plain, 0) is plain


@pytest.mark.fsdp
@pytest.mark.world_size(4)
def test_sharded_over_two_dimensions_of_the_mesh() -> None:
    check(tensor_parallel=2)
    check(replicas=2)
