"""The order in which all ranks gather the sharded tensors of one save."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from torch import Tensor

from trainkit.tagged_json.tensors import ShardedTensor

__all__ = ["GatherOrder"]


class GatherOrder:
    """The gathers of one save, in an order that is the same on all ranks.

    Each rank writes its own tensors in its own order, and participates in the gathers for the other ranks in between. The
    ranks alternate, so that each waits as little as possible for the others.

    Args:
        rank: the rank of this process.
        owned: for each rank, the tensors that it writes, in the order in which it writes them.
    """

    def __init__(self, rank: int, owned: Sequence[Sequence[Tensor]]) -> None:
        self._rank = rank
        by_rank = [
            [(owner, tensor) for tensor in tensors if isinstance(tensor, ShardedTensor)] for owner, tensors in enumerate(owned)
        ]
        self._remaining = iter([entry for entry in chain(*zip_longest(*by_rank)) if entry is not None])

    def values_of(self, tensor: Tensor) -> Tensor:
        """A tensor of this rank with its values. For a sharded one, the gathers that come before it are done first."""
        if not isinstance(tensor, ShardedTensor):
            return tensor
        for owner, current in self._remaining:
            values = current.collect(owner)
            if current is tensor and owner == self._rank:
                assert values is not None
                return values
        raise ValueError("a tensor was requested twice, or not in the order of `owned`")

    def finish(self) -> None:
        """Run the remaining gathers, even if this rank failed to write its files: the other ranks wait for it."""
        for owner, current in self._remaining:
            current.collect(owner)
