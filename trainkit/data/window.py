"""The accumulation window: the micro-batches that make up one optimizer update, and how much each of them counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from trainkit.errors import DataError
from trainkit.nested import batch_size

__all__ = ["NOTHING", "MicroBatch", "Nothing", "Offer", "Window", "checked_weight", "weight_of", "windows"]


class Nothing:
    """What a process is given in a window in which only others have micro-batches; ``NOTHING`` is the only one."""

    def __repr__(self) -> str:
        return "NOTHING"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "NOTHING"  # a copy is the same


NOTHING = Nothing()


class Offer(NamedTuple):
    """A micro-batch of an accumulation window, as a loader gives it to a user's own loop; ``accumulate`` takes it.

    A row is one micro-batch of each process.
    """

    place: tuple[int, int, int]  # the loader (its id), the row that the window begins with, this row
    full: bool  # the last of its window
    share: float  # of this process's micro-batch in the window
    part: float  # of the whole row in the window
    rest: float  # of this row and of those after it
    alone: float  # of this process's micro-batch in its row


class MicroBatch(NamedTuple):
    """A batch with its place in its window."""

    batch: Any
    first: bool
    full: bool  # the last of its window
    share: float  # its weight over the sum of the window's weights
    rest: float = 1.0  # the share of this micro-batch and of those after it

    def offer(self, place: tuple[int, int, int]) -> Offer:
        """The same for an own loop on one process."""
        return Offer(place, self.full, self.share, self.share, self.rest, float(self.share > 0.0))


_OF_A_BATCH = ("alike", "driven", "empty", "filler", "first", "full", "learnt", "offered", "share", "uneven")


class Window:
    """The state of the window that is being worked on: the loader writes it, the ``Accelerator`` acts on it.

    Attributes:
        size: micro-batches in a window of one process; the last one of an epoch may have fewer.
        first: the current micro-batch is the first of its window.
        full: the current micro-batch is the last of its window: after its backward the update is due.
        share: the part of the window's total weight that the current micro-batch has. Scaled by it, the mean losses of the
            micro-batches add up to the mean over the global batch. With several processes the total is that of all of them,
            and the part is multiplied by their number, as the mean over their gradients is taken.
        empty: the total weight of the window, over all processes, is 0, so there is nothing to learn from it.
        uneven: the processes have different numbers of micro-batches in this window.
        alike: it is certain that the processes have as many, all of one size.
        worked: so many micro-batches have been worked on.
        learnt: a loss has been taken of the current micro-batch.
        filler: only others have a micro-batch here, and what this process was given counts nothing.
        counted: micro-batches that :meth:`count` has counted.
        driven: a prepared loader has set this state and ``accumulate`` has not yet taken it.
        own: it is that of a user's own loop, where micro-batches make up a window only if the loop calls ``accumulate``.
        offered: in an own loop, the current micro-batch as a part of a window, until ``accumulate`` takes it.
        taken: number of micro-batches that ``accumulate`` has taken so far.
        rows: number of them in the window that is not full yet; 0: none is open. The window stays open when the loop leaves the
            epoch, and the next epoch completes it.
        done: the part of that window's weight that they have.
        fresh: there has been no backward pass for the current micro-batch.
        by_hand: the loop calls ``backward`` outside of ``accumulate``; ``None``: not known yet.
    """

    __slots__ = (
        "_next",
        "_scale",
        "alike",
        "by_hand",
        "counted",
        "done",
        "driven",
        "empty",
        "filler",
        "first",
        "fresh",
        "full",
        "learnt",
        "offered",
        "own",
        "rows",
        "share",
        "size",
        "taken",
        "uneven",
        "worked",
    )

    def __init__(self, size: int, own: bool = False) -> None:
        self.size, self.own = size, own
        self.reset()

    def reset(self) -> None:
        """As before the first micro-batch."""
        self.first = True
        self.full = True
        self.worked = self.taken = 0
        self.share = 1.0
        self.empty = False
        self.uneven = False
        self.alike = True
        self.learnt = False
        self.filler = False
        self.driven = False
        self.counted = 0
        self.by_hand: bool | None = None
        self.forget()

    def forget(self) -> None:
        """No window is open: the next micro-batch begins one."""
        self.rows, self.done = 0, 0.0
        self.offered: Offer | None = None
        self.fresh = True
        self._scale, self._next = 1.0, (0, 0, 0)
        self.first = self.full = True

    def take(self, micro: MicroBatch) -> None:
        """Work on this micro-batch now."""
        _, self.first, self.full, self.share, _ = micro
        self.worked += 1
        if self.first:
            self.empty = True
        if self.share > 0.0:
            self.empty = False
        self.driven = True

    def deal(self, first: bool, full: bool, share: float, *, empty: bool, uneven: bool, filler: bool) -> None:
        """Work now on a micro-batch of a window that several processes work on."""
        self.first, self.full, self.share = first, full, share
        self.worked += 1
        self.empty, self.uneven, self.filler = empty, uneven, filler
        self.driven = True

    def offer(self, offer: Offer, *, uneven: bool = False, filler: bool = False) -> None:
        """A loader has given an own loop a micro-batch of a window.

        Until ``accumulate`` takes it as such, it is a window of its own, unless one is open. Its loss is divided by the number
        of micro-batches in a window all the same, as in Accelerate.
        """
        self.offered = offer
        self.first = self.full = self.rows == 0
        self.share = offer.alone / self.size
        self.empty = offer.part <= 0.0
        self.uneven, self.filler = uneven, filler
        self.worked += 1
        self.driven = self.fresh = True

    def enter(self) -> None:
        """``accumulate`` takes the micro-batch that has been offered as a part of its window.

        The shares of what is worked on add up to 1, also where a loop enters a window in its middle, or completes one that it
        has left before.
        """
        offer, begins = self.offered, self.rows == 0
        if offer is None:
            return
        loader, window, row = offer.place
        if begins or offer.place != self._next:
            self._scale = (1.0 - self.done) / offer.rest if offer.rest > 0.0 else 0.0
        self._next = loader, window, row + 1
        self.first, self.full, self.share = begins, offer.full, offer.share * self._scale
        self.done += offer.part * self._scale
        self.empty = self.done <= 0.0
        self.rows += 1
        if offer.full:
            self.rows, self.done = 0, 0.0
        self.taken += 1
        self.offered = None

    def leave(self) -> None:
        """No loader is being read any more. A window that is not full stays open."""
        if self.rows:
            self.first = self.full = False

    def unfinished(self, taken: int) -> bool:
        """Whether the micro-batch that a loader gave last belongs to a window that is not complete.

        Args:
            taken: :attr:`taken` when it was given; -1: it was no offer.
        """
        if taken < 0:
            return not self.full
        return self.rows > 0 or (self.taken == taken and self.by_hand is not True)

    @property
    def offers(self) -> bool:
        """Whether loaders offer micro-batches: in an own loop whose windows have several, or have had and one is open."""
        return self.own and (self.size > 1 or self.rows > 0)

    @property
    def clears(self) -> bool:
        """Whether ``zero_grad`` acts: before the backward pass of a window's first micro-batch, or after that of its last."""
        if not self.own:
            return self.full
        return (self.first and self.fresh) or (self.full and (self.first or not self.fresh))

    def state(self) -> tuple[Any, ...]:
        """What :meth:`put_back` takes."""
        return tuple(getattr(self, name) for name in _OF_A_BATCH)

    def put_back(self, state: tuple[Any, ...]) -> None:
        """Work again on the micro-batch that was worked on when :meth:`state` was asked."""
        for name, value in zip(_OF_A_BATCH, state, strict=True):
            setattr(self, name, value)
        self.full = self.full and not self.rows

    def count(self) -> None:
        """Work on the next of ``size`` equal micro-batches: for loops whose loader was not prepared."""
        place = self.counted % self.size
        self.counted += 1
        self.uneven = self.filler = False
        self.alike = True
        self.take(MicroBatch(None, place == 0, place == self.size - 1, 1.0 / self.size))


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
    """The micro-batches of an epoch with their places in windows of ``size``.

    Args:
        batches: the micro-batches from ``start`` on.
        size: micro-batches in a window.
        count: the number of samples of a batch.
        start: number of the first of them in its epoch.
        length: micro-batches of the epoch, where known together with ``sizes``.
        sizes: samples in each micro-batch but the last, and in the last. With them known nothing is fetched ahead.
        weigh: the user's ``batch_weight``; without it a micro-batch counts by the number of its samples.
        taken: number of micro-batches that the first window has less: it completes one that was left.

    Raises:
        DataError: ``weigh`` returned something else than a finite number ≥ 0.
    """
    if size == 1:
        return _alone(batches, weigh)
    if weigh is None and sizes is not None and length is not None:
        return _planned(batches, size, start, length, sizes, taken)
    return _gathered(batches, size, count, weigh, taken)


