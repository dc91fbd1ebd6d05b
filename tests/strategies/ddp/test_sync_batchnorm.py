"""Synchronized BatchNorm layers replace the user's layers, which are restored later. Computing with them needs a GPU."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from helpers.runs.replicas import inputs, joined
from torch import nn

from trainkit.micro_batch import WHOLE_WINDOW
from trainkit.strategies.ddp.sync_batchnorm import SyncedBatchNorms


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.deep = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm2d(3, affine=False), self.norm)
        self.other = nn.LayerNorm(3)


@pytest.mark.world_size(2)
def test_layers_are_converted_and_restored() -> None:
    world = joined().world
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainkit").addHandler(handler)
    model, norms = Model(), SyncedBatchNorms()
    users, parameters, names = model.norm, list(model.parameters()), list(model.state_dict())
    norms.convert(model, world)
    synced = [part for part in model.modules() if isinstance(part, nn.SyncBatchNorm)]
    assert len(synced) == 2
    assert model.norm is model.deep[2] is synced[0]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == names
    assert type(model.other) is nn.LayerNorm

    def groups() -> list[int]:
        return [dist.get_world_size(layer.process_group) for layer in synced]

    assert groups() == [2, 2]
    norms.select_statistics(True)
    assert groups() == [1, 1]
    norms.select_statistics(True)
    norms.select_statistics(False)
    assert groups() == [2, 2]
    synced[0].running_mean = torch.full((3,), 7.0)
    model.eval()
    norms.restore()
    assert model.norm is model.deep[2] is users
    assert users.running_mean is not None
    assert users.running_mean.tolist() == [7.0] * 3
    assert not users.training
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    norms.restore()
    assert not norms
    assert [text.split(":")[0] for text in messages] == (["sync_batchnorm"] if world.is_main else [])


@pytest.mark.world_size(2)
def test_in_a_training_loop() -> None:
    strategy = joined()
    strategy.sync_batchnorm = True  # an error as an argument on the CPU, but in eval mode the layers work there
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    model = strategy.wrap(strategy.prepare_module(module)).eval()
    for uneven, size in ((True, 1), (False, 2)):
        strategy.begin_micro_batch(WHOLE_WINDOW._replace(uneven=uneven))
        model(inputs(1))
        assert isinstance(module[1], nn.SyncBatchNorm)
        assert dist.get_world_size(module[1].process_group) == size
    strategy.teardown()
    assert type(module[1]) is nn.BatchNorm1d
