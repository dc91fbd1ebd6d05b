"""Work on several ranks succeeds on all or on none, and is shared out by bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers.worlds.threaded import FakeWorld, run_groups, run_threads, try_groups
from hypothesis import given
from hypothesis import strategies as st

from trainkit.checkpoint.ranks import assign_to_ranks, run_on_all_ranks
from trainkit.distributed.world import ThreadExchange
from trainkit.errors import CheckpointError, CheckpointWriteError, CorruptCheckpointError, MissingMetricError


def failing(errors: dict[int, BaseException], **options: Any) -> list[Any]:
    """Run `run_on_all_ranks` on three ranks and return the result or error of each; the ranks in `errors` raise."""

    def work(group: ThreadExchange) -> Any:
        def act() -> int:
            if group.rank in errors:
                raise errors[group.rank]
            return group.rank * 10

        return run_on_all_ranks(group, act, **options)

    return try_groups(3, work)


def test_all_ranks_get_the_result_of_the_main_process() -> None:
    assert failing({}) == [0] * 3


def test_all_ranks_get_the_answer_to_all_results() -> None:
    asked: list[list[int]] = []

    def answer(results: list[int]) -> int:
        asked.append(results)
        return sum(results)

    assert failing({}, answer=answer) == [30] * 3
    assert asked == [[0, 10, 20]]  # on the main process only
    assert failing({1: CheckpointError("this")}, answer=answer)[0].args == ("rank 1: this",)
    assert len(asked) == 1


def test_an_answer_that_fails_is_an_error_of_the_main_process() -> None:
    def answer(results: list[int]) -> None:
        raise OSError("full")

    ends = failing({}, answer=answer, otherwise=CheckpointWriteError)
    assert [(type(end), str(end)) for end in ends] == [(CheckpointWriteError, "rank 0: OSError: full")] * 3
    assert [type(end.__cause__) for end in ends] == [OSError, type(None), type(None)]


def test_a_world_gathers_only_errors() -> None:
    """Without an error, two collectives that grow with log N are enough."""

    def work(world: FakeWorld, error: Exception | None) -> Any:
        def act() -> int:
            if world.rank == 1 and error is not None:
                raise error
            return world.rank

        gathers: list[Any] = []
        collect, world.collect = world.collect, lambda *args: gathers.append(1) or collect(*args)  # type: ignore[method-assign]
        try:
            return run_on_all_ranks(world, act), len(gathers)
        except CheckpointError as raised:
            return str(raised), len(gathers)

    assert run_threads(3, work, None) == [(0, 0)] * 3
    assert run_threads(3, work, CheckpointError("this")) == [("rank 1: this", 1)] * 3


def test_a_single_process_only_runs_the_work() -> None:
    assert run_on_all_ranks(ThreadExchange(), lambda: object) is object  # not even JSON
    assert run_on_all_ranks(ThreadExchange(), lambda: 1, answer=lambda results: [results]) == [[1]]
    error = ValueError("x")

    def act() -> None:
        raise error

    with pytest.raises(ValueError, match="x") as raised:
        run_on_all_ranks(ThreadExchange(), act)
    assert raised.value is error


@pytest.mark.parametrize("kind", [CorruptCheckpointError, CheckpointWriteError, MissingMetricError])
def test_an_error_of_trainkit_keeps_its_class(kind: Callable[..., Exception]) -> None:
    ends = failing({1: kind("it is bad")})
    assert [(type(end), str(end)) for end in ends] == [(kind, "rank 1: it is bad")] * 3
    assert str(ends[1].__cause__) == "it is bad"


def test_the_first_of_several_errors_is_raised() -> None:
    ends = failing({1: CheckpointError("this"), 2: CheckpointError("that")})
    assert [str(end) for end in ends] == ["rank 1 (and 1 more): this"] * 3


def test_other_errors_become_write_errors() -> None:
    ends = failing({2: ValueError("odd")}, otherwise=CheckpointWriteError)
    assert [(type(end), str(end)) for end in ends] == [(CheckpointWriteError, "rank 2: ValueError: odd")] * 3
    assert [str(end) for end in failing({0: KeyError()})] == ["rank 0: KeyError: KeyError"] * 3


def test_the_same_error_on_all_ranks_names_no_rank() -> None:
    errors = {rank: CheckpointError("all the same") for rank in range(3)}
    ends = failing(errors)
    assert all(end is errors[rank] for rank, end in enumerate(ends))


def test_an_interrupt_is_raised_unchanged_on_its_rank() -> None:
    ends = failing({1: KeyboardInterrupt()})
    assert [type(end) for end in ends] == [CheckpointError, KeyboardInterrupt, CheckpointError]
    assert str(ends[0]) == "rank 1: KeyboardInterrupt: KeyboardInterrupt"


def test_it_is_one_exchange() -> None:
    # `run_on_all_ranks` communicates once: each rank takes part in one exchange.

    def work(group: ThreadExchange) -> int:
        run_on_all_ranks(group, lambda: None)
        return group.completed

    assert run_groups(2, work) == [1, 1]


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
