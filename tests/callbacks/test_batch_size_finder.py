"""`BatchSizeFinder`: a search before the loaders exist, and never again in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same

from trainkit.callbacks import BatchSizeFinder, ModelCheckpoint
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, LossError
from trainkit.tuner import batch_size


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not collect garbage after each trial, which takes longer than the trial."""
    monkeypatch.setattr(batch_size, "release_memory", lambda: None)


class Sized(TinyModule):
    """Runs out of memory with more than `most` samples in a batch; records the sizes of its batches."""

    def __init__(self, most: int = 20) -> None:
        super().__init__()
        self.most, self.batch_size = most, 7
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        Sized.training_step(self, batch, batch_idx)

    def train_dataloader(self) -> Any:
        return tiny_loader(256, self.batch_size, shuffle=True)

    test_dataloader = train_dataloader


def fit(folder: Path, max_steps: int, most: int = 20, ckpt_path: str | None = None) -> tuple[Sized, BatchSizeFinder]:
    torch.manual_seed(3)
    module, finder = Sized(most), BatchSizeFinder()
    callbacks = finder, ModelCheckpoint(save_last=True)
    trainer = make_trainer(*callbacks, default_root_dir=folder, enable_checkpointing=True, max_steps=max_steps)
    trainer.fit(module, ckpt_path=ckpt_path)
    return module, finder


def test_the_loader_has_the_size_found() -> None:
    module, finder = Sized(), BatchSizeFinder()
    assert finder.optimal_batch_size == 2
    make_trainer(finder).fit(module)
    assert finder.optimal_batch_size == module.batch_size == 16
    assert module.sizes == [16] * 16
    finder = BatchSizeFinder()
    module.most = 40
    make_trainer(finder).test(module, verbose=False)
    assert finder.optimal_batch_size == module.batch_size == 32


def test_a_resumed_run_keeps_the_size_and_is_the_same_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole", 12)
    fit(tmp_path / "parts", 5)
    rest, finder = fit(tmp_path / "parts", 12, most=1000, ckpt_path="last")  # a search would find another size now
    assert finder.optimal_batch_size == rest.batch_size == 16
    assert same(parameters_of(whole), parameters_of(rest))


def test_a_checkpoint_without_a_size_warns() -> None:
    trainer, module = make_trainer(max_steps=2), Sized()
    trainer.fit(module)
    trainer.save_checkpoint("saved")
    with pytest.warns(TrainkitWarning, match="scale_batch_size"):
        make_trainer(BatchSizeFinder(), max_steps=4).fit(module, ckpt_path="saved")
    assert module.batch_size == 7


def test_the_arguments_are_those_of_the_tuner() -> None:
    class Named(Sized):
        size = 1

        def train_dataloader(self) -> Any:
            return tiny_loader(256, self.size)

    module = Named()
    steps: list[int] = []
    module.configure_callbacks = lambda: steps.append(1) or []  # type: ignore[func-returns-value]
    options: dict[str, Any] = {"mode": "binsearch", "init_val": 3, "batch_arg_name": "size", "steps_per_trial": 1}
    finder = BatchSizeFinder(**options, margin=0.5, max_val=10, max_trials=25)
    make_trainer(finder, max_steps=1).fit(module)
    assert module.size == finder.optimal_batch_size == 5
    finder = BatchSizeFinder(**options, margin=0.0, max_trials=2)
    make_trainer(finder, max_steps=1).fit(module)
    assert module.size == 6
    assert len(steps) == 2  # the trials have no callbacks of the module


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_loaders_that_were_passed_are_refused(stage: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{stage} received loaders"):
        getattr(make_trainer(BatchSizeFinder()), stage)(Sized(), tiny_loader())


def test_subclasses_that_search_elsewhere() -> None:
    """The patterns of Lightning's documentation: in evaluations they work, during a fit they are refused."""

    class FindInTest(BatchSizeFinder):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            return

        def on_test_start(self, trainer: Any, module: Any) -> None:
            self.scale_batch_size(trainer, module)

    class FindInEpochs(FindInTest):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.scale_batch_size(trainer, module)

    module, finder = Sized(), FindInTest()
    trainer = make_trainer(finder)
    trainer.fit(module)
    assert module.batch_size == 7
    module.sizes.clear()
    trainer.test(module, verbose=False)
    assert finder.optimal_batch_size == module.batch_size == 16
    assert set(module.sizes) == {16}
    with pytest.raises(ConfigurationError, match="FindInEpochs: .* the batch size of a run is fixed.*remove on_fit_start"):
        make_trainer(FindInEpochs()).fit(module)


def test_a_module_that_skips_all_batches() -> None:
    class Skipping(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.sizes.append(len(batch[0]))

    module, words = Skipping(), "training_step returned None for (the first|every) batch"
    with pytest.warns(TrainkitWarning, match=words):
        make_trainer(BatchSizeFinder(max_trials=2), limit_train_batches=1, max_epochs=1).fit(module)
    assert module.batch_size == 4
    module.sizes.clear()
    with (
        pytest.warns(TrainkitWarning, match=words),
        pytest.raises(LossError, match="training_step returned None for every batch of epoch 0"),
    ):
        make_trainer(BatchSizeFinder(max_trials=2), limit_train_batches=1, max_epochs=2).fit(module)
    assert module.batch_size == module.sizes[-1] == 4  # after the trials, the fit itself refuses a second such epoch
