"""Freezing, unfreezing and accumulation windows by epoch under XLA: as on one device of torch, and resumed bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.resume.saving import SaveIn
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from helpers.xla.xla_runs import run_xla
from torch import nn

from trainkit import Callback
from trainkit.callbacks import BackboneFinetuning, LayerFreezing

pytestmark = pytest.mark.xla


class Pretrained(TinyModule):
    def __init__(self, everything: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.everything = everything
        self.backbone, self.layer = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(self.backbone(inputs))

    def configure_optimizers(self) -> Any:
        own = [p for p in self.parameters() if p.requires_grad or self.everything]
        return torch.optim.AdamW(own, lr=0.02)


def fit(kind: str, freezing: bool, *callbacks: Callback, **arguments: Any) -> dict[str, Any]:
    own: Callback = LayerFreezing({0: ["layer"], 1: ["*"], 3: ["backbone"]}) if freezing else BackboneFinetuning(1)
    options = {"strategy": "xla", "accelerator": "auto"} if kind == "xla" else {}
    trainer = make_trainer(own, *callbacks, max_epochs=4, accumulate_grad_batches={0: 2, 2: 1, 3: 4}, **options)
    module = Pretrained(freezing)
    trainer.fit(module, tiny_loader(32, shuffle=True), **arguments)
    return {name: value.cpu() for name, value in parameters_of(module).items()}


def runs(freezing: bool) -> list[dict[str, Any]]:
    found = [fit("xla", freezing)]
    for number in (3, 13, 27):
        fit("xla", freezing, SaveIn("on_train_batch_end", number))
        found.append(fit("xla", freezing, ckpt_path="there"))
    return [*found, fit("cpu", freezing)]


@pytest.mark.parametrize("freezing", [False, True])
def test_as_without_xla(freezing: bool) -> None:
    whole, *resumed, cpu = run_xla(runs, freezing)
    assert all(torch.allclose(whole[name], cpu[name], atol=1e-4) for name in cpu)
    assert all(same(one, whole) for one in resumed)
