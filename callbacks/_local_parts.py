"""Sharded parameters as callbacks compute with them: this rank's part of a `DTensor`, as a plain tensor."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from trainkit.tagged_json.tensors import ShardedTensor

__all__ = ["is_sharded", "local_part", "part_of", "stored_part"]


def is_sharded(value: Tensor) -> bool:
    """Whether a parameter is sharded over the ranks."""
    return isinstance(value, DTensor)


def local_part(value: Tensor) -> Tensor:
    """This rank's part of a parameter, in the same memory; all of it if it is not sharded. Called under `torch.no_grad`."""
    return value.to_local() if isinstance(value, DTensor) else value


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor with the shape of a parameter; all of it if the parameter is not sharded."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def stored_part(part: Tensor, parameter: Tensor, rank: int) -> Tensor:
    """A part of a tensor with the shape of a parameter, in the form in which checkpoints save the whole tensor.

    Args:
        part: this rank's part.
        parameter: the parameter.
        rank: the rank of this process.
    """
    if not isinstance(parameter, DTensor):
        return part
    return ShardedTensor(parameter.shape, part.dtype, partial(_whole, part, parameter, rank))


@torch.no_grad()
def _whole(part: Tensor, parameter: DTensor, rank: int, owner: int | None) -> Tensor | None:
    """The whole tensor on rank `owner`, or on all ranks if `owner` is `None`. Collective."""
    mesh = parameter.device_mesh
    local = part.to(mesh.device_type)  # of communication: an average may be on the host
    shape, stride = parameter.shape, parameter.stride()
    found = DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
    for dimension in range(mesh.ndim):  # one after the other: torch warns about a gather over several
        placements = [Replicate() if place == dimension else placement for place, placement in enumerate(found.placements)]
        found = found.redistribute(placements=placements)
    return found.to_local() if owner in (None, rank) else None
