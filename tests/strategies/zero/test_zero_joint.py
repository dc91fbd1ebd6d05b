"""Several optimizers in one step, and optimizers that need whole parameters, under ZeRO: the same training as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.parity import Case, RegressionModule, trained
from helpers.zero.zero_cases import STAGES, strategy
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR


class Joint(RegressionModule):
    """SGD for the matrices, Adagrad, which begins with state, for one bias and AdamW for the other, with schedules."""

    def matrices(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        first = self.matrices([p for p in parameters if p.ndim == 2])
        one, other = (p for p in parameters if p.ndim != 2)
        schedule = {"scheduler": CosineAnnealingLR(first, self.trainer.estimated_stepping_batches), "interval": "step"}
        return [
            {"optimizer": first, "lr_scheduler": schedule},
            {"optimizer": torch.optim.AdamW([one], lr=0.01), "lr_scheduler": {"scheduler": "linear"}},
            {"optimizer": torch.optim.Adagrad([other], lr=0.05, initial_accumulator_value=0.1)},
        ]


class WithMuon(Joint):
    def matrices(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.01)


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("make", [Joint, WithMuon])
@pytest.mark.parametrize("kind, size", [*((kind, 2) for kind in STAGES), ("zero2", 1), ("zero3", 3)])
def test_as_on_one_process(make: type, kind: str, size: int) -> None:
    """The last window is short."""
    case = Case(samples=75, make=make, arguments={"precision": "32-true", "gradient_clip_val": 0.5})
    one, some = trained(case, 1), trained(case, size, strategy=strategy(kind))
    assert some.losses == pytest.approx(one.losses, rel=2e-6)
    assert some.rates == one.rates
    assert difference(some.parameters[-1], one.parameters[-1]) < 5e-6
