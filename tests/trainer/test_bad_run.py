"""Errors during a run: the right error is raised, the state of the process is restored, and the next run works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from torch import Tensor

from trainkit import Callback, DataModule
from trainkit.callbacks import EarlyStopping
from trainkit.console import TrainkitWarning
from trainkit.errors import EmptyLoaderError, LossError, MetricError, MissingMetricError, TrainkitError


class Witness(Callback):
    def __init__(self) -> None:
        self.exceptions: list[BaseException] = []
        self.teardowns: list[str] = []

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.exceptions.append(exception)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.teardowns.append(stage)


class Failing(TinyModule):
    """Calls `fail` in the third training step or in the second validation step, until the list `fail` is cleared."""

    def __init__(self, fail: Any, where: str = "training_step") -> None:
        super().__init__()
        self.fail: list[Any] = [fail]
        self.where = where

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.where == "training_step" and batch_idx == 2 and self.fail:
            return self.fail[0](self, batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.where == "validation_step" and batch_idx == 1 and self.fail:
            self.fail[0](self, batch)
        super().validation_step(batch, batch_idx)


def failed(kind: type[TrainkitError], module: Failing, *callbacks: Callback, **arguments: Any) -> str:
    """Check that this error ends a fit, and that the same trainer and module can train again. Returns the message."""
    witness, logger = Witness(), Memory()
    trainer = make_trainer(witness, *callbacks, logger=logger, precision="64-true", **arguments)
    with pytest.raises(kind) as caught:
        trainer.fit(module, tiny_loader(), tiny_loader())
    assert type(caught.value) is kind
    assert witness.exceptions == [caught.value]
    assert witness.teardowns == ["fit"]
    assert logger.status == "failed"
    assert trainer.stage is None
    assert not trainer.validating
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert all(parameter.requires_grad for parameter in module.parameters())
    module.fail.clear()
    trainer.callbacks = [callback for callback in trainer.callbacks if callback not in callbacks]
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert logger.status == "success"
    assert trainer.global_step == 4
    return str(caught.value)


# Losses


@pytest.mark.parametrize(
    "fail, words",
    [
        (
            lambda m, b: 1.5,
            ["must return the mean loss (a scalar tensor), a dict with it under 'loss', or None", "1.5 (float)"],
        ),
        (lambda m, b: "loss", ["'loss' (str)"]),
        (lambda m, b: (m.loss(b), 1), ["(tuple)"]),
        (lambda m, b: {"los": m.loss(b)}, ["a dict with the keys ['los']"]),
        (lambda m, b: {"loss": 1.0}, ["outputs['loss'] must be a scalar tensor, not 1.0 (float)"]),
        (lambda m, b: m(b[0]), ["must return a scalar loss, not a tensor of shape (4, 1)", "return loss.mean()"]),
        (lambda m, b: m.loss(b).detach(), ["has no graph", "Do not use .item(), .detach() or torch.no_grad()"]),
        (lambda m, b: torch.tensor(1), ["has no graph"]),
    ],
)
def test_a_loss_that_cannot_be_trained_on(fail: Any, words: list[str]) -> None:
    message = failed(LossError, Failing(fail))
    for word in words:
        assert word in message


def test_a_loss_of_frozen_parameters_has_no_graph() -> None:
    module = TinyModule()
    module.freeze()
    with pytest.raises(LossError, match="check that at least one parameter has requires_grad=True"):
        make_trainer().fit(module, tiny_loader())


# Metrics


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_a_metric_that_is_no_number(where: str) -> None:
    message = failed(MetricError, Failing(lambda m, b: m.log("x", "high"), where))
    assert message == "log('x'): a metric must be a number, a tensor with one element or a Metric, not 'high'."


def test_a_monitor_that_was_never_logged() -> None:
    message = failed(MissingMetricError, Failing(None, "nowhere"), EarlyStopping("val_los"))
    for word in ("'val_los'", "val_loss", "train_loss", "self.log('val_los', value)"):
        assert word in message


def test_a_scheduler_whose_monitor_was_never_logged() -> None:
    class Plateau(Failing):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            if not self.fail:
                return optimizer
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_los"}

    message = failed(MissingMetricError, Plateau(None, "nowhere"))
    assert message == (
        "the scheduler ReduceLROnPlateau monitors 'val_los', which was not logged. Logged so far: 'train_loss', "
        "'val_loss'. Did you mean 'val_loss'?"
    )


# Data


def test_an_iterator_that_is_used_up() -> None:
    module, trainer = TinyModule(), make_trainer()
    batches = iter(tiny_loader())
    trainer.fit(module, batches)
    with pytest.raises(EmptyLoaderError, match="An iterator can be read only once"):
        trainer.fit(module, batches)
    trainer.fit(module, tiny_loader())
    assert trainer.global_step == 4


# Errors of the user's own


class MineError(Exception):
    pass


def raising(*arguments: Any) -> None:
    raise MineError("mine")


@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_an_error_of_the_users_own_is_passed_on_as_it_is(where: str) -> None:
    witness = Witness()
    trainer = make_trainer(witness)
    with pytest.raises(MineError) as caught:
        trainer.fit(Failing(raising, where), tiny_loader(), tiny_loader())
    assert witness.exceptions == [caught.value]
    assert caught.value.__cause__ is None


class Data(DataModule):
    def __init__(self, fail: bool = False) -> None:
        self.fail, self.torn_down = fail, 0

    def train_dataloader(self) -> Any:
        return tiny_loader()

    def teardown(self, stage: str) -> None:
        self.torn_down += 1
        if self.fail:
            raise MineError("data")


class BadTeardown(Callback):
    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        raise KeyError("callback")


def test_a_tear_down_that_fails_stops_no_other() -> None:
    witness, data, logger = Witness(), Data(fail=True), Memory()
    trainer = make_trainer(BadTeardown(), witness, logger=logger)
    with pytest.raises(KeyError, match="callback"):  # the first error; the run itself succeeded
        trainer.fit(TinyModule(), data)
    assert witness.teardowns == ["fit"]
    assert data.torn_down == 1
    assert logger.status == "success"
    assert trainer.stage is None


def test_a_tear_down_that_fails_does_not_hide_the_first_error(caplog: pytest.LogCaptureFixture) -> None:
    data = Data(fail=True)
    with pytest.raises(MineError, match="^mine$"):
        make_trainer(BadTeardown()).fit(Failing(raising), data)
    assert data.torn_down == 1
    assert "the tear-down failed too: KeyError('callback')" in caplog.messages
    assert "the tear-down failed too: MineError('data')" in caplog.messages


@pytest.mark.parametrize("hook", ["prepare_data", "setup", "configure_model", "configure_optimizers"])
def test_an_error_in_the_set_up(hook: str) -> None:
    witness = Witness()
    trainer = make_trainer(witness)
    module = type("Module", (TinyModule,), {hook: raising if hook != "setup" else lambda self, stage: raising()})()
    with pytest.raises(MineError):
        trainer.fit(module, tiny_loader())
    assert witness.teardowns == ["fit"]
    assert [type(error) for error in witness.exceptions] == [MineError]
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 4


def test_an_error_before_any_callback_is_known() -> None:
    witness = Witness()
    trainer = make_trainer(witness)
    with pytest.raises(MineError):
        trainer.fit(type("Module", (TinyModule,), {"configure_callbacks": raising})(), tiny_loader())
    assert (witness.teardowns, witness.exceptions, trainer.stage) == ([], [], None)
    trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 4


def test_a_logger_that_cannot_write_does_not_end_the_run() -> None:
    class Full(Memory):
        def write_metrics(self, metrics: Any, step: int) -> None:
            if step == 2:
                raise OSError(28, "No space left on device")
            super().write_metrics(metrics, step)

    logger = Full()
    trainer = make_trainer(logger=logger, log_every_n_steps=1)
    with pytest.warns(TrainkitWarning, match=r"Full could not write .* of step 2: .*No space left.* Training continues"):
        trainer.fit(TinyModule(), tiny_loader())
    assert trainer.global_step == 4
    assert sorted(logger.of("train_loss")) == [1, 3, 4]
