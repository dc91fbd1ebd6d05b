"""Optimizers that need whole parameters, such as Muon, over sharded parameters: the same training as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_runs import assert_like_one_process, joined_fsdp
from helpers.runs.parity import Case, RegressionModule, trained
from helpers.runs.replicas import Net
from torch import Tensor, nn
from torch.optim import Muon
from torch.optim.lr_scheduler import CosineAnnealingLR

from trainkit.errors import OptimizerError
from trainkit.strategies.fsdp.gathered_steps import GatheredSteps


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 2]


class Lars(torch.optim.SGD):
    """The learning rate of each parameter is scaled by its norm, and counts its steps. Groups with `plain` are not."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                scale = 1.0 if group.get("plain") else float(parameter.detach().norm() / parameter.grad.norm())
                moment = state.setdefault("moment", torch.zeros_like(parameter.detach()))
                moment.mul_(0.9).add_(parameter.grad.detach(), alpha=scale / state["count"])
                parameter.data.add_(moment, alpha=-group["lr"])


def lars(module: nn.Module) -> torch.optim.Optimizer:
    """Biases are stepped elementwise, in a group of their own."""
    biases = [p for p in module.parameters() if p.ndim == 1]
    return Lars([{"params": matrices(module)}, {"params": biases, "plain": True}], lr=0.05)


def muon(module: nn.Module) -> torch.optim.Optimizer:
    return Muon(matrices(module), lr=0.01)


MADE = {"muon": muon, "lars": lars}
PLAN = [[8 * window + place for place in range(4)] for window in range(20)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["muon", "lars"])
def test_like_one_process(name: str) -> None:
    """Twenty steps. Each parameter is stepped by one rank, which is another one for each of a round."""
    stepped: list[int] = []
    step_whole = GatheredSteps._step_whole
    with pytest.MonkeyPatch.context() as patch:

        def counted(self: GatheredSteps, one: Any, before: Any, wholes: Any) -> Any:
            assert [whole.shape for whole in wholes] == [one.parameter.shape] * len(wholes)
            stepped.append(one.parameter.numel())
            return step_whole(self, one, before, wholes)

        patch.setattr(GatheredSteps, "_step_whole", counted)
        assert_like_one_process(plan=PLAN, optimizer=MADE[name])
    assert len(stepped) == len(PLAN) * len(matrices(Net())) // 2


class Coupled(torch.optim.SGD):
    """Its step depends on all parameters together."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.data.add_(parameter.grad / norm, alpha=-0.1)


class Factored(Lars):
    """Has a number for each row."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter, state in self.state.items():
            state["rows"] = parameter.detach().reshape(len(parameter), -1).sum(1)


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ValueError("only with my own parameters")


@pytest.mark.world_size(2)
def test_refused() -> None:
    module = Net()
    strategy = joined_fsdp(precision="32-true")
    strategy.prepare_module(module)
    for kind, why in (
        (Coupled, "Coupled does not work on sharded parameters.*depends on several parameters together"),
        (Factored, r"Factored does not work on sharded parameters.*its state \(rows\) has neither the shape"),
        (Failing, r"Failing does not work.*could not be tried.*ValueError: only with my own parameters"),
    ):
        with pytest.raises(OptimizerError, match=why):
            strategy.prepare_optimizer(kind(module.parameters(), lr=0.1), module)
    strategy.teardown()


class WithMuon(RegressionModule):
    def configure_optimizers(self) -> Any:
        first = Muon(matrices(self), lr=0.01)
        second = torch.optim.AdamW([p for p in self.parameters() if p.ndim != 2], lr=0.01)
        schedule = {"scheduler": CosineAnnealingLR(first, self.trainer.estimated_stepping_batches), "interval": "step"}
        return [{"optimizer": first, "lr_scheduler": schedule}, {"optimizer": second}]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def test_muon_and_adamw_in_a_trainer() -> None:
    """As on one process, in float32: losses, and parameters with one gradient norm over both."""
    arguments = {"precision": "32-true", "gradient_clip_val": 0.5, "max_epochs": 5}
    one = trained(Case(make=WithMuon, arguments=arguments), 1)
    two = trained(Case(make=WithMuon, arguments={**arguments, "strategy": "fsdp"}), 2)
    assert len(one.rates) == 20
    assert two.rates == one.rates
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    assert difference(two.parameters[-1], one.parameters[-1]) < 5e-6
