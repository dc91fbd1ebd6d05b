"""Accumulation windows of several ranks: what each rank computes alone, and what the ranks exchange."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from helpers.data.dealt import Alike

from trainkit.data.windows import Piece, SharedWindow, collected, planned
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
    found = [list(planned(iter("abc"), Alike(rank, 3), 2, 0, 7, (4, 1))) for rank in range(3)]
    assert [[(p.batch, p.m, p.index, p.first, p.last, p.weight) for p in own] for own in found] == [
        [("a", 0, 0, True, False, 4), ("b", 3, 1, False, True, 4), ("c", 6, 2, True, True, 1)],
        [("a", 1, 0, True, False, 4), ("b", 4, 1, False, True, 4), (NO_BATCH, 7, 2, True, True, 0)],
        [("a", 2, 0, True, False, 4), ("b", 5, 1, False, True, 4), (NO_BATCH, 8, 2, True, True, 0)],
    ]
    for own in found:
        assert [(p.shared.total, p.shared.per_rank, p.shared.uneven) for p in own] == [(24, 2, False)] * 2 + [(1, 1, True)]


def test_a_window_that_begins_with_a_row_that_is_not_full() -> None:
    """2 ranks start at micro-batch 2 of 5, in a window of 2 per rank: rank 0 has two of the other three, rank 1 has one."""
    found = [list(planned(iter("ab"), Alike(rank, 2), 2, 2, 5, (4, 4))) for rank in range(2)]
    assert [[(p.m, p.index, p.last) for p in own] for own in found] == [[(2, 0, False), (4, 1, True)], [(3, 0, True)]]
    assert found[0][0].shared.uneven


def entries(pieces: list[Piece]) -> list[tuple[Any, ...]]:
    """Index, last, share and the values for your own training loop, for each micro-batch of one of two ranks."""
    found = []
    for piece in pieces:
        begin = next(p.index for p in pieces if p.shared is piece.shared)
        micro = piece.shared.micro_batch(None, MicroBatchKind.DATA, (begin, piece.index), piece.weight, piece.last, 2)
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
            pieces = list(planned(iter(sizes), Alike(rank, 2), 3, 0, 6, (4, 2), 2))
        else:
            pieces = list(
                collected(iter(sizes), Alike(rank, 2), 3, 0, per_rank=3, count=lambda size: size, weigh=None, taken=2)
            )
            others = Telling([[4, 1, 4], [8, 2, 4, 4, 0] if rank else [6, 2, 4, 2, 0]])
            assert [piece.shared.weights for piece in pieces[:2]] == [[4], [*sizes[1:], 0.0]]
            for piece in pieces:
                piece.shared.agree(others)
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
        shared = SharedWindow(sum(weights), len(weights), False, agreed=True, weights=weights)
        micro = shared.micro_batch(None, MicroBatchKind.DATA, (0, 0), 0.0, True, 2)
        assert (micro.share, micro.empty, micro.entry) == (0.0, sum(weights) == 0.0, (0, 0.0, 1.0, 0.0, 0.0))


def test_a_loader_that_ends_too_early() -> None:
    pieces = planned(iter("a"), Alike(1, 2), 1, 0, 4, (4, 4))
    assert next(pieces).batch == "a"
    with pytest.raises(DataError, match="ended before micro-batch 3 of 4"):
        next(pieces)


def test_what_is_collected() -> None:
    """Rank 1 of 3 reads 3 batches, so its first window has 2 and the next has 1; then it only takes part with `NO_BATCH`."""
    pieces = collected(iter("abc"), Alike(1, 3), 2, 6, per_rank=None, count=lambda batch: 5, weigh=None)
    found = [next(pieces) for _ in range(5)]
    assert [(p.batch, p.m, p.index, p.first, p.last, p.weight, p.absent) for p in found] == [
        ("a", 7, 0, True, False, 5, False),
        ("b", 10, 1, False, True, 5, False),
        ("c", 13, 2, True, True, 5, False),
        (NO_BATCH, 19, 4, True, True, 0, True),
        (NO_BATCH, 25, 6, True, True, 0, True),
    ]
    assert len(list(collected(iter("abc"), Alike(1, 3), 2, 6, per_rank=5, count=len, weigh=None))) == 4, "three windows"


@pytest.mark.parametrize(
    "other, expected",
    [([6.0, 2], (10.0, 2, False)), ([0.0, 1], (4.0, 2, True)), ([6.0, 3], (10.0, 3, True)), ([0.0, 0], (4.0, 2, True))],
)
def test_what_others_have(other: list[float], expected: tuple[float, int, bool]) -> None:
    """Total, micro-batches per rank, and whether they are uneven, after an exchange with another rank."""
    shared, world = SharedWindow(4.0, 2, False, agreed=False), Telling([other])
    for _ in range(2):
        shared.agree(world)  # exchanges only once
    assert (shared.total, shared.per_rank, shared.uneven) == expected
    assert isinstance(shared.per_rank, int)


def test_a_micro_batch_of_a_shared_window() -> None:
    shared = SharedWindow(8.0, 2, True, agreed=True, weights=[6.0, 2.0])
    micro = shared.micro_batch("a", MicroBatchKind.DATA, (4, 5), 2.0, True, ranks=2)
    assert micro == ("a", 5, False, True, 0.5, MicroBatchKind.DATA, True, False, False, (4, 0.25, 0.25, 2.0, 2.0), 2.0)
    assert shared.micro_batch("a", MicroBatchKind.DATA, (4, 4), 3.0, False, ranks=2).entry == (4, 0.75, 1.0, 1.0, 6.0)


def test_a_padding_micro_batch_has_no_share() -> None:
    shared = SharedWindow(8.0, 2, True, agreed=True)
    micro = shared.micro_batch("a", MicroBatchKind.PADDING, (4, 5), 0.0, True, ranks=2)
    assert (micro.share, micro.empty, micro.entry) == (0.0, False, None)
    assert SharedWindow(0.0, 1, False, agreed=True).micro_batch(1, MicroBatchKind.DATA, (0, 0), 0.0, True, 2).empty
