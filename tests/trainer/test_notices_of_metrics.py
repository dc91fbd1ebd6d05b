"""Messages about metrics that are monitored but not logged, misspelled, logged twice under one name, or logged rarely."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer

from trainkit import Callback, TrainModule
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.console import TrainkitWarning
from trainkit.errors import MissingMetricError


class Plateau(TinyModule):
    """A module with ReduceLROnPlateau, which monitors a metric."""

    def __init__(self, monitor: str, strict: bool = True) -> None:
        super().__init__()
        self.monitor, self.strict = monitor, strict

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor, "strict": self.strict},
        }


# -------------------------------------------------------------------------------------------------------- no validation


@pytest.mark.parametrize(
    "callback, module",
    [
        (EarlyStopping("val_loss"), TinyModule()),
        (ModelCheckpoint(monitor="val_loss"), TinyModule()),
        (Callback(), Plateau("val_loss")),
    ],
    ids=["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"],
)
@pytest.mark.parametrize("off", [False, True])
def test_a_monitor_without_a_validation(callback: Callback, module: Any, off: bool, request: Any) -> None:
    """A warning says so before the first epoch, and the error at its end says it again."""
    name = request.node.callspec.id.split("-")[-1]
    loaders, arguments = ([tiny_loader()], {"limit_val_batches": 0}) if off else ([], {})
    reason = "limit_val_batches=0 turns it off" if off else "no validation loader was given. Pass one, trainer.fit(module, "
    with (
        pytest.warns(TrainkitWarning) as warned,
        pytest.raises(MissingMetricError) as raised,
    ):
        make_trainer(callback, enable_checkpointing=name == "ModelCheckpoint", **arguments).fit(module, tiny_loader(), *loaders)
    assert [str(warning.message).startswith(f"{name} monitors 'val_loss', but this fit has no") for warning in warned] == [True]
    for text in (str(warned[0].message), str(raised.value)):
        assert "his fit has no validation: " + reason in text
    assert f"{name} monitors 'val_loss', which was not logged. This fit" in str(raised.value)
    assert "Logged so far: 'train_loss'." in str(raised.value)


def test_a_module_without_a_validation_step() -> None:
    class Trains(TinyModule):
        validation_step = TrainModule.validation_step

    with (
        pytest.warns(TrainkitWarning, match="no validation_step"),
        pytest.raises(MissingMetricError, match="This fit has no validation: Trains has no validation_step. Define one"),
    ):
        make_trainer(EarlyStopping("val_loss")).fit(Trains(), tiny_loader(), tiny_loader())


def test_a_metric_of_training_needs_no_validation() -> None:
    make_trainer(EarlyStopping("train_loss")).fit(TinyModule(), tiny_loader())


# ------------------------------------------------------------------------------------------------------------ misspelled


@pytest.mark.parametrize("monitor", ["val_los", "Val_Loss", "val-loss", "valid_loss", "vla_loss"])
@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"])
def test_a_misspelled_monitor_is_reported_after_the_sanity_check(monitor: str, kind: str) -> None:
    callback = {"EarlyStopping": EarlyStopping(monitor), "ModelCheckpoint": ModelCheckpoint(monitor=monitor)}.get(kind)
    module = TinyModule() if callback else Plateau(monitor)
    steps: list[int] = []

    class Ending(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            steps.append(trainer.global_step)
            raise KeyboardInterrupt

    callbacks = [callback] if callback else []
    trainer = make_trainer(*callbacks, Ending(), num_sanity_val_steps=1, enable_checkpointing=kind == "ModelCheckpoint")
    with (
        pytest.warns(TrainkitWarning, match=f"{kind} monitors '{monitor}', which validation did not log.*'val_loss'?"),
        pytest.raises(KeyboardInterrupt),
    ):
        trainer.fit(module, tiny_loader(), tiny_loader())
    assert steps == [0]  # before the first optimizer step


def test_monitor_is_not_checked_in_manual_optimization(recwarn: pytest.WarningsRecorder) -> None:
    """With manual optimization the user steps the scheduler, so its monitor is not checked."""
    module = Plateau("val_los")
    module.automatic_optimization = False
    module.training_step = lambda batch, batch_idx: None
    make_trainer(num_sanity_val_steps=1, max_epochs=1).fit(module, tiny_loader(), tiny_loader())
    assert not [str(warning.message) for warning in recwarn if "monitors" in str(warning.message)]


def test_a_monitor_of_one_of_several_loaders() -> None:
    class Several(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            super().validation_step(batch, batch_idx)

    with (
        pytest.warns(TrainkitWarning, match="Did you mean 'val_loss/dataloader_idx_0'"),
        pytest.raises(MissingMetricError),
    ):
        make_trainer(EarlyStopping("val_loss"), num_sanity_val_steps=1).fit(
            Several(), tiny_loader(), [tiny_loader(4), tiny_loader(4)]
        )


@pytest.mark.parametrize("monitor", ["train_loss", "loss", "val_loss", "val_map", "grad_norm"])
def test_monitors_that_may_well_be_right_are_left_alone(monitor: str) -> None:
    """There is no warning for a metric that training logs, or that only a complete validation logs."""

    class Logs(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for name in ("train_loss", "loss", "grad_norm"):
                self.log(name, 1.0)
            return self.loss(batch)

        def on_validation_epoch_end(self) -> None:
            if not self.trainer.sanity_checking:
                self.log("val_map", 0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stopping = EarlyStopping(monitor)
        make_trainer(stopping, num_sanity_val_steps=1).fit(Logs(), tiny_loader(), tiny_loader())
    assert stopping._checked


def test_a_metric_that_validation_logs_by_step_only() -> None:
    class ByStep(TinyModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", 1.0, on_step=True, on_epoch=False)

    with pytest.raises(
        MissingMetricError, match=r"Validation logs it by step only: use self.log\('score', value, on_epoch=True"
    ):
        make_trainer(EarlyStopping("score")).fit(ByStep(), tiny_loader(), tiny_loader())


# --------------------------------------------------------------------------------------------------------- the same name


class SameName(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 100.0 + self.global_step)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", float(self.trainer.current_epoch))


def test_a_name_that_training_and_validation_share_is_reported_once(caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    stopping = EarlyStopping("loss", patience=9)
    make_trainer(stopping, max_epochs=3).fit(SameName(), tiny_loader(), tiny_loader())
    told = [message for message in caplog.messages if "is logged in training and in validation" in message]
    assert told == [
        "'loss' is logged in training and in validation; EarlyStopping monitors the value of validation. Use two names to "
        "tell them apart: self.log('train_loss', value)"
    ]
    assert stopping.best_score.item() == 0.0


def test_a_shared_name_that_is_not_monitored_is_not_reported(caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    make_trainer(max_epochs=2).fit(SameName(), tiny_loader(), tiny_loader())
    assert not any("is logged in training and in validation" in message for message in caplog.messages)


def test_the_best_checkpoint_is_that_of_the_validation() -> None:
    best = ModelCheckpoint(monitor="loss", mode="max", save_top_k=3)
    make_trainer(best, max_epochs=3, enable_checkpointing=True).fit(SameName(), tiny_loader(), tiny_loader())
    assert [score.item() for score in best.best_k_models.values()] == [2.0, 1.0, 0.0]


# ------------------------------------------------------------------------------------------------------------ rare logs


def rare(caplog: Any, **arguments: Any) -> list[str]:
    caplog.set_level("INFO", "trainkit")
    make_trainer(**{"logger": Memory(), "max_epochs": 2, **arguments}).fit(TinyModule(), tiny_loader())
    return [message for message in caplog.messages if "log_every_n_steps" in message]


def test_an_epoch_shorter_than_the_log_interval_is_reported_once(caplog: Any) -> None:
    assert rare(caplog, accumulate_grad_batches=2) == [
        "an epoch has 2 optimizer steps, fewer than log_every_n_steps=50: values logged by step reach the loggers only every "
        "50 steps. To log more often: Trainer(log_every_n_steps=1)"
    ]


@pytest.mark.parametrize(
    "arguments", [{"log_every_n_steps": 4}, {"log_every_n_steps": 0}, {"logger": False}, {"fast_dev_run": True}]
)
def test_where_the_log_interval_is_no_surprise(caplog: Any, arguments: dict[str, Any]) -> None:
    """There is no message if an epoch is as long as the interval, or if nothing is logged by step."""
    assert rare(caplog, **arguments) == []


# -------------------------------------------------------------------------------------------------------- the wrong mode


class Accurate(TinyModule):
    """Logs an accuracy and an error."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"val/acc1": 0.5, "val_error": 0.5, "faccade": 0.5, "accuracy_loss": 0.5})


