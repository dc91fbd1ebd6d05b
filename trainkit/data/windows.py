"""Accumulation windows: which micro-batches make up one optimizer step, and their weights, on one rank or on several.

Rank r of W has the micro-batches start + r, start + r + W, … of an epoch; an index numbers those of one rank. If the number and
the sizes of the micro-batches are known, each rank computes the windows by itself and fetches nothing in advance
(`plan_windows`). If not, it fetches its micro-batches of a window first (`collect_windows`), and several ranks exchange their
weights (`Window.agree`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from trainkit.data.micro_batches import NO_BATCH, MicroBatch, MicroBatchKind, WindowEntry
from trainkit.distributed.world import World
from trainkit.errors import DataError

__all__ = ["Window", "WindowPart", "check_weight", "collect_windows", "plan_windows"]

_END = object()


class Window:
    """What all ranks know of one window.

    Attributes:
        begin: index of its first micro-batch.
        total: sum of the weights of all micro-batches of the window; before `agree` of those of this rank.
        per_rank: micro-batches of the rank that has most of them; 0: the epoch has ended.
        uneven: the ranks have different numbers of micro-batches.
        agreed: all ranks know the same; otherwise `agree` must be called.
        alike: all ranks certainly have the same number of micro-batches, all of one size.
        weights: in your own training loop, the weight of the micro-batches of all ranks at each index; before `agree`
            that of this rank's.
        digest: of what this rank has read of a stream that must be the same on all ranks, see `ReadRecord`; `None`: it need
            not be the same.
    """

    __slots__ = ("agreed", "alike", "begin", "digest", "per_rank", "total", "uneven", "weights")

    def __init__(
        self,
        begin: int,
        total: float,
        per_rank: int,
        uneven: bool,
        agreed: bool,
        alike: bool = False,
        weights: list[float] | None = None,
        digest: int | None = None,
    ) -> None:
        self.begin = begin
        self.total = total
        self.per_rank = per_rank
        self.uneven = uneven
        self.agreed = agreed
        self.alike = alike
        self.weights = weights
        self.digest = digest

    def agree(self, world: World) -> bool:
        """Exchange the weights and numbers of all ranks. Collective, unless they are known already.

        Called when a window begins and not when it is fetched: ranks may fetch at different times.

        Returns:
            Whether all ranks have read the same stream, if they must.
        """
        if self.agreed:
            return True
        mine = [self.total, self.per_rank, *(self.weights or ())] + ([] if self.digest is None else [self.digest])
        weights, counts, *by_index = zip(*world.rows(mine), strict=True)
        digests = () if self.digest is None else by_index.pop()
        self.total = sum(weights)
        self.per_rank = int(max(counts))
        self.uneven = min(counts) != max(counts)
        if self.weights is not None:
            self.weights = [sum(weights) for weights in by_index]
        self.agreed = True
        return len(set(digests)) <= 1

    def micro_batch(self, batch: Any, kind: MicroBatchKind, index: int, weight: float, last: bool, ranks: int) -> MicroBatch:
        """A micro-batch of this window, for one rank. Call `agree` first.

        Args:
            batch: its batch.
            kind: whether this rank has data in it.
            index: its index.
            weight: of this rank's micro-batch.
            last: it is the last of the window.
            ranks: number of ranks.
        """
        total = self.total
        share = weight * ranks / total if total > 0.0 else 0.0
        entry = None if self.weights is None else self._entry(index - self.begin, weight, ranks, self.weights)
        first, empty = index == self.begin, total <= 0.0
        return MicroBatch(batch, index, first, last, share, kind, self.uneven, self.alike, empty, entry, weight)

    def _entry(self, place: int, weight: float, ranks: int, weights: list[float]) -> WindowEntry:
        whole, total = weights[place], self.total
        if total <= 0.0:
            return WindowEntry(self.begin, 0.0, 1.0, 0.0)
        remaining = sum(weights[place:]) / total if place else 1.0
        return WindowEntry(self.begin, whole / total, remaining, weight * ranks / whole if whole > 0.0 else 0.0, whole)


class WindowPart(NamedTuple):
    """A micro-batch of one rank with its place in a window.

    Attributes:
        batch: Its batch; `NO_BATCH` if this rank has no micro-batch in the window.
        index: Its index.
        last: This rank has no more of the window.
        weight: The result of `batch_weight`, or the number of its samples.
        window: The window.
    """

    batch: Any
    index: int  # type: ignore[assignment]  # hides tuple.index
    last: bool
    weight: float
    window: Window


def plan_windows(
    batches: Iterator[Any],
    world: World,
    size: int,
    start: int,
    length: int,
    sizes: tuple[int, int],
    *,
    index: int = 0,
    taken: int = 0,
    entries: bool = False,
) -> Iterator[WindowPart]:
    """The parts of an epoch whose micro-batches are known.

    Args:
        batches: this rank's micro-batches from `start` on.
        world: the ranks.
        size: micro-batches of a rank in a window.
        start: the micro-batch of the epoch that rank 0 begins with.
        length: micro-batches of the epoch.
        sizes: samples in each micro-batch but the last, and in the last.
        index: that of the first micro-batch.
        taken: micro-batches that the first window already has, because your own training loop has left it open.
        entries: your own training loop may enter a window in the middle, for which it needs `Window.weights`.

    Raises:
        DataError: a micro-batch is missing.
    """
    (common, last), ranks, begin, per_rank = sizes, world.size, start, max(1, size - taken)
    while begin < length:
        count = min(per_rank * ranks, length - begin)
        short = common - last if begin + count == length else 0
        total = count * common - short
        uneven = count % ranks != 0
        alike = ranks == 1 or (not uneven and not short)
        window = Window(index, total, -(-count // ranks), uneven, agreed=True, alike=alike)
        if entries:
            window.weights = [float(ranks * common)] * window.per_rank
            window.weights[-1] = float((count - 1) % ranks * common + common - short)
        end = begin + count
        for m in range(begin + world.rank, end, ranks):
            batch = next(batches, _END)
            if batch is _END:
                raise DataError(
                    f"the loader ended before micro-batch {m} of {length}, which the other ranks expect. "
                    "Check the length of the dataset."
                )
            yield WindowPart(batch, index, m + ranks >= end, last if m == length - 1 else common, window)
            index += 1
        if world.rank >= count:
            yield WindowPart(NO_BATCH, index, True, 0.0, window)
        begin, per_rank = end, size
        index = window.begin + window.per_rank
    if ranks == 1:
        next(batches, None)  # A sampler may have code after its last `yield`.


def collect_windows(
    batches: Iterator[Any],
    world: World,
    size: int,
    *,
    per_rank: int | None,
    count: Callable[[Any], int],
    weigh: Callable[[Any], float] | None,
    index: int = 0,
    taken: int = 0,
    entries: bool = False,
    digest: Callable[[], int | None] = lambda: None,
) -> Iterator[WindowPart]:
    """The parts of an epoch whose micro-batches are only known after fetching.

    Args:
        batches: this rank's micro-batches.
        world: the ranks; nothing is exchanged here.
        size: micro-batches of a rank in a window.
        per_rank: number of this rank's micro-batches; `None`: until `batches` end, and on several ranks without an end.
        count: the number of samples of a batch.
        weigh: the user's `batch_weight`; without it a micro-batch counts by the number of its samples.
        index: as in `plan_windows`.
        taken: as in `plan_windows`.
        entries: as in `plan_windows`.
        digest: of what this rank has read, see `Window`.

    Raises:
        DataError: `weigh` did not return a finite number ≥ 0.
    """
    one_rank, end, missing = world.size == 1, None if per_rank is None else index + per_rank, max(1, size - taken)
    while end is None or index < end:
        fetched = list(islice(batches, missing))
        if one_rank and not fetched:
            return
        weights = [_weight_of(batch, count, weigh) for batch in fetched]
        window = Window(index, sum(weights), len(fetched), False, agreed=one_rank, alike=one_rank, digest=digest())
        if entries:
            window.weights = weights + [0.0] * (missing - len(weights))
        for place, (batch, weight) in enumerate(zip(fetched, weights, strict=True), 1):
            yield WindowPart(batch, index + place - 1, place == len(fetched), weight, window)
        if not fetched:
            yield WindowPart(NO_BATCH, index, True, 0.0, window)
        del fetched, weights
        index, missing = index + missing, size


def _weight_of(batch: Any, count: Callable[[Any], int], weigh: Callable[[Any], float] | None) -> float:
    """What the user's `batch_weight` returns for a batch, or without it the number of samples; 0 if the batch is `None`."""
    if batch is None:
        return 0.0
    if weigh is None:
        return float(count(batch))
    return check_weight(weigh(batch), "batch_weight must return", "return ")


def check_weight(value: Any, what: str, example: str) -> float:
    """A weight as a number.

    Raises:
        DataError: not a finite number ≥ 0. The message begins with `what`, and its example with `example`.
    """
    try:
        weight = float(value)
    except (RuntimeError, TypeError, ValueError):  # RuntimeError: a tensor of several elements
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0.0):
        raise DataError(
            f"{what} a finite number ≥ 0, such as the number of tokens that count, not {value!r}. For example: "
            f"{example}float((batch['labels'] != -100).sum())"
        )
    return weight
