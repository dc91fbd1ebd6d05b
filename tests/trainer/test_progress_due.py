"""`DueDates`: when a fit logs, validates and ends, computed from counters without a Trainer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer

from trainkit import Callback
from trainkit.trainer.arguments import TrainerArguments
from trainkit.trainer.progress import DueDates, RunProgress


def due(progress: RunProgress | None = None, **arguments: Any) -> DueDates:
    return DueDates(TrainerArguments(**arguments), progress or RunProgress())


# ---------------------------------------------------------------------------------------------------------------- logging


@pytest.mark.parametrize("every, steps", [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (0, []), (7, [])])
def test_log_boundaries(every: int, steps: list[int]) -> None:
    dates = due(log_every_n_steps=every)
    assert [step for step in range(1, 7) if dates.logs(step)] == steps


# ----------------------------------------------------------------------------------------------------------------- ending


@pytest.mark.parametrize("step, reached", [(0, False), (9, False), (10, True), (11, True)])
def test_max_steps(step: int, reached: bool) -> None:
    dates = due(RunProgress(global_step=step), max_steps=10)
    assert (dates.max_steps_reached, dates.training_ends) == (reached, reached)


def test_without_limits_nothing_ends() -> None:
    dates = due(RunProgress(global_step=10**9, current_epoch=10**6), max_epochs=-1)
    assert not dates.max_steps_reached
    assert not dates.training_ends


@pytest.mark.parametrize("epoch, ends", [(1, False), (2, True), (3, True)])
def test_max_epochs(epoch: int, ends: bool) -> None:
    assert due(RunProgress(current_epoch=epoch), max_epochs=2).training_ends is ends


@pytest.mark.parametrize(
    "progress, may_stop",
    [
        (RunProgress(current_epoch=1, global_step=20), False),
        (RunProgress(current_epoch=2, global_step=19), False),
        (RunProgress(current_epoch=2, global_step=20), True),
    ],
)
def test_a_stop_request_counts_from_min_epochs_and_min_steps_on(progress: RunProgress, may_stop: bool) -> None:
    progress.should_stop = True
    dates = due(progress, min_epochs=2, min_steps=20, max_epochs=-1)
    assert (dates.may_stop, dates.training_ends) == (may_stop, may_stop)


# ------------------------------------------------------------------------------------------------------------- validation


def validated(dates: DueDates, every: int | None, batches: range) -> list[int]:
    """The micro-batches after which to validate, if each micro-batch is an accumulation window."""
    return [batch_idx for batch_idx in batches if dates.validates(batch_idx, True, every)]


def test_every_n_micro_batches() -> None:
    assert validated(due(), 3, range(10)) == [2, 5, 8]


def test_an_interval_that_ends_inside_a_window_is_due_at_its_end() -> None:
    dates = due()
    windows = [3, 7, 11]  # last micro-batches of windows of four
    assert [last for last in windows if dates.validates(last, True, 6)] == [7, 11]


def test_without_an_interval_only_the_end_of_the_epoch_tells() -> None:
    """Without an interval, validation is due only at the end of an epoch."""
    dates = due()
    assert validated(dates, None, range(10)) == []
    assert dates.validates_at_end(None)
    assert not dates.validates_at_end(5)


def test_every_second_epoch() -> None:
    progress = RunProgress()
    dates = due(progress, check_val_every_n_epoch=2)
    assert validated(dates, 3, range(6)) == []
    assert not dates.validates_at_end(None)
    progress.current_epoch = 1
    assert validated(dates, 3, range(6)) == [2, 5]
    assert dates.validates_at_end(None)


def test_across_epochs() -> None:
    progress = RunProgress()
    dates = due(progress, check_val_every_n_epoch=None, val_check_interval=4)
    assert validated(dates, 4, range(6)) == [3]
    progress.begin_next_epoch(6, across_epochs=True)
    assert validated(dates, 4, range(6)) == [1, 5]


def test_after_a_time() -> None:
    progress = RunProgress()
    dates = due(progress, check_val_every_n_epoch=2, val_check_interval=timedelta(hours=1))
    progress.request_validation()
    assert validated(dates, None, range(4)) == [], "epoch 0 has no validation: the request waits"
    assert not dates.validates_at_end(None)
    progress.current_epoch = 1
    assert validated(dates, None, range(4)) == [0], "once for a request"
    assert not dates.validates_at_end(None), "the end of an epoch is nothing special"
    across = due(progress, check_val_every_n_epoch=None, val_check_interval=timedelta(hours=1))
    progress.current_epoch = 2
    progress.request_validation()
    assert validated(across, None, range(4)) == [0]


class Validated(Callback):
    """Notes the step of each validation, and compares those of all ranks."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.steps.append(trainer.global_step)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.by_rank = trainer.strategy.world.exchange(self.steps)


@pytest.mark.world_size(2)
def test_all_ranks_validate_after_the_same_step_when_a_time_is_over() -> None:
    """The clock of the main process decides."""
    validated = Validated()
    trainer = make_trainer(validated, strategy="ddp", devices=2, max_epochs=50, val_check_interval=timedelta(microseconds=1))
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader(8))
    first, second = validated.by_rank
    assert first == second != []


def test_every_n_optimizer_steps() -> None:
    progress = RunProgress(global_step=4)
    dates = due(progress, val_every_n_steps=4)
    assert dates.validates(0, True, None)
    assert not dates.validates(0, False, None), "an optimizer step that was skipped"
    progress.global_step = 5
    assert not dates.validates(1, True, None)
    assert not dates.validates_at_end(None)


def test_an_epoch_resumed_on_another_number_of_processes_does_not_count_its_surplus() -> None:
    """The two extra micro-batches of the resumed epoch do not shift the validation interval."""
    assert validated(due(RunProgress(extra_batches=2)), 3, range(2, 12)) == [4, 7, 10]
