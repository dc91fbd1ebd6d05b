"""Optimizers and schedulers that a configuration names."""

from __future__ import annotations

import torch
from torch import nn

from trainkit.cli import ReduceLROnPlateau, instantiate_class
from trainkit.cli.for_scripts.argument_parser import with_class_path


def test_instantiate_class() -> None:
    parameters = list(nn.Linear(2, 1).parameters())
    optimizer = instantiate_class((parameters,), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}})
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.SGD, 0.5)
    assert type(instantiate_class(parameters, {"class_path": "torch.optim.Adam"})) is torch.optim.Adam
    path = "lightning.pytorch.cli.ReduceLROnPlateau"  # of a configuration for Lightning
    assert type(instantiate_class(optimizer, {"class_path": path, "init_args": {"monitor": "a"}})) is ReduceLROnPlateau


def test_reduce_on_plateau_is_torchs_with_a_monitor() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.5)
    scheduler = ReduceLROnPlateau(optimizer, "val_loss", "max", 0.5, patience=0)
    assert isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert (scheduler.monitor, scheduler.mode, scheduler.factor) == ("val_loss", "max", 0.5)


def test_with_class_path() -> None:
    assert with_class_path(torch.optim.Adam, {"lr": 1}) == {"class_path": "torch.optim.adam.Adam", "init_args": {"lr": 1}}
    assert with_class_path(torch.optim.Adam, None)["init_args"] == {}