def _alone(batches: Iterator[Any], weigh: Callable[[Any], float] | None) -> Iterator[MicroBatch]:
    for batch in batches:
        share = 1.0 if weigh is None or weight_of(weigh, batch) > 0.0 else 0.0
        yield MicroBatch(batch, True, True, share)


def _planned(
    batches: Iterator[Any], size: int, start: int, length: int, sizes: tuple[int, int], taken: int
) -> Iterator[MicroBatch]:
    common, last = sizes
    taken = min(taken, size - 1)
    for m, batch in enumerate(batches, start):
        begin = m - (m - start + taken) % size
        end, begin = min(begin + size, length), max(begin, start)
        rest = (end - m) * common + (last - common if end == length else 0)
        total = rest + (m - begin) * common
        samples = last if m == length - 1 else common
        yield MicroBatch(batch, m == begin, m == end - 1, samples / total, rest / total)


def _gathered(
    batches: Iterator[Any], size: int, count: Callable[[Any], int], weigh: Callable[[Any], float] | None, taken: int
) -> Iterator[MicroBatch]:
    wanted = max(1, size - taken)
    while window := list(islice(batches, wanted)):
        weights = [float(count(batch)) if weigh is None else weight_of(weigh, batch) for batch in window]
        total = sum(weights)
        for place, (batch, weight) in enumerate(zip(window, weights, strict=True)):
            share = weight / total if total > 0.0 else 0.0
            rest = 1.0 if place == 0 or total <= 0.0 else sum(weights[place:]) / total
            yield MicroBatch(batch, place == 0, place == len(window) - 1, share, rest)
        wanted = size


def weight_of(weigh: Callable[[Any], float], batch: Any) -> float:
    """What the user's ``batch_weight`` says of a batch.

    Raises:
        DataError: something else than a finite number ≥ 0.
    """
    return checked_weight(weigh(batch), "batch_weight must return", "return ")


def checked_weight(value: Any, what: str, example: str) -> float:
    """A weight as a number.

    Raises:
        DataError: something else than a finite number ≥ 0; ``what`` and ``example`` begin what the message says.
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
