"""Repeated runs in one process leak nothing, and each run, even a failed one, restores the global state of the process."""

from __future__ import annotations

import copy
import gc
import logging
import os
import random
import sys
import weakref
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from helpers.runs.leaks import (
    counted,
    evaluations,
    fits_with_new_trainers,
    fits_with_one_trainer,
    fits_with_one_trainer_and_new_modules,
    handlers,
)
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer, parameters_of, same
from helpers.worlds.worlds import run_world
from torch import Tensor, nn

from trainkit import Callback

each_way = pytest.mark.parametrize(
    "make", [fits_with_one_trainer, fits_with_one_trainer_and_new_modules, fits_with_new_trainers, evaluations]
)


def run_fifty_times(make: Callable[[Path], Callable[[], None]], folder: Path) -> tuple[Any, Any, int]:
    """What is counted before 50 runs and after them, and how many blocks of Python's memory they leave."""
    logging.getLogger("trainkit").setLevel(logging.ERROR)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        run = make(folder)
        for _ in range(3):  # objects that are created once and kept
            run()
        before, blocks = (counted(), list(map(str, handlers()))), sys.getallocatedblocks()
        for _ in range(50):
            run()
        return before, (counted(), list(map(str, handlers()))), sys.getallocatedblocks() - blocks


@each_way
def test_fifty_runs_leave_nothing_behind(make: Callable[[Path], Callable[[], None]], tmp_path: Path) -> None:
    """In a process of their own: what earlier tests of this one have left may go at any time."""
    ((before, after, blocks),) = run_world(1, run_fifty_times, make, tmp_path)
    assert before == after
    # each run adds about ten blocks to Python's own caches; a module that is not freed adds more than a hundred
    assert blocks < 50 * 50


def test_a_module_is_freed_with_its_trainer() -> None:
    module = TinyModule()
    trainer = make_trainer(logger=Memory())
    trainer.fit(module, tiny_loader(), tiny_loader())
    alive = weakref.ref(module), weakref.ref(trainer)
    del module, trainer
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_steps": 3}, {"max_epochs": 1, "accumulate_grad_batches": 2}])
def test_a_fit_holds_no_batch_when_it_is_over(limits: dict[str, int]) -> None:
    """After a fit, also one that ends inside an epoch, only the module stays in device memory."""
    trainer = make_trainer(**limits)
    module = TinyModule()

    class Batches:
        alive: ClassVar[weakref.WeakSet[Tensor]] = weakref.WeakSet()

        def __iter__(self) -> Any:
            for batch in tiny_loader(8):
                self.alive.add(batch[0])
                yield batch

    trainer.fit(module, Batches())
    gc.collect()
    assert not list(Batches.alive)


def test_fits_of_one_trainer_are_the_same_run() -> None:
    """Each fit is a new run from step 0 with the same seed."""
    trainer = make_trainer(max_epochs=2)
    first, second = TinyModule(), TinyModule()
    second.load_state_dict(first.state_dict())
    for module in (first, second):
        trainer.fit(module, tiny_loader(14, shuffle=True))
        assert (trainer.global_step, trainer.current_epoch) == (8, 2)
    assert same(parameters_of(first), parameters_of(second))


def test_metrics_of_an_earlier_run_are_gone() -> None:
    trainer = make_trainer()
    trainer.fit(TinyModule(), tiny_loader(), tiny_loader())
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss"}
    trainer.test(TinyModule(), tiny_loader(), verbose=False)
    assert set(trainer.callback_metrics) == set(trainer.logged_metrics) == {"test_loss"}


# --------------------------------------------------------------------------------------------- the state of the process