@pytest.mark.parametrize(
    "monitor, mode, advice",
    [
        ("val/acc1", "min", "the lowest value is the best. If the highest is: mode='max'"),
        ("val/acc1", "max", None),
        ("val_error", "min", None),
        ("faccade", "min", None),  # the letters of "acc" inside a word
        ("accuracy_loss", "min", None),
    ],
)
@pytest.mark.parametrize("kind", [ModelCheckpoint, EarlyStopping])
def test_a_mode_that_contradicts_the_name(kind: Any, monitor: str, mode: str, advice: str | None) -> None:
    trainer = make_trainer(kind(monitor=monitor, mode=mode), enable_checkpointing=kind is ModelCheckpoint)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Accurate(), tiny_loader(), tiny_loader())
    expected = [f"{kind.__name__}(monitor={monitor!r}) has mode={mode!r}: {advice}"] if advice else []
    assert [str(one.message) for one in caught if "has mode=" in str(one.message)] == expected


def test_the_mode_of_a_scheduler() -> None:
    class Accuracy(Plateau, Accurate):
        """Its scheduler follows the accuracy."""

    with pytest.warns(TrainkitWarning, match=r"ReduceLROnPlateau\(monitor='val/acc1'\) has mode='min'"):
        make_trainer().fit(Accuracy("val/acc1"), tiny_loader(), tiny_loader())
