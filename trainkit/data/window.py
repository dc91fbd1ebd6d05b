"""The accumulation window: the micro-batches that make up one optimizer update, and how much each of them counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from trainkit.data.nested import batch_size
from trainkit.errors import DataError

__all__ = ["NOTHING", "MicroBatch", "Nothing", "Window", "checked_weight", "weight_of", "windows"]


class Nothing:
    """What a process is given in a window in which only others have micro-batches; ``NOTHING`` is the only one."""

    def __repr__(self) -> str:
        return "NOTHING"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "NOTHING"  # a copy is the same


NOTHING = Nothing()


class MicroBatch(NamedTuple):
    """A batch with its place in its window."""

    batch: Any
    first: bool
    full: bool  # the last of its window
    share: float  # its weight over the sum of the window's weights


_OF_A_BATCH = ("alike", "driven", "empty", "filler", "first", "full", "learnt", "share", "uneven")


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
    """

    __slots__ = (
        "alike",
        "counted",
        "driven",
        "empty",
        "filler",
        "first",
        "full",
        "learnt",
        "share",
        "size",
        "uneven",
        "worked",
    )

    def __init__(self, size: int) -> None:
        self.size = size
        self.reset()

    def reset(self) -> None:
        """As before the first micro-batch."""
        self.first = True
        self.full = True
        self.worked = 0
        self.share = 1.0
        self.empty = False
        self.uneven = False
        self.alike = True
        self.learnt = False
        self.filler = False
        self.driven = False
        self.counted = 0

    def take(self, micro: MicroBatch) -> None:
        """Work on this micro-batch now."""
        _, self.first, self.full, self.share = micro
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

    def state(self) -> tuple[Any, ...]:
        """What :meth:`put_back` takes."""
        return tuple(getattr(self, name) for name in _OF_A_BATCH)

    def put_back(self, state: tuple[Any, ...]) -> None:
        """Work again on the micro-batch that was worked on when :meth:`state` was asked."""
        for name, value in zip(_OF_A_BATCH, state, strict=True):
            setattr(self, name, value)

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

    Raises:
        DataError: ``weigh`` returned something else than a finite number ≥ 0.
    """
    if size == 1:
        return _alone(batches, weigh)
    if weigh is None and sizes is not None and length is not None:
        return _planned(batches, size, start, length, sizes)
    return _gathered(batches, size, count, weigh)


def _alone(batches: Iterator[Any], weigh: Callable[[Any], float] | None) -> Iterator[MicroBatch]:
    for batch in batches:
        share = 1.0 if weigh is None or weight_of(weigh, batch) > 0.0 else 0.0
        yield MicroBatch(batch, True, True, share)


def _planned(batches: Iterator[Any], size: int, start: int, length: int, sizes: tuple[int, int]) -> Iterator[MicroBatch]:
    common, last = sizes
    for m, batch in enumerate(batches, start):
        place = (m - start) % size
        begin = m - place
        end = min(begin + size, length)
        total = (end - begin) * common + (last - common if end == length else 0)
        samples = last if m == length - 1 else common
        yield MicroBatch(batch, place == 0, m == end - 1, samples / total)


def _gathered(
    batches: Iterator[Any], size: int, count: Callable[[Any], int], weigh: Callable[[Any], float] | None
) -> Iterator[MicroBatch]:
    while window := list(islice(batches, size)):
        weights = [float(count(batch)) if weigh is None else weight_of(weigh, batch) for batch in window]
        total = sum(weights)
        for place, (batch, weight) in enumerate(zip(window, weights, strict=True)):
            share = weight / total if total > 0.0 else 0.0
            yield MicroBatch(batch, place == 0, place == len(window) - 1, share)


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
