"""A run that fails restores the state of the process, reports the error, and can be repeated."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer, parameters_of, same

from trainkit import Callback, DataModule
from trainkit.callbacks import ModelCheckpoint, NonFiniteGuard
from trainkit.console import TrainkitWarning
from trainkit.errors import CheckpointWriteError, ConfigurationError, NonFiniteError
from trainkit.loggers import CSVLogger


class Witness(Callback):
    """Records the hooks that are called after an error."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.calls.append((type(exception).__name__, trainer.stage))

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.calls.append(stage)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.calls.append("on_train_end")

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.calls.append("on_fit_end")


class Failing(TinyModule):
    """Raises an error in one method or hook while `armed` is set."""

    def __init__(self, where: str, error: type[BaseException] = KeyError) -> None:
        super().__init__()
        self.where, self.error, self.armed = where, error, True
        self.torn_down = 0
        original = getattr(self, where)

        @functools.wraps(original)
        def failing(*arguments: Any, **options: Any) -> Any:
            if self.armed:
                raise self.error("mine")
            return original(*arguments, **options)

        setattr(self, where, failing)

    def teardown(self, stage: str) -> None:
        self.torn_down += 1


PLACES = [
    "prepare_data",
    "setup",
    "configure_model",
    "configure_optimizers",
    "on_fit_start",
    "on_sanity_check_start",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "training_step",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
]


@pytest.mark.parametrize("where", PLACES)
def test_a_run_that_fails_leaves_nothing_and_can_be_run_again(where: str) -> None:
    module, witness, logger = Failing(where), Witness(), Memory()
    trainer = make_trainer(witness, logger=logger, num_sanity_val_steps=1)
    started = parameters_of(module)
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(module, tiny_loader(), tiny_loader())
    assert witness.calls[-2:] == [("KeyError", "fit"), "fit"]
    assert module.torn_down == 1
    assert logger.status == "failed"
    state = trainer.stage, trainer.validating, trainer.sanity_checking, trainer._run.evaluation
    assert state == (None, False, False, None)
    assert torch.is_grad_enabled()
    assert module.training
    assert witness._module is None

    module.armed = False
    module.load_state_dict(started)
    twin = TinyModule()
    twin.load_state_dict(started)
    trainer.fit(module, tiny_loader(), tiny_loader())
    make_trainer().fit(twin, tiny_loader())
    assert same(parameters_of(module), parameters_of(twin))
    assert logger.status == "success"


def test_an_error_before_the_callbacks_of_a_run_are_known() -> None:
    module, witness = Failing("configure_callbacks"), Witness()
    trainer = make_trainer(witness)
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(module, tiny_loader())
    assert (witness.calls, trainer.stage) == ([], None)
    module.armed = False
    trainer.fit(module, tiny_loader())
    assert trainer.global_step == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interruptions_are_passed_on(error: type[BaseException]) -> None:
    module, witness = Failing("training_step", error), Witness()
    with pytest.raises(error):
        make_trainer(witness).fit(module, tiny_loader())
    assert witness.calls == [(error.__name__, "fit"), "fit"]


@pytest.mark.parametrize("stage, where", [("validate", "validation_step"), ("test", "test_step"), ("predict", "predict_step")])
def test_an_evaluation_that_fails(stage: str, where: str) -> None:
    module, witness = Failing(where), Witness()
    trainer = make_trainer(witness)
    with pytest.raises(KeyError, match="mine"):
        getattr(trainer, stage)(module, tiny_loader())
    assert witness.calls == [("KeyError", stage), stage]
    assert trainer.stage is None
    assert module.training
    module.armed = False
    getattr(trainer, stage)(module, tiny_loader())


