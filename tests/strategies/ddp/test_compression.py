"""`DDPStrategy(comm_hook=)`: gradients are compressed before the all-reduce."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.runs.replicas import Net, Plan, by_hand, flat, joined, over_strategy, together
from torch import Tensor, nn
from torch.futures import Future

from trainkit.strategies.ddp import ddp_strategy as _ddp_strategy

PLAN: Plan = [[1, 2], [3, 4], [5], [7, 8], [9, 10], [11, 12]]


def train(options: dict[str, Any]) -> list[float]:
    return flat(over_strategy(joined(**options), PLAN, Net(width=16).double()))


LOW = {"matrix_approximation_rank": 1, "min_compression_rate": 0.1}
# The smallest and largest difference that compression may make, relative to the largest parameter.
CASES: dict[str, tuple[dict[str, Any], float, float]] = {
    "fp16": ({"comm_hook": "fp16"}, 1e-7, 2e-3),
    "fp16, views": ({"comm_hook": "fp16", "gradient_as_bucket_view": True}, 1e-7, 2e-3),
    "bf16": ({"comm_hook": "bf16"}, 1e-6, 2e-2),
    "powersgd, later": ({"comm_hook": "powersgd", "comm_state": {**LOW, "start_powerSGD_iter": 100}}, 0.0, 1e-11),
    "powersgd": ({"comm_hook": "powersgd", "comm_state": {**LOW, "start_powerSGD_iter": 2}}, 1e-6, 1.0),
}


@cache
def trained() -> dict[str, list[list[float]]]:
    return together(2, {name: (train, options) for name, (options, _, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_compressed_gradients(name: str) -> None:
    results, (_, smallest, largest) = trained()[name], CASES[name]
    assert results[0] == results[1]
    exact = flat(by_hand(PLAN, Net(width=16).double()))
    assert smallest <= max(abs(a - b) for a, b in zip(results[0], exact, strict=True)) / max(map(abs, exact)) <= largest


@pytest.mark.world_size(2)
def test_powersgd_when_other_parameters_are_trained() -> None:
    """New buckets need a new PowerSGD state, which keeps the number of iterations."""

    def before(module: nn.Module, window: int) -> None:
        module.get_submodule("first").requires_grad_(window >= 3)

    options = {"start_powerSGD_iter": 2, "min_compression_rate": 0.1}
    strategy = joined(comm_hook="powersgd", comm_state=options)
    module = over_strategy(strategy, PLAN, Net(width=16), before=before)
    assert strategy._compression._powersgd_state.iter == len(PLAN) - 1
    assert all(each == flat(module) for each in strategy.world.exchange(flat(module)))


def halving(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook whose annotations are strings in this file, which torch rejects."""
    state["calls"] += 1
    future: Any = dist.all_reduce(bucket.buffer() / 4, async_op=True).get_future()  # type: ignore[union-attr]
    result: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
    return result


@pytest.mark.world_size(2)
def test_a_custom_hook() -> None:
    state = {"calls": 0}
    strategy = joined(comm_hook=halving, comm_state=state)
    module = Net().double()
    step = strategy.step_function(strategy.prepare_module(module), module, "training_step")
    strategy.backward(step(strategy.rank + 1, 0))
    assert state == {"calls": 1}
    alone = Net().double()
    for item in (1, 2):
        loss = alone.training_step(item, 0)
        assert loss is not None
        (loss / 4).backward()
    for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_failed_reduction_is_an_error(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[Any] = Future()
    work = SimpleNamespace(get_future=lambda: future)
    monkeypatch.setattr(_ddp_strategy.dist, "all_reduce", lambda tensor, async_op: work)
    monkeypatch.setattr(_ddp_strategy.dist, "get_world_size", lambda: 2)
    bucket = SimpleNamespace(buffer=lambda: torch.ones(3, dtype=dtype))
    arrived = _ddp_strategy._send_short(torch.bfloat16, bucket)
    future.set_exception(RuntimeError("the connection is closed"))
    with pytest.raises(RuntimeError, match="the connection is closed"):
        arrived.wait()
