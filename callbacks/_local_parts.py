"""Sharded parameters as callbacks compute with them: this rank's part of a `DTensor`, as a plain tensor."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

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
    return _sharded(whole, parameter, 0) if isinstance(parameter, DTensor) else whole


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


def _sharded(whole: Tensor, parameter: DTensor, first: int) -> Tensor:
    """This rank's part of a tensor that is sharded like a parameter over the dimensions of the mesh from `first` on.

    The last one comes first: FSDP shards what tensor parallelism has sharded.
    """
    mesh = parameter.device_mesh
    for dimension in reversed(range(first, mesh.ndim)):
        placement = parameter.placements[dimension]
        if not isinstance(placement, Replicate):
            along = placement.dim  # type: ignore[attr-defined]
            chunks, rank = whole.chunk(mesh.size(dimension), along), mesh.get_local_rank(dimension)
            whole = chunks[rank] if rank < len(chunks) else whole.narrow(along, 0, 0)
    return whole


@torch.no_grad()
def _whole(part: Tensor, parameter: DTensor, rank: int, owner: int | None) -> Tensor | None:
    """The whole tensor on rank `owner`, or on all ranks if `owner` is `None`. Collective."""
    mesh = parameter.device_mesh
    found = part.to(mesh.device_type)  # of communication: an average may be on the host
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            continue
        one = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dimension]]  # type: ignore[index]
        gathered = _sharded(torch.empty(parameter.shape, device="meta"), parameter, dimension + 1)
        shape, stride = gathered.shape, torch.empty(gathered.shape, device="meta").stride()
        along = [Shard(placement.dim)]  # type: ignore[attr-defined]
        found = DTensor.from_local(found, one, along, run_check=False, shape=shape, stride=stride).full_tensor()
    return found if owner in (None, rank) else None