def test_an_error_of_a_callback_does_not_hide_the_first() -> None:
    class Worse(Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            raise ValueError("second")

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            raise ValueError("third")

    witness = Witness()
    with pytest.raises(KeyError, match="mine"):
        make_trainer(Worse(), witness).fit(Failing("training_step"), tiny_loader())
    assert witness.calls == [("KeyError", "fit"), "fit"]


@pytest.mark.parametrize("again", ["the same object", "the same", "another"])
def test_an_error_is_shown_once(again: str, caplog: pytest.LogCaptureFixture) -> None:
    """If a callback raises the run's error again in `on_exception` or `teardown`, that is not reported."""

    class Asking(Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            raise exception if again == "the same object" else KeyError("mine" if again == "the same" else "else")

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            raise KeyError("mine" if again != "another" else "else")

    with pytest.raises(KeyError, match="mine"):
        make_trainer(Asking()).fit(Failing("training_step"), tiny_loader())
    told = [message for message in caplog.messages if "failed" in message]
    expected = ["on_exception failed: KeyError('else')", "the tear-down failed too: KeyError('else')"]
    assert told == (expected if again == "another" else [])


class Nan(TinyModule):
    """Its loss is NaN from the third optimizer step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.global_step == 2 else loss


def test_a_guard_that_refuses_the_save_after_its_own_error(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The NonFiniteGuard rejects the save that follows its own error, and nothing more is logged."""
    with pytest.raises(NonFiniteError, match="optimizer step 3"):
        make_trainer(NonFiniteGuard("raise"), enable_checkpointing=True).fit(Nan(), tiny_loader())
    assert not [message for message in caplog.messages if "failed" in message]


def test_a_guard_that_refuses_the_save_after_another_error_says_so(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Other(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make_trainer(NonFiniteGuard("raise"), Other(), enable_checkpointing=True).fit(Nan(), tiny_loader())
    (message,) = [message for message in caplog.messages if "failed" in message]
    assert 'on_exception failed: NonFiniteError("Not finite in optimizer step 3' in message


def test_saves_that_fail_are_counted_alike(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each warning counts down to the error. The save that an error requests does not report the error again."""

    class Full(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            if trainer.global_step > 1:
                raise CheckpointWriteError("no space left.")

    callbacks = [Full(), ModelCheckpoint(every_n_train_steps=1)]
    with pytest.warns(TrainkitWarning) as warned, pytest.raises(CheckpointWriteError, match="^3 saves in a row have failed; "):
        make_trainer(*callbacks, enable_checkpointing=True, max_epochs=3).fit(TinyModule(), tiny_loader(64))
    texts = [str(warning.message) for warning in warned]
    assert [text.partition("no space left. Training continues, and ")[2].rpartition(". ")[2] for text in texts] == [
        "After 2 more failures in a row the run ends.",
        "After 1 more failure in a row the run ends.",
    ]
    assert not [message for message in caplog.messages if "saves in a row" in message]


def test_an_error_in_a_tear_down_is_an_error() -> None:
    with pytest.raises(KeyError, match="mine"):
        make_trainer().fit(Failing("teardown"), tiny_loader())


def test_a_data_module_is_torn_down_after_an_error() -> None:
    class Data(DataModule):
        calls: list[str] = []  # noqa: RUF012

        def train_dataloader(self) -> Any:
            return tiny_loader()

        def teardown(self, stage: str) -> None:
            self.calls.append(stage)

    with pytest.raises(KeyError):
        make_trainer().fit(Failing("training_step"), datamodule=Data())
    assert Data.calls == ["fit"]


def test_an_error_keeps_no_batch_alive_through_the_trainer() -> None:
    trainer = make_trainer()
    with pytest.raises(KeyError):
        trainer.fit(Failing("training_step"), tiny_loader())
    assert trainer._run.metrics.batch is None


@pytest.mark.parametrize("version", [None, 3])
@pytest.mark.parametrize("where", ["default_root_dir", "save_dir"])
def test_a_log_folder_that_cannot_be_made_stops_a_fit_before_training(where: str, version: int | None, run_dir: Path) -> None:
    (run_dir / "file").touch()
    folder, steps = run_dir / "file" / "runs", []

    class Counting(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(folder if where == "save_dir" else None, version=version)
    root = {"default_root_dir": folder} if where == "default_root_dir" else {}
    with pytest.raises(ConfigurationError, match=r"Fix: .*save_dir='runs' or Trainer\(default_root_dir='runs'\)"):
        make_trainer(logger=logger, **root).fit(Counting(), tiny_loader())
    assert not steps


def test_a_logger_without_files_needs_no_folder(run_dir: Path) -> None:
    (run_dir / "file").touch()
    logger = Memory()
    make_trainer(logger=logger, default_root_dir=run_dir / "file", log_every_n_steps=1).fit(TinyModule(), tiny_loader())
    assert logger.rows
    assert [path.name for path in run_dir.iterdir()] == ["file"]
