"""`DummyLogger` and what a script finds in a `fast_dev_run`: it may call its logger and read its checkpoint callback."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers import CSVLogger
from trainkit.loggers.dummy_logger import DummyLogger


def test_it_accepts_every_call_and_writes_nothing(run_dir: Path) -> None:
    logger = DummyLogger()
    logger.log_metrics({"x": 1.0}, step=3)
    logger.log_metrics({"not": "a number"})
    logger.log_hyperparams({"object": object()})
    logger.log_image(key="sample", images=[torch.rand(3, 4, 4)], caption=["one"])
    logger.log_text("note", "text")
    logger.log_histogram("weights", torch.ones(3))
    logger.watch(TinyModule(), log="all")  # a method of one logger only
    logger.experiment.add_image("sample", torch.rand(3, 4, 4), 0)
    logger.experiment.config["lr"] = 1.0
    logger.save()
    logger.finalize("success")
    assert (logger.save_dir, logger.log_dir, logger.version, list(run_dir.iterdir())) == (None, None, None, [])


def test_it_can_be_copied_and_has_no_special_methods_by_accident() -> None:
    assert isinstance(copy.deepcopy(DummyLogger()), DummyLogger)
    assert not hasattr(DummyLogger(), "__len__")


class Touches(TinyModule):
    """Uses its logger and its checkpoint callback as a script does."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.logger is not None
        self.logger.log_metrics({"mine": 1.0}, step=self.global_step)
        self.logger.experiment.add_image("sample", torch.rand(3, 4, 4), 0)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        callback = self.trainer.checkpoint_callback
        assert isinstance(callback, ModelCheckpoint)
        self.seen = callback.best_model_path, Path(str(callback.dirpath), "mine.txt")


@pytest.mark.parametrize("loggers", [None, True, "csv", [CSVLogger(), CSVLogger(name="other")]])
def test_a_module_finds_its_logger_in_a_fast_dev_run(run_dir: Path, loggers: Any) -> None:
    module = Touches()
    trainer = make_trainer(fast_dev_run=True, logger=loggers, enable_checkpointing=True)
    trainer.fit(module, tiny_loader())
    assert {type(logger) for logger in trainer.loggers} == {DummyLogger}
    assert len(trainer.loggers) == (2 if isinstance(loggers, list) else 1)
    assert module.seen == ("", Path(trainer.default_root_dir, "checkpoints", "mine.txt"))
    assert trainer.log_dir == trainer.default_root_dir
    assert not any(run_dir.rglob("*"))


def test_what_is_turned_off_stays_off_in_a_fast_dev_run() -> None:
    trainer = make_trainer(fast_dev_run=True, logger=False, enable_checkpointing=False)
    assert (trainer.logger, trainer.checkpoint_callback) == (None, None)
    trainer.logger = CSVLogger()
    assert isinstance(trainer.logger, DummyLogger)
    trainer.loggers = []
    assert trainer.logger is None
