"""A Trainer that is not running can be pickled and copied, with its callbacks, loggers and results."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer, parameters_of, same

from trainkit import Callback, Trainer
from trainkit.callbacks import EarlyStopping, ModelCheckpoint, ThroughputMonitor
from trainkit.errors import ConfigurationError

WAYS = {"pickle": lambda trainer: pickle.loads(pickle.dumps(trainer)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_that_has_not_run(way: str) -> None:
    trainer = WAYS[way](make_trainer(max_epochs=2, accumulate_grad_batches=2, precision="64-true", seed=5, profiler="advanced"))
    facts = trainer.max_epochs, trainer.accumulate_grad_batches, trainer.precision, trainer.seed, trainer.state.status
    assert facts == (2, 2, "64-true", 5, "initializing")
    assert type(trainer.profiler).__name__ == "AdvancedProfiler"
    one, other = TinyModule(), TinyModule()
    other.load_state_dict(one.state_dict())
    trainer.fit(one, tiny_loader(shuffle=True))
    make_trainer(max_epochs=2, accumulate_grad_batches=2, precision="64-true", seed=5).fit(other, tiny_loader(shuffle=True))
    assert same(parameters_of(one), parameters_of(other))


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_after_a_fit(way: str, tmp_path: Any) -> None:
    callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss"), ThroughputMonitor()]
    options = {"logger": ["csv", "tensorboard"], "default_root_dir": tmp_path, "log_every_n_steps": 1, "max_epochs": 1}
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=callbacks, **options, **quiet)
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    copied = WAYS[way](trainer)
    assert copied.global_step == trainer.global_step == 4
    assert copied.callback_metrics == trainer.callback_metrics
    assert copied.checkpoint_callback.best_model_path == trainer.checkpoint_callback.best_model_path != ""
    assert copied.log_dir == trainer.log_dir
    assert copied.callbacks[0] is not trainer.callbacks[0]
    assert same(parameters_of(copied.lightning_module), parameters_of(trainer.lightning_module))
    assert copied.validate(copied.lightning_module, tiny_loader()) == trainer.validate(dataloaders=tiny_loader())
    copied.fit(TinyModule(), tiny_loader(), tiny_loader())
    assert copied.global_step == 4


def test_a_trainer_that_runs() -> None:
    class Copying(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            copy.deepcopy(trainer)

    with pytest.raises(ConfigurationError, match="a Trainer that is running cannot be copied or pickled"):
        make_trainer(Copying()).fit(TinyModule(), tiny_loader())
