"""Several optimizers in one step on XLA devices: as a plain loop on the CPU."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.xla.xla_cases import FEW, Net, Numbers, Trained, by_hand, close, limit, loader, train, under
from torch import nn

from trainkit.optim.joint_optimizer import JointOptimizer

pytestmark = pytest.mark.xla


class Joint(Net):
    """SGD or Muon for the matrices, and SGD or AdamW for the rest."""

    def parts(self) -> list[torch.optim.Optimizer]:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest: list[nn.Parameter] = [p for p in self.parameters() if p.ndim != 2]
        if self.optimizer == "muon":
            return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
        return [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.SGD(rest, lr=0.1)]

    def made(self) -> torch.optim.Optimizer:
        return JointOptimizer(self.parts())

    def configure_optimizers(self) -> Any:
        return self.parts()


def both(kind: str, optimizer: str) -> tuple[Trained, Trained, list[int]]:
    module, data = Joint(optimizer), Numbers(79)
    again = copy.deepcopy(module)
    # Muon orthogonalizes in bfloat16, which the CPU and XLA round in different places. In float32 the rest can be compared.
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        mine = train(kind, module, loader(kind, data), max_epochs=3, gradient_clip_val=0.5)
        return mine, by_hand(again, data, 3, clip=0.5), mine.compilations


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_parity(optimizer: str, kind: str) -> None:
    mine, theirs, compilations = under(kind, both, optimizer, optimized=True)
    allowed = limit("32-true")
    assert len(theirs.losses) == 30
    close(mine.losses, theirs.losses, allowed)
    close(mine.norms, theirs.norms, 4 * allowed)
    assert compilations[-1] == compilations[12], "a step of the second epoch, and none later, may compile"
    for name, value in theirs.parameters.items():
        assert float((mine.parameters[name] - value).norm() / value.norm()) < 5 * allowed, name
