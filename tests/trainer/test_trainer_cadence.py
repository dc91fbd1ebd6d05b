"""When a run ends, validates, logs, reloads and stops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, Recorder, Seen, make_trainer, run
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit import Callback, TrainModule
from trainkit.callbacks import timer
from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError

FOUR, TWO = 16, 8  # samples in four and in two batches of tiny_loader


class StopAt(Callback):
    """Sets `should_stop` in a hook once `step` optimizer steps have been made."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step
        setattr(self, hook, self._stop)

    def _stop(self, trainer: Any, module: Any, *rest: Any) -> None:
        if trainer.global_step >= self.step and not trainer.sanity_checking:
            trainer.should_stop = True


@pytest.mark.parametrize("interval", [100, 0.5])
@pytest.mark.parametrize("off", ["no loader", "no step", "limit"])
@pytest.mark.filterwarnings("ignore:there is validation data, but")
def test_an_interval_of_no_validation_is_not_checked(interval: int | float, off: str) -> None:
    """Without a validation, val_check_interval may be longer than the epoch, or a fraction of an unknown length."""

    class Trains(TinyModule):
        validation_step = TrainModule.validation_step

    module = Trains() if off == "no step" else TinyModule()
    loaders = [] if off == "no loader" else [tiny_loader()]
    limit = 0 if off == "limit" else None
    trainer = make_trainer(
        val_check_interval=interval, limit_val_batches=limit, reload_dataloaders_every_n_epochs=1, max_epochs=2
    )
    stream = Unknown() if interval == 0.5 else tiny_loader()
    trainer.fit(module, stream, *loaders)
    assert trainer.global_step == 8
    with pytest.raises(ConfigurationError, match="val_check_interval="):
        make_trainer(val_check_interval=interval).fit(TinyModule(), stream, tiny_loader())


