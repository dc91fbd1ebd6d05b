"""A reduction over all ranks in O(log N) hops: every rank gets the combination of all values, in the same bits."""

from __future__ import annotations

import math
from collections import deque
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from trainkit.distributed.hops import hops
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.launch.joining import join


def simulate(size: int, values: list[Any]) -> tuple[list[Any], int, dict[tuple[int, int], deque[Any]]]:
    """Combine the values of `size` ranks with +; the result of each rank, the number of rounds, and messages never received."""
    plans = [deque(hops(rank, size)) for rank in range(size)]
    sent: dict[tuple[int, int], deque[Any]] = {}
    posted: set[int] = set()  # ranks that have sent the value of their next hop
    rounds = 0
    while any(plans):
        rounds += 1
        arrived = {pair: len(queue) for pair, queue in sent.items()}
        for rank in (rank for rank in range(size) if plans[rank] and rank not in posted):
            posted.add(rank)
            if plans[rank][0].sends:
                sent.setdefault((rank, plans[rank][0].peer), deque()).append(values[rank])
        progress = False
        for rank in (rank for rank in range(size) if plans[rank]):
            hop, pair = plans[rank][0], (plans[rank][0].peer, rank)
            if hop.receives and not sent.get(pair):
                continue
            if hop.receives:
                other = sent[pair].popleft()
                values[rank] = other if hop.final else values[rank] + other
            plans[rank].popleft()
            posted.discard(rank)
            progress = True
        assert progress, f"no rank can continue; sent before: {arrived}"
    return values, rounds, sent


@pytest.mark.parametrize("size", [*range(1, 35), 63, 64, 100, 1000, 1024])
def test_every_rank_gets_every_value_once(size: int) -> None:
    powers = [1 << (2 * rank) for rank in range(size)]  # a value that counted twice would be seen
    found, rounds, left = simulate(size, list(powers))
    assert found == [sum(powers)] * size
    assert not any(left.values())
    assert rounds <= math.floor(math.log2(size)) + 2


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 13])
def test_all_ranks_get_the_same_bits(size: int) -> None:
    values = [float(value) for value in torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)]
    found, _, _ = simulate(size, [value * 10.0 ** (rank % 5) for rank, value in enumerate(values)])
    assert len(set(found)) == 1


def check_combine() -> None:
    world = join(RequestedDevices(), timeout=timedelta(seconds=30))
    for turn in range(20):
        mine = torch.tensor([float(world.rank), turn, -math.inf], dtype=torch.float64)
        total = world.combine(mine, torch.add)
        assert total.tolist() == [sum(range(world.size)), turn * world.size, -math.inf]
        assert mine[0] == world.rank  # unchanged
        assert world.from_main([world.rank, "x" * 3000 * turn]) == [0, "x" * 3000 * turn]
        reply = world.collect([world.rank, "y" * 100 * turn], lambda values: [rank for rank, _ in values])
        assert reply == list(range(world.size))
    assert world.agree(ValueError("x") if world.rank == world.size - 1 else None) == f"rank {world.size - 1}: ValueError: x"
    assert world.agree() is None
    with mock.patch("trainkit.distributed.world.RING_RANKS", 1):
        for turn in range(20):
            flags = world.begin_largest([turn * world.rank, -world.rank, 1 << 62])
            assert world.collectives.depth == 0
            assert world.combine(torch.tensor([turn]), torch.add).item() == turn * world.size  # in between
            assert flags.wait() == flags.wait() == [turn * (world.size - 1), 0, 1 << 62]


@pytest.mark.world_size(2)
def test_two_processes() -> None:
    check_combine()


@pytest.mark.world_size(3)
def test_three_processes() -> None:
    check_combine()
