"""`SpikeDetection`: what is a spike, when training stops, and what a resumed run remembers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer as quiet_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor

from trainkit.callbacks import ModelCheckpoint, SpikeDetection
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, LossError, TrainingSpikeException


@pytest.fixture
def feed(trainer: Any, module: Any, run_dir: Path) -> Any:
    """Passes losses to a callback as if each was a step; returns the micro-batch of the spike."""
    trainer.default_root_dir = str(run_dir)

    def pass_losses(callback: SpikeDetection, losses: list[float], window: int = 1) -> int | None:
        try:
            for index, loss in enumerate(losses):
                last = (index + 1) % window == 0
                trainer.accelerator.sync_gradients = last
                if last:
                    callback.on_before_optimizer_step(trainer, module, None)  # type: ignore[arg-type]
                callback.on_train_batch_end(trainer, module, {"loss": torch.tensor(loss)}, None, index)
            callback.on_train_end(trainer, module)
        except TrainingSpikeException as spike:
            return spike.batch_idx
        return None

    return pass_losses


def test_a_high_loss_is_a_spike_and_a_low_one_is_not(feed: Any) -> None:
    assert feed(SpikeDetection(), [1.0, 1.1, 0.9, 0.01, 1.0, 2.0]) is None
    assert feed(SpikeDetection(), [1.0, 1.1, 0.9, 4.0, 1.0]) == 3
    assert feed(SpikeDetection(), [1.0, 4.0, 1.0]) == 1
    assert feed(SpikeDetection(), [1.0, 1.0, 4.0]) == 2  # when training ends


def test_a_low_spike(feed: Any) -> None:
    assert feed(SpikeDetection(mode="max"), [-1.0, -1.0, -9.0]) == 2
    assert feed(SpikeDetection(mode="max"), [1.0, 1.0, 9.0]) is None


def test_the_mean_is_of_the_last_losses(feed: Any) -> None:
    losses = [9.0, 9.0, 1.0, 1.0, 4.0]
    assert feed(SpikeDetection(window=2), losses) == 4
    assert feed(SpikeDetection(window=4), losses) is None


def test_the_first_losses_are_not_judged(feed: Any) -> None:
    losses = [1.0, 9.0, 1.0, 1.0, 99.0]
    assert feed(SpikeDetection(warmup=1), losses) == 1
    assert feed(SpikeDetection(warmup=2), losses) == 4
    assert feed(SpikeDetection(warmup=5), losses) is None


def test_both_distances_must_be_reached(feed: Any) -> None:
    losses = [1.0, 1.0, 3.5]
    assert feed(SpikeDetection(atol=2.5, rtol=2.5), losses) == 2
    assert feed(SpikeDetection(atol=2.6, rtol=2.5), losses) is None
    assert feed(SpikeDetection(atol=2.5, rtol=2.6), losses) is None
    assert feed(SpikeDetection(atol=2.5, rtol=None), losses) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_losses_that_are_not_finite(feed: Any, value: float) -> None:
    losses = [1.0, 1.0, value, 1.0]
    assert feed(SpikeDetection(), losses) == 2
    assert feed(SpikeDetection(finite_only=False), losses) is None


def test_only_windows_that_are_complete_are_judged(trainer: Any, module: Any, feed: Any) -> None:
    """Reading a loss of the window that is being computed would wait for the device."""
    callback = SpikeDetection()
    feed(callback, [])
    for index, loss in enumerate([1.0, 1.0, 9.0]):  # windows of two
        trainer.accelerator.sync_gradients = index == 1
        callback.on_train_batch_end(trainer, module, {"loss": torch.tensor(loss)}, None, index)
    callback.on_before_optimizer_step(trainer, module, None)  # type: ignore[arg-type]
    assert [loss.batch_idx for loss in callback._pending] == [2]
    with pytest.raises(TrainingSpikeException):
        callback.check_now(trainer)


def test_a_file_that_cannot_be_written_does_not_hide_the_spike(feed: Any, run_dir: Path) -> None:
    Path("taken").write_text("a file and no folder")
    with pytest.warns(TrainkitWarning, match=r"could not write taken/skip_batches.json: .*to skip: \[1, 2\]"):
        feed(callback := SpikeDetection(exclude_batches_path="taken"), [1.0, 1.0, 9.0])
    assert callback.bad_batches == [1, 2]


def test_the_file(feed: Any, run_dir: Path) -> None:
    callback = SpikeDetection()
    feed(callback, [1.0, 1.0, 9.0])
    assert callback.bad_batches == json.loads(Path("skip_batches.json").read_text()) == [1, 2]
    feed(SpikeDetection(exclude_batches_path="folder"), [1.0, 1.0, 9.0])
    assert json.loads(Path("folder/skip_batches.json").read_text()) == [1, 2]
    feed(SpikeDetection(exclude_batches_path=Path("other/own.json"), warmup=0), [math.nan])
    assert json.loads(Path("other/own.json").read_text()) == [0]


def test_the_exception() -> None:
    error = TrainingSpikeException("text", 3)
    assert (str(error), error.batch_idx) == ("text", 3)
    assert isinstance(error, RuntimeError)


def test_outputs_without_a_loss(trainer: Any, module: Any) -> None:
    callback = SpikeDetection()
    callback.on_train_batch_end(trainer, module, None, None, 0)
    with pytest.raises(LossError, match="loss"):
        callback.on_train_batch_end(trainer, module, {"other": 1}, None, 0)


@pytest.mark.parametrize("arguments", [{"mode": "mean"}, {"window": 0}, {"warmup": -1}, {"atol": -1.0}, {"rtol": "2"}])
def test_a_wrong_argument_is_named_with_its_fix(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"SpikeDetection\({next(iter(arguments))}="):
        SpikeDetection(**arguments)


# -------------------------------------------------------------------------------------------------------------- whole runs


class Spiking(TinyModule):
    """The loss of one micro-batch, on one rank, is 1000 times as large."""

    def __init__(self, spike: int = -1, rank: int = 0) -> None:
        super().__init__()
        self.spike, self.rank, self.steps = spike, rank, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 1000 if (batch_idx, self.global_rank) == (self.spike, self.rank) else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1


def test_training_stops_before_the_next_optimizer_step(make_trainer: Any) -> None:
    module, callback = Spiking(5), SpikeDetection(rtol=50.0)
    trainer = make_trainer(callback, default_root_dir=".")
    with pytest.raises(TrainingSpikeException, match="micro-batch 5 in epoch 0"):
        trainer.fit(module, tiny_loader(64))
    assert (trainer.global_step, module.steps) == (6, 6)
    assert callback.bad_batches == [4, 5]


def test_nothing_is_saved_after_a_spike(make_trainer: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(SpikeDetection(rtol=50.0), saver)
    with pytest.raises(TrainingSpikeException):
        trainer.fit(Spiking(5), tiny_loader(64))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]


def resumed(folder: Path, strategy: str) -> Any:
    """The losses in mind after an uninterrupted run, and after one that was resumed."""
    kept = []
    for stops in ([9], [4, 9]):
        for max_steps in stops:
            torch.manual_seed(3)
            callback, path = SpikeDetection(window=5, rtol=1e6), folder / str(len(stops))
            saver = ModelCheckpoint(path, save_last=True)
            trainer = quiet_trainer(
                callback, saver, max_steps=max_steps, max_epochs=-1, enable_checkpointing=True, strategy=strategy
            )
            trainer.fit(Spiking(), tiny_loader(32), ckpt_path="last" if max_steps != stops[0] else None)
        kept.append([list(callback._recent), callback._seen])
    return kept


def test_a_resumed_run_remembers_the_losses(tmp_path: Path) -> None:
    whole, parts = resumed(tmp_path, "auto")
    assert whole == parts
    assert (len(whole[0]), whole[1]) == (5, 9)


def test_a_new_run_remembers_nothing(make_trainer: Any) -> None:
    callback = SpikeDetection(rtol=1e6)
    trainer = make_trainer(callback, max_steps=3)
    trainer.fit(Spiking(), tiny_loader())
    trainer.save_checkpoint("saved")
    trainer.fit(Spiking(), tiny_loader())
    assert callback._seen == 3
    trainer.fit(Spiking(), tiny_loader(), ckpt_path="saved", restore={"model"})
    assert callback._seen == 3


def ended(folder: Path) -> Any:
    found = resumed(folder, "ddp")
    module, callback = Spiking(2, rank=1), SpikeDetection(rtol=50.0)
    trainer = quiet_trainer(callback, default_root_dir=folder / "spike", strategy="ddp")
    with pytest.raises(TrainingSpikeException) as spike:
        trainer.fit(module, tiny_loader(60))  # an odd number of micro-batches
    return found, (spike.value.batch_idx, trainer.global_step, callback.bad_batches)


def test_a_spike_on_one_process_counts_for_all(tmp_path: Path) -> None:
    first, second = run_world(2, ended, tmp_path)
    for whole, parts in (first[0], second[0]):
        assert whole == parts
    assert first[0] != second[0]  # each process remembers its own losses
    assert first[1] == second[1] == (2, 3, [1, 2])
    assert json.loads((tmp_path / "spike/skip_batches.json").read_text()) == [1, 2]


def test_losses_are_copied_without_waiting(trainer: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of the device is waited for only when the loss is judged. The device is replaced."""
    from trainkit.callbacks import spike_detection

    waited: list[int] = []
    event = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(spike_detection, "copy_to_host", lambda value: (value, event))
    callback = SpikeDetection()
    callback.on_train_batch_end(trainer, module, {"loss": torch.tensor(1.0)}, None, 0)
    assert waited == []
    callback.on_before_optimizer_step(trainer, module, None)  # type: ignore[arg-type]
    assert waited == [1]
