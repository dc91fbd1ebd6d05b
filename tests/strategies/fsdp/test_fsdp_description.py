"""`Trainer.explain` says which modules `FSDPStrategy` has sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.trainers import make_trainer
from torch import Tensor, nn

from trainkit import TrainModule
from trainkit.strategies import FSDPStrategy


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4)))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.head(self.layers(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


@pytest.mark.parametrize(
    "make, wrap, precision, expected",
    [
        (Net, "Linear", "bf16-true", "5 Linear (layers.0.0, layers.1.0, ..., head), and the root"),
        (Net, False, "bf16-true", "the root"),
        (Manual, "layers.*.0", "bf16-true", "4 Linear (layers.0.0, layers.1.0, ..., layers.3.0), and the roots: "
         "1 Sequential, 1 Linear (layers, head)"),
        (Net, None, "32-true", "nothing: there is one process"),
    ],
)  # fmt: skip
def test_explain_names_the_units(make: Any, wrap: Any, precision: str, expected: str) -> None:
    trainer = make_trainer(strategy=FSDPStrategy(wrap=wrap), precision=precision, max_steps=1)
    assert "sharded" not in trainer.explain()
    for _ in range(2):  # a second run replaces what the first one has found
        trainer = make_trainer(strategy=trainer.strategy, precision=precision, max_steps=1)
        trainer.fit(make(), [torch.randn(2, 4)])
        assert f"\n  sharded        {expected}\n" in trainer.explain()
