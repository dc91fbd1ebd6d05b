from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.data.dealt import Alike
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit.callbacks import EarlyStopping, LambdaCallback
from trainkit.callbacks.early_stopping import EarlyStoppingReason
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, MissingMetricError


def validate(callback: EarlyStopping, trainer: Any, module: Any, value: float | None, name: str = "val_loss") -> bool:
    """Run the hook of a validation that logged this value; returns whether training should stop."""
    if value is not None:
        trainer.callback_metrics[name] = torch.tensor(value)
    callback.on_validation_end(trainer, module)
    return bool(trainer.should_stop)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"monitor": ""}, ["EarlyStopping('val_loss')", "self.log"]),
        ({"monitor": None}, ["name of a logged metric"]),
        ({"monitor": "a", "mode": "minimum"}, ["'min', 'max'", "'minimum'", "Did you mean 'min'"]),
        ({"monitor": "a", "patience": -1}, ["patience", "≥ 0"]),
        ({"monitor": "a", "patience": 2.5}, ["patience", "2.5"]),
        ({"monitor": "a", "patience": True}, ["patience", "True"]),
        ({"monitor": "a", "min_delta": -0.1}, ["min_delta", "at least 0"]),
        ({"monitor": "a", "min_delta": math.nan}, ["min_delta", "nan"]),
        ({"monitor": "a", "stopping_threshold": "low"}, ["stopping_threshold", "'low'"]),
        ({"monitor": "a", "divergence_threshold": math.nan}, ["divergence_threshold"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EarlyStopping(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("mode, values", [("min", [5.0, 4.0, 4.5, 4.0, 3.9, 4, 4]), ("max", [1, 2, 1.5, 2, 2.1, 2, 2])])
def test_stops_after_patience_checks_without_improvement(trainer, module, mode: str, values: list[float]) -> None:
    callback = EarlyStopping("val_loss", patience=2, mode=mode)
    callback.on_train_start(trainer, module)
    stops = [validate(callback, trainer, module, value) for value in values[:3]]
    assert stops == [False, False, False]
    assert callback.wait_count == 1
    trainer.current_epoch = 7
    assert validate(callback, trainer, module, values[3])  # an equal value is no improvement
    assert callback.stopped_epoch == 7
    assert callback.best_score.item() == values[1]
    assert "has not improved for 2 checks" in str(callback.stopping_reason_message)


def test_an_improvement_restarts_the_count(trainer, module) -> None:
    callback = EarlyStopping("val_loss", patience=2)
    callback.on_train_start(trainer, module)
    assert not any(validate(callback, trainer, module, value) for value in [5, 6, 4, 6, 3, 6])
    assert validate(callback, trainer, module, 6)


@pytest.mark.parametrize("mode, first, second, third", [("min", 1.0, 0.75, 0.5), ("max", 1.0, 1.25, 1.5)])
def test_a_change_of_min_delta_or_less_is_no_improvement(trainer, module, mode, first, second, third) -> None:
    callback = EarlyStopping("val_loss", patience=5, mode=mode, min_delta=0.25)
    callback.on_train_start(trainer, module)
    validate(callback, trainer, module, first)
    validate(callback, trainer, module, second)
    assert (callback.best_score.item(), callback.wait_count) == (first, 1)
    validate(callback, trainer, module, third)
    assert (callback.best_score.item(), callback.wait_count) == (third, 0)


def test_patience_0_stops_at_the_first_check_that_is_no_better(trainer, module) -> None:
    callback = EarlyStopping("val_loss", patience=0)
    callback.on_train_start(trainer, module)
    assert not validate(callback, trainer, module, 1.0)
    assert validate(callback, trainer, module, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_stops_at_once_unless_told(trainer, module, value: float) -> None:
    tolerant = EarlyStopping("val_loss", check_finite=False)
    tolerant.on_train_start(trainer, module)
    assert not validate(tolerant, trainer, module, value)
    strict = EarlyStopping("val_loss")
    strict.on_train_start(trainer, module)
    assert validate(strict, trainer, module, value)
    assert "not finite" in str(strict.stopping_reason_message)


@pytest.mark.parametrize("mode, good, bad", [("min", 0.1, 10.0), ("max", 10.0, 0.1)])
def test_thresholds_stop_at_once(trainer, module, mode: str, good: float, bad: float) -> None:
    arguments = {"mode": mode, "stopping_threshold": good, "divergence_threshold": bad}
    factor = 0.5 if mode == "min" else 2.0
    for value, stops, word in [(1.0, False, None), (good, False, None), (good * factor, True, "stopping_threshold")]:
        trainer.should_stop = False
        callback = EarlyStopping("val_loss", **arguments)
        callback.on_train_start(trainer, module)
        assert validate(callback, trainer, module, value) is stops
        assert word is None or word in str(callback.stopping_reason_message)
        assert callback.best_score.item() == pytest.approx(value)
    trainer.should_stop = False
    callback = EarlyStopping("val_loss", **arguments)
    callback.on_train_start(trainer, module)
    assert not validate(callback, trainer, module, bad)
    assert validate(callback, trainer, module, bad / factor)
    assert "divergence_threshold" in str(callback.stopping_reason_message)


def test_says_why_it_stops_only_when_verbose(trainer, module) -> None:
    for verbose in (False, True):
        callback = EarlyStopping("val_loss", patience=1, verbose=verbose)
        callback.on_train_start(trainer, module)
        for value in (2.0, 1.5, 1.75):
            validate(callback, trainer, module, value)
        assert callback.stopping_reason_message == "val_loss has not improved for 1 check. Best value: 1.5. Training stops."
        expected = ["val_loss improved to 2.", "val_loss improved by 0.5 to 1.5.", callback.stopping_reason_message]
        assert module.printed == (expected if verbose else [])


def test_with_several_processes_each_prints_unless_told(trainer, module, capsys) -> None:
    trainer.strategy.world = Alike(1, 2)
    module.global_rank = 1
    for rank_zero_only in (False, True):
        callback = EarlyStopping("val_loss", verbose=True, log_rank_zero_only=rank_zero_only)
        callback.on_train_start(trainer, module)
        validate(callback, trainer, module, 2.0)
    assert capsys.readouterr().out == "[rank 1] val_loss improved to 2.\n"
    assert module.printed == ["val_loss improved to 2."]  # module.print prints on rank 0 only


def test_the_sanity_check_and_a_validation_outside_fit_do_not_count(trainer, module) -> None:
    callback = EarlyStopping("val_loss", check_on_train_epoch_end=False)
    callback.on_train_start(trainer, module)
    trainer.sanity_checking = True
    validate(callback, trainer, module, math.nan)
    trainer.sanity_checking, trainer.stage = False, "validate"
    validate(callback, trainer, module, math.nan)
    assert not trainer.should_stop
    assert callback.best_score.item() == math.inf


def test_a_metric_that_was_never_logged_is_an_error_that_names_what_was(trainer, module) -> None:
    trainer.callback_metrics = {"val_loss": torch.tensor(1.0), "train_loss": torch.tensor(1.0)}
    callback = EarlyStopping("valloss", check_on_train_epoch_end=False)
    callback.on_train_start(trainer, module)
    with pytest.raises(MissingMetricError) as caught:
        callback.on_validation_end(trainer, module)
    assert str(caught.value) == (
        "EarlyStopping monitors 'valloss', which was not logged. Logged so far: 'train_loss', 'val_loss'. Did you mean "
        "'val_loss'? To monitor 'valloss', log it in validation_step or training_step: self.log('valloss', value). Or remove "
        "check_on_train_epoch_end=False, which decides when it is read. Or pass strict=False to continue without it."
    )


def test_a_metric_of_the_training_epoch_is_not_there_after_validation(make_trainer) -> None:
    """It is complete when validation has ended."""

    class ByEpoch(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("by_step", loss)
            self.log("by_epoch", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def stopped(monitor: str, when: bool | None) -> int:
        trainer = make_trainer(EarlyStopping(monitor, patience=1, stopping_threshold=100.0, check_on_train_epoch_end=when))
        trainer.fit(ByEpoch(), tiny_loader(), tiny_loader())
        return trainer.current_epoch

    assert [stopped("by_step", when) for when in (None, True, False)] == [1, 1, 1]
    assert [stopped("by_epoch", when) for when in (None, True)] == [1, 1]
    with pytest.raises(MissingMetricError, match="'by_epoch', which was not logged.*Or remove check_on_train_epoch_end=False"):
        stopped("by_epoch", False)


def test_not_strict_warns_once(trainer, module) -> None:
    callback = EarlyStopping("absent", strict=False, check_on_train_epoch_end=False)
    callback.on_train_start(trainer, module)
    with pytest.warns(TrainkitWarning, match="'absent', which was not logged. Logged so far: nothing"):
        callback.on_validation_end(trainer, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_validation_end(trainer, module)
    assert not trainer.should_stop


def test_unless_told_a_metric_that_validation_lacks_is_looked_for_at_the_end_of_the_epoch(trainer, module, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    callback = EarlyStopping("train_loss", patience=1)
    callback.on_train_start(trainer, module)
    callback.on_validation_end(trainer, module)  # the metric is not logged yet
    callback.on_validation_end(trainer, module)
    assert len(caplog.messages) == 1
    assert "'train_loss' was not logged before the end of validation" in caplog.messages[0]
    trainer.callback_metrics["train_loss"] = torch.tensor(1.0)
    callback.on_train_epoch_end(trainer, module)
    assert callback.best_score.item() == 1.0
    validate(callback, trainer, module, None)  # from now on, only the end of an epoch is checked
    assert callback.wait_count == 0
    callback.on_train_epoch_end(trainer, module)
    assert trainer.should_stop

    missing = EarlyStopping("tran_loss")
    missing.on_train_start(trainer, module)
    missing.on_validation_end(trainer, module)
    with pytest.raises(MissingMetricError, match="Did you mean 'train_loss'"):
        missing.on_train_epoch_end(trainer, module)


def test_unless_told_epochs_before_the_first_validation_are_not_checked(trainer, module) -> None:
    callback = EarlyStopping("val_loss")
    callback.on_train_start(trainer, module)
    callback.on_train_epoch_end(trainer, module)  # no validation yet (check_val_every_n_epoch=2)
    validate(callback, trainer, module, 1.0)
    callback.on_train_epoch_end(trainer, module)
    assert (callback.best_score.item(), callback.wait_count) == (1.0, 0)


@pytest.mark.parametrize("batches", [[], [0]])
def test_without_validation_the_end_of_the_epoch_is_checked(trainer, module, batches: list[int]) -> None:
    trainer.num_val_batches = batches
    callback = EarlyStopping("train_loss")
    callback.on_train_start(trainer, module)
    with pytest.raises(MissingMetricError):
        callback.on_train_epoch_end(trainer, module)


def test_training_that_ends_within_the_first_epoch_still_tells_of_a_missing_metric(trainer, module) -> None:
    callback = EarlyStopping("absent")
    callback.on_train_start(trainer, module)
    callback.on_validation_end(trainer, module)
    with pytest.raises(MissingMetricError):
        callback.on_train_end(trainer, module)


def test_fast_dev_run_looks_for_the_metric_but_does_not_stop(trainer, module) -> None:
    trainer.fast_dev_run = True
    callback = EarlyStopping("val_loss", check_on_train_epoch_end=False)
    callback.on_train_start(trainer, module)
    with pytest.raises(MissingMetricError):
        callback.on_validation_end(trainer, module)
    assert not validate(callback, trainer, module, math.nan)


def test_state_comes_back(trainer, module) -> None:
    first = EarlyStopping("val_loss", patience=2)
    first.on_train_start(trainer, module)
    validate(first, trainer, module, 1.0)
    validate(first, trainer, module, 2.0)
    state = first.state_dict()
    assert {key: type(value) for key, value in state.items()} == {
        "wait_count": int,
        "stopped_epoch": int,
        "best_score": torch.Tensor,
        "patience": int,
        "checked": bool,
        "checked_step": int,
        "validated": bool,
        "at_train_epoch_end": bool,
        "stopping_reason": int,
        "stopping_reason_message": type(None),
    }
    second = EarlyStopping("val_loss", patience=2)
    second.load_state_dict({**state, "stopped_epoch": 6})
    assert second.stopped_epoch == 6
    second.on_train_start(trainer, module)
    assert (second.wait_count, second.best_score.item()) == (1, 1.0)
    assert validate(second, trainer, module, 2.0)


def test_a_second_fit_starts_again_and_says_everything_again(trainer, module) -> None:
    callback = EarlyStopping("val_loss", patience=1, strict=False)
    for _ in range(2):
        callback.setup(trainer, module, "fit")
        callback.on_train_start(trainer, module)
        assert callback.stopping_reason is EarlyStoppingReason.NOT_STOPPED
        trainer.callback_metrics.clear()
        callback.on_validation_end(trainer, module)
        with pytest.warns(TrainkitWarning, match="not logged"):
            callback.on_train_epoch_end(trainer, module)
        callback.setup(trainer, module, "fit")
        callback.on_train_start(trainer, module)
        validate(callback, trainer, module, 1.0)
        validate(callback, trainer, module, 1.0)
        assert callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert callback.wait_count == 1


def resumed(state: dict[str, Any], trainer: Any, module: Any, **arguments: Any) -> EarlyStopping:
    """A new callback with this state, as after resuming from a checkpoint."""
    callback = EarlyStopping(**{"monitor": "val_loss", **arguments})
    callback.setup(trainer, module, "fit")
    callback.load_state_dict(state)
    callback.on_train_start(trainer, module)
    return callback


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("monitor, when", [("val_loss", None), ("train_loss", None), ("train_loss", True), ("val_loss", False)])
def test_a_resume_at_any_moment_decides_as_if_there_had_been_none(
    trainer, module, monitor: str, when: bool | None, at: int
) -> None:
    def events(callback: EarlyStopping, numbers: range) -> list[Any]:
        seen: list[Any] = []
        for number in numbers:
            end_of_epoch = number % 2 == 1
            if monitor == "val_loss" or end_of_epoch:
                trainer.callback_metrics[monitor] = torch.tensor(1.0 + number)
            (callback.on_train_epoch_end if end_of_epoch else callback.on_validation_end)(trainer, module)
            seen.append((callback.wait_count, callback.best_score.item(), trainer.should_stop))
            trainer.should_stop = False
        return seen

    arguments: dict[str, Any] = {"patience": 3, "check_on_train_epoch_end": when}
    whole = EarlyStopping(monitor, **arguments)
    whole.setup(trainer, module, "fit")
    whole.on_train_start(trainer, module)
    expected = events(whole, range(8))
    assert expected[-1][0]
    trainer.callback_metrics.clear()
    first = EarlyStopping(monitor, **arguments)
    first.setup(trainer, module, "fit")
    first.on_train_start(trainer, module)
    before = events(first, range(at))
    second = resumed(first.state_dict(), trainer, module, monitor=monitor, **arguments)
    assert before + events(second, range(at, 8)) == expected


def test_a_state_of_before_these_flags_is_taken(trainer, module) -> None:
    """A state of an earlier version, without the flags, can be loaded."""
    state = {"wait_count": 1, "stopped_epoch": 0, "best_score": torch.tensor(1.0), "patience": 3}
    callback = resumed(state, trainer, module, patience=2)
    assert not validate(callback, trainer, module, 0.5)
    assert callback.wait_count == 0


def test_the_constructor_says_when_it_is_checked(trainer, module) -> None:
    """`check_on_train_epoch_end` of the constructor takes precedence over the restored state."""
    state = {**EarlyStopping("val_loss").state_dict(), "at_train_epoch_end": True}
    assert validate(resumed(state, trainer, module, patience=0, check_on_train_epoch_end=False), trainer, module, math.nan)
    trainer.should_stop = False
    state["at_train_epoch_end"] = False
    assert not validate(resumed(state, trainer, module, patience=0, check_on_train_epoch_end=True), trainer, module, math.nan)


@pytest.mark.parametrize("patience, goes_on", [(2, False), (1, False), (3, True)])
def test_a_run_that_had_stopped_resumes_with_more_patience(trainer, module, caplog, patience: int, goes_on: bool) -> None:
    caplog.set_level("INFO", "trainkit")
    first = EarlyStopping("val_loss", patience=2)
    first.on_train_start(trainer, module)
    trainer.current_epoch = 4
    assert [validate(first, trainer, module, value) for value in (1.0, 2.0, 2.0)] == [False, False, True]
    second = resumed(first.state_dict(), trainer, module, patience=patience)  # the resumed trainer has should_stop=True, too
    assert trainer.should_stop is not goes_on
    assert second.stopped_epoch == (0 if goes_on else 4)
    if goes_on:
        expected = (
            "EarlyStopping had stopped after 2 checks without an improvement of val_loss; with patience=3 training continues."
        )
    else:
        expected = (
            "EarlyStopping had stopped the resumed run: val_loss had not improved for 2 checks. It does not train "
            f"further. To continue, raise patience={patience}: EarlyStopping('val_loss', patience=5)"
        )
    assert caplog.messages == [expected]
    assert validate(second, trainer, module, 2.0)


@pytest.mark.parametrize("arguments", [{"stopping_threshold": 0.5}, {"check_finite": True}])
def test_a_stop_for_another_reason_stays(trainer, module, arguments: dict[str, Any]) -> None:
    first = EarlyStopping("val_loss", patience=2, **arguments)
    first.on_train_start(trainer, module)
    assert validate(first, trainer, module, 0.25 if "stopping_threshold" in arguments else math.nan)
    second = resumed(first.state_dict(), trainer, module, patience=9, **arguments)
    assert trainer.should_stop
    threshold = "stopping_threshold" in arguments
    expected = EarlyStoppingReason.STOPPING_THRESHOLD if threshold else EarlyStoppingReason.NON_FINITE_METRIC
    assert first.stopping_reason is second.stopping_reason is expected
    assert first.stopping_reason_message == second.stopping_reason_message
    never = EarlyStopping("val_loss", patience=0).state_dict()  # the state of a callback that did not stop this run
    resumed(never, trainer, module, patience=9)
    assert trainer.should_stop


def test_before_any_check() -> None:
    callback = EarlyStopping("val_loss")
    assert (callback.wait_count, callback.stopped_epoch, callback.stopping_reason_message) == (0, 0, None)
    assert callback.best_score.item() == math.inf
    assert EarlyStopping("val_loss", mode="max").best_score.item() == -math.inf


@pytest.mark.parametrize("mode, sign", [("min", "<"), ("max", ">")])
def test_the_comparison_of_a_mode(mode: str, sign: str) -> None:
    callback = EarlyStopping("val_loss", mode=mode)
    assert callback.monitor_op is {"<": torch.lt, ">": torch.gt}[sign]
    assert callback.order_dict[mode] == sign


def test_two_with_other_metrics_have_other_keys() -> None:
    keys = {EarlyStopping("a").state_key, EarlyStopping("b").state_key, EarlyStopping("a", mode="max").state_key}
    assert len(keys) == 3
    assert EarlyStopping("a").state_key == EarlyStopping("a", patience=9).state_key


def test_runs_after_the_modules_own_hooks() -> None:
    assert EarlyStopping.runs_last


class Scripted(TinyModule):
    """Logs one given value in each epoch, as `val_metric` and as `train_metric`."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values
        self.validated: list[int] = []

    def training_step(self, batch, batch_idx):
        self.log("train_metric", self.values[self.current_epoch], on_step=False, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx) -> None:
        if batch_idx == 0:
            self.validated.append(self.current_epoch)
        self.log("val_metric", self.values[self.current_epoch])


def test_a_fit_ends_when_validation_no_longer_improves(make_trainer) -> None:
    module, callback = Scripted([3.0, 2.0, 2.5, 2.25, 1.0, 0.5]), EarlyStopping("val_metric", patience=2)
    trainer = make_trainer(callback, max_epochs=6)
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert module.validated == [0, 1, 2, 3]
    assert trainer.global_step == 16
    assert (callback.stopped_epoch, callback.best_score.item()) == (3, 2.0)
    assert trainer.early_stopping_callback is callback


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize("when", [None, True])
def test_a_metric_of_the_training_epoch_is_that_of_the_epoch_that_ends(make_trainer, validates: bool, when: Any) -> None:
    module = Scripted([3.0, 2.0, 2.5, 2.25, 1.0, 0.5])
    callback = EarlyStopping("train_metric", patience=2, check_on_train_epoch_end=when)
    trainer = make_trainer(callback, max_epochs=6)
    trainer.fit(module, tiny_loader(), tiny_loader() if validates else None)
    assert trainer.global_step == 16
    assert (callback.stopped_epoch, callback.best_score.item()) == (3, 2.0)


def test_several_validations_in_an_epoch_count_each(make_trainer) -> None:
    module, callback = Scripted([1.0]), EarlyStopping("val_metric", patience=2)
    trainer = make_trainer(callback, val_check_interval=1)
    trainer.fit(module, tiny_loader(samples=40), tiny_loader())
    assert trainer.global_step == 3
    assert callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED


def test_epochs_without_validation_count_nothing(make_trainer) -> None:
    module, callback = Scripted([1.0] * 9), EarlyStopping("val_metric", patience=1)
    trainer = make_trainer(callback, max_epochs=9, check_val_every_n_epoch=3)
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert module.validated == [2, 5]
    assert callback.stopped_epoch == 5


@pytest.mark.parametrize("when", [True, False, None])
def test_a_value_is_checked_once(make_trainer, when: bool | None) -> None:
    """A metric that always improves never stops the fit, though only every third epoch validates; nor after a resume."""
    module = Scripted([9.0 - epoch for epoch in range(9)])
    callback = EarlyStopping("val_metric", patience=1, check_on_train_epoch_end=when, strict=when is not True)
    waits = LambdaCallback(
        on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint("middle") if trainer.current_epoch == 4 else None
    )
    with pytest.warns(TrainkitWarning, match="No validation was due yet") if when else nullcontext():
        make_trainer(waits, callback, max_epochs=9, check_val_every_n_epoch=3).fit(module, tiny_loader(), tiny_loader())
    assert module.validated == [2, 5, 8]
    assert (callback.wait_count, callback.best_score.item()) == (0, 1.0)
    # the restored callback knows that the value of epoch 2 was checked
    resumed, again = EarlyStopping("val_metric", patience=1, check_on_train_epoch_end=when), Scripted([9.0] * 5 + [8.0] * 4)
    trainer = make_trainer(resumed, max_epochs=9, check_val_every_n_epoch=3)
    trainer.fit(again, tiny_loader(), tiny_loader(), ckpt_path="middle")
    assert (again.validated, resumed.stopped_epoch, resumed.best_score.item()) == ([5], 5, 7.0)


def test_a_metric_of_the_training_epoch_with_rare_validations(make_trainer) -> None:
    """At the first validation, in the second epoch, its value is that of the first epoch, which validation did not log."""
    module, callback = Scripted([9.0, 1.0, 2.0, 2.0, 2.0, 2.0]), EarlyStopping("train_metric", patience=2)
    trainer = make_trainer(callback, max_epochs=6, check_val_every_n_epoch=2)
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert (callback.stopped_epoch, callback.best_score.item()) == (3, 1.0)


def test_without_optimizer_steps_each_value_counts(make_trainer) -> None:
    """The Trainer counts no steps of an optimizer that it does not know."""

    class Unknown(Scripted):
        automatic_optimization = False

        def configure_optimizers(self) -> None:
            return None

    module, callback = Unknown([1.0] * 9), EarlyStopping("train_metric", patience=2)
    trainer = make_trainer(callback, max_epochs=9)
    trainer.fit(module, tiny_loader())
    assert (trainer.global_step, callback.stopped_epoch) == (0, 2)


def test_the_sanity_check_of_a_fit_does_not_count(make_trainer) -> None:
    module, callback = Scripted([math.nan]), EarlyStopping("val_metric", check_finite=True)
    trainer = make_trainer(callback, num_sanity_val_steps=1, limit_train_batches=1, check_val_every_n_epoch=2)
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert module.validated == [0]
    assert callback.stopping_reason is EarlyStoppingReason.NOT_STOPPED


def test_a_fit_that_never_logs_the_monitor_says_so(make_trainer) -> None:
    with pytest.raises(MissingMetricError, match=r"'val_los'.*'train_loss', 'val_loss'\. Did you mean 'val_loss'"):
        make_trainer(EarlyStopping("val_los")).fit(TinyModule(), tiny_loader(), tiny_loader())


def test_what_it_keeps_is_an_ordinary_tensor(make_trainer) -> None:
    callback = EarlyStopping("val_loss")
    make_trainer(callback).fit(TinyModule(), tiny_loader(), tiny_loader())  # validation runs in inference mode
    assert not callback.best_score.is_inference()


def test_the_reason_is_printed_in_a_fit(make_trainer, capsys) -> None:
    callback = EarlyStopping("val_metric", patience=1, verbose=True)
    make_trainer(callback, max_epochs=5).fit(Scripted([1.0] * 5), tiny_loader(), tiny_loader())
    assert capsys.readouterr().out.splitlines() == ["val_metric improved to 1.", callback.stopping_reason_message]


def test_each_fit_is_a_new_run(make_trainer) -> None:
    stopping = EarlyStopping("val_loss", patience=1, min_delta=1e9)  # nothing ever improves by that much
    trainer = make_trainer(stopping, max_epochs=5)
    for _ in range(2):
        trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
        assert (trainer.current_epoch, stopping.stopped_epoch, stopping.wait_count) == (2, 1, 1)
