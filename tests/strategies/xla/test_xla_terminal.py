"""A run under XLA prints only trainkit's output: nothing from torch_xla's runtime or its libraries, and no warnings."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.support import run_python

pytestmark = pytest.mark.xla

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer, TrainModule
from trainkit.strategies import XLAStrategy


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader(samples, **options):
    x = torch.randn(samples, 4)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, **options)


if __name__ == "__main__":
    for number in range(2):
        trainer = Trainer(strategy=XLAStrategy(OPTIONS), seed=1, max_epochs=2, gradient_clip_val=1.0, default_root_dir="runs")
        module = Line()
        trainer.fit(module, loader(42, shuffle=True, num_workers=2), loader(10))
        trainer.validate(module, loader(10))
        trainer.predict(module, loader(10))
    print("that was all")
"""


FOREIGN = re.compile(
    r"torch_xla|absl|tensorflow|^[WEFI]\d{4} |xla_|PjRt|pjrt|computation_client|Warning|INFO:|WARNING:", re.MULTILINE
)


@pytest.mark.parametrize(
    "devices, options",
    [
        (1, ""),
        pytest.param(4, "", marks=pytest.mark.slow),
        pytest.param(4, "fsdp=True", marks=pytest.mark.slow),
        (4, "fsdp=True, mesh={'data': 2, 'fsdp': 2}"),
    ],
)
def test_what_a_script_prints(devices: int, options: str, run_dir: Path) -> None:
    Path("script.py").write_text(SCRIPT.replace("OPTIONS", options))
    kind = os.environ.get("PJRT_DEVICE", "CPU")
    env = {"PJRT_DEVICE": kind, **({"CPU_NUM_DEVICES": str(devices)} if kind == "CPU" else {})}
    done = run_python("-W", "default", "script.py", env=env, timeout=300.0)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    foreign = re.compile(
        r"torch_xla|absl|tensorflow|^[WEFI]\d{4} |xla_|PjRt|pjrt|computation_client|Warning|INFO:|WARNING:", re.M
    )
    assert not foreign.search(said), said
    assert said.count("that was all") == 1
    assert said.count("trainkit: fit on") == 2, said
