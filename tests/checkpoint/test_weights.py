"""`load_state_dict`: the weights of a checkpoint or of a file, by the user's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, same
from safetensors.torch import save_file
from torch import nn

import trainkit
from trainkit import Accelerator
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, StateMismatchError


class Tied(TinyModule):
    """Has a tied parameter, a buffer and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.tied = self.more[1]

    def get_extra_state(self) -> Any:
        return {"seen": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": (1, 2)}


def test_a_checkpoint() -> None:
    module = Tied()
    trainer = make_trainer()
    trainer.fit(module, tiny_loader())
    trainer.save_checkpoint("saved")
    for found in (trainkit.load_state_dict("saved"), open_checkpoint("saved").state_dict()):
        assert set(found) == set(module.state_dict())
        assert same({name: found[name] for name, _ in module.named_parameters()}, dict(module.named_parameters()))
        assert same({name: found[name] for name, _ in module.named_buffers()}, dict(module.named_buffers()))
        assert found["tied.weight"] is found["more.1.weight"]
        Tied().load_state_dict(found)
    with pytest.raises(ConfigurationError, match="device 'meta' is not supported"):
        trainkit.load_state_dict("saved", map_location="meta")
    with pytest.raises(StateMismatchError, match="expected a checkpoint with model_1"):
        trainkit.load_state_dict("saved", model=1)
    with pytest.raises(CheckpointNotFoundError, match=r"Did you mean 'saved'"):
        trainkit.load_state_dict("save")
    with open("saved/model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(CorruptCheckpointError, match=r"model.safetensors"):
        trainkit.load_state_dict("saved")


def test_several_models() -> None:
    accelerator = Accelerator()
    first, second = accelerator.prepare(nn.Linear(2, 1), nn.Linear(3, 1))
    accelerator.save_state("saved")
    assert same(trainkit.load_state_dict("saved"), first.state_dict())
    assert same(trainkit.load_state_dict("saved", model=1), second.state_dict())


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.bin", "lightning.ckpt"])
def test_files(name: str) -> None:
    model = nn.Linear(2, 1)
    if name == "w.safetensors":
        save_file(model.state_dict(), name)
    else:
        torch.save({"state_dict": model.state_dict(), "epoch": 3} if name == "lightning.ckpt" else model.state_dict(), name)
    found = trainkit.load_state_dict(name)
    assert same(found, model.state_dict())
    Path(name).write_bytes(bytes(100))  # the tensors do not lie in the file
    assert same(found, model.state_dict())
    with pytest.raises(CorruptCheckpointError):
        trainkit.load_state_dict(name)
