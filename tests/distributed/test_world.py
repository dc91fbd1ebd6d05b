"""`World`: collectives for small values, on real processes."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
from helpers.worlds.worlds import run_world

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.launch.joining import join


def joined() -> World:
    return join(RequestedDevices(), timeout=timedelta(seconds=30))


@pytest.mark.world_size(3)
def test_exchange() -> None:
    world = joined()
    assert world.size == 3
    got = world.exchange({"rank": world.rank, "value": math.nan, "text": "é" * world.rank * 2000})
    assert [one["rank"] for one in got] == [0, 1, 2]
    assert [len(one["text"]) for one in got] == [0, 2000, 4000]
    assert all(math.isnan(one["value"]) for one in got)
    assert world.from_main(world.rank) == 0
    assert world.sums([world.rank, 0.5]) == [3, 1.5]
    assert world.largest([world.rank, -world.rank]) == [2, 0]


def ranks() -> tuple[int, int]:
    world = joined()
    return world.rank, world.size


def test_results_are_in_rank_order() -> None:
    """`run_world` returns the results in the order of the ranks."""
    assert run_world(2, ranks) == [(0, 2), (1, 2)]


@pytest.mark.world_size(2)
def test_exchange_of_state_and_of_objects() -> None:
    world = joined()
    mine = {"rank": (world.rank, math.inf), "values": torch.arange(3000.0 * world.rank), b"key": {world.rank}}
    for rank, one in enumerate(world.exchange_state(mine)):
        assert one["rank"] == (rank, math.inf)
        assert torch.equal(one["values"], torch.arange(3000.0 * rank))
        assert one[b"key"] == {rank}
    found = world.exchange_user_objects(range(world.rank))
    assert found == [range(0), range(1)]
