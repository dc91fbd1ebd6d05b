"""`trainer.init_module`: modules created on the device and in the dtype of the run, if wanted without initialization."""

from __future__ import annotations

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import nn

from trainkit.errors import ConfigurationError


def test_a_module_in_the_dtype_of_the_run() -> None:
    trainer = make_trainer(precision="64-true")
    with trainer.init_module():
        module = TinyModule()
    assert module.layer.weight.dtype == torch.float64
    assert TinyModule().layer.weight.dtype == torch.float32
    trainer.fit(module, tiny_loader())


def test_a_module_on_the_device_of_the_run() -> None:
    trainer = make_trainer()
    trainer.strategy.device = torch.device("meta")
    with trainer.init_module():
        assert nn.Linear(2, 2).weight.is_meta


def test_without_initialization() -> None:
    """No random number is drawn; values that are not random are set."""
    trainer = make_trainer()
    before = torch.get_rng_state()
    with trainer.init_module(empty_init=True):
        layers = nn.Linear(4, 4), nn.Conv2d(2, 2, 1), nn.Embedding(3, 2), nn.LayerNorm(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert layers[3].weight.tolist() == [1.0, 1.0]
    nn.Linear(4, 4)
    assert not torch.equal(torch.get_rng_state(), before)


def test_without_initialization_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    monkeypatch.setattr(trainer.strategy, "shards_parameters", True, raising=False)
    with pytest.raises(ConfigurationError, match="empty_init=True"), trainer.init_module(empty_init=True):
        pass
