"""The parts of sharded tensors: where each rank's part lies in the whole tensor, how to gather it, and how to fill it.

A checkpoint stores whole tensors. Saving sends the parts to the rank that writes the tensor. Loading copies each rank's part
out of the whole tensor, without communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trainkit.distributed.dtensor_parts import Range, own_range, part_at
from trainkit.distributed.world import World
from trainkit.tagged_json.tensors import ShardedTensor

__all__ = ["Shards"]


def _is_empty(place: Range) -> bool:
    return any(start == end for start, end in place)


class Shards:
    """Where the parts of sharded parameters lie, of all ranks. Making one is a collective.

    Args:
        parameters: the sharded parameters, the same ones on all ranks.
        world: the processes.
    """

    def __init__(self, parameters: Iterable[DTensor], world: World) -> None:
        listed = list(parameters)
        self._world = world
        by_rank = world.exchange([own_range(parameter) for parameter in listed])
        self._places: dict[int, list[Range]] = {
            id(parameter): [tuple((start, end) for start, end in one) for one in each]
            for parameter, each in zip(listed, zip(*by_rank, strict=True), strict=True)
        }

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._places

    def sharded_tensor(self, tensor: DTensor, parameter: Tensor) -> ShardedTensor:
        """A parameter, or optimizer state that is sharded like it, in the form in which checkpoints save it."""
        return ShardedTensor(tensor.shape, tensor.dtype, partial(self._collect, tensor, parameter))

    @torch.no_grad()
    def _collect(self, tensor: DTensor, parameter: Tensor, owner: int | None) -> Tensor | None:
        """The whole tensor on rank `owner`, or on all ranks if `owner` is `None`. Collective."""
        if owner is None:
            return self.whole(tensor, parameter)
        rank, part = self._world.rank, tensor.to_local().detach()
        places = self._places[id(parameter)]
        senders = _senders(places, owner)
        device = torch.device(tensor.device_mesh.device_type)  # of communication: an offloaded part is on the host
        if rank != owner:
            if rank in senders:
                dist.send(part.to(device).contiguous(), owner)
            return None
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        for sender in senders:
            target = part_at(whole, places[sender])
            if sender == rank:
                target.copy_(part)
            elif target.is_contiguous():
                dist.recv(target, sender)
            else:
                received = torch.empty_like(target, memory_format=torch.contiguous_format)
                dist.recv(received, sender)
                target.copy_(received)
        return whole

    @torch.no_grad()
    def whole(self, tensor: DTensor, parameter: Tensor) -> Tensor:
        """The values of a parameter, or of optimizer state that is sharded like it, on all ranks. Collective."""
        if sum(not isinstance(placement, Replicate) for placement in tensor.placements) == 1:
            gathered: Tensor = tensor.full_tensor()
            return gathered.detach()
        made = self._collect(tensor, parameter, 0)  # sharded over two dimensions of the mesh: torch would gather twice
        if made is None:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device_mesh.device_type)
        dist.broadcast(made, 0)
        return made

    @torch.no_grad()
    def load(self, tensor: DTensor, parameter: Tensor, whole: Tensor) -> None:
        """Copy this rank's part of a whole tensor into its shard."""
        place = self._places[id(parameter)][self._world.rank]
        if not _is_empty(place):
            tensor.to_local().copy_(part_at(whole, place))


def _senders(places: list[Range], owner: int) -> list[int]:
    """The ranks whose parts make up the whole tensor: of equal parts one, the owner's if it has it."""
    first: dict[Range, int] = {}
    for rank in (owner, *range(len(places))):
        if not _is_empty(places[rank]):
            first.setdefault(places[rank], rank)
    return sorted(first.values())
