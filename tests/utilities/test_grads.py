"""`grad_norm`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import nn

from trainkit.errors import ConfigurationError
from trainkit.utilities import grad_norm


@pytest.mark.parametrize(("norm_type", "shown", "total"), [(2, "2.0", 5.0), ("inf", "inf", 4.0), (1.0, "1.0", 7.0)])
def test_names_and_values(norm_type: Any, shown: str, total: float) -> None:
    net = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1).requires_grad_(False)})
    net["a"].weight.grad, net["a"].bias.grad = torch.tensor([[-3.0]]), torch.tensor([4.0])
    norms = grad_norm(net, norm_type)
    assert {name: value.item() for name, value in norms.items()} == {
        f"grad_{shown}_norm/a.weight": 3.0,
        f"grad_{shown}_norm/a.bias": 4.0,
        f"grad_{shown}_norm_total": pytest.approx(total),
    }
    assert next(iter(grad_norm(net, norm_type, group_separator="."))) == f"grad_{shown}_norm.a.weight"


def test_without_gradients() -> None:
    assert grad_norm(nn.Linear(1, 1), 2) == {}


@pytest.mark.parametrize("norm_type", [0, -1.0, math.nan])
def test_what_is_no_norm(norm_type: float) -> None:
    with pytest.raises(ConfigurationError, match="norm_type must be a positive number or 'inf'"):
        grad_norm(nn.Linear(1, 1), norm_type)


def test_in_a_hook() -> None:
    class Logs(TinyModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self.layer, 2))

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Logs(), tiny_loader())
    assert trainer.callback_metrics["grad_2.0_norm_total"] > 0