class Drawing(TinyModule):
    """Draws from every random generator in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(5), numpy.random.rand(5), random.random()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(5), numpy.random.rand(5), random.random()


def draws() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), numpy.random.rand(3).tolist(), [random.random() for _ in range(3)]


@pytest.mark.parametrize("fails", [False, True])
def test_the_users_generators_continue_where_they_were(fails: bool) -> None:
    """A fit, even a failed one, does not change the state of the user's random generators."""

    def fit() -> None:
        module = Drawing()
        if fails:
            module.on_train_epoch_end = lambda: 1 / 0
        try:
            make_trainer(max_epochs=2).fit(module, tiny_loader(shuffle=True), tiny_loader())
        except ZeroDivisionError:
            assert fails

    module_draws = Drawing()  # initializing a module draws random numbers
    assert module_draws is not None
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    Drawing()
    expected = draws()
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    fit()
    assert draws() == expected


@pytest.mark.parametrize("deterministic", [True, "warn", False, None])
@pytest.mark.parametrize("fails", [False, True])
def test_torch_flags_are_restored(deterministic: Any, fails: bool) -> None:
    """A fit, even a failed one, restores the global settings of torch."""
    seen: dict[str, Any] = {}

    def switches() -> dict[str, Any]:
        return {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "benchmark": torch.backends.cudnn.benchmark,
            "anomaly": torch.is_anomaly_enabled(),
            "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            "grad": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
        }

    class Looking(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.update(switches())
            if fails:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    before = switches()
    trainer = make_trainer(deterministic=deterministic, benchmark=True, detect_anomaly=True)
    try:
        trainer.fit(Looking(), tiny_loader())
    except KeyError:
        assert fails
    assert switches() == before
    assert seen["deterministic"] is bool(deterministic)
    assert seen["warn only"] is (deterministic == "warn")
    assert seen["benchmark"] is True
    assert seen["anomaly"] is True
    assert (seen["cublas"] is not None) is bool(deterministic)


def test_a_users_setting_is_left_alone() -> None:
    """A fit without `deterministic` uses the user's setting, and deterministic=False changes it only during the fit."""
    seen = []

    class Looking(TinyModule):
        def on_train_start(self) -> None:
            seen.append(torch.are_deterministic_algorithms_enabled())

    torch.use_deterministic_algorithms(True)
    try:
        make_trainer().fit(Looking(), tiny_loader())
        make_trainer(deterministic=False).fit(Looking(), tiny_loader())
        seen.append(torch.are_deterministic_algorithms_enabled())
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True, False, True]


# --------------------------------------------------------------------------------------------------------------- copies


def test_a_module_can_be_copied_after_a_fit() -> None:
    module = TinyModule()
    trainer = make_trainer(logger=Memory())
    trainer.fit(module, tiny_loader(), tiny_loader())
    twin = copy.deepcopy(module)
    assert twin._trainer is None
    assert module._trainer is trainer
    assert same(parameters_of(module), parameters_of(twin))
    twin.layer.weight.data.zero_()
    assert module.layer.weight.abs().sum() > 0
    make_trainer().fit(twin, tiny_loader())
    assert not same(parameters_of(module), parameters_of(twin))


def test_a_module_can_be_copied_inside_a_fit() -> None:
    """Callbacks that average weights copy the module during training. The copy has no trainer."""

    class Averaging(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.twin = copy.deepcopy(module)

    averaging = Averaging()
    make_trainer(averaging).fit(TinyModule(), tiny_loader())
    assert averaging.twin._trainer is None
    assert averaging.twin.global_step == 0


def test_a_module_outside_a_run() -> None:
    module = TinyModule()
    assert (module.global_step, module.current_epoch, module.logger, module.loggers) == (0, 0, None, [])
    assert (module.device, module.dtype) == (torch.device("cpu"), torch.float32)
    assert (module.global_rank, module.local_rank) == (0, 0)
    assert isinstance(module.layer, nn.Linear)


@pytest.mark.skipif(sys.platform == "win32", reason="spawn starts a new Python")
def test_a_module_as_a_dataset_of_workers_does_not_take_the_run_along() -> None:
    """A dataset may hold the module. When it is pickled for DataLoader workers, the trainer is not included."""
    module = TinyModule()
    make_trainer().fit(module, tiny_loader())
    state = module.__getstate__()
    assert state["_trainer"] is None
