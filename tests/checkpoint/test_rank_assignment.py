"""Assigning tensors to ranks by bytes: as even as possible, and the same result on every rank."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from trainkit.checkpoint.rank_assignment import assign_to_ranks


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6), st.randoms())
def test_all_is_distributed_evenly_in_whatever_order(sizes: list[int], ranks: int, chance: random.Random) -> None:
    named = {f"n{i}": size for i, size in enumerate(sizes)}
    loads = [0] * ranks
    assigned = assign_to_ranks(named, loads, -1)
    assert sorted(name for names in assigned.values() for name in names) == sorted(named)
    assert loads == [sum(named[name] for name in assigned.get(rank, [])) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    turned = list(named.items())
    chance.shuffle(turned)
    again = assign_to_ranks(dict(turned), [0] * ranks, -1)
    assert {rank: set(names) for rank, names in again.items()} == {rank: set(names) for rank, names in assigned.items()}
    order = list(named)
    assert all(names == sorted(names, key=order.index) for names in assigned.values())


def test_what_is_small_goes_to_one_that_has_least() -> None:
    """Tensors that are small in total all go to the rank with the fewest bytes."""
    loads = [5, 3, 4]
    assert assign_to_ranks({"a": 1, "b": 2}, loads, 3) == {1: ["a", "b"]}
    assert loads == [5, 6, 4]
    assert assign_to_ranks({"a": 1, "b": 3}, loads, 3) == {0: ["a"], 2: ["b"]}
    assert loads == [6, 6, 7]


def test_no_tensors_to_assign() -> None:
    assert assign_to_ranks({}, [1, 0]) == {1: []}
    assert assign_to_ranks({"a": 5}, [0]) == {0: ["a"]}
