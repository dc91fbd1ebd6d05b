"""`Strategy.all_gather`."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers.runs.replicas import joined

from trainkit.errors import ConfigurationError


class Pair(NamedTuple):
    one: Any
    other: Any


@pytest.mark.world_size(3)
def test_tensors_are_stacked_along_a_new_first_dimension() -> None:
    strategy = joined()
    rank = strategy.rank
    data = {"a": torch.tensor([rank, 1]), "b": [Pair(torch.tensor(float(rank)), "text"), 3], "c": torch.zeros(2, 0)}
    got = strategy.all_gather(data)
    assert got["a"].tolist() == [[0, 1], [1, 1], [2, 1]]
    pair = got["b"][0]
    assert type(pair) is Pair
    assert pair.one.tolist() == [0.0, 1.0, 2.0]
    assert pair.other == "text"
    assert got["b"][1] == 3
    assert got["c"].shape == (3, 2, 0)
    for kind in (torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.complex64, torch.int64):
        assert strategy.all_gather(torch.ones(2, dtype=kind)).tolist() == torch.ones(3, 2, dtype=kind).tolist()
    assert strategy.all_gather("nothing to gather") == "nothing to gather"


@pytest.mark.world_size(2)
def test_gradients_flow_back_with_sync_grads() -> None:
    strategy = joined()
    mine = torch.full((2,), 1.0 + strategy.rank, requires_grad=True)
    assert not strategy.all_gather(mine).requires_grad
    gathered = strategy.all_gather(mine.square(), sync_grads=True)
    (gathered * torch.tensor([[1.0], [10.0]]) * (strategy.rank + 1)).sum().backward()
    # the gradient sums over both processes, with factors 1 and 2, times the factor of the row
    assert mine.grad is not None
    assert mine.grad.tolist() == [[6.0] * 2, [120.0] * 2][strategy.rank]


@pytest.mark.world_size(2)
def test_different_shapes() -> None:
    strategy = joined()
    with pytest.raises(ConfigurationError, match=r"rank 0: float32\[1\]; rank 1: float32\[2\]. Pad them first: "):
        strategy.all_gather(torch.zeros(strategy.rank + 1))
    with pytest.raises(ConfigurationError, match="rank 0: float32.*; rank 1: int64"):
        strategy.all_gather(torch.zeros(1, dtype=torch.int64 if strategy.rank else torch.float32))
