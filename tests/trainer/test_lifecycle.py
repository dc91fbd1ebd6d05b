"""A run from its start to its teardown, whatever its body does. Whole runs: `test_bad_run`, `test_trainer`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer

from trainkit import Callback, DataModule, Trainer
from trainkit.errors import ConfigurationError, DataError, ModuleError
from trainkit.trainer.lifecycle import running, set_up


class Heard(Callback):
    """Records the hooks that are called, in order."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        self.hooks.append(f"setup {stage}")

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        self.hooks.append(f"on_exception {exception}")

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        self.hooks.append(f"teardown {stage}")


def test_a_body_is_set_up_and_torn_down() -> None:
    heard, logger = Heard(), Memory()
    trainer, module = make_trainer(heard, logger=logger), TinyModule()
    with running(trainer, "validate", module, None) as run:
        assert (trainer.stage, module.trainer, run.module) == ("validate", trainer, module)
        set_up(trainer, run)
    assert heard.hooks == ["setup validate", "teardown validate"]
    assert (trainer.stage, logger.status) == (None, "success")


def test_a_body_that_fails_is_torn_down_and_its_error_is_raised() -> None:
    heard, logger = Heard(), Memory()
    trainer = make_trainer(heard, logger=logger)
    with pytest.raises(ZeroDivisionError), running(trainer, "test", TinyModule(), None):
        _ = 1 / 0
    assert heard.hooks == ["on_exception division by zero", "teardown test"]
    assert (trainer.stage, logger.status) == (None, "failed")


def test_a_fit_has_a_new_run_and_an_evaluation_the_progress_of_the_fit_before() -> None:
    """A fit starts with new counters. An evaluation keeps the counters and the save policy of the fit before it."""
    trainer, module = make_trainer(), TinyModule()
    with running(trainer, "fit", module, None) as fit:
        fit.progress.global_step = 7
    with running(trainer, "validate", module, None) as evaluation:
        assert evaluation is not fit
        assert (trainer.global_step, evaluation.save_policy) == (7, fit.save_policy)
    with running(trainer, "fit", module, None) as second:
        assert (trainer.global_step, second.save_policy is fit.save_policy) == (0, False)


def test_a_trainer_runs_one_thing_at_a_time() -> None:
    trainer = make_trainer()
    with running(trainer, "fit", TinyModule(), None) as run:
        with pytest.raises(ConfigurationError, match="is running 'fit'"), running(trainer, "test", TinyModule(), None):
            pass
        assert (trainer._run, trainer.stage) == (run, "fit")


def test_a_module_in_the_run_of_another_trainer_returns_to_it() -> None:
    """After an inner run with another Trainer, `module.trainer` is the outer Trainer again."""
    module, outer, inner = TinyModule(), make_trainer(), make_trainer()
    with running(outer, "fit", module, None):
        with running(inner, "validate", module, None):
            assert module.trainer is inner
        assert module.trainer is outer


@pytest.mark.parametrize(
    "module, datamodule, given, error, message",
    [(TinyModule, None, None, ModuleError, "Did you forget to make an instance: TinyModule()"),
     (TinyModule(), DataModule, None, DataError, "Did you forget to make an instance: DataModule()"),
     (TinyModule(), DataModule(), tiny_loader(), ConfigurationError, "loaders and a datamodule were both given")],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_the_trainer_changes(
    module: Any, datamodule: Any, given: Any, error: type[Exception], message: str
) -> None:
    heard = Heard()
    trainer = make_trainer(heard)
    before = trainer._run
    with pytest.raises(error, match=re.escape(message)), running(trainer, "fit", module, datamodule, given):
        pass
    assert (trainer._run, trainer.stage, heard.hooks) == (before, None, [])


def test_an_error_of_the_tear_down_does_not_hide_that_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Callback):
        def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
            raise OSError("no space left")

    heard = Heard()
    trainer = make_trainer(Fails(), heard)
    with pytest.raises(ZeroDivisionError), running(trainer, "fit", TinyModule(), None):
        _ = 1 / 0
    assert heard.hooks[-1] == "teardown fit", "the others are torn down all the same"
    assert "no space left" in caplog.text
    with pytest.raises(OSError, match="no space left"), running(trainer, "fit", TinyModule(), None):
        pass