class Unknown:
    """An iterable of four batches without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_loader())


# ----------------------------------------------------------------------------------------------------- the end of a run


def test_max_epochs() -> None:
    trainer, recorder = run(max_epochs=3)
    assert (trainer.global_step, trainer.current_epoch) == (12, 3)
    assert recorder.epochs == [0, 1, 2]
    assert recorder.batches == [(epoch, batch) for epoch in range(3) for batch in range(4)]
    assert trainer.num_training_batches == 4


@pytest.mark.parametrize("steps, epochs", [(1, 0), (3, 0), (4, 1), (6, 1), (8, 2)])
def test_max_steps(steps: int, epochs: int) -> None:
    """An epoch that max_steps ends early is not counted and not validated, but on_train_epoch_end is called for it."""
    trainer, recorder = run(max_epochs=-1, max_steps=steps)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)
    assert len(recorder.batches) == steps
    assert recorder.epochs == list(range(math.ceil(steps / 4)))
    assert recorder.validations == [4 * (epoch + 1) for epoch in range(epochs)]


def test_max_steps_count_updates() -> None:
    trainer, recorder = run(max_epochs=-1, max_steps=3, accumulate_grad_batches=2)
    assert (trainer.global_step, trainer.current_epoch) == (3, 1)
    assert len(recorder.batches) == 6


def test_whichever_end_comes_first() -> None:
    assert run(max_epochs=1, max_steps=100)[0].global_step == 4
    assert run(max_epochs=100, max_steps=5)[0].global_step == 5


@pytest.mark.parametrize("arguments", [{"max_epochs": 0}, {"max_steps": 0}, {"limit_train_batches": 0}])
def test_nothing_to_train(arguments: dict[str, Any]) -> None:
    trainer, recorder = run(**arguments)
    assert (trainer.global_step, recorder.batches, recorder.validations) == (0, [], [])


@pytest.mark.parametrize("step, ends", [(1, 2), (2, 3), (3, 4), (4, 4)])
def test_a_stop_in_a_step_ends_training_after_the_next(step: int, ends: int) -> None:
    """In the last step of an epoch, it ends training at once."""
    trainer, recorder = run(4, 2, StopAt("on_train_batch_end", step), max_epochs=3)
    assert trainer.global_step == ends
    assert recorder.epochs == [0]
    assert recorder.validations == ([4] if ends == 4 else [])


def test_a_stop_is_obeyed_at_the_end_of_a_window() -> None:
    """A stop requested in the accumulation window of optimizer step 1 ends training after step 2."""
    trainer, recorder = run(8, None, StopAt("on_train_batch_start", 0), accumulate_grad_batches=2, max_epochs=3)
    assert trainer.global_step == 2
    assert len(recorder.batches) == 4


@pytest.mark.parametrize("hook", ["on_validation_end", "on_validation_epoch_end", "on_validation_batch_end"])
def test_a_stop_in_a_validation_acts_at_once(hook: str) -> None:
    trainer, recorder = run(4, 2, StopAt(hook, 2), val_check_interval=2, max_epochs=3)
    assert trainer.global_step == 2
    assert recorder.validations == [2]
    assert (recorder.epochs, trainer.current_epoch) == ([0], 0)


@pytest.mark.parametrize("hook, step", [("on_train_epoch_end", 4), ("on_train_epoch_start", 8), ("on_train_start", 0)])
def test_a_stop_between_epochs(hook: str, step: int) -> None:
    trainer, _ = run(4, None, StopAt(hook, step), max_epochs=5)
    # a request before the first step of an epoch acts like one in that step: training ends after the second step
    assert trainer.global_step == {"on_train_epoch_end": 4, "on_train_epoch_start": 10, "on_train_start": 0}[hook]


def test_min_epochs_and_min_steps_hold_off_a_stop() -> None:
    assert run(4, None, StopAt("on_train_batch_end", 1), max_epochs=5, min_epochs=3)[0].current_epoch == 3
    assert run(4, None, StopAt("on_train_batch_end", 1), max_epochs=5, min_steps=6)[0].global_step == 6
    assert run(4, None, StopAt("on_train_batch_end", 1), max_epochs=5, min_steps=6, min_epochs=2)[0].global_step == 8
    assert run(4, None, StopAt("on_train_batch_end", 1), max_epochs=5, min_epochs=1)[0].global_step == 4


def test_should_stop_is_taken_back_for_the_next_fit() -> None:
    """The next fit of the same Trainer starts without the stop request."""
    trainer, _ = run(4, None, StopAt("on_train_batch_end", 1), max_epochs=2)
    trainer.callbacks.pop()
    trainer.fit(TinyModule(), tiny_loader(FOUR))
    assert trainer.global_step == 8


@pytest.mark.parametrize("limit", ["00:00:00:10", timedelta(seconds=10), {"seconds": 10}])
def test_max_time(limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Slow(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.now += 4.0
            return super().training_step(batch, batch_idx)

    trainer, _ = run(8, None, module=Slow(), max_epochs=None, max_time=limit)
    assert trainer.max_epochs == -1
    assert trainer.global_step == 4  # the time is up in step 3, after 12 s; training ends after the next step


class Unmeasured:
    """An iterable of eight batches without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_loader(32))


