"""`MicroBatch`: one batch of an accumulation window, and its position in it, for the loop, the engine and the strategies."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

__all__ = ["NO_BATCH", "WHOLE_WINDOW", "MicroBatch", "MicroBatchKind", "NoBatch", "WindowEntry"]


class NoBatch:
    """The batch of a micro-batch of kind `NONE`; `NO_BATCH` is the only instance."""

    def __repr__(self) -> str:
        return "NO_BATCH"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "NO_BATCH"  # a copy is the same object


NO_BATCH = NoBatch()


class MicroBatchKind(Enum):
    """Whether a rank has data in a micro-batch."""

    DATA = "data"
    """The batch is this rank's share of the data."""
    PADDING = "padding"
    """Only other ranks have data. This rank runs a batch of the right shape to take part in collectives; its outputs, gradients
    and metrics are ignored."""
    NONE = "none"
    """Only other ranks have data. This rank has no batch and runs no forward."""


class WindowEntry(NamedTuple):
    """What your own training loop needs to enter a window at a micro-batch other than its first.

    Attributes:
        begin: index of the first micro-batch of the window.
        whole: weight of the micro-batches of all ranks at this index, over the total weight of the window.
        remaining: weight of these and of all later ones, over the total weight of the window.
        alone: share that this rank's micro-batch would have if the micro-batches at this index were one whole window.
    """

    begin: int
    whole: float
    remaining: float
    alone: float


class MicroBatch(NamedTuple):
    """One batch of an accumulation window. Immutable.

    Attributes:
        batch: the batch, on the device; `NO_BATCH` if the kind is `NONE`.
        index: its number in the epoch, counted for each rank; the same on all ranks.
        first: it is the first of its accumulation window.
        last: it is the last of its accumulation window: the optimizer step follows its backward.
        share: the factor for its mean loss. With it the sum of the losses of a window, averaged over the ranks, is the mean
            over the global batch: its weight × number of ranks ÷ total weight of the window.
        kind: whether this rank has data in it.
        uneven: ranks have different numbers of micro-batches in this window, so no backward averages gradients.
        alike: it is certain that all ranks have the same number of micro-batches in this window, all of one size.
        empty: the total weight of the window, over all ranks, is 0, so there is no optimizer step.
        entry: for your own training loop; else `None`.
    """

    batch: Any
    index: int  # type: ignore[assignment]  # hides tuple.index
    first: bool
    last: bool
    share: float
    kind: MicroBatchKind = MicroBatchKind.DATA
    uneven: bool = False
    alike: bool = True
    empty: bool = False
    entry: WindowEntry | None = None


WHOLE_WINDOW = MicroBatch(None, 0, True, True, 1.0)
"""The micro-batch outside of any loader: each backward is one whole window."""
