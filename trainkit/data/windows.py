"""Accumulation windows on one rank and on several: which micro-batches make up one optimizer step, and their weights.

Rank r of W has the micro-batches start + r, start + r + W, … of an epoch. `index` numbers them for each rank. If the number
and the sizes of the micro-batches are known, each rank computes the windows by itself (`planned`). If not, it fetches
its micro-batches of a window first, and the ranks exchange their weights (`collected` and `SharedWindow.agree`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.micro_batch import NO_BATCH, MicroBatch, MicroBatchKind, WindowEntry
from trainkit.nested import batch_size

__all__ = ["Piece", "SharedWindow", "checked_weight", "collected", "planned", "weight_of", "windows"]


def windows(
    batches: Iterator[Any],
    size: int,
    *,
    count: Callable[[Any], int] = batch_size,
    start: int = 0,
    length: int | None = None,
    sizes: tuple[int, int] | None = None,
    weigh: Callable[[Any], float] | None = None,
    taken: int = 0,
) -> Iterator[MicroBatch]:
    """The micro-batches of an epoch with their places in windows of `size`.

    Args:
        batches: the batches from `start` on.
        size: micro-batches in a window.
        count: returns the number of samples of a batch.
        start: number of the first batch in its epoch.
        length: micro-batches of the epoch, if known together with `sizes`.
        sizes: samples in each micro-batch but the last, and in the last. If they are known, nothing is fetched in advance.
        weigh: the user's `batch_weight`; without it the weight of a micro-batch is the number of its samples.
        taken: micro-batches that the first window already has: it completes an open one.

    Raises:
        DataError: `weigh` did not return a finite number ≥ 0.
    """
    if size == 1:
        return _windows_of_one(batches, start, weigh)
    if weigh is None and sizes is not None and length is not None:
        return _planned(batches, size, start, length, sizes, taken)
    return _collected(batches, size, start, count, weigh, taken)


def _micro_batch(
    batch: Any, index: int, last: bool, entry: WindowEntry, empty: bool = False, weight: float | None = None
) -> MicroBatch:
    return MicroBatch(batch, index, index == entry.begin, last, entry.whole, empty=empty, entry=entry, weight=weight)


def _entry(begin: int, share: float, remaining: float, weight: float) -> WindowEntry:
    return WindowEntry(begin, share, remaining, float(share > 0.0), weight)


def _windows_of_one(batches: Iterator[Any], start: int, weigh: Callable[[Any], float] | None) -> Iterator[MicroBatch]:
    for index, batch in enumerate(batches, start):
        weight = None if weigh is None else weight_of(batch, batch_size, weigh)
        share = 0.0 if weight == 0.0 else 1.0
        entry = _entry(index, share, 1.0, 1.0 if weight is None else weight)
        yield _micro_batch(batch, index, True, entry, share == 0.0, weight)


def _planned(
    batches: Iterator[Any], size: int, start: int, length: int, sizes: tuple[int, int], taken: int
) -> Iterator[MicroBatch]:
    common, last = sizes
    taken = min(taken, size - 1)
    for m, batch in enumerate(batches, start):
        begin = m - (m - start + taken) % size
        end, begin = min(begin + size, length), max(begin, start)
        remaining = (end - m) * common + (last - common if end == length else 0)
        total = remaining + (m - begin) * common
        samples = last if m == length - 1 else common
        yield _micro_batch(batch, m, m == end - 1, _entry(begin, samples / total, remaining / total, samples))


def _collected(
    batches: Iterator[Any],
    size: int,
    start: int,
    count: Callable[[Any], int],
    weigh: Callable[[Any], float] | None,
    taken: int,
) -> Iterator[MicroBatch]:
    begin, wanted = start, max(1, size - taken)
    while window := list(islice(batches, wanted)):
        weights = [weight_of(batch, count, weigh) for batch in window]
        total = sum(weights)
        for place, (batch, weight) in enumerate(zip(window, weights, strict=True)):
            share = weight / total if total > 0.0 else 0.0
            remaining = 1.0 if place == 0 or total <= 0.0 else sum(weights[place:]) / total
            entry, last = _entry(begin, share, remaining, weight), place == len(window) - 1
            yield _micro_batch(batch, begin + place, last, entry, total <= 0.0, weight)
        begin, wanted = begin + len(window), size


def weight_of(batch: Any, count: Callable[[Any], int], weigh: Callable[[Any], float] | None) -> float:
    """What the user's `batch_weight` returns for a batch, or without it the number of samples; 0 if the batch is `None`.

    Raises:
        DataError: `batch_weight` did not return a finite number ≥ 0.
    """
    if batch is None:
        return 0.0
    if weigh is None:
        return float(count(batch))
    return checked_weight(weigh(batch), "batch_weight must return", "return ")


def checked_weight(value: Any, what: str, example: str) -> float:
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


_END = object()


class SharedWindow:
    """What all ranks know of one window.

    Attributes:
        per_rank: micro-batches of the rank that has most of them; 0: the epoch has ended.
        total: sum of the weights of all micro-batches of the window.
        uneven: the ranks have different numbers of micro-batches.
        alike: all ranks certainly have the same number of micro-batches, all of one size.
        weights: in your own training loop, the weight of the micro-batches of all ranks at each index; before `agree`
            that of this rank's.
        chain: what this rank has read of a stream that must be the same on all ranks, see `ReadRecord`; `None`: it need not.
    """

    __slots__ = ("agreed", "alike", "chain", "per_rank", "total", "uneven", "weights")

    def __init__(
        self,
        total: float,
        per_rank: int,
        uneven: bool,
        agreed: bool,
        alike: bool = False,
        weights: list[float] | None = None,
        chain: int | None = None,
    ) -> None:
        self.chain = chain
        self.total, self.per_rank, self.uneven, self.agreed, self.alike = total, per_rank, uneven, agreed, alike
        self.weights = weights

    def agree(self, world: World) -> bool:
        """Exchange the weights and numbers of all ranks. Collective, unless they are known already.

        Called when a window begins and not when it is fetched: ranks may fetch at different times.

        Returns:
            Whether all ranks have read the same stream, if they must.
        """
        if self.agreed:
            return True
        mine = [self.total, self.per_rank, *(self.weights or ())] + ([] if self.chain is None else [self.chain])
        weights, counts, *by_index = zip(*world.rows(mine), strict=True)
        chains = () if self.chain is None else by_index.pop()
        self.total, self.per_rank, self.uneven = sum(weights), int(max(counts)), min(counts) != max(counts)
        if self.weights is not None:
            self.weights = [sum(weights) for weights in by_index]
        self.agreed = True
        return len(set(chains)) <= 1

    def micro_batch(
        self, batch: Any, kind: MicroBatchKind, place: tuple[int, int], weight: float, last: bool, ranks: int
    ) -> MicroBatch:
        """A micro-batch of this window, for one rank. Call `agree` first.

        Args:
            batch: its batch.
            kind: whether this rank has data in it.
            place: the index of the window's first micro-batch, and of this one.
            weight: of this rank's micro-batch.
            last: it is the last of the window.
            ranks: number of ranks.
        """
        begin, index = place
        total = self.total
        share = weight * ranks / total if total > 0.0 else 0.0
        entry = None if self.weights is None else self._entry(begin, index - begin, weight, ranks)
        facts = (kind, self.uneven, self.alike, total <= 0.0, entry, weight)
        return MicroBatch(batch, index, index == begin, last, share, *facts)

    def _entry(self, begin: int, place: int, weight: float, ranks: int) -> WindowEntry:
        assert self.weights is not None
        whole, total = self.weights[place], self.total
        if total <= 0.0:
            return WindowEntry(begin, 0.0, 1.0, 0.0)
        remaining = sum(self.weights[place:]) / total if place else 1.0
        return WindowEntry(begin, whole / total, remaining, weight * ranks / whole if whole > 0.0 else 0.0, whole)


class Piece(NamedTuple):
    """A micro-batch with its position in this process's part of a window."""

    batch: Any
    m: int  # its number in the epoch
    index: int  # type: ignore[assignment]  # of the rank's micro-batch since the start; hides tuple.index
    first: bool
    last: bool  # this process has no more of the window
    weight: float
    shared: SharedWindow

    @property
    def absent(self) -> bool:
        """This process has no micro-batch in the window."""
        return self.batch is NO_BATCH


