"""Ways to place the parts of a tensor on a mesh."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # what `fully_shard` makes of a tensor-parallel parameter

__all__ = ["MESHES", "STRIDED", "numbered"]

STRIDED = (_StridedShard(0, split_factor=2), Shard(0))
# mesh → placements over its dimensions
MESHES: dict[tuple[int, ...], list[tuple[Placement, ...]]] = {
    (4,): [(Shard(0),), (Shard(1),)],
    (2, 2): [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Replicate()), STRIDED],
    (2, 2, 2): [(Replicate(), *STRIDED), (Replicate(), Shard(0), Shard(1))],
}


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
