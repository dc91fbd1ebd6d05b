"""Accumulation windows on one process: which micro-batches make up one optimizer step, and the weight of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from trainkit.errors import DataError
from trainkit.micro_batch import MicroBatch, WindowEntry
from trainkit.nested import batch_size

__all__ = ["checked_weight", "weight_of", "windows"]


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
