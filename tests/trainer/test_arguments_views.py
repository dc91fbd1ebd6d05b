"""Arguments of a Trainer are its attributes, under Lightning's names; assigning one takes effect in the next run."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Recorder, make_trainer

from trainkit import Callback, Trainer
from trainkit.errors import ConfigurationError

DEFAULTS = {
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "limit_test_batches": 1.0,
    "limit_predict_batches": 1.0,
    "overfit_batches": 0.0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 2,
    "log_every_n_steps": 50,
    "reload_dataloaders_every_n_epochs": 0,
    "fast_dev_run": False,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "accumulate_grad_batches": 1,
    "max_epochs": 1000,
    "max_steps": -1,
    "min_epochs": None,
    "min_steps": None,
}


def test_defaults() -> None:
    trainer = Trainer(accelerator="cpu", logger=False)
    assert {name: getattr(trainer, name) for name in DEFAULTS} == DEFAULTS


def test_what_other_arguments_imply() -> None:
    trainer = make_trainer(fast_dev_run=3)
    assert (trainer.fast_dev_run, trainer.limit_train_batches, trainer.max_steps, trainer.num_sanity_val_steps) == (3, 3, 3, 0)
    trainer = make_trainer(overfit_batches=2)
    assert (trainer.overfit_batches, trainer.limit_train_batches, trainer.limit_val_batches) == (2, 2, 2)


def test_an_assigned_argument_counts_in_the_next_run() -> None:
    recorder = Recorder()
    trainer = make_trainer(recorder)
    trainer.limit_train_batches, trainer.limit_val_batches, trainer.max_epochs = 3, 1, 2
    trainer.accumulate_grad_batches = 2
    module = TinyModule()
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert (trainer.num_training_batches, trainer.num_val_batches, recorder.epochs) == (3, [1], [0, 1])
    assert (trainer.global_step, trainer.accumulate_grad_batches) == (4, 2)
    trainer.limit_val_batches = None
    trainer.validate(module, tiny_loader())
    assert (trainer.num_val_batches, trainer.limit_val_batches) == ([4], 1.0)


def test_an_assigned_argument_is_checked_with_the_others() -> None:
    trainer = make_trainer(overfit_batches=2)
    with pytest.raises(ConfigurationError, match="limit_val_batches must be a number of batches"):
        trainer.limit_val_batches = 1.5
    with pytest.raises(ConfigurationError, match="overfit_batches=2 and limit_train_batches=3 both limit"):
        trainer.limit_train_batches = 3
    trainer.overfit_batches = 3
    assert trainer.limit_train_batches == 3, "the default that follows from it"


def test_what_cannot_be_assigned() -> None:
    class Late(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            trainer.limit_val_batches = 2

    with pytest.raises(ConfigurationError, match=r"cannot change during a run.*: trainer.limit_val_batches = 2"):
        make_trainer(Late()).fit(TinyModule(), tiny_loader())
    with pytest.raises(ConfigurationError, match=r"a callback was made from it. Pass it: Trainer\(gradient_clip_val=0.5\)"):
        make_trainer().gradient_clip_val = 0.5


def test_an_assignment_that_would_have_no_effect() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer.max_epochs = 3 has no effect, because fast_dev_run=True"):
        make_trainer(fast_dev_run=True).max_epochs = 3
    for given, value in (({}, {0: 2, 1: 8}), ({"accumulate_grad_batches": {0: 4}}, 1)):
        with pytest.raises(ConfigurationError, match=r"accumulate_grad_batches cannot be assigned where.* changes by epoch"):
            make_trainer(**given).accumulate_grad_batches = value


def test_a_number_of_micro_batches_that_changes_in_a_run() -> None:
    class Later(TinyModule):
        def on_train_epoch_start(self) -> None:
            self.trainer.accumulate_grad_batches = 2

    with pytest.raises(ConfigurationError, match=r"cannot change during a run.*GradientAccumulationScheduler\(\{0: 1"):
        make_trainer().fit(Later(), tiny_loader())
