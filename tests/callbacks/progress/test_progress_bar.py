from __future__ import annotations

import math
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from trainkit.errors import NotAvailableError


class Percent(ProgressBar):
    """A bar of a user, with Lightning's names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.seen.append((self.train_description, (batch_idx + 1) / self.total_train_batches))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            self.seen.append((dataloader_idx, self.total_val_batches_current_dataloader, self.total_val_batches))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.reset_dataloader_idx_tracker()

    def print(self, *values: Any, **options: Any) -> None:
        self.seen.append(values)


class Module(TinyModule):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)


def test_a_bar_of_a_user(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Percent()
    trainer = make_trainer(bar, max_epochs=2, enable_progress_bar=True, check_val_every_n_epoch=2)
    trainer.fit(Module(), tiny_loader(8), [tiny_loader(4), tiny_loader(12)])
    epochs = [[(f"Epoch {epoch}/1", 0.5), (f"Epoch {epoch}/1", 1.0)] for epoch in (0, 1)]
    assert bar.seen == [*epochs[0], *epochs[1], (0, 1, 4), (1, 3, 4)]
    trainer.print("above", "the bar")
    assert bar.seen[-1] == ("above", "the bar")
    assert trainer.progress_bar_callback is bar
    assert sorted(bar.get_metrics(trainer, Module())) == ["val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"]
    assert capsys.readouterr().out == ""


def test_what_it_knows_in_each_stage(trainer: Any, module: Any) -> None:
    bar = ProgressBar()
    with pytest.raises(NotAvailableError, match=r"Fix: read it in a hook"):
        _ = bar.trainer
    bar.setup(trainer, module, "fit")
    trainer.check_val_every_n_epoch = 2
    assert (bar.total_val_batches, bar.total_val_batches_current_dataloader) == (0, 2)
    trainer.current_epoch, trainer.sanity_checking, trainer.max_epochs = 1, True, -1
    assert (bar.total_val_batches, bar.total_val_batches_current_dataloader) == (2, 1)
    trainer.num_training_batches = math.inf
    assert (bar.train_description, bar.total_train_batches) == ("Epoch 1", math.inf)
    assert (bar.total_test_batches_current_dataloader, bar.total_predict_batches_current_dataloader) == (3, 3)
    texts = (bar.sanity_check_description, bar.validation_description, bar.test_description, bar.predict_description)
    assert texts == ("Sanity check", "Validation", "Test", "Prediction")


def test_other_processes_show_nothing(trainer: Any, module: Any) -> None:
    trainer.is_global_zero = False
    bar = ProgressBar()
    assert bar.is_enabled
    bar.setup(trainer, module, "fit")
    assert bar.is_disabled
    bar.enable()
    assert bar.is_enabled


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_both_bars_are_progress_bars(kind: Any) -> None:
    assert isinstance(kind(), ProgressBar)
    assert kind().is_progress_bar
    assert kind(refresh_rate=0).is_disabled
