"""Tensors that no process has whole: they are gathered when a checkpoint is written, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

__all__ = ["Scattered", "Turns", "is_scattered"]


class Scattered(Tensor):
    """A tensor by its shape and dtype alone, with the way to get its values; it is on the meta device.

    Attributes:
        collect: called by all processes with the rank of one of them: returns the tensor there, ``None`` on the others. With
            ``None`` instead of a rank it returns the tensor everywhere.
    """

    collect: Callable[[int | None], Tensor | None]

    @staticmethod
    def __new__(cls, shape: Iterable[int], dtype: torch.dtype, collect: Callable[[int | None], Tensor | None]) -> Scattered:
        made: Scattered = Tensor._make_subclass(cls, torch.empty(tuple(shape), dtype=dtype, device="meta"))
        made.collect = collect
        return made

    def detach(self) -> Scattered:
        """The same: it has no graph."""
        return self

    resolve_conj = resolve_neg = detach


def is_scattered(tensor: Any) -> bool:
    """Whether a tensor's values are to be gathered."""
    return isinstance(tensor, Scattered)


class Turns:
    """The gathers of one save, in the one order in which all processes take part in them.

    Each process writes its own tensors, in an order of its own; the gathers of the others come in between. So that each waits
    for the others as little as may be, the processes take turns.

    Args:
        rank: of this process.
        owned: for each process the tensors that it writes, in the order in which it does.
    """

    def __init__(self, rank: int, owned: Sequence[Sequence[Tensor]]) -> None:
        self._rank = rank
        lists = [
            [(owner, tensor) for tensor in tensors if isinstance(tensor, Scattered)] for owner, tensors in enumerate(owned)
        ]
        self._left = iter([turn for turn in chain(*zip_longest(*lists)) if turn is not None])

    def take(self, tensor: Tensor) -> Tensor:
        """A tensor of this process's with its values: of a scattered one its turn is awaited."""
        if not is_scattered(tensor):
            return tensor
        for owner, turn in self._left:
            values = turn.collect(owner)
            if turn is tensor and owner == self._rank:
                assert values is not None
                return values
        raise ValueError("a tensor was asked for twice, or in another order than it was announced in")

    def finish(self) -> None:
        """Take part in what is left, whatever has become of this process's own files: the others wait for it."""
        for owner, turn in self._left:
            turn.collect(owner)
