"""`RunProgress`: what changes at the ends of a run, an epoch and an accumulation window, and the states of a stop request."""

from __future__ import annotations

import dataclasses
import math

import pytest

from trainkit.trainer.progress import Phase, RunProgress, Stop


def test_a_run_that_has_not_begun() -> None:
    progress = RunProgress()
    assert (progress.stage, progress.global_step, progress.current_epoch, progress.batch_idx) == (None, 0, 0, -1)
    assert (progress.phase, progress.stop, progress.next_save_step) == (Phase.STEP, Stop.RUNNING, math.inf)


def test_a_run_begins_and_ends() -> None:
    progress = RunProgress(global_step=7, current_epoch=2, batch_idx=3, should_stop=True, should_log=True, validating=True)
    progress.begin("validate")
    assert (progress.stage, progress.batch_idx) == ("validate", -1)
    assert not any((progress.should_stop, progress.should_log, progress.validating, progress.sanity_checking))
    assert (progress.global_step, progress.current_epoch) == (7, 2), "the counters of the fit before it stay"
    progress.validating = True
    progress.end()
    assert (progress.stage, progress.validating) == (None, False)


def test_two_runs_share_nothing() -> None:
    first, second = RunProgress(), RunProgress()
    first.computed["loss"] = 1
    assert second.computed == {}


# --------------------------------------------------------------------------------------------------- accumulation windows


def test_the_end_of_a_window() -> None:
    progress = RunProgress(phase=Phase.UPDATED)
    progress.end_window(batch_idx=5, steps=3)
    assert (progress.batches_done, progress.steps_done, progress.phase) == (6, 3, Phase.STEP)


@pytest.mark.parametrize(
    "phase, expected",
    [(Phase.STEP, 4), (Phase.EPOCH_END, 4), (Phase.UPDATED, 6), (Phase.VALIDATING, 6)],
)
def test_where_a_checkpoint_of_this_moment_resumes(phase: Phase, expected: int) -> None:
    """In the middle of an accumulation window it resumes at the start of the window; after the optimizer step, at its end."""
    assert RunProgress(batches_done=4, batch_idx=5, phase=phase).batches_consumed == expected


# ----------------------------------------------------------------------------------------------------------------- epochs


def test_the_next_epoch_counts_its_own_validations() -> None:
    progress = RunProgress(current_epoch=1, epoch_start=3, batches_done=10, validations=2, extra_batches=1)
    progress.begin_next_epoch(10, across_epochs=False)
    assert (progress.current_epoch, progress.epoch_start, progress.batches_done) == (2, 0, 0)
    assert (progress.validations, progress.earlier_batches, progress.extra_batches) == (0, 9, 0)


def test_across_epochs_the_micro_batches_of_earlier_ones_count() -> None:
    progress = RunProgress(validations=2, earlier_batches=20, extra_batches=3)
    progress.begin_next_epoch(13, across_epochs=True)
    assert (progress.validations, progress.earlier_batches, progress.extra_batches) == (2, 30, 0)


# --------------------------------------------------------------------------------------------------------------- stopping


def test_a_stop_request_is_agreed_on_and_can_be_taken_back() -> None:
    progress = RunProgress()
    progress.agree_on_stop(True)
    assert progress.stop is Stop.REQUESTED
    progress.agree_on_stop(False)
    assert progress.stop is Stop.RUNNING


def test_a_stop_that_has_begun_is_final() -> None:
    progress = RunProgress()
    progress.begin_stopping()
    progress.agree_on_stop(False)
    assert progress.stop is Stop.STOPPING
    progress.end_training()
    progress.agree_on_stop(True)
    assert progress.stop is Stop.STOPPED


def test_each_attribute_is_documented() -> None:
    assert RunProgress.__doc__ is not None
    for field in dataclasses.fields(RunProgress):
        assert f"        {field.name}: " in RunProgress.__doc__, field.name
