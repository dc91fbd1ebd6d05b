from __future__ import annotations

from datetime import timedelta
from types import MappingProxyType
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit.callbacks import Timer, timer
from trainkit.callbacks.timer import Interval
from trainkit.errors import ConfigurationError, UnknownNameError
from trainkit.trainer.states import RunningStage


@pytest.fixture(autouse=True)
def _stopped_clock(clock, monkeypatch) -> None:
    monkeypatch.setattr(timer, "time", clock)


@pytest.mark.parametrize(
    "duration, seconds",
    [
        ("00:00:00:01", 1.0),
        ("01:02:03:04", 93784.0),
        ("00:00:90:00", 5400.0),
        (timedelta(minutes=1.5), 90.0),
        ({"hours": 1, "minutes": 0.5}, 3630.0),
        (MappingProxyType({"days": 1}), 86400.0),
        (timedelta(0), 0.0),
        (None, None),
    ],
)
def test_durations(duration: Any, seconds: float | None) -> None:
    assert Timer(duration).duration == seconds
    assert Timer(duration).time_remaining() == seconds


@pytest.mark.parametrize("duration", ["12:00:00", "1 day", "", 60, {"hour": 1}, timedelta(-1), {"days": -1}])
def test_a_duration_that_cannot_be_understood(duration: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Timer\('00:12:00:00'\)"):
        Timer(duration)


def test_an_unknown_interval_or_stage() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'epoch'"):
        Timer(interval="epochs")
    with pytest.raises(UnknownNameError, match="Did you mean 'validate'"):
        Timer().time_elapsed("validation")


def test_stops_when_the_time_is_up(trainer, module, clock) -> None:
    callback = Timer("00:00:01:40")
    callback.on_train_start(trainer, module)
    clock.now += 99
    callback.on_train_batch_end(trainer, module, None, None, 0)
    assert not trainer.should_stop
    assert (callback.time_elapsed(), callback.time_remaining()) == (99, 1)
    clock.now += 1
    callback.on_train_batch_end(trainer, module, None, None, 1)
    assert trainer.should_stop
    callback.on_train_batch_end(trainer, module, None, None, 2)
    assert module.printed == ["Time limit of 0:01:40 reached: training stops after 0:01:40."]  # printed only once


def test_interval_epoch_looks_at_the_end_of_epochs_only(trainer, module, clock) -> None:
    callback = Timer(timedelta(seconds=10), interval="epoch", verbose=False)
    callback.on_train_start(trainer, module)
    clock.now += 11
    callback.on_train_batch_end(trainer, module, None, None, 0)
    assert not trainer.should_stop
    callback.on_train_epoch_end(trainer, module)
    assert trainer.should_stop
    assert module.printed == []


def test_times_of_the_stages(trainer, module, clock) -> None:
    callback = Timer()
    assert (callback.start_time(), callback.end_time(), callback.time_elapsed()) == (None, None, 0.0)
    callback.on_train_start(trainer, module)
    for _ in range(2):  # validations add up, and are part of training time
        clock.now += 5
        callback.on_validation_start(trainer, module)
        clock.now += 3
        callback.on_validation_end(trainer, module)
    assert callback.end_time("train") is None
    callback.on_train_end(trainer, module)
    clock.now += 100
    assert callback.time_elapsed("train") == 16
    assert callback.time_elapsed("validate") == 6
    assert (callback.start_time("train"), callback.end_time("train")) == (1000.0, 1016.0)
    assert callback.time_remaining() is None
    callback.duration = 100.0
    assert (callback.time_remaining(), callback.time_remaining("validate")) == (84.0, 94.0)
    for stage, start, end in [
        ("test", callback.on_test_start, callback.on_test_end),
        ("predict", callback.on_predict_start, callback.on_predict_end),
        ("sanity_check", callback.on_sanity_check_start, callback.on_sanity_check_end),
    ]:
        trainer.stage = "fit" if stage == "sanity_check" else stage
        start(trainer, module)
        clock.now += 2
        end(trainer, module)
        clock.now += 50
        assert callback.time_elapsed(stage) == 2
        assert callback.end_time(stage) - callback.start_time(stage) == 2


def test_the_sanity_check_is_no_validation(trainer, module, clock) -> None:
    callback = Timer()
    trainer.sanity_checking = True
    callback.on_sanity_check_start(trainer, module)
    callback.on_validation_start(trainer, module)
    clock.now += 4
    callback.on_validation_end(trainer, module)
    callback.on_sanity_check_end(trainer, module)
    assert (callback.time_elapsed("validate"), callback.time_elapsed("sanity_check")) == (0.0, 4.0)


def test_a_resumed_run_has_the_time_that_was_left(trainer, module, clock) -> None:
    first = Timer("00:00:00:10")
    first.on_train_start(trainer, module)
    clock.now += 7
    state = first.state_dict()
    assert state == {"time_elapsed": {"train": 7.0}}
    clock.now += 1e6  # time between the runs does not count
    second = Timer("00:00:00:10")
    second.load_state_dict(state)
    assert second.time_remaining() == 3
    second.on_train_start(trainer, module)
    clock.now += 2
    second.on_train_batch_end(trainer, module, None, None, 0)
    assert not trainer.should_stop
    assert second.time_elapsed() == 9
    clock.now += 1
    second.on_train_batch_end(trainer, module, None, None, 1)
    assert trainer.should_stop


def test_a_chain_of_resumes_counts_every_second_once(trainer, module, clock) -> None:
    state: dict[str, Any] = {"time_elapsed": {}}
    for fit in range(1, 5):
        clock.now += 1e5
        callback = Timer("00:00:01:00", verbose=False)
        callback.setup(trainer, module, "fit")
        callback.load_state_dict(state)
        callback.on_sanity_check_start(trainer, module)
        clock.now += 0.5
        callback.on_sanity_check_end(trainer, module)
        callback.on_train_start(trainer, module)
        clock.now += 7.125
        callback.on_validation_start(trainer, module)
        clock.now += 1.25
        callback.on_validation_end(trainer, module)
        state = callback.state_dict()
        clock.now += 3  # time after the last checkpoint does not count
        assert state == {"time_elapsed": {"train": fit * 8.375, "validate": fit * 1.25, "sanity_check": fit * 0.5}}
    assert not trainer.should_stop


def test_a_new_fit_with_a_timer_that_had_resumed_one_has_the_whole_time(trainer, module, clock) -> None:
    callback = Timer("00:00:00:10", verbose=False)
    callback.load_state_dict({"time_elapsed": {"train": 7.0, "validate": 2.0}})
    callback.on_train_start(trainer, module)
    clock.now += 2
    callback.on_train_end(trainer, module)
    callback.setup(trainer, module, "validate")
    assert callback.time_elapsed() == 9.0
    callback.setup(trainer, module, "fit")
    assert (callback.time_remaining(), callback.time_elapsed("validate")) == (10.0, 2.0)
    assert callback.state_dict() == {"time_elapsed": {"validate": 2.0}}


def test_a_stop_that_was_taken_back_is_asked_for_again(trainer, module, clock) -> None:
    callback = Timer("00:00:00:10")
    callback.on_train_start(trainer, module)
    clock.now += 10
    for batch in range(3):
        trainer.should_stop = False  # as EarlyStopping does if its patience was raised
        callback.on_train_batch_end(trainer, module, None, None, batch)
        assert trainer.should_stop
    assert len(module.printed) == 1


def test_a_loaded_state_takes_the_place_of_what_was_measured(trainer, module, clock) -> None:
    callback = Timer()
    callback.on_train_start(trainer, module)
    clock.now += 5
    callback.on_train_end(trainer, module)
    callback.load_state_dict({"time_elapsed": {"validate": 3.0}})
    assert (callback.time_elapsed("train"), callback.time_elapsed("validate")) == (0.0, 3.0)
    assert (callback.start_time(), callback.end_time()) == (None, None)


def test_a_resumed_run_without_time_left_stops_at_its_start(trainer, module) -> None:
    callback = Timer("00:00:00:10")
    callback.load_state_dict({"time_elapsed": {"train": 10.0}})
    callback.on_train_start(trainer, module)
    assert trainer.should_stop


def test_a_second_fit_has_the_whole_time_again(trainer, module, clock) -> None:
    callback = Timer("00:00:00:10", verbose=False)
    for _ in range(2):
        trainer.should_stop = False
        callback.setup(trainer, module, "fit")
        callback.on_train_start(trainer, module)
        clock.now += 9
        callback.on_train_batch_end(trainer, module, None, None, 0)
        assert not trainer.should_stop
        clock.now += 1
        callback.on_train_batch_end(trainer, module, None, None, 1)
        assert trainer.should_stop
        callback.on_train_end(trainer, module)


class TenSecondSteps(TinyModule):
    """Each training step moves the clock by ten seconds, each validation step by one."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.now += 10
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx) -> None:
        self.clock.now += 1


def test_a_fit_ends_when_the_time_is_up(make_trainer, clock, capsys) -> None:
    trainer = make_trainer(max_time="00:00:00:25", max_epochs=5)
    trainer.fit(TenSecondSteps(clock), tiny_loader())
    assert trainer.global_step == 4  # the third step passes the limit, and the one after it is the last
    assert capsys.readouterr().out == "Time limit of 0:00:25 reached: training stops after 0:00:30.\n"


def test_a_fit_ends_with_the_epoch_in_which_the_time_is_up(make_trainer, clock) -> None:
    trainer = make_trainer(Timer({"seconds": 45}, interval="epoch", verbose=False), max_epochs=5)
    trainer.fit(TenSecondSteps(clock), tiny_loader())
    assert trainer.global_step == 8


@pytest.mark.parametrize(
    ("limits", "step"), [({}, 0), ({"min_steps": 3}, 3), ({"min_epochs": 2}, 8), ({"min_steps": 3, "min_epochs": 2}, 8)]
)
@pytest.mark.parametrize("interval", Interval)
def test_no_time_at_all(make_trainer, clock, caplog, limits: Any, step: int, interval: Interval) -> None:
    callback = Timer(timedelta(0), interval, verbose=False)
    trainer = make_trainer(callback, max_epochs=5, **limits)
    trainer.fit(TenSecondSteps(clock), tiny_loader())
    assert trainer.global_step == step
    assert callback.time_elapsed(RunningStage.TRAINING) == 10 * step
    assert "resumed" not in caplog.text


def test_a_limit_shorter_than_a_step(make_trainer, clock) -> None:
    trainer = make_trainer(Timer({"microseconds": 1}, "epoch", verbose=False), max_epochs=5)
    trainer.fit(TenSecondSteps(clock), tiny_loader())
    assert trainer.global_step == 4
    trainer = make_trainer(max_time={"microseconds": 1}, min_steps=3, max_epochs=5)
    trainer.fit(TenSecondSteps(clock), tiny_loader())
    assert trainer.global_step == 3


def test_a_fit_is_timed_by_stage(make_trainer, clock) -> None:
    callback = Timer()
    trainer = make_trainer(callback, num_sanity_val_steps=2)
    trainer.fit(TenSecondSteps(clock), tiny_loader(), tiny_loader())
    assert callback.time_elapsed("train") == 44
    assert callback.time_elapsed("validate") == 4
    assert callback.time_elapsed("sanity_check") == 2
    trainer.validate(TenSecondSteps(clock), tiny_loader(), verbose=False)
    assert callback.time_elapsed("validate") == 8
