"""Norms and clipping of sharded gradients equal those of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_runs import joined_fsdp
from helpers.runs.replicas import Net
from torch import Tensor, nn

from trainkit.errors import ConfigurationError

NORMS = (1.0, 2.0, 3.5, math.inf)


class Odd(Net):
    """Parameters with 1, 2, 3 and 5 rows, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.odd = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((1,), (2, 3), (3, 2), (5,), ())
        )

    def training_step(self, item: Any, batch_idx: int) -> Tensor:
        rows = torch.stack([(p * (item + i)).sum() for i, p in enumerate(self.odd)])
        return super().training_step(item, batch_idx) + rows.square().mean() / 10


def check(size: int, **options: Any) -> None:
    plain = Odd().double()
    strategy = joined_fsdp(**options)
    module: Any = strategy.prepare_module(Odd().double())
    step = strategy.step_function(module, module, "training_step")
    sum(plain.training_step(item, 0) for item in range(1, size + 1)).div(size).backward()
    listed = [*plain.parameters()]
    for norm_type in NORMS:
        module.zero_grad()
        strategy.backward(step(1 + strategy.rank, 0))
        expected = torch.nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None], norm_type)
        norm = strategy.clip_grad_norm_(module.parameters(), 0.1, norm_type)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
        clipped = strategy.clip_grad_norm_(module.parameters(), 1e9, norm_type)
        assert clipped.item() == pytest.approx(0.1, rel=1e-4)
        optimizer = torch.optim.SGD(module.parameters())
        if norm_type == 2.0:
            assert strategy.gradient_norm(optimizer).item() == pytest.approx(0.1, rel=1e-4)  # type: ignore[union-attr]
    strategy.teardown()


@pytest.mark.world_size(2)
def test_norms_on_2_ranks() -> None:
    check(2)
    check(2, wrap=False, ignored_modules="last", accumulate="reshard")


@pytest.mark.world_size(4)
def test_norms_on_4_ranks() -> None:
    check(4)
    check(4, replicas=2, ignored_modules="last")


@pytest.mark.world_size(2)
def test_clipping_by_value() -> None:
    strategy = joined_fsdp(ignored_modules="last")
    module: Any = strategy.prepare_module(Odd().double())
    strategy.backward(strategy.step_function(module, module, "training_step")(1 + strategy.rank, 0))
    before = [whole(p.grad) for p in module.parameters()]
    strategy.clip_grad_value_(module.parameters(), 0.05)
    after = [whole(p.grad) for p in module.parameters()]
    assert all(torch.equal(a, b.clamp(-0.05, 0.05)) for a, b in zip(after, before, strict=True))
    assert any((b.abs() > 0.05).any() for b in before)


def whole(gradient: Any) -> Tensor:
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()


@pytest.mark.world_size(2)
def test_a_norm_of_gradients_that_are_not_numbers() -> None:
    """A NaN on one rank only: no norm is finite, on any rank."""
    strategy = joined_fsdp()
    module: Any = strategy.prepare_module(Odd().double())
    strategy.backward(strategy.step_function(module, module, "training_step")(1 + strategy.rank, 0))
    if strategy.rank == 1:
        module.first.weight.grad.to_local()[0, 0] = math.nan
    for norm_type in NORMS:
        assert not strategy.clip_grad_norm_(module.parameters(), 1e9, norm_type).isfinite()
    strategy.teardown()


@pytest.mark.world_size(2)
def test_an_empty_or_wrong_norm() -> None:
    strategy = joined_fsdp()
    module = strategy.prepare_module(Odd().double())
    assert strategy.clip_grad_norm_(module.parameters(), 1.0).item() == 0.0
    with pytest.raises(ConfigurationError, match=r"norm_type=0.0: expected a number > 0"):
        strategy.clip_grad_norm_(module.parameters(), 1.0, 0.0)
