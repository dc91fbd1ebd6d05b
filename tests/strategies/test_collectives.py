"""`average_gradients`, `broadcast` and `mean`, which combine many tensors in few collectives."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers.runs.replicas import Net, flat, joined
from torch import Tensor, nn

from trainkit.errors import ConfigurationError, ModuleError
from trainkit.strategies._collectives import average_gradients, broadcast, mean


def parameters() -> list[nn.Parameter]:
    """Parameters of several dtypes and shapes, one of them not contiguous."""
    return [
        nn.Parameter(torch.zeros(3, 2)),
        nn.Parameter(torch.zeros(4, dtype=torch.float64)),
        nn.Parameter(torch.zeros((), dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(2, 3).t()),
        nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
        nn.Parameter(torch.zeros(0)),
        nn.Parameter(torch.zeros(5)),
    ]


@pytest.mark.world_size(3)
def test_average_gradients() -> None:
    strategy = joined()
    rank = strategy.rank
    for size in (25, 1e-5):  # buckets of many parameters, and of one
        given = parameters()
        for place, parameter in enumerate(given[:-1]):
            if place != 3 or rank == 1:  # only rank 1 has this gradient
                parameter.grad = torch.full_like(parameter, rank + place * 3)
        given[4].grad = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        kept = given[0].grad
        average_gradients([*given, given[0]], size)
        assert given[0].grad is kept
        assert given[0].grad.tolist() == [[1.0, 1.0]] * 3
        assert given[1].grad.tolist() == [4.0] * 4
        assert given[2].grad.item() == 7.0
        assert given[3].grad.flatten().tolist() == pytest.approx([10 / 3] * 6)
        assert given[4].grad.tolist() == [2 + 4j, 6 - 2j]
        assert given[6].grad is None
        for parameter in given:
            assert parameter.grad is None or (parameter.grad.dtype, parameter.grad.shape) == (parameter.dtype, parameter.shape)
            assert parameter.grad is None or all(torch.equal(g, parameter.grad) for g in strategy.all_gather(parameter.grad))


@pytest.mark.world_size(2)
def test_sparse_gradients() -> None:
    strategy = joined()
    table, dense = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)
    strategy.prepare_module(nn.Sequential(table, dense))
    everything = [table.weight, *dense.parameters()]
    strategy.reduce_gradients(everything)
    assert table.weight.grad is None
    dense(table(torch.tensor([strategy.rank, 2]))).sum().backward()
    strategy.reduce_gradients(everything)
    both = table.weight.grad
    assert both is not None
    assert both.is_sparse
    assert torch.allclose(both.to_dense(), torch.tensor([0.5, 0.5, 1.0, 0.0])[:, None] * dense.weight)
    table.weight.grad = None
    if strategy.rank == 1:
        dense(table(torch.tensor([3]))).sum().backward()
    strategy.reduce_gradients([table.weight])
    one = table.weight.grad
    assert one is not None
    assert torch.allclose(one.to_dense(), torch.tensor([0.0, 0.0, 0.0, 0.5])[:, None] * dense.weight)


@pytest.mark.world_size(2)
def test_a_sparse_gradient_that_is_not_expected() -> None:
    joined()
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.zeros(3, 2).to_sparse(1)
    with pytest.raises(ModuleError, match=r"shape \(3, 2\) has a sparse gradient, .* Make it dense: "):
        average_gradients([parameter], 25)


@pytest.mark.world_size(2)
def test_short_gradients() -> None:
    rank = joined().rank
    for wire, expected in ((torch.bfloat16, 1.0), (torch.float16, 1.0009765625), (None, 1.001)):
        parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        parameter.grad = torch.full_like(parameter, 2.002) if rank else torch.zeros_like(parameter)
        average_gradients([parameter], 25, wire=wire)
        assert parameter.grad.tolist() == [expected] * 2


@pytest.mark.world_size(2)
def test_broadcast_and_mean() -> None:
    strategy = joined()
    rank = strategy.rank
    large = torch.full((4, 3), rank, dtype=torch.int32)
    tensors: list[Tensor] = [
        torch.full((2, 2), float(rank)),
        torch.tensor([rank == 0, False]),
        large.t(),
        torch.tensor(rank + 5),
        torch.tensor([1j * (rank + 1), 2.0]),
        torch.tensor([rank], dtype=torch.uint8),
        torch.empty(0),
        torch.full((3,), rank + 0.5, dtype=torch.bfloat16),
        torch.zeros(3, 2, requires_grad=True) + rank,
    ]
    broadcast(tensors)
    assert [t.tolist() for t in tensors] == [
        [[0.0, 0.0]] * 2,
        [True, False],
        [[0] * 4] * 3,
        5,
        [1j, 2.0],
        [0],
        [],
        [0.5] * 3,
        [[0.0] * 2] * 3,
    ]
    value = torch.tensor(float(rank), requires_grad=True)
    assert mean(value).item() == strategy.mean(value).item() == 0.5
    assert not mean(value).requires_grad
    assert value.item() == rank


# Under manual optimization


@pytest.mark.world_size(2)
def test_manual_optimization_runs_on_the_bare_module() -> None:
    strategy, module = joined(), Net()
    module.automatic_optimization = False
    step = strategy.step_function(strategy.prepare_module(module), module, "training_step")
    assert strategy._step is None, "no DDP around it"
    strategy.backward(step(strategy.rank + 1, 0))
    mine: Any = module.last.weight.grad
    mine = mine.clone()
    strategy.reduce_gradients(module.parameters())
    assert torch.allclose(strategy.all_gather(mine).mean(0), module.last.weight.grad)  # type: ignore[arg-type]
    strategy.optimizer_step(torch.optim.SGD(module.parameters(), lr=0.1))
    assert all(each == flat(module) for each in strategy.world.exchange(flat(module)))


# --------------------------------------------------------------------------------------------------------------- gather


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
