"""Trainings that are saved under one configuration of ZeRO and resume under another."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.parity import Case, Recorder, RegressionModule, train, trained
from helpers.runs.replicas import together
from helpers.zero.zero_cases import Wide, strategy
from torch import Tensor

from trainkit import Callback
from trainkit.checkpoint import open_checkpoint

__all__ = ["ADAMW", "SaveAfterTen", "SaveAtOnce", "assert_portable", "case", "go_on", "save", "tensors"]

ADAMW = {"optimizer": "adamw", "schedule": True}


def case(precision: str = "32-true", make: type = RegressionModule) -> Case:
    """Twenty updates; of dropout, augmentation, a schedule, clipping and accumulation each a bit."""
    arguments = {"precision": precision, "gradient_clip_val": 1.0, "max_epochs": -1, "max_steps": 20}
    return Case(samples=75, make=make, options=ADAMW, arguments=arguments)


class SaveAtOnce(Callback):
    """Saves again what has just been loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder)


class SaveAfterTen(Callback):
    """Saves after ten updates, and ends the training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 10 and trainer.accelerator.sync_gradients:
            trainer.save_checkpoint(self.folder)
            trainer.should_stop = True


def go_on(which: Case, kind: str, source: Path, copy: Path) -> dict[Any, float]:
    """Train to the end from a checkpoint; the losses."""
    recorder = Recorder()
    train(which, recorder, SaveAtOnce(copy), strategy=strategy(kind), ckpt_path=str(source))
    return recorder.record.losses


def save(which: Case, kind: str, folder: Path) -> None:
    """Train half of it, and save."""
    train(which, SaveAfterTen(folder), strategy=strategy(kind))


def tensors(folder: Path) -> dict[str, Tensor]:
    loaded = open_checkpoint(folder).read().tensors
    return {f"{stem}/{name}": tensor for stem, own in loaded.items() for name, tensor in own.items() if stem != "state"}


@cache
def undisturbed(precision: str, make: type) -> dict[Any, float]:
    """The losses after the tenth update: of one process, or where that has no masters, of two under ZeRO."""
    alone = precision != "bf16-true"
    losses = trained(case(precision, make), 1 if alone else 2, strategy=strategy("auto" if alone else "zero2")).losses
    return {key: loss for key, loss in losses.items() if key[0] >= 10}


def assert_portable(
    source: Path, kind: str, size: int, precision: str = "32-true", make: type = RegressionModule, exact: bool = True
) -> None:
    """Resume from a checkpoint of `save` under another configuration.

    Args:
        source: the checkpoint.
        kind: of `zero_cases.strategy`.
        size: processes.
        precision: of the trainer, here and there.
        make: the module's class.
        exact: the state has come back bit for bit, and the losses are those of ten updates more; else the state has come back
            as the module's precision can hold it.
    """
    copy = source.with_name(f"{source.name}-{kind}-{size}")
    losses: dict[Any, float] = {}
    for own in together(size, {"resume": (go_on, case(precision, make), kind, source, copy)})["resume"]:
        losses |= own
    saved, again = tensors(source), tensors(copy)
    assert saved.keys() == again.keys()
    for name, tensor in saved.items():
        assert torch.equal(again[name], tensor if exact else tensor.to(again[name].dtype)), name
        assert tensor.dtype == torch.float32 or (precision == "bf16-true" and make is Wide and "net.3." in name)  # is frozen
        assert tensor.abs().sum() > 0
    if exact:
        expected = undisturbed(precision, make)
        assert len(expected) == 90
        assert losses == pytest.approx(expected, rel=2e-6 if precision == "32-true" else 5e-3)
