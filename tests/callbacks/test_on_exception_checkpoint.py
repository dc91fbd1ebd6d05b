from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world

from trainkit import Callback
from trainkit.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from trainkit.checkpoint import open_checkpoint
from trainkit.errors import CheckpointWriteError, ConfigurationError, Preempted


class StoppedError(Exception):
    """Raised on purpose."""


class Fails(Callback):
    """Raises, or sends SIGTERM to its process, in a micro-batch of one rank."""

    def __init__(self, step: int, *, sends: bool = False, rank: int = 0) -> None:
        self.step, self.sends, self.rank = step, sends, rank

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step, trainer.global_rank) != (self.step, self.rank):
            return
        if not self.sends:
            raise StoppedError
        os.kill(os.getpid(), signal.SIGTERM)


class Momentum(TinyModule):
    """The optimizer has a state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(*callbacks: Callback, ckpt_path: str | None = None, **options: Any) -> tuple[int, Any]:
    torch.manual_seed(0)
    module, trainer = Momentum(), make_trainer(*callbacks, max_epochs=2, **options)
    trainer.fit(module, tiny_loader(16, shuffle=True), ckpt_path=ckpt_path)
    return trainer.global_step, parameters_of(module)


@pytest.mark.parametrize("filename", ["", ".hidden", "a/b", "a\\b", None])
def test_wrong_names(filename: Any) -> None:
    with pytest.raises(ConfigurationError, match="plain name"):
        OnExceptionCheckpoint("rescue", filename)


def test_where_it_saves() -> None:
    callback = OnExceptionCheckpoint("rescue")
    assert callback.ckpt_path == os.path.abspath("rescue/on_exception")
    assert isinstance(callback, Checkpoint)
    assert isinstance(ModelCheckpoint(), Checkpoint)
    with pytest.raises(ConfigurationError, match="URL"):
        OnExceptionCheckpoint("nothing://bucket/rescue")


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start() -> None:
    Path("rescue").write_text("a file")
    with pytest.raises(CheckpointWriteError):
        fit(OnExceptionCheckpoint("rescue"))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_failed_continues_exactly(accumulation: int, caplog: pytest.LogCaptureFixture) -> None:
    """Twice: the second failure replaces the checkpoint of the first."""
    caplog.set_level("INFO", "trainkit")
    rescue = OnExceptionCheckpoint("rescue")
    options = {"accumulate_grad_batches": accumulation}
    whole = fit(**options)
    for step, start in [(1, None), (3, rescue.ckpt_path)]:
        with pytest.raises(StoppedError):
            fit(rescue, Fails(step), ckpt_path=start, **options)
        assert open_checkpoint(rescue.ckpt_path).manifest.step == step
    assert f"OnExceptionCheckpoint, after StoppedError: saved {rescue.ckpt_path}" in caplog.messages
    resumed = fit(rescue, ckpt_path=rescue.ckpt_path, **options)
    assert resumed[0] == whole[0]
    assert same(resumed[1], whole[1])
    assert open_checkpoint(rescue.ckpt_path).manifest.step == 3  # a good end saves and removes nothing


def test_the_message_of_ctrl_c_names_it() -> None:
    class Stops(Fails):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == self.step:
                os.kill(os.getpid(), signal.SIGINT)

    rescue = OnExceptionCheckpoint("rescue")
    with pytest.raises(KeyboardInterrupt, match=re.escape(f"ckpt_path={rescue.ckpt_path!r}")):
        fit(rescue, Stops(1))


def test_a_save_that_fails_does_not_hide_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainkit")
    rescue = OnExceptionCheckpoint("rescue")
    os.makedirs(rescue.ckpt_path)
    Path(rescue.ckpt_path, "notes.txt").write_text("not a checkpoint")
    with pytest.raises(StoppedError):
        fit(rescue, Fails(1))
    assert "on_exception failed: CheckpointError" in caplog.text
    assert Path(rescue.ckpt_path, "notes.txt").exists()


class HalfDone(torch.optim.SGD):
    """Fails in its third step, after it has changed the parameters."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps += 1
        if self.steps == 3:
            raise StoppedError
        return loss


class Torn(TinyModule):
    def configure_optimizers(self) -> Any:
        return HalfDone(self.parameters(), lr=0.1)


def test_a_step_that_failed_half_way_is_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainkit")
    with pytest.raises(StoppedError):
        make_trainer(OnExceptionCheckpoint("rescue")).fit(Torn(), tiny_loader(16))
    assert "nothing was saved, because the step that failed had begun to change the parameters" in caplog.text
    assert not Path("rescue/on_exception").exists()


def test_nothing_to_save(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainkit")
    with pytest.raises(StoppedError):
        fit(OnExceptionCheckpoint("rescue"), Fails(0))
    assert "nothing was saved, because no optimizer step was made yet" in caplog.text
    with pytest.raises(StoppedError):
        fit(OnExceptionCheckpoint("trial"), Fails(0), fast_dev_run=True)
    assert not Path("trial").exists()
    fit(OnExceptionCheckpoint("good"))
    assert not Path("good/on_exception").exists()


def on_two(folder: str, sends: bool) -> Any:
    rescue = OnExceptionCheckpoint(folder)
    try:
        fit(rescue, Fails(1, sends=sends, rank=1), strategy="ddp")
    except BaseException as error:
        return type(error) is Preempted, os.path.exists(rescue.ckpt_path)


def test_after_a_signal_to_one_of_two_processes_both_save(tmp_path: Path) -> None:
    assert run_world(2, on_two, str(tmp_path), True) == [(True, True)] * 2
    assert open_checkpoint(tmp_path / "on_exception").manifest.step == 2


def test_after_an_error_of_one_of_two_processes_nothing_is_saved(tmp_path: Path) -> None:
    assert run_world(2, on_two, str(tmp_path), False) == [(False, False)] * 2
