"""Windows that several processes work on: what each works out alone, and what they tell one another."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from dealt import Alike

from trainkit.data.shared_window import Shared, collected, planned
from trainkit.data.window import NOTHING, MicroBatch, Window
from trainkit.distributed import World
from trainkit.errors import DataError


class Telling(World):
    """One of two processes, whose other one says what it is given to say."""

    def __init__(self, said: list[list[float]]) -> None:
        super().__init__(0, 2)
        self.said = said

    def rows(self, values: Any) -> list[list[float]]:
        return [list(values), self.said.pop(0)]


def test_nothing() -> None:
    assert repr(NOTHING) == "NOTHING"
    assert not NOTHING
    assert copy.deepcopy([NOTHING])[0] is pickle.loads(pickle.dumps(NOTHING)) is NOTHING


def test_what_is_planned() -> None:
    """7 micro-batches of 4 samples, the last of 1, in windows of 2 rows on 3 processes, from micro-batch 0 on."""
    found = [list(planned(iter("abc"), Alike(rank, 3), 2, 0, 7, (4, 1))) for rank in range(3)]
    assert [[(p.batch, p.m, p.row, p.first, p.full, p.weight) for p in own] for own in found] == [
        [("a", 0, 0, True, False, 4), ("b", 3, 1, False, True, 4), ("c", 6, 2, True, True, 1)],
        [("a", 1, 0, True, False, 4), ("b", 4, 1, False, True, 4), (NOTHING, 7, 2, True, True, 0)],
        [("a", 2, 0, True, False, 4), ("b", 5, 1, False, True, 4), (NOTHING, 8, 2, True, True, 0)],
    ]
    for own in found:
        assert [(p.shared.total, p.shared.rows, p.shared.uneven) for p in own] == [(24, 2, False)] * 2 + [(1, 1, True)]


def test_a_window_that_begins_with_a_row_that_is_not_full() -> None:
    """5 micro-batches from number 2 on, 2 rows on 2 processes: 2 and 1 of them."""
    found = [list(planned(iter("ab"), Alike(rank, 2), 2, 2, 5, (4, 4))) for rank in range(2)]
    assert [[(p.m, p.row, p.full) for p in own] for own in found] == [[(2, 0, False), (4, 1, True)], [(3, 0, True)]]
    assert found[0][0].shared.uneven


def test_a_loader_that_ends_too_early() -> None:
    pieces = planned(iter("a"), Alike(1, 2), 1, 0, 4, (4, 4))
    assert next(pieces).batch == "a"
    with pytest.raises(DataError, match="ended before micro-batch 3 of 4"):
        next(pieces)


def test_what_is_collected() -> None:
    pieces = collected(iter("abc"), Alike(1, 3), 2, 6, rows=None, count=lambda batch: 5, weigh=None)
    found = [next(pieces) for _ in range(5)]
    assert [(p.batch, p.m, p.row, p.first, p.full, p.weight, p.filler) for p in found] == [
        ("a", 7, 0, True, False, 5, False),
        ("b", 10, 1, False, True, 5, False),
        ("c", 13, 2, True, True, 5, False),
        (NOTHING, 19, 4, True, True, 0, True),
        (NOTHING, 25, 6, True, True, 0, True),
    ]
    assert len(list(collected(iter("abc"), Alike(1, 3), 2, 6, rows=5, count=len, weigh=None))) == 4, "three windows"


@pytest.mark.parametrize(
    "other, expected",
    [([6.0, 2], (10.0, 2, False)), ([0.0, 1], (4.0, 2, True)), ([6.0, 3], (10.0, 3, True)), ([0.0, 0], (4.0, 2, True))],
)
def test_what_others_have(other: list[float], expected: tuple[float, int, bool]) -> None:
    shared, world = Shared(4.0, 2, False, settled=False), Telling([other])
    for _ in range(2):
        shared.settle(world)  # once
    assert (shared.total, shared.rows, shared.uneven) == expected
    assert isinstance(shared.rows, int)


def test_a_window_is_what_was_said_last() -> None:
    window = Window(2)
    window.deal(True, True, 0.0, empty=False, uneven=True, filler=True)
    assert (window.first, window.full, window.share, window.empty) == (True, True, 0.0, False)
    assert (window.uneven, window.filler, window.driven) == (True, True, True)
    window.count()
    assert (window.uneven, window.filler, window.full, window.share) == (False, False, False, 0.5)
    window.take(MicroBatch(None, True, True, 1.0))
    assert not window.uneven
