"""Accumulation windows of several ranks: what each rank computes alone, and what the ranks exchange."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from helpers.data.dealt import Alike

from trainkit.data.windows import Window, WindowPart, collect_windows, plan_windows
from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.micro_batch import NO_BATCH, MicroBatchKind


class Telling(World):
    """The world of one of two ranks, in which the values of the other rank are given."""

    def __init__(self, said: list[list[float]]) -> None:
        super().__init__(0, 2)
        self.said = said

    def rows(self, values: Any) -> list[list[float]]:
        return [list(values), self.said.pop(0)]


def test_nothing() -> None:
    """`NO_BATCH` is false, and copies and pickles of it are the same object."""
    assert repr(NO_BATCH) == "NO_BATCH"
    assert not NO_BATCH
    assert copy.deepcopy([NO_BATCH])[0] is pickle.loads(pickle.dumps(NO_BATCH)) is NO_BATCH


def test_what_is_planned() -> None:
    """3 ranks, windows of 2 micro-batches per rank, and 7 micro-batches in all: 6 of 4 samples and the last of 1."""
    found = [list(plan_windows(iter("abc"), Alike(rank, 3), 2, 0, 7, (4, 1))) for rank in range(3)]
    assert [[(p.batch, p.index, p.index == p.window.begin, p.last, p.weight) for p in own] for own in found] == [
        [("a", 0, True, False, 4), ("b", 1, False, True, 4), ("c", 2, True, True, 1)],
        [("a", 0, True, False, 4), ("b", 1, False, True, 4), (NO_BATCH, 2, True, True, 0)],
        [("a", 0, True, False, 4), ("b", 1, False, True, 4), (NO_BATCH, 2, True, True, 0)],
    ]
    for own in found:
        assert [(p.window.total, p.window.per_rank, p.window.uneven) for p in own] == [(24, 2, False)] * 2 + [(1, 1, True)]


def test_a_window_that_begins_with_a_row_that_is_not_full() -> None:
    """2 ranks start at micro-batch 2 of 5, in a window of 2 per rank: rank 0 has two of the other three, rank 1 has one."""
    found = [list(plan_windows(iter("ab"), Alike(rank, 2), 2, 2, 5, (4, 4))) for rank in range(2)]
    assert [[(p.index, p.last) for p in own] for own in found] == [[(0, False), (1, True)], [(0, True)]]
    assert found[0][0].window.uneven


def entries(pieces: list[WindowPart]) -> list[tuple[Any, ...]]:
    """Index, last, share and the values for your own training loop, for each micro-batch of one of two ranks."""
    found = []
    for piece in pieces:
        micro = piece.window.micro_batch(None, MicroBatchKind.DATA, piece.index, piece.weight, piece.last, 2)
        assert micro.entry is not None
        found.append((micro.index, micro.last, micro.share, *micro.entry[1:]))
    return found


@pytest.mark.parametrize("way", ["planned", "collected"])
def test_rows_of_an_own_loop(way: str) -> None:
    """2 ranks with 3 micro-batches each: all of 4 samples, but the last of rank 1 of 2. Windows have 3 per rank.

    The first window has one micro-batch per rank left, because two of its three were in the previous epoch.
    """
    found = []
    for rank in range(2):
        sizes = [4, 4, 4] if rank == 0 else [4, 4, 2]
        if way == "planned":
            pieces = list(plan_windows(iter(sizes), Alike(rank, 2), 3, 0, 6, (4, 2), taken=2, entries=True))
        else:
            pieces = list(
                collect_windows(
                    iter(sizes), Alike(rank, 2), 3, per_rank=3, count=lambda size: size, weigh=None, taken=2, entries=True
                )
            )
            others = Telling([[4, 1, 4], [8, 2, 4, 4, 0] if rank else [6, 2, 4, 2, 0]])
            assert [piece.window.weights for piece in pieces[:2]] == [[4], [*sizes[1:], 0.0]]
            for piece in pieces:
                piece.window.agree(others)
        found.append(entries(pieces))
    assert found[0] == [
        (0, True, 1.0, 1.0, 1.0, 1.0, 8.0),
        (1, False, 8 / 14, 8 / 14, 1.0, 1.0, 8.0),
        (2, True, 8 / 14, 6 / 14, 6 / 14, 8 / 6, 6.0),
    ]
    assert [row[2:6] for row in found[1]] == [(1.0, 1.0, 1.0, 1.0), (8 / 14, 8 / 14, 1.0, 1.0), (4 / 14, 6 / 14, 6 / 14, 4 / 6)]
    assert [row[6] for row in found[1]] == [8.0, 8.0, 6.0]


def test_a_window_that_weighs_nothing() -> None:
    """A micro-batch of weight 0 has the share 0, whether or not the other micro-batches of its window have weights."""
    for weights in ([0.0], [0.0, 3.0]):
        window = Window(0, sum(weights), len(weights), False, agreed=True, weights=weights)
        micro = window.micro_batch(None, MicroBatchKind.DATA, 0, 0.0, True, 2)
        assert (micro.share, micro.empty, micro.entry) == (0.0, sum(weights) == 0.0, (0, 0.0, 1.0, 0.0, 0.0))


def test_a_loader_that_ends_too_early() -> None:
    pieces = plan_windows(iter("a"), Alike(1, 2), 1, 0, 4, (4, 4))
    assert next(pieces).batch == "a"
    with pytest.raises(DataError, match="ended before micro-batch 3 of 4"):
        next(pieces)


def test_what_is_collected() -> None:
    """Rank 1 of 3 reads 3 batches, so its first window has 2 and the next has 1; then it only takes part with `NO_BATCH`."""
    pieces = collect_windows(iter("abc"), Alike(1, 3), 2, per_rank=None, count=lambda batch: 5, weigh=None)
    found = [next(pieces) for _ in range(5)]
    assert [(p.batch, p.index, p.index == p.window.begin, p.last, p.weight) for p in found] == [
        ("a", 0, True, False, 5),
        ("b", 1, False, True, 5),
        ("c", 2, True, True, 5),
        (NO_BATCH, 4, True, True, 0),
        (NO_BATCH, 6, True, True, 0),
    ]
    assert len(list(collect_windows(iter("abc"), Alike(1, 3), 2, per_rank=5, count=len, weigh=None))) == 4, "three windows"


@pytest.mark.parametrize(
    "other, expected",
    [([6.0, 2], (10.0, 2, False)), ([0.0, 1], (4.0, 2, True)), ([6.0, 3], (10.0, 3, True)), ([0.0, 0], (4.0, 2, True))],
)
def test_what_others_have(other: list[float], expected: tuple[float, int, bool]) -> None:
    """Total, micro-batches per rank, and whether they are uneven, after an exchange with another rank."""
    window, world = Window(0, 4.0, 2, False, agreed=False), Telling([other])
    for _ in range(2):
        window.agree(world)  # exchanges only once
    assert (window.total, window.per_rank, window.uneven) == expected
    assert isinstance(window.per_rank, int)


def test_a_micro_batch_of_a_window_of_two_ranks() -> None:
    window = Window(4, 8.0, 2, True, agreed=True, weights=[6.0, 2.0])
    micro = window.micro_batch("a", MicroBatchKind.DATA, 5, 2.0, True, ranks=2)
    assert micro == ("a", 5, False, True, 0.5, MicroBatchKind.DATA, True, False, False, (4, 0.25, 0.25, 2.0, 2.0), 2.0, False)
    assert window.micro_batch("a", MicroBatchKind.DATA, 4, 3.0, False, ranks=2).entry == (4, 0.75, 1.0, 1.0, 6.0)


def test_a_padding_micro_batch_has_no_share() -> None:
    window = Window(4, 8.0, 2, True, agreed=True)
    micro = window.micro_batch("a", MicroBatchKind.PADDING, 5, 0.0, True, ranks=2)
    assert (micro.share, micro.empty, micro.entry) == (0.0, False, None)
    assert Window(0, 0.0, 1, False, agreed=True).micro_batch(1, MicroBatchKind.DATA, 0, 0.0, True, 2).empty
