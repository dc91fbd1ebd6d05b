"""Which optimizers need whole parameters, as trials with tiny ones show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainkit.optim.whole_parameters import try_step

ELEMENTWISE = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


def study(name: str, kind: Any = None, **options: Any) -> Any:
    optimizer = (kind or getattr(torch.optim, name))([nn.Parameter(torch.ones(4, 3))], **{"lr": 0.0, **options})
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


class ByNorm(torch.optim.SGD):
    """Divides by the norm of the gradient of each parameter, as LARS, or of all of them."""

    together = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norms = [p.grad.norm() for p in group["params"]]
            for p, norm in zip(group["params"], norms, strict=True):
                p -= group["lr"] * p.grad / (sum(norms) if self.together else norm)


class Together(ByNorm):
    together = True


class Adapting(ByNorm):
    """Keeps an estimate of its own in the group, as Prodigy."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["d"] = group.get("d", 1.0) * 1.5


class Warming(ByNorm):
    """Its first step is that of SGD."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.state:
            super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = self.state[p].get("step", 0) + 1
            if self.state[p]["step"] == 1:
                p -= self.param_groups[0]["lr"] * p.grad


@pytest.mark.parametrize(("kind", "independent"), [(ByNorm, True), (Together, False), (Adapting, False), (Warming, True)])
def test_what_a_step_depends_on(kind: Any, independent: bool) -> None:
    trial = study(kind.__name__, kind)
    assert (trial.elementwise, trial.independent) == (False, independent)
