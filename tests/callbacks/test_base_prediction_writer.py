from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule
from helpers.worlds.worlds import run_world
from torch.utils.data import DataLoader

from trainkit import Trainer
from trainkit.callbacks import BasePredictionWriter, PredictionWriter
from trainkit.errors import ConfigurationError


class Negative(TinyModule):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return -batch


def numbers(length: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(length), batch_size=2, **options)  # type: ignore[arg-type]


class Custom(BasePredictionWriter):
    """Written for Lightning: with its names, in its order."""

    def __init__(self, output_dir: str, write_interval: str) -> None:
        super().__init__(write_interval)
        self.output_dir = output_dir
        self.seen: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        self.seen.append((prediction.tolist(), batch_indices, batch.tolist(), batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.seen.append(([prediction.tolist() for prediction in predictions], batch_indices))


def seen(write_interval: str, length: int, **options: Any) -> list[Any]:
    writer = Custom("out", write_interval)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "seed": 1}
    trainer = Trainer(callbacks=[writer], **quiet, **options)  # type: ignore[arg-type]
    trainer.predict(Negative(), numbers(length), return_predictions=False)
    return writer.seen


def seen_by_rank() -> list[Any]:
    return seen("batch_and_epoch", 5, strategy="ddp")


def test_what_a_subclass_receives() -> None:
    by_batch = [([0, -1], [0, 1], [0, 1], 0, 0), ([-2], [2], [2], 1, 0)]
    at_the_end = [([[0, -1], [-2]], [[[0, 1], [2]]])]
    assert seen("batch", 3) == by_batch
    assert seen("epoch", 3) == at_the_end
    assert seen("batch_and_epoch", 3) == by_batch + at_the_end


def test_each_process_receives_its_own_with_their_indices() -> None:
    """Rank 1 has one batch of the three."""
    first, second = run_world(2, seen_by_rank)
    assert first == [
        ([0, -1], [0, 1], [0, 1], 0, 0),
        ([-4], [4], [4], 1, 0),
        ([[0, -1], [-4]], [[[0, 1], [4]]]),
    ]
    assert second == [([-2, -3], [2, 3], [2, 3], 0, 0), ([[-2, -3]], [[[2, 3]]])]


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigurationError, match=r"Custom\(write_interval=\).*Did you mean 'batch'"):
        Custom("out", "batches")
    assert (Custom("out", "epoch").interval, PredictionWriter(once=True).interval) == ("epoch", "epoch")
    assert BasePredictionWriter().write_interval == "batch"


@pytest.mark.parametrize("interval, method", [("batch", "write_on_batch_end"), ("epoch", "write_on_epoch_end")])
def test_a_class_without_the_method_of_its_interval_is_refused_at_once(interval: str, method: str) -> None:
    class Empty(BasePredictionWriter):
        pass

    trainer = Trainer(accelerator="cpu", callbacks=[Empty(interval)], logger=False, enable_progress_bar=False)
    with pytest.raises(ConfigurationError, match=rf"Empty\(write_interval='{interval}'\) does not define {method}.*Fix"):
        trainer.predict(Negative(), numbers(3), return_predictions=False)