def planned(
    batches: Iterator[Any],
    world: World,
    size: int,
    start: int,
    length: int,
    sizes: tuple[int, int],
    taken: int | None = None,
) -> Iterator[Piece]:
    """The pieces of an epoch whose micro-batches are known.

    Args:
        batches: this process's micro-batches from `start` on.
        world: the processes.
        size: micro-batches of a rank in a window.
        start: the micro-batch of the epoch that rank 0 begins with.
        length: micro-batches of the epoch.
        sizes: samples in each micro-batch but the last, and in the last.
        taken: in your own training loop, micro-batches that the first window already has: it completes an open one.

    Raises:
        DataError: a micro-batch is missing.
    """
    common, last = sizes
    begin = start
    for per_rank in _window_sizes(size, taken):
        if begin >= length:
            return
        count = min(per_rank * world.size, length - begin)
        short = common - last if begin + count == length else 0
        total = count * common - short
        uneven = count % world.size != 0
        shared = SharedWindow(total, -(-count // world.size), uneven, agreed=True, alike=not uneven and total == count * common)
        if taken is not None:
            shared.weights = [float(world.size * common)] * shared.per_rank
            shared.weights[-1] = float((count - 1) % world.size * common + common - short)
        index, end = (begin - start) // world.size, begin + count
        for m in range(begin + world.rank, end, world.size):
            batch = next(batches, _END)
            if batch is _END:
                raise DataError(
                    f"the loader ended before micro-batch {m} of {length}, which the other ranks expect. "
                    "Check the length of the dataset."
                )
            final = m + world.size >= end
            yield Piece(batch, m, index, m < begin + world.size, final, last if m == length - 1 else common, shared)
            index += 1
        if world.rank >= count:
            yield Piece(NO_BATCH, begin + world.rank, index, True, True, 0.0, shared)
        begin = end


def _window_sizes(size: int, taken: int | None) -> Iterator[int]:
    yield max(1, size - (taken or 0))
    while True:
        yield size


def collected(
    batches: Iterator[Any],
    world: World,
    size: int,
    start: int,
    *,
    per_rank: int | None,
    count: Callable[[Any], int],
    weigh: Callable[[Any], float] | None,
    taken: int | None = None,
    chain: Callable[[], int | None] = lambda: None,
) -> Iterator[Piece]:
    """The pieces of an epoch whose micro-batches are only known after fetching; endless if `per_rank` is `None`.

    Args:
        batches: this process's micro-batches from `start` on.
        world: the processes; nothing is exchanged here.
        size: micro-batches of a rank in a window.
        start: the micro-batch of the epoch that rank 0 begins with.
        per_rank: number of a rank's micro-batches from `start` on; `None` if unknown.
        count: the number of samples of a batch.
        weigh: the user's `batch_weight`; without it a micro-batch counts by the number of its samples.
        taken: as in `planned`.
        chain: what this process has read, see `SharedWindow`.
    """
    index = 0
    for wanted in _window_sizes(size, taken):
        if per_rank is not None and index >= per_rank:
            return
        window = list(islice(batches, wanted))
        weights = [weight_of(batch, count, weigh) for batch in window]
        shared = SharedWindow(sum(weights), len(window), False, agreed=False, chain=chain())
        if taken is not None:
            shared.weights = weights + [0.0] * (wanted - len(weights))
        m = start + index * world.size + world.rank
        for place, (batch, weight) in enumerate(zip(window, weights, strict=True)):
            final = place == len(window) - 1
            yield Piece(batch, m + place * world.size, index + place, place == 0, final, weight, shared)
        if not window:
            yield Piece(NO_BATCH, m, index, True, True, 0.0, shared)
        del window, weights
        index += wanted
