"""Sharded parameters as callbacks compute with them: this rank's part of a `DTensor`, as a plain tensor."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.distributed.dtensor_parts import is_dtensor, own_range, part_at
from trainkit.tagged_json.tensors import ShardedTensor

__all__ = ["local_part", "part_of", "stored_part"]


def local_part(value: Any) -> Tensor:
    """This rank's part of a parameter, in the same memory; all of it if it is not sharded. Called under `torch.no_grad`."""
    part: Tensor = value.to_local() if is_dtensor(value) else value
    return part


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor with the shape of a parameter; all of it if the parameter is not sharded."""
    return part_at(whole, own_range(parameter)) if is_dtensor(parameter) else whole


def stored_part(part: Tensor, parameter: Tensor, rank: int) -> Tensor:
    """A part of a tensor with the shape of a parameter, in the form in which checkpoints save the whole tensor.

    Args:
        part: this rank's part.
        parameter: the parameter.
        rank: the rank of this process.
    """
    if not is_dtensor(parameter):
        return part
    return ShardedTensor(parameter.shape, part.dtype, partial(_whole, part, parameter, rank))


@torch.no_grad()
def _whole(part: Tensor, parameter: Any, rank: int, owner: int | None) -> Tensor | None:
    """The whole tensor on rank `owner`, or on all ranks if `owner` is `None`. Collective."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = parameter.device_mesh
    found = part.to(mesh.device_type)  # of communication: an average may be on the host
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            continue
        one = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dimension]]
        shape = torch.Size(end - start for start, end in own_range(parameter, dimension + 1))
        stride = torch.empty(shape, device="meta").stride()
        along = [Shard(placement.dim)]
        found = DTensor.from_local(found, one, along, run_check=False, shape=shape, stride=stride).full_tensor()
    return found if owner in (None, rank) else None
