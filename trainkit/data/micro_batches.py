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
        begin: Index of the micro-batch that the window begins with.
        whole: Weight of the micro-batches of all ranks at this index, over the total weight of the window.
        remaining: Weight of these and of all later ones, over the total weight of the window.
        alone: Share that this rank's micro-batch would have if the micro-batches at this index were a window of their own.
        weight: Weight of the micro-batches of all ranks at this index.
    """

    begin: int
    whole: float
    remaining: float
    alone: float
    weight: float = 0.0


class MicroBatch(NamedTuple):
    """One batch of an accumulation window, with its place in the window. It is never changed.

    Attributes:
        batch: The batch, on the device; `NO_BATCH` if the kind is `NONE`.
        index: Its number in the epoch, counted for each rank; the same on all ranks.
        first: It is the first of its accumulation window.
        last: It is the last of its window: the optimizer step follows its backward.
        share: The factor for its mean loss: its weight × number of ranks ÷ total weight of the window. With it the sum of
            the losses of a window, averaged over the ranks, is the mean over the global batch.
        kind: Whether this rank has data in it.
        uneven: Ranks have different numbers of micro-batches in this window, so no backward averages gradients.
        alike: It is certain that all ranks have the same number of micro-batches in this window, all of one size.
        empty: The total weight of the window, over all ranks, is 0, so it makes no optimizer step.
        entry: For your own training loop; otherwise `None`.
        weight: The result of `batch_weight`, or the number of its samples; `None` if neither was needed.
        alone: Other ranks may run theirs in another number of parts, so its forward must not communicate.
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
    weight: float | None = None
    alone: bool = False


WHOLE_WINDOW = MicroBatch(None, 0, True, True, 1.0)
"""The micro-batch outside of any loader: each backward is one whole window."""
