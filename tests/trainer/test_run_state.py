"""The state of a run in a checkpoint: captured from one `Run` and restored into another, without a Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.bare import make_run
from helpers.runs.tiny import tiny_loader

from trainkit.callbacks import EarlyStopping
from trainkit.trainer.loaders import train_loader
from trainkit.trainer.progress import Phase, Stop
from trainkit.trainer.run import Run
from trainkit.trainer.run_state import capture_run, restore_loop, restore_run, training_objects
from trainkit.trainer.safe_points import SafePoints
from trainkit.trainer.setup import Training, prepare_evaluation, prepare_training


def fitting(**arguments: Any) -> tuple[Run, Training]:
    run = make_run(**arguments)
    run.validation = prepare_evaluation(run, "validation", tiny_loader(8))
    return run, prepare_training(run, train_loader(run, tiny_loader()), SafePoints(run, lambda wait: None, lambda: None))


def loop(run: Run) -> dict[str, Any]:
    state: dict[str, Any] = capture_run(run, run.train_loader)["loop"]
    return state


def test_counters_and_position() -> None:
    run, _ = fitting()
    run.progress.global_step, run.progress.current_epoch = 6, 1
    run.progress.end_window(batch_idx=1, steps=2)
    run.progress.computed = {"val_loss": 4}
    saved = loop(run)

    other, plan = fitting()
    restore_loop(other, plan, saved)
    progress = other.progress
    assert (progress.global_step, progress.current_epoch, progress.epoch_start, progress.batch_idx) == (6, 1, 2, 1)
    assert (progress.computed, progress.phase) == ({"val_loss": 4}, Phase.STEP)
    assert [micro.index for micro in plan.micro_batches(1, progress.epoch_start)] == [2, 3]


@pytest.mark.parametrize("phase, consumed", [(Phase.STEP, 1), (Phase.UPDATED, 3), (Phase.VALIDATING, 3), (Phase.EPOCH_END, 1)])
def test_the_position_is_what_the_phase_has_consumed(phase: Phase, consumed: int) -> None:
    """The micro-batches of an incomplete window do not count; those of a completed optimizer step do."""
    run, _ = fitting()
    run.progress.batches_done, run.progress.batch_idx, run.progress.phase = 1, 2, phase
    saved = loop(run)
    assert (saved["position"]["batches"], saved["phase"]) == (consumed, phase.value)


@pytest.mark.parametrize(
    "stop, may_stop, asked",
    [(Stop.RUNNING, True, False), (Stop.REQUESTED, True, True), (Stop.STOPPED, True, False), (Stop.STOPPING, True, False),
     (Stop.STOPPING, False, True)],
)  # fmt: skip
def test_a_stop_that_was_obeyed_does_not_end_the_resumed_run(stop: Stop, may_stop: bool, asked: bool) -> None:
    """A checkpoint contains a stop request only if the run has not stopped yet, or may not stop before min_steps."""
    run, _ = fitting(min_steps=None if may_stop else 100)
    run.progress.batches_done, run.progress.stop = 2, stop
    run.progress.should_stop = stop is not Stop.RUNNING
    saved = loop(run)
    assert saved["stop_asked"] is asked
    other, plan = fitting()
    restore_loop(other, plan, saved)
    assert other.progress.should_stop is asked


def test_a_validation_that_is_running_is_repeated_from_its_start() -> None:
    from trainkit.trainer.progress import ValidationStart

    run, _ = fitting()
    assert run.validation is not None
    run.validation.began, run.validation.count = 4, 5
    run.progress.validation_start = ValidationStart([], {})
    assert (loop(run)["validation_pending"], loop(run)["validation_batches"]) == (True, 4)
    run.progress.validation_start = None
    saved = loop(run)
    assert (saved["validation_pending"], saved["validation_batches"]) == (False, 5)
    other, plan = fitting()
    restore_loop(other, plan, saved)
    assert other.validation is not None
    assert other.validation.count == 5


def test_callbacks_and_results_are_restored_if_they_are_wanted() -> None:
    run, _ = fitting()
    stopping = EarlyStopping("val_loss")
    stopping.wait_count = 3
    run.callbacks = [stopping]
    run.results.add({"val_loss": 0.5})
    state = capture_run(run, run.train_loader)
    for wanted, waits, values in (({"callbacks"}, 3, {}), ({"loop"}, 0, {"val_loss": 0.5})):
        other, _ = fitting()
        other.callbacks = [fresh := EarlyStopping("val_loss")]
        restore_run(other, state, wanted)
        assert (fresh.wait_count, dict(other.results.callback)) == (waits, values)


def test_without_a_loader_only_what_builds_the_module_again() -> None:
    """Without a loader, the state contains only what is needed to create the module again."""
    run, _ = fitting()
    kept = {f"hyper_parameters_{part}" for part in ("name", "omegaconf", "attributes", "omitted")}
    names = {"hyper_parameters", *kept, "module"}
    assert set(capture_run(run, None)) == names


def test_the_parts_are_the_users_own_objects() -> None:
    run, plan = fitting()
    objects = training_objects(run)
    assert objects.models == [run.module]
    assert objects.optimizers == [plan.optimizer]
    assert isinstance(objects.optimizers[0], torch.optim.SGD)
