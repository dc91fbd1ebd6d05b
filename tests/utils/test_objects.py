"""`gather_object`, `broadcast_object_list` and `tqdm`."""

from __future__ import annotations

import io
from typing import Any

import pytest
from helpers.worlds.worlds import run_world, start_world

from trainkit import Accelerator
from trainkit.errors import CollectiveError, ConfigurationError
from trainkit.utils import broadcast_object_list, gather_object, tqdm


def on_several() -> list[Any]:
    with pytest.raises(ConfigurationError, match="one of several, but has not joined them yet. Create the Accelerator"):
        gather_object([1])
    accelerator = Accelerator()
    rank = accelerator.strategy.rank
    own = [{"rank": rank, "kind": (rank, "a")}] * rank  # rank 0 has none
    given = [rank, "text", None]
    received = broadcast_object_list(given, from_process=1)
    assert received is given
    with pytest.raises(
        ConfigurationError, match="the same length and from_process on all ranks, got rank 0: 0 from 0, rank 1: 1"
    ):
        broadcast_object_list([None] * rank)
    with pytest.raises(ConfigurationError, match=r"from_process=7\): expected a rank from 0 to 2"):
        broadcast_object_list([], from_process=7)
    shown = []
    for everywhere in (False, True):
        file = io.StringIO()
        assert list(tqdm(range(3), main_process_only=not everywhere, file=file)) == [0, 1, 2]
        shown.append("3/3" in file.getvalue())
    return [gather_object(own), given, shown]


def test_on_several() -> None:
    gathered = [{"rank": 1, "kind": (1, "a")}, {"rank": 2, "kind": (2, "a")}, {"rank": 2, "kind": (2, "a")}]
    answers = run_world(3, on_several)
    assert [answer[:2] for answer in answers] == [[gathered, [1, "text", None]]] * 3
    assert [answer[2] for answer in answers] == [[True, True], [False, True], [False, True]]


def in_a_block() -> None:
    accelerator = Accelerator()
    if accelerator.is_main_process:
        gather_object([1])
    broadcast_object_list([2])


def test_on_the_main_process_alone() -> None:
    ends = start_world(2, in_a_block).ends(60)
    assert not any(fine for fine, _ in ends)
    assert any(CollectiveError.__name__ in text and "gather_object (test_objects.py:" in text for _, text in ends)


def test_alone() -> None:
    assert gather_object((1, [2])) == [1, [2]]
    assert broadcast_object_list([1, 2]) == [1, 2]
    for given in (3, "text", {"a": 1}):
        with pytest.raises(ConfigurationError, match=r"gather_object takes a list.*gather_object\(\[value\]\)"):
            gather_object(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="broadcast_object_list takes a list"):
        broadcast_object_list((1,))  # type: ignore[arg-type]


def test_a_bar_alone() -> None:
    file = io.StringIO()
    assert list(tqdm(range(2), desc="loading", file=file)) == [0, 1]
    assert "loading: 100%" in file.getvalue()
    assert list(tqdm(range(2), disable=True, file=file)) == [0, 1]
    with pytest.raises(ConfigurationError, match=r"write tqdm\(..., main_process_only=True\)"):
        tqdm(True, range(3))
