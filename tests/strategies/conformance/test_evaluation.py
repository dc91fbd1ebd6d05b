"""Under each strategy, an evaluation counts each sample once, even if the processes have different numbers of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.conformance.settings import LIMITS, Setting, settings
from helpers.conformance.training import Net, Numbers, Way, trainer_of
from torch.utils.data import DataLoader

from trainkit import Accelerator

SAMPLES = 13  # seven batches of two, the last with one sample


class Evaluated(Net):
    """Logs its loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch))


def validated(setting: Setting) -> float:
    trainer = trainer_of(setting, Way(), setting)
    [metrics] = trainer.validate(Evaluated(Way()), DataLoader(Numbers(SAMPLES), 2), verbose=False)
    return float(metrics["val_loss"])


@pytest.mark.parametrize("setting", settings())
def test_a_metric(setting: Setting) -> None:
    net, data = Net(Way()), Numbers(SAMPLES)
    dtype = torch.float64 if setting.precision == "64-true" else torch.float32
    expected = float(net.to(dtype).eval()({"x": data.x, "y": data.y}).detach())
    assert setting.launch(validated) == pytest.approx([expected] * setting.processes, rel=LIMITS[setting.precision])


def gathered(setting: Setting) -> list[int]:
    accelerator = Accelerator(strategy=setting.strategy(), cpu="xla" not in setting.info.devices)
    model, loader = accelerator.prepare(Net(Way()), DataLoader(Numbers(SAMPLES), 2))
    model.eval()
    found: list[int] = []
    with torch.no_grad():
        for batch in loader:
            model(batch)
            found += accelerator.gather_for_metrics(batch["id"]).tolist()
    accelerator.wait_for_everyone()
    return found


@pytest.mark.parametrize("setting", settings())
def test_gather_for_metrics(setting: Setting) -> None:
    assert setting.launch(gathered) == [list(range(SAMPLES))] * setting.processes
