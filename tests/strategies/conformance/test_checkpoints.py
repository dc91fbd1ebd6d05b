"""Each strategy resumes its checkpoints exactly; they can also be resumed on one device, and vice versa."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conformance.settings import LIMITS, ONE_DEVICE, Setting, settings
from helpers.conformance.training import EPOCHS, Result, Way, assert_same, by_hand, by_trainer, combined
from torch import Tensor

from trainkit import Callback
from trainkit.checkpoint import open_checkpoint
from trainkit.console import TrainkitWarning

each = pytest.mark.parametrize("setting", settings())
SAVED = 3  # optimizer steps before the save; an epoch has five, the last with a short accumulation window


class Saving(Callback):
    """Saves after `steps` optimizer steps, and also at the start of a run that resumes from that step."""

    def __init__(self, folder: Path, steps: int, stop: bool = False) -> None:
        self.folder, self.steps, self.stop = folder, steps, stop

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.folder)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.steps and trainer.accelerator.sync_gradients:
            trainer.save_checkpoint(self.folder)
            trainer.should_stop = self.stop


def train(setting: Setting, way: Way, folder: Path, like: Setting, stop: bool = False, resume: Path | None = None) -> Result:
    """Train, and save to `folder` after three optimizer steps, or immediately after resuming."""
    return by_trainer(setting, way, Saving(folder, SAVED, stop), like=like, resume=resume)


def tensors(folder: Path) -> dict[str, Tensor]:
    """The parameters and the optimizer state of a checkpoint."""
    loaded = open_checkpoint(folder).read().tensors
    return {f"{stem}/{name}": tensor for stem in ("model", "optimizer") for name, tensor in loaded[stem].items()}


def after_the_save(result: Result) -> Result:
    """A result without the steps before the save."""
    return replace(result, losses={step: own for step, own in result.losses.items() if step >= SAVED})


@each
def test_exact_resume(setting: Setting, run_dir: Path) -> None:
    """New processes continue bit for bit like the ones that saved, with shuffling, augmentation and dropout."""
    way = Way(accumulate=2, rest=1, optimizer="adamw", random=True)
    whole = combined(setting.launch(train, way, run_dir / "saved", setting))
    resumed = combined(setting.launch(train, way, run_dir / "again", setting, False, run_dir / "saved"))
    assert resumed.steps == 5 * EPOCHS
    assert_same(resumed, after_the_save(whole))


def assert_moves(source: Setting, target: Setting, like: Setting, folder: Path) -> None:
    """Save under one strategy and continue under another, over the same global batches."""
    precision = "64-true" if source.precision == target.precision == "64-true" else "32-true"
    way = Way(accumulate=2, rest=1, optimizer="adamw", precision=precision)
    stopped = combined(source.launch(train, way, folder / "saved", like, True))
    assert stopped.steps < 5 * EPOCHS
    found = combined(target.launch(train, way, folder / "again", like, False, folder / "saved"))
    saved, again = tensors(folder / "saved"), tensors(folder / "again")
    assert saved.keys() == again.keys()
    assert len(saved) == 5 + 3 * 4  # 4 parameters and a buffer; two moments and a step count per parameter
    for name, tensor in saved.items():
        assert torch.equal(again[name], tensor), name
    assert_same(found, after_the_save(by_hand(like, way)), LIMITS[precision])


@each
def test_a_checkpoint_moves_to_one_device(setting: Setting, run_dir: Path) -> None:
    assert_moves(setting, ONE_DEVICE, setting, run_dir)


@each
def test_a_checkpoint_moves_from_one_device(setting: Setting, run_dir: Path) -> None:
    assert_moves(ONE_DEVICE, setting, setting, run_dir)


class SavingTwice(Callback):
    """Saves to one path: after `SAVED` optimizer steps, and at the end of training."""

    def __init__(self, folder: Path, blocking: bool) -> None:
        self.folder, self.blocking = folder, blocking

    def save(self, trainer: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainkitWarning)
            trainer.save_checkpoint(self.folder, blocking=self.blocking)
            trainer._save_policy.wait()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SAVED and trainer.current_epoch == 0:
            self.save(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.save(trainer)


def break_down(setting: Setting, way: Way, folder: Path) -> Result:
    return by_trainer(setting, way, *(SavingTwice(folder / str(blocking), blocking) for blocking in (True, False)))


@each
def test_what_is_not_finite_is_marked_and_replaces_nothing(setting: Setting, run_dir: Path) -> None:
    """The loss of one process is infinite in one step."""
    window = Way().window(setting)
    setting.launch(break_down, Way(overflow=(SAVED * window,)), run_dir)
    for blocking in ("True", "False"):
        good, bad = (open_checkpoint(run_dir / f"{blocking}{mark}") for mark in ("", "-nonfinite"))
        assert (good.manifest.step, good.manifest.finite, bad.manifest.finite) == (SAVED, True, False)
        for checkpoint, finite in ((good, True), (bad, False)):
            values = [value for name, value in checkpoint.read({"model"}).tensors["model"].items() if name != "mean"]
            assert all(bool(torch.isfinite(value).all()) for value in values) == finite
