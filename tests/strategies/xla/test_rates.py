"""`Rate`: a learning rate that never becomes a constant of a compiled graph. Tested on the CPU, where it is a number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainkit.strategies.xla.xla_strategy import Rate, steady_rates

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"amsgrad": True},
    "NAdam": {"decoupled_weight_decay": True},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5},
    "Adagrad": {"lr_decay": 0.1},
    "Adadelta": {},
    "Adamax": {},
}
RATES = [0.1, 0.0, 1.0, 1e-17, 0.5, 0.0]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 0.3, 1e-9])
def test_a_rate_is_never_a_constant(value: float) -> None:
    rate = Rate(value, 0, {})
    assert float(rate) not in (0.0, 1.0, -1.0)
    assert np.float32(float(rate)) == np.float32(value)
    assert rate.exact == value
    assert math.copysign(1.0, rate) == math.copysign(1.0, value)


def test_computed_values_are_exact_and_never_constants() -> None:
    rate, decay = Rate(1e-20, 0, {}), 0.01
    for found, exact in [
        (1 - rate * decay, 1.0),
        (decay * rate * 0, 0.0),
        (-rate / 1e-20, -1.0),
        (rate / 3.0, 1e-20 / 3.0),
        (2.0 / rate, 2.0 / 1e-20),
        (rate - rate, 0.0),
        (abs(-rate) + 1, 1.0),
    ]:
        assert isinstance(found, Rate)
        assert found.exact == exact
        assert float(found) not in (0.0, 1.0, -1.0)


def test_zeros_of_two_groups_differ() -> None:
    """Equal numbers would become one input of the graph, and need another graph when they differ."""
    zeros = [float(Rate(0.0, group, {})) for group in range(4)]
    assert len({np.float32(zero).tobytes() for zero in zeros}) == 4
    assert all(abs(zero) < 1e-44 for zero in zeros), "XLA treats them as 0"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_compute_the_same(name: str) -> None:
    found = []
    for steady in (False, True):
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4), nn.Linear(4, 2)
        groups = [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.01}]
        optimizer = getattr(torch.optim, name)(groups, lr=0.1, foreach=False, **OPTIMIZERS[name])
        for rate in RATES:
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, rate * 0.1
            second(first(torch.randn(3, 4))).square().mean().backward()
            if steady:
                with steady_rates(optimizer):
                    assert all(isinstance(group["lr"], Rate) for group in optimizer.param_groups)
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
            assert [type(group["lr"]) for group in optimizer.param_groups] == [float, float]
        found.append([p.detach().clone() for p in (*first.parameters(), *second.parameters())])
    for plain, steadied in zip(*found, strict=True):
        torch.testing.assert_close(steadied, plain, rtol=1e-6, atol=1e-9)


def test_a_rate_of_zero_changes_nothing() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.bias.zero_()
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0)
    layer(torch.randn(3, 4)).square().mean().backward()
    with steady_rates(optimizer):
        optimizer.step()
    assert all(torch.equal(p, kept) for p, kept in zip(layer.parameters(), before, strict=True))


def test_rates_are_restored_after_an_error() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    with pytest.raises(ValueError, match="in the step"), steady_rates(optimizer):
        raise ValueError("in the step")
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_tensor_rates_are_unchanged() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    with steady_rates(optimizer):
        assert optimizer.param_groups[0]["lr"] is rate
