"""`ReplicaScheduler` and `ThreadWorld`: replicas that are threads of one process run one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.patience import PATIENCE

from trainkit.errors import ConfigurationError, ProcessFailedError
from trainkit.strategies.xla import threads as _xla_threads
from trainkit.strategies.xla.threads import ReplicaScheduler, ThreadWorld, replica_scheduler


def replicas(size: int, function: Callable[[ThreadWorld], Any]) -> list[Any]:
    """Run a function in `size` replicas; returns the result or the error of each."""
    scheduler = ReplicaScheduler(size)
    ended: list[Any] = [None] * size

    def run(rank: int) -> None:
        scheduler.launched.add(rank)
        error: BaseException | None = None
        try:
            scheduler.join(rank)
            ended[rank] = function(ThreadWorld(rank, size, scheduler))
        except BaseException as caught:
            ended[rank] = error = caught
        finally:
            scheduler.leave(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in reversed(threads):  # rank 0 runs first, whatever the order in which threads start
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the replicas wait for each other"
    return ended


def test_one_runs_at_a_time_until_it_waits() -> None:
    events: list[tuple[int, str]] = []

    def function(world: ThreadWorld) -> Any:
        events.append((world.rank, "begins"))
        events.append((world.rank, "still"))
        found = world.exchange({"rank": world.rank})
        events.append((world.rank, "goes on"))
        return found

    assert replicas(3, function) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    assert events[:6] == [(rank, what) for rank in range(3) for what in ("begins", "still")]
    assert sorted(events[6:]) == [(rank, "goes on") for rank in range(3)]


def test_exchanged_values() -> None:
    def function(world: ThreadWorld) -> Any:
        shared = {"list": [world.rank]}
        mine = world.exchange_state(shared)
        mine[0]["list"].append("changed here")
        pending = world.begin_largest([world.rank, 5 - world.rank])
        return [
            shared,
            world.rows([world.rank, 0.5]),
            world.sums([world.rank + 1]),
            world.from_main(world.rank + 10),
            world.agree(ValueError("no") if world.rank == 1 else None),
            pending.wait(),
            world.thread_exchange("a").exchange(world.rank),
        ]

    first, second = replicas(2, function)
    assert first[0] == {"list": [0]}, "each replica has its own copy"
    assert second[0] == {"list": [1]}
    assert first[1:] == second[1:]
    assert first[1:] == [[[0.0, 0.5], [1.0, 0.5]], [3.0], 10, "rank 1: ValueError: no", [1, 5], [0, 1]]


def test_exchanges_of_one_name_are_distinguished_by_their_order() -> None:
    def function(world: ThreadWorld) -> Any:
        return [world.exchange(number * 10 + world.rank) for number in range(50)]

    assert replicas(2, function) == [[[n * 10, n * 10 + 1] for n in range(50)]] * 2


def test_all_replicas_fail_if_one_fails() -> None:
    def function(world: ThreadWorld) -> Any:
        world.barrier()
        if world.rank == 1:
            raise ValueError("this one")
        return world.exchange(None)

    first, second, third = replicas(3, function)
    assert isinstance(second, ValueError)
    for other in (first, third):
        assert isinstance(other, ProcessFailedError)
        assert str(other) == "replica 1 has failed: ValueError: this one"


def test_waiting_for_an_exited_replica_is_an_error() -> None:
    first, second = replicas(2, lambda world: None if world.rank == 0 else world.exchange(1))
    assert first is None
    assert isinstance(second, ProcessFailedError)
    assert "replica 0 has exited, but the other replicas wait for it" in str(second)


def test_between_runs_replicas_do_not_wait_for_their_turn() -> None:
    """For replicas that `XLAStrategy.launch` did not start. Those that it starts leave the run when they exit."""
    scheduler = ReplicaScheduler(2)
    over = threading.Barrier(2)
    found: list[Any] = []

    def run(rank: int) -> None:
        world = ThreadWorld(rank, 2, scheduler)
        for number in range(20):  # without a pause, whether or not the other one has left the run
            first = world.exchange([rank, number])
            world.leave_run()
            if number == 10:
                over.wait(PATIENCE)  # neither blocks the other
            found.append(first)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert sorted(found) == sorted([[[0, number], [1, number]] for number in range(20)] * 2)


def test_the_runtime_must_run_one_graph_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_xla_threads, "_scheduler", None)
    monkeypatch.delenv("PJRT_CPU_ASYNC_CLIENT", raising=False)
    with pytest.raises(ConfigurationError, match=r"export PJRT_CPU_ASYNC_CLIENT=0\. XLAStrategy\.launch\(main\) sets it"):
        replica_scheduler(2)
    monkeypatch.setenv("PJRT_CPU_ASYNC_CLIENT", "0")
    assert replica_scheduler(2) is replica_scheduler(2)
