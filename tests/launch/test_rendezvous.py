"""How agents meet: two of them in threads of this process; as real processes in test_agent.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers.patience import PATIENCE, within
from helpers.worlds.worlds import free_port

from trainkit.errors import ConfigurationError
from trainkit.launch import rendezvous
from trainkit.launch.rendezvous import Alone, Meeting

pytestmark = pytest.mark.prompt


def both(function: Callable[[int], Any]) -> list[Any]:
    """What ``function(0)`` and ``function(1)`` return or raise, called at the same time."""
    results: list[Any] = [None, None]

    def run(index: int) -> None:
        try:
            results[index] = function(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return results


def meetings(*numbers: int | None) -> list[Meeting]:
    """Two agents; the first one keeps the store."""
    port = free_port()
    first = Meeting("job", 2, 2, "127.0.0.1", port, number=numbers[0], patience=PATIENCE)
    return [first, Meeting("job", 2, 2, "127.0.0.1", port, number=numbers[1], patience=PATIENCE)]


def close(agents: list[Meeting]) -> None:
    both(lambda index: agents[index].shutdown())


def test_alone() -> None:
    alone = Alone("job", None)
    first = alone.next_rendezvous()
    assert (first.rank, first.world_size, alone.restarts) == (0, 1, 0)
    assert first.bootstrap_store_info is not None
    assert first.bootstrap_store_info.master_addr == "127.0.0.1"
    first.store.set("key", "value")
    second = alone.next_rendezvous()
    assert alone.restarts == 1
    assert not second.store.check(["key"])  # each start begins with nothing
    assert (alone.num_nodes_waiting(), alone.is_closed(), alone.get_run_id()) == (0, False, "job")
    alone.wait_for_all()
    assert alone.shutdown()


def test_two_that_are_numbered() -> None:
    """They have the numbers that were given, a new place for the workers at each start, and count alike."""
    agents = meetings(0, 1)
    met = both(lambda index: agents[index].next_rendezvous())
    assert [(one.rank, one.world_size) for one in met] == [(0, 2), (1, 2)]
    points = [one.bootstrap_store_info for one in met]
    assert points[0].master_port == points[1].master_port
    assert {point.master_addr for point in points} == {"127.0.0.1"}
    assert [agent.restarts for agent in agents] == [0, 0]
    again = both(lambda index: agents[index].next_rendezvous())
    assert [one.rank for one in again] == [0, 1]
    assert [agent.restarts for agent in agents] == [1, 1]
    assert again[0].bootstrap_store_info.master_port == again[1].bootstrap_store_info.master_port != points[0].master_port
    assert both(lambda index: agents[index].wait_for_all()) == [None, None]
    close(agents)
    assert [agent.is_closed() for agent in agents] == [True, True]


def test_numbers_that_are_given_twice() -> None:
    agents = meetings(0, 1)
    agents[1]._number = 0
    for error in both(lambda index: agents[index].next_rendezvous()):
        assert isinstance(error, ConfigurationError)
        assert "2 machines were started with --node-rank 0" in str(error)
    close(agents)


def test_those_without_a_number_come_after_the_others() -> None:
    agents = meetings(None, 3)
    met = both(lambda index: agents[index].next_rendezvous())
    assert [one.rank for one in met] == [1, 0]
    close(agents)


def test_a_machine_that_is_not_heard_of_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is done waits for the others only as long as they live."""
    monkeypatch.setattr(rendezvous, "_SILENT", 4.0)
    monkeypatch.setattr(rendezvous, "_BEAT", 0.2)
    agents = meetings(0, 1)
    both(lambda index: agents[index].next_rendezvous())
    over = threading.Event()

    def work() -> None:  # as the loop of an agent does while its workers run
        while not over.wait(0.1):
            agents[1].num_nodes_waiting()

    other = threading.Thread(target=work)
    other.start()
    waiting = threading.Thread(target=agents[0].wait_for_all)
    waiting.start()
    waiting.join(5.5)
    assert waiting.is_alive()
    over.set()
    other.join()
    start = time.monotonic()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert time.monotonic() - start < within(10)
    close(agents)


def test_one_that_gives_up_is_not_waited_for() -> None:
    agents = meetings(0, 1)
    both(lambda index: agents[index].next_rendezvous())
    done = both(lambda index: agents[0].wait_for_all() if index == 0 else agents[1].set_closed())
    assert done == [None, None]
    close(agents)
