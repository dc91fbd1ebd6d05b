"""`trainer.state` and its properties, at each moment of a run, as Lightning 2.6.6 has them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit import Callback
from trainkit.errors import Preempted
from trainkit.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

FLAGS = ("training", "sanity_checking", "validating", "testing", "predicting", "evaluating")


def facts(trainer: Any) -> tuple[Any, ...]:
    state = trainer.state
    return state.status, state.fn, state.stage, {name for name in FLAGS if getattr(trainer, name)}


class Stages(Callback):
    """Records the stage that its hooks receive."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.seen.append(stage)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.seen.append(stage)


@pytest.mark.parametrize("fn", list(TrainerFn))
def test_the_stage_of_setup_and_teardown_is_a_text_and_a_trainer_fn(fn: TrainerFn) -> None:
    stages = Stages()
    getattr(make_trainer(stages), fn.value)(TinyModule(), tiny_loader())
    assert stages.seen == [fn, fn] == [fn.value] * 2
    assert all(stage is fn and f"{stage}_{stage.value}" == f"{fn.value}_{fn.value}" for stage in stages.seen)


class Watch(Callback):
    """Records the state in some hooks."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.seen[f"setup of {stage}"] = facts(trainer)

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        self.seen["sanity"] = facts(trainer)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.seen["validation in a check" if trainer.sanity_checking else "validation"] = facts(trainer)

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self.seen["test"] = facts(trainer)

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self.seen["predict"] = facts(trainer)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.seen["train"] = facts(trainer)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.seen["teardown"] = facts(trainer)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.seen["exception"] = facts(trainer)


def test_the_states_of_a_fit() -> None:
    watch = Watch()
    trainer = make_trainer(watch, num_sanity_val_steps=1)
    assert trainer.state == TrainerState("initializing", None, None)  # type: ignore[arg-type]
    assert facts(trainer) == ("initializing", None, None, set())
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    training = ("running", "fit", "train", {"training"})
    sanity = ("running", "fit", "sanity_check", {"sanity_checking", "evaluating"})
    assert watch.seen == {
        "setup of fit": training,
        "sanity": sanity,
        "validation in a check": sanity,
        "train": training,
        "validation": ("running", "fit", "validate", {"validating", "evaluating"}),
        "teardown": training,
    }
    assert facts(trainer) == ("finished", "fit", None, set())
    assert trainer.state.finished
    assert trainer.state.stopped
    assert not trainer.interrupted


def test_the_states_of_evaluations() -> None:
    watch = Watch()
    trainer = make_trainer(watch)
    module = TinyModule()
    trainer.validate(module, tiny_loader())
    assert watch.seen["validation"] == ("running", "validate", "validate", {"validating", "evaluating"})
    trainer.test(module, tiny_loader())
    assert watch.seen["test"] == ("running", "test", "test", {"testing", "evaluating"})
    trainer.predict(module, tiny_loader())
    assert watch.seen["predict"] == ("running", "predict", "predict", {"predicting"})
    assert facts(trainer) == ("finished", "predict", None, set())


def test_a_run_that_an_exception_ends() -> None:
    class Failing(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("mine")

    watch = Watch()
    trainer = make_trainer(watch)
    with pytest.raises(KeyError):
        trainer.fit(Failing(), tiny_loader())
    assert watch.seen["exception"] == ("interrupted", "fit", "train", {"training"})
    assert facts(trainer) == ("interrupted", "fit", None, set())
    assert trainer.interrupted
    trainer.fit(TinyModule(), tiny_loader())
    assert not trainer.interrupted


def test_a_signal() -> None:
    class Killed(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert not self.trainer.received_sigterm
            os.kill(os.getpid(), signal.SIGTERM)
            assert self.trainer.received_sigterm
            return super().training_step(batch, batch_idx)

    trainer = make_trainer()
    with pytest.raises(Preempted):
        trainer.fit(Killed(), tiny_loader())
    assert trainer.interrupted
    assert trainer.received_sigterm


def test_names_and_values() -> None:
    """They equal their texts, as in Lightning."""
    assert TrainerFn.FITTING == "fit"
    assert TrainerStatus.INTERRUPTED.stopped
    assert not TrainerStatus.RUNNING.stopped
    assert [stage.dataloader_prefix for stage in RunningStage] == ["train", "val", "val", "test", "predict"]
    assert [stage for stage in RunningStage if stage.evaluating] == ["sanity_check", "validate", "test"]
