"""The accumulation window: three ways to compute the shares agree with each other and with the mean over all samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainkit.data.windows import collect_windows, plan_windows
from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.micro_batch import MicroBatch, MicroBatchKind
from trainkit.nested import batch_size


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
    """The micro-batches of one rank that drives one device, as `PreparedLoader` yields them to your own training loop."""
    options: dict[str, Any] = {"index": start, "taken": taken, "entries": True}
    if weigh is None and sizes is not None and length is not None:
        parts = plan_windows(batches, World(), size, start, length, sizes, **options)
    else:
        parts = collect_windows(batches, World(), size, per_rank=None, count=count, weigh=weigh, **options)
    for part in parts:
        yield part.window.micro_batch(part.batch, MicroBatchKind.DATA, part.index, part.weight, part.last, 1)


def batches_of(sizes: list[int]) -> list[Tensor]:
    return [torch.zeros(size) for size in sizes]


def sizes_of(length: int, common: int, last: int) -> list[int]:
    return [common] * (length - 1) + [last] if length else []


def places(micros: list[MicroBatch]) -> list[tuple[bool, bool]]:
    return [(micro.first, micro.last) for micro in micros]


def grouped(micros: list[MicroBatch]) -> list[list[MicroBatch]]:
    """Group micro-batches by window, and check that all windows are complete."""
    groups: list[list[MicroBatch]] = []
    for micro in micros:
        assert micro.first == (not groups or groups[-1][-1].last)
        if micro.first:
            groups.append([])
        groups[-1].append(micro)
    assert not groups or groups[-1][-1].last, "the last window of an epoch is full, however short"
    return groups


# ---------------------------------------------------------------------------- planned, gathered, and computed by hand


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """(micro-batches, samples in each, samples in the last, window, first micro-batch)."""
    length, common, size = draw(st.integers(0, 40)), draw(st.integers(1, 9)), draw(st.integers(1, 12))
    last = draw(st.integers(1, common))
    start = size * draw(st.integers(0, length // size + 1))
    return length, common, last, size, start


@given(epochs())
def test_planned_and_gathered_windows_agree(epoch: tuple[int, int, int, int, int]) -> None:
    """Shares planned from known sizes, counted in fetched batches, and computed from weights agree with exact fractions."""
    length, common, last, size, start = epoch
    samples = sizes_of(length, common, last)
    batches = batches_of(samples)[start:]
    planned = list(windows(iter(batches), size, start=start, length=length, sizes=(common, last)))
    gathered = list(windows(iter(batches), size))
    weighed = list(windows(iter(batches), size, weigh=len))
    assert [id(micro.batch) for micro in planned] == [id(batch) for batch in batches]
    assert places(planned) == places(gathered) == places(weighed)
    if size > 1:
        assert [micro.share for micro in planned] == [micro.share for micro in gathered]
        assert gathered == weighed
    for group, expected in zip(grouped(planned), chunks(samples[start:], size), strict=True):
        shares = [Fraction(count, sum(expected)) for count in expected]
        assert [micro.share for micro in group] == [float(share) for share in shares]


def chunks(values: list[int], size: int) -> list[list[int]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


@given(epochs())
def test_a_resumed_epoch_has_the_windows_of_the_whole_one(epoch: tuple[int, int, int, int, int]) -> None:
    length, common, last, size, start = epoch
    batches = batches_of(sizes_of(length, common, last))
    for options in ({"sizes": (common, last), "length": length}, {}):
        whole = list(windows(iter(batches), size, **options))
        tail = list(windows(iter(batches[start:]), size, start=start, **options))
        assert tail == whole[start:]


def test_shares_make_the_mean_over_the_window() -> None:
    """The means of micro-batches times their shares add up to the mean over all samples of the window."""
    values = [torch.arange(3.0), torch.arange(3.0) + 5, torch.tensor([7.0])]
    total = sum(micro.share * micro.batch.mean() for micro in windows(iter(values), 3, length=3, sizes=(3, 1)))
    assert torch.allclose(total, torch.cat(values).mean())


def test_batches_of_any_size_count_by_their_samples() -> None:
    micros = list(windows(iter(batches_of([4, 1, 3, 2])), 2))
    assert [micro.share for micro in micros] == [0.8, 0.2, 0.6, 0.4]


def test_a_batch_may_be_counted_otherwise() -> None:
    micros = list(windows(iter([{"n": 3}, {"n": 1}]), 2, count=lambda batch: batch["n"]))
    assert [micro.share for micro in micros] == [0.75, 0.25]


@given(epochs(), st.integers(0, 12))
def test_the_first_window_completes_one_that_was_left(epoch: tuple[int, int, int, int, int], taken: int) -> None:
    """With `taken`, the first window has only the micro-batches that complete the window of the previous epoch."""
    length, common, last, size, start = epoch
    samples, taken = sizes_of(length, common, last)[start:], min(taken, size - 1)
    sizes = (common, last)
    found = list(windows(iter(batches_of(samples)), size, start=start, length=length, sizes=sizes, taken=taken))
    assert [len(group) for group in grouped(found)][:1] == [min(size - taken, len(samples))][: len(samples)]
    gathered = list(windows(iter(batches_of(samples)), size, start=start, taken=taken))
    assert [micro[1:4] for micro in found] == [micro[1:4] for micro in gathered]
    for ours, theirs in zip(found, gathered, strict=True):
        assert (ours.share, ours.entry.remaining) == pytest.approx((theirs.share, theirs.entry.remaining))
    for group in grouped(found):
        assert [micro.entry.remaining for micro in group] == pytest.approx(
            [sum(m.share for m in group[n:]) for n in range(len(group))]
        )
        assert group[0].entry.remaining == 1.0, "exactly: so what is worked on from there on is scaled by nothing"


def test_a_window_of_one_counts_in_full() -> None:
    micros = list(windows(iter(batches_of([4, 1])), 1, length=2, sizes=(4, 1)))
    assert [micro[2:5] for micro in micros] == [(True, True, 1.0)] * 2


class Counting:
    """Counts the batches that are read from it."""

    def __init__(self, batches: list[Any]) -> None:
        self.taken = 0
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.taken += 1
            yield batch


@pytest.mark.parametrize(
    "options, ahead",
    [({"sizes": (2, 2), "length": 6}, 1), ({}, 3), ({"sizes": (2, 2)}, 3), ({"length": 6}, 3)],
    ids=["planned", "counted", "no length", "no sizes"],
)
def test_only_what_has_to_be_is_fetched_ahead(options: dict[str, Any], ahead: int) -> None:
    """If the sizes are known, one batch is fetched at a time; otherwise the whole window is."""
    source = Counting(batches_of([2] * 6))
    micros = windows(iter(source), 3, **options)
    next(micros)
    assert source.taken == ahead
    next(micros)
    assert source.taken == max(ahead, 2)


def test_weights_are_worked_out_once_and_in_order() -> None:
    seen: list[int] = []
    list(windows(iter(range(1, 6)), 2, weigh=lambda batch: seen.append(batch) or float(batch)))
    assert seen == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------------------ weights


def test_weights_beat_the_number_of_samples() -> None:
    """If the user gives weights, the numbers of samples are not used."""
    micros = list(windows(iter([1.0, 3.0, 5.0]), 2, length=3, sizes=(8, 8), weigh=float))
    assert [(micro.share, micro.first, micro.last) for micro in micros] == [
        (0.25, True, False),
        (0.75, False, True),
        (1.0, True, True),
    ]


def test_a_micro_batch_of_weight_zero_has_no_share() -> None:
    assert [micro.share for micro in windows(iter([0.0, 2.0, 2.0]), 3, weigh=float)] == [0.0, 0.5, 0.5]


def test_a_window_of_weight_zero_has_no_shares() -> None:
    assert [micro.share for micro in windows(iter([0.0, 0.0, 1.0, 0.0]), 2, weigh=float)] == [0.0, 0.0, 1.0, 0.0]


def test_alone_a_weight_says_only_whether_a_micro_batch_counts() -> None:
    """Without accumulation, a share is 1, or 0 if the weight is 0."""
    assert [micro.share for micro in windows(iter([0.0, 0.5, 9.0]), 1, weigh=float)] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("weigh", [None, float])
def test_a_batch_that_is_none_has_no_weight(weigh: Any) -> None:
    assert [micro.share for micro in windows(iter([1.0, None, None, None]), 2, weigh=weigh)] == [1.0, 0.0, 0.0, 0.0]
    assert [micro.share for micro in windows(iter([None, 1.0]), 1, weigh=float)] == [0.0, 1.0]


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([3.0]), True])
def test_what_may_be_a_weight(weight: Any) -> None:
    micros = list(windows(iter([weight, weight]), 2, weigh=lambda batch: batch))
    assert [micro.share for micro in micros] == [0.5, 0.5]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "weight", [-1.0, -1e-9, float("nan"), float("inf"), None, "many", torch.ones(2), torch.tensor(-1.0), [3]], ids=repr
)
def test_what_may_not_be_a_weight(weight: Any, size: int) -> None:
    with pytest.raises(DataError, match=r"a finite number ≥ 0.*return float\("):
        list(windows(iter(["batch"]), size, weigh=lambda batch: weight))


def test_an_error_in_batch_weight_is_the_users() -> None:
    def weigh(batch: Any) -> float:
        raise ValueError("no labels")

    with pytest.raises(ValueError, match="no labels"):
        list(windows(iter([1]), 2, weigh=weigh))


def test_windows_of_a_stream_without_an_end() -> None:
    def endless() -> Iterator[Tensor]:
        while True:
            yield torch.zeros(2)

    micros = list(islice(windows(endless(), 3), 7))
    assert [micro.last for micro in micros] == [False, False, True, False, False, True, False]
    assert all(before.last == after.first for before, after in pairwise(micros))
