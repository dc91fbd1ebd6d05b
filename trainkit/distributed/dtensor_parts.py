"""`DTensor`s, torch's sharded tensors, without importing their module, which takes about a second: none exists before that."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

__all__ = ["Range", "is_dtensor", "own_range", "part_at"]

Range = tuple[tuple[int, int], ...]
"""Start and end of a part in each dimension."""


def is_dtensor(value: Any) -> bool:
    """Whether a value is a `DTensor`."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def own_range(tensor: Any, first: int = 0) -> Range:
    """Where this rank's part of a `DTensor` lies in the whole one.

    The last dimension of the mesh comes first: `fully_shard` cuts into chunks what tensor parallelism has cut.
    `distribute_tensor` of torch 2.9 places unequal parts differently.

    Args:
        tensor: the tensor.
        first: the part that is sharded only over the dimensions of the mesh from this one on.
    """
    mesh, ranges = tensor.device_mesh, [(0, size) for size in tensor.shape]
    for dimension in reversed(range(first, mesh.ndim)):
        placement = tensor.placements[dimension]
        if not placement.is_replicate():
            start, end = ranges[placement.dim]
            size = -(-(end - start) // mesh.size(dimension))  # as `torch.chunk`
            begin = min(start + size * mesh.get_local_rank(dimension), end)
            ranges[placement.dim] = begin, min(begin + size, end)
    return tuple(ranges)


def part_at(whole: Tensor, place: Range) -> Tensor:
    """The part of a whole tensor at a place, in the same memory."""
    return whole[tuple(slice(start, end) for start, end in place)]
