"""`ExponentialMovingAverage` on a device of XLA: the same average, and no new graph for a step."""

from __future__ import annotations

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of
from helpers.xla.xla_runs import run_xla
from torch import Tensor

from trainkit.callbacks import ExponentialMovingAverage

pytestmark = pytest.mark.xla


def fit(strategy: str, warmup: bool) -> tuple[dict[str, Tensor], int | None]:
    torch.manual_seed(3)
    module = TinyModule()
    accelerator = "cpu" if strategy == "auto" else "auto"
    average = ExponentialMovingAverage(decay=0.8, warmup=warmup)
    trainer = make_trainer(average, strategy=strategy, accelerator=accelerator, max_epochs=2)
    trainer.fit(module, tiny_loader(), tiny_loader(4))
    return {name: value.cpu() for name, value in parameters_of(module).items()}, trainer.strategy.compilations


@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_is_that_of_the_cpu(warmup: bool) -> None:
    """A decay that changes in each step is an input of the graph."""
    weights, compilations = run_xla(fit, "xla", warmup)
    reference, _ = fit("auto", warmup)
    for name, value in reference.items():
        torch.testing.assert_close(weights[name], value)
    assert compilations == 5
