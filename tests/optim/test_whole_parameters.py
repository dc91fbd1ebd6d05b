"""Which optimizers need whole parameters, as trials with tiny ones show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainkit.optim.whole_parameters import try_step

ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def study(name: str, **options: Any) -> Any:
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(4, 3))], **{"lr": 0.0, **options})
    trial = try_step(optimizer, optimizer.param_groups[0], 2, torch.float32, torch.device("cpu"))
    assert not optimizer.state or name == "Adagrad"
    return trial


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    """Also if a schedule begins with a learning rate of 0."""
    trial = study(name)
    assert trial.elementwise
    assert trial.independent


def test_muon() -> None:
    trial = study("Muon")
    assert (trial.elementwise, trial.independent, trial.odd) == (False, True, [])
    assert trial.tensors == {"momentum_buffer": torch.float32}


def test_adafactor() -> None:
    trial = study("Adafactor")
    assert not trial.elementwise
    assert {"row_var", "col_var"} <= set(trial.odd)


def test_options_of_the_step() -> None:
    """Fused and foreach steps, and a learning rate that is a tensor."""
    for options in ({"fused": True}, {"foreach": True}, {"lr": torch.tensor(0.0)}):
        assert study("AdamW", **options).elementwise
    assert set(study("AdamW").tensors) == {"exp_avg", "exp_avg_sq"}
    assert set(study("AdamW").numbers) == {"step"}