def test_returning_minus_one_skips_the_rest_of_the_epoch() -> None:
    class Impatient(TinyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    class AlsoNothing(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.seen = batch_idx

    callback = AlsoNothing()
    trainer, recorder = run(8, 1, callback, module=Impatient(), max_epochs=2, accumulate_grad_batches=2)
    assert trainer.current_epoch == 2  # the epochs count as completed
    assert trainer.global_step == 2  # the incomplete window is dropped
    assert callback.seen == 3
    assert recorder.epochs == [0, 1]
    assert recorder.validations == []  # as in Lightning
    recorder = Recorder()
    trainer = make_trainer(recorder, max_epochs=2)
    trainer.fit(Impatient(), Unmeasured(), tiny_loader(4))
    assert (trainer.current_epoch, trainer.global_step, recorder.validations) == (2, 6, [])


# ----------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    "interval, steps",
    [
        (1.0, [8, 16]),
        (0.5, [4, 8, 12, 16]),
        (0.25, [2, 4, 6, 8, 10, 12, 14, 16]),
        (0.3, [2, 4, 6, 8, 10, 12, 14, 16]),
        (3, [3, 6, 11, 14]),
        (8, [8, 16]),
        (1, list(range(1, 17))),
    ],
)
def test_val_check_interval(interval: int | float, steps: list[int]) -> None:
    assert run(8, val_check_interval=interval, max_epochs=2)[1].validations == steps


def test_an_integer_interval_across_epochs() -> None:
    arguments = {"val_check_interval": 5, "check_val_every_n_epoch": None, "max_epochs": 4}
    assert run(4, **arguments)[1].validations == [5, 10, 15]
    assert run(4, **{**arguments, "val_check_interval": 16})[1].validations == [16]


def test_an_interval_that_would_never_be_reached() -> None:
    with pytest.raises(ConfigurationError, match=r"val_check_interval=9 is more than the 8 training batches"):
        run(8, val_check_interval=9)


def test_a_fraction_across_epochs_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs an integer"):
        make_trainer(val_check_interval=0.5, check_val_every_n_epoch=None)


def test_an_interval_that_ends_inside_a_window_waits_for_its_update() -> None:
    """Windows end after micro-batches 3, 6 and 8. Validation is due after 2, 4, 6 and 8, and runs at the end of the window."""
    _, recorder = run(8, val_check_interval=2, accumulate_grad_batches=3)
    assert recorder.validations == [1, 2, 3]


def test_a_time_between_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer that fires in step 2 and in step 7 of 8 lets the next step validate; then it starts again."""
    timers: list[tuple[float, Any]] = []

    class FakeTimer:
        daemon = False

        def __init__(self, seconds: float, act: Any, arguments: list[int]) -> None:
            timers.append((seconds, lambda: act(*arguments)))

        def start(self) -> None:
            pass

        cancel = join = start

    class Fires(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step in (2, 7):
                timers[-1][1]()

    monkeypatch.setattr("trainkit.trainer.safe_points.threading.Timer", FakeTimer)
    _, recorder = run(4, 2, Fires(), val_check_interval="00:01:00:00", max_epochs=2, enable_checkpointing=False)
    assert recorder.validations == [3, 8]
    assert [seconds for seconds, _ in timers] == [3600.0] * 3
    timers.clear()
    run(4, None, val_check_interval="00:01:00:00", enable_checkpointing=False)
    assert timers == [], "nothing to validate"


def test_check_val_every_n_epoch() -> None:
    assert run(4, check_val_every_n_epoch=2, max_epochs=5)[1].validations == [8, 16]
    assert run(4, check_val_every_n_epoch=2, val_check_interval=2, max_epochs=3)[1].validations == [6, 8]


def test_val_every_n_steps_counts_updates_across_epochs() -> None:
    assert run(4, val_every_n_steps=3, max_epochs=3)[1].validations == [3, 6, 9, 12]
    assert run(8, val_every_n_steps=3, accumulate_grad_batches=2, max_epochs=2)[1].validations == [3, 6]


def test_a_skipped_update_does_not_validate_again() -> None:
    class Skipping(TinyModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.batch_idx in (2, 3):
                self.trainer.accelerator.skip_update()

    trainer, recorder = run(6, module=Skipping(), val_every_n_steps=2)
    assert trainer.global_step == 4
    assert recorder.validations == [2, 4]


@pytest.mark.parametrize("steps, batches", [(2, 2), (100, 3), (-1, 3), (0, 0), (None, 2)])
def test_num_sanity_val_steps(steps: int | None, batches: int) -> None:
    module = Seen()
    trainer = make_trainer(recorder := Recorder(), num_sanity_val_steps=steps, limit_train_batches=1)
    module.on_train_start = lambda: setattr(module, "before", len(module.validation_inputs))
    trainer.fit(module, tiny_loader(FOUR), tiny_loader(12))
    assert module.before == batches
    assert recorder.sanity_checks == (batches > 0)
    assert trainer.num_sanity_val_batches == [batches]


def test_what_the_sanity_check_logs_is_gone() -> None:
    logger = Memory()

    class Looking(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if trainer.sanity_checking:
                self.in_check = dict(trainer.callback_metrics)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.after = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics, list(logger.rows)]
            self.flags = trainer.sanity_checking, trainer.validating

    looking = Looking()
    trainer = make_trainer(looking, num_sanity_val_steps=2, logger=logger)
    trainer.fit(TinyModule(), tiny_loader(FOUR), tiny_loader(TWO))
    assert looking.after == [{}, {}, {}, []]
    assert looking.flags == (False, False)
    assert list(logger.of("val_loss")) == [4]


def test_a_limit_of_validation_batches_limits_the_sanity_check_too() -> None:
    trainer, _ = run(4, 8, num_sanity_val_steps=5, limit_val_batches=3)
    assert trainer.num_sanity_val_batches == [3]


def test_validation_data_without_a_step_is_a_warning() -> None:
    class Bare(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        training_step = TinyModule.training_step
        loss = TinyModule.loss
        forward = TinyModule.forward
        learning_rate = 0.1
        configure_optimizers = TinyModule.configure_optimizers

    with pytest.warns(TrainkitWarning, match="Bare has no validation_step: nothing is validated"):
        make_trainer().fit(Bare(), tiny_loader(), tiny_loader())


# -------------------------------------------------------------------------------------------------------------- logging


@pytest.mark.parametrize("every, steps", [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4]), (0, []), (50, [])])
def test_log_every_n_steps(every: int, steps: list[int]) -> None:
    logger = Memory()
    seen = []

    class Looking(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.should_log:
                seen.append(trainer.global_step + 1)

    run(3, None, Looking(), max_epochs=2, log_every_n_steps=every, logger=logger)
    assert sorted(logger.of("train_loss")) == steps
    assert seen == steps
    assert all(row["epoch"] == (step - 1) // 3 for step, row in logger.rows)


def test_should_log_holds_for_the_whole_window() -> None:
    seen = []

    class Looking(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(trainer.should_log)

    run(8, None, Looking(), accumulate_grad_batches=2, log_every_n_steps=2)
    assert seen == [False, False, True, True, False, False, True, True]


# ------------------------------------------------------------------------------------- any combination of arguments


@dataclass
class ExpectedRun:
    """What a fit should do: the documented rules in their simplest form, without a model."""

    batches: list[tuple[int, int]] = field(default_factory=list)
    validations: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    step: int = 0
    completed: int = 0


def course(length: int, window: int, max_epochs: int, max_steps: int, min_epochs: int, interval: int, stop: int) -> ExpectedRun:
    result, asked, wanted = ExpectedRun(), False, False
    while result.completed < max_epochs and result.step != max_steps:
        if wanted and result.completed >= min_epochs:
            break
        epoch, left = result.completed, False
        for batch in range(length):
            result.batches.append((epoch, batch))
            wanted = wanted or len(result.batches) == stop
            last = batch == length - 1
            if not (last or (batch + 1) % window == 0):
                continue
            result.step += 1
            leave = asked and epoch >= min_epochs  # requested in the previous window
            asked = wanted
            begin = batch - batch % window
            if (batch + 1) // interval > begin // interval:  # an interval has ended in this window
                result.validations.append(result.step)
                leave = leave or (wanted and epoch >= min_epochs)  # after a validation, a request acts at once
            if leave or result.step == max_steps:
                left = not last
                break
        result.epochs.append(epoch)
        if left:
            break
        result.completed += 1
    return result


class StopAtBatch(Callback):
    """Requests a stop after a number of micro-batches."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        trainer.should_stop = trainer.should_stop or self.seen == self.number


@settings(max_examples=80)
@given(
    length=st.integers(1, 7),
    window=st.integers(1, 8),
    max_epochs=st.integers(1, 4),
    max_steps=st.sampled_from([-1, 1, 2, 3, 5, 8]),
    min_epochs=st.integers(0, 2),
    interval=st.integers(1, 7),
    stop=st.integers(1, 30),
)
def test_any_combination(**arguments: int) -> None:
    arguments["interval"] = min(arguments["interval"], arguments["length"])
    arguments["min_epochs"] = min(arguments["min_epochs"], arguments["max_epochs"])
    expected = course(**arguments)
    trainer, recorder = run(
        arguments["length"],
        1,
        StopAtBatch(arguments["stop"]),
        accumulate_grad_batches=arguments["window"],
        max_epochs=arguments["max_epochs"],
        max_steps=arguments["max_steps"],
        min_epochs=arguments["min_epochs"],
        val_check_interval=arguments["interval"],
    )
    assert recorder.batches == expected.batches
    assert (trainer.global_step, trainer.current_epoch) == (expected.step, expected.completed)
    assert recorder.validations == expected.validations
    assert recorder.epochs == expected.epochs
