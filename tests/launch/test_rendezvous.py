"""How launchers find each other, with two of them as threads of this process. test_agent.py uses real processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.patience import PATIENCE
from helpers.worlds.worlds import free_port

from trainkit.errors import ConfigurationError
from trainkit.launch.rendezvous import Rendezvous

pytestmark = pytest.mark.prompt


def both(function: Callable[[int], Any]) -> list[Any]:
    """Call `function(0)` and `function(1)` at the same time; return what each returns or raises."""
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


@pytest.fixture(autouse=True)
def no_shared_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher does


def launchers(*numbers: int | None) -> list[Rendezvous]:
    """Two launchers, with these node ranks, at one address."""
    first = ("127.0.0.1", free_port())
    return [Rendezvous((2, 2), first, number, PATIENCE) for number in numbers]


def close(pair: list[Rendezvous]) -> None:
    both(lambda index: pair[index].leave())


def test_a_single_node() -> None:
    """Each start has a new store for the workers, and the launcher keeps its own store."""
    alone = Rendezvous((1, 1), ("", 0), None, 1.0)
    first = alone.next_rendezvous()
    assert (first.rank, first.world_size, alone.restarts) == (0, 1, 0)
    assert first.bootstrap_store_info is not None
    assert first.bootstrap_store_info.master_addr == "127.0.0.1"
    first.store.set("key", "value")
    second = alone.next_rendezvous()
    assert alone.restarts == 1
    assert not second.store.check(["key"])
    assert (alone.num_nodes_waiting(), alone.is_closed()) == (0, False)
    assert alone.where.startswith("127.0.0.1:")
    alone.leave()


def test_two_nodes_with_ranks() -> None:
    """At each start, nodes keep their ranks, count the same restarts, and get a new address for the workers."""
    pair = launchers(0, 1)
    met = both(lambda index: pair[index].next_rendezvous())
    assert [(one.rank, one.world_size) for one in met] == [(0, 2), (1, 2)]
    points = [one.bootstrap_store_info for one in met]
    assert points[0].master_port == points[1].master_port
    assert {point.master_addr for point in points} == {"127.0.0.1"}
    assert [one.restarts for one in pair] == [0, 0]
    again = both(lambda index: pair[index].next_rendezvous())
    assert [one.rank for one in again] == [0, 1]
    assert [one.restarts for one in pair] == [1, 1]
    assert again[0].bootstrap_store_info.master_port == again[1].bootstrap_store_info.master_port != points[0].master_port
    close(pair)
    assert [one.is_closed() for one in pair] == [True, True]


def test_two_nodes_with_the_same_rank() -> None:
    pair = launchers(0, 1)
    pair[1]._node_rank = 0
    for error in both(lambda index: pair[index].next_rendezvous()):
        assert isinstance(error, ConfigurationError)
        assert "2 nodes were started with --node-rank 0" in str(error)
    close(pair)


@pytest.mark.parametrize("line", [b"", b"no json", b"[" * 5000, b"1", b"[1]", b'["0", 0]', b"[0, null]", b"{}", b"\xff"])
def test_another_program_writes_to_the_store(line: bytes) -> None:
    alone = Rendezvous((1, 1), ("", 0), None, 1.0)
    assert alone._read_node(b"[null, 2]") == (None, 2)
    with pytest.raises(ConfigurationError, match=r"not a launcher of this job has written .* --master-port PORT"):
        alone._read_node(line)
    alone.leave()


def test_nodes_without_a_rank_come_last() -> None:
    """Nodes without a rank are numbered after those with one."""
    pair = launchers(None, 3)
    met = both(lambda index: pair[index].next_rendezvous())
    assert [one.rank for one in met] == [1, 0]
    close(pair)
