"""`Run`: its properties and methods, without a Trainer."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.runs.bare import make_run
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import Memory
from torch.utils.data import IterableDataset

from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.errors import ModuleError
from trainkit.strategy import Strategy
from trainkit.trainer.loaders import train_loader
from trainkit.trainer.progress import RunProgress
from trainkit.trainer.run import Run


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(1)


def test_each_attribute_is_documented() -> None:
    names = re.findall(r"^        (\w+): ", Run.__doc__ or "", re.MULTILINE)
    assert set(names) == set(Run.__dataclass_fields__)


def test_before_the_first_run_there_is_no_module() -> None:
    run = replace(make_run(), given_module=None)
    with pytest.raises(ModuleError, match=re.escape("Call trainer.fit(module)")):
        _ = run.module


def test_a_run_that_follows_has_stores_and_due_dates_of_its_own() -> None:
    """A later run has its own metrics and its own due dates."""
    first = make_run(max_steps=3)
    first.progress.global_step = 3
    second = replace(first, progress=RunProgress())
    assert (first.due.max_steps_reached, second.due.max_steps_reached) == (True, False)
    assert second.metrics is second.train_metrics is not first.metrics


@pytest.mark.parametrize(
    "loader, limit, expected",
    [(None, 1.0, 0), (tiny_loader(), 1.0, 4), (tiny_loader(), 3, 3), (tiny_loader(), 0.5, 2), (Endless(), 1.0, math.inf),
     (Endless(), 7, 7)],
)  # fmt: skip
def test_the_largest_number_of_batches(loader: Any, limit: float, expected: float) -> None:
    run = make_run(limit_train_batches=limit)
    if loader is not None:
        train_loader(run, loader)
    assert run.max_batches == expected


def test_the_checkpoint_callbacks_are_found() -> None:
    run, own = make_run(), ModelCheckpoint()
    run.callbacks = [EarlyStopping("x"), own]
    assert run.checkpoint_callbacks == [own]


def test_several_processes_are_woken_by_the_step_flags_alone() -> None:
    """With several processes, a request sets no local flag: the ranks agree on a safe point in the next step."""
    run = make_run()
    run.request_safe_point()
    assert (run.distributed, run.progress.safe_point_due) == (False, True)

    class Two(Strategy):
        world = type("World", (), {"size": 2})()
        data_world = Strategy.world

    other = replace(run, strategy=Two("cpu"), progress=RunProgress())
    other.request_safe_point()
    assert (other.distributed, other.progress.safe_point_due) == (True, False)


# ---------------------------------------------------------------------------------------------------------------- metrics


def test_loggers_get_the_step_and_the_epoch() -> None:
    run, logger = make_run(), Memory()
    run.loggers, run.progress.global_step, run.progress.current_epoch = [logger], 5, 2
    run.emit({"a": 1.0}, for_step=True)
    run.emit({"a": 2.0}, for_step=False, step=4)
    assert logger.rows == [(5, {"a": 1.0, "epoch": 2}), (4, {"a": 2.0, "epoch": 2})]


def test_the_sanity_check_logs_nothing() -> None:
    run, logger = make_run(), Memory()
    run.loggers, run.progress.sanity_checking = [logger], True
    run.emit({"a": 1.0}, for_step=False)
    assert logger.rows == []


def test_a_logger_that_cannot_write_warns_and_the_others_get_theirs() -> None:
    class Full(Memory):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            raise OSError(28, "No space left on device")

    run, logger = make_run(), Memory()
    run.loggers = [Full(), logger]
    object.__setattr__(run.loggers[0], "_attached", True)  # as a Trainer does
    with pytest.warns(UserWarning, match="Full could not write the metrics of step 0: .*No space left"):
        run.emit({"a": 1.0}, for_step=True)
    assert len(logger.rows) == 1


def test_values_of_an_epoch_are_of_the_step_at_its_end() -> None:
    run = make_run()
    run.progress.global_step = 4
    run.results.add({})
    run.finish_metrics()
    assert run.progress.computed == {}
