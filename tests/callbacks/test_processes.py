"""Callbacks on several processes, one hook at a time: what each process decides."""

from __future__ import annotations

import contextlib
import io
import math
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit.callbacks import EarlyStopping, MemoryMonitor, ModelCheckpoint, NonFiniteGuard, Timer, memory_monitor
from trainkit.callbacks.memory_monitor import Gauge
from trainkit.callbacks.model_summary import ModelSummary
from trainkit.callbacks.progress.tqdm_progress import TQDMProgressBar
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import MissingMetricError, NonFiniteError
from trainkit.launch.joining import join
from trainkit.precision import Precision


class Module(torch.nn.Linear):
    """The part of a `TrainModule` that callbacks use."""

    automatic_optimization = True

    def __init__(self, rank: int) -> None:
        super().__init__(2, 1)
        self.global_rank = rank
        self.printed: list[str] = []

    def print(self, text: str) -> None:
        self.printed.append(text)


def setting() -> tuple[Any, Any]:
    """A module, and a trainer that only has attributes, on one of several processes."""
    world = join(RequestedDevices(), timeout=timedelta(seconds=30))
    skips: list[int] = []
    trainer = SimpleNamespace(
        _run=SimpleNamespace(validation=None, find_logged_step=lambda name: math.inf),
        accelerator=SimpleNamespace(skip_update=lambda: skips.append(1), skips=skips),
        callback_metrics={},
        current_epoch=0,
        fast_dev_run=False,
        global_step=0,
        is_global_zero=world.is_main,
        logged_metrics={},
        num_val_batches=[2],
        precision="32-true",
        precision_plugin=Precision("32-true"),
        scaler=None,
        sanity_checking=False,
        should_stop=False,
        stage="fit",
        strategy=SimpleNamespace(
            device=torch.device("cpu"), data_world=world, world=world, gradient_norm=lambda optimizer: None
        ),
        world_size=world.size,
    )
    return trainer, Module(world.rank)


# -------------------------------------------------------------------------------------------------------- EarlyStopping


@pytest.mark.world_size(3)
def test_early_stopping_decides_the_same_though_the_values_differ() -> None:
    """If the values of the ranks differ, the value of the main process decides on all of them."""
    trainer, module = setting()
    rank = trainer.strategy.world.rank
    callback = EarlyStopping("loss", patience=2)
    callback.on_train_start(trainer, module)
    stops = []
    for main, other in [(3.0, 1.0), (2.0, 1.5), (2.5, 0.5), (2.0, 0.25)]:
        trainer.callback_metrics["loss"] = torch.tensor(other if rank else main, dtype=torch.float64)
        callback.on_validation_end(trainer, module)
        stops.append(trainer.should_stop)
    assert stops == [False, False, False, True]
    assert (callback.best_score.item(), callback.wait_count) == (2.0, 2)
    assert callback.best_score.dtype is torch.float64


@pytest.mark.world_size(2)
def test_early_stopping_where_one_process_has_no_value() -> None:
    """A rank that has no value, such as one without a batch, uses that of another rank. Without any value all ranks raise."""
    trainer, module = setting()
    callback = EarlyStopping("loss", patience=1)
    callback.on_train_start(trainer, module)
    if trainer.strategy.world.rank:
        trainer.callback_metrics["loss"] = torch.tensor(0.5)
    callback.on_validation_end(trainer, module)
    assert callback.best_score.item() == 0.5
    if not trainer.strategy.world.rank:
        trainer.callback_metrics["loss"], trainer._run.find_logged_step = torch.tensor(0.25), lambda name: -1
    trainer.global_step = 1
    callback.on_validation_end(trainer, module)  # the value of the main process is an old one
    assert (callback.best_score.item(), callback.wait_count) == (0.5, 1)
    trainer.callback_metrics.clear()
    with pytest.raises(MissingMetricError):
        callback.on_validation_end(trainer, module)


@pytest.mark.world_size(2)
def test_who_says_why_training_stops() -> None:
    """With `verbose=True` every rank prints; with `log_rank_zero_only=True` only the main process does."""
    trainer, module = setting()
    trainer.callback_metrics["loss"] = torch.tensor(1.0)
    printed = io.StringIO()
    for of_main_only in (False, True):
        callback = EarlyStopping("loss", verbose=True, log_rank_zero_only=of_main_only)
        callback.on_train_start(trainer, module)
        with contextlib.redirect_stdout(printed):
            callback.on_validation_end(trainer, module)
    assert printed.getvalue() == f"[rank {module.global_rank}] loss improved to 1.\n"
    assert module.printed == ["loss improved to 1."]  # module.print prints on the main process only


# ---------------------------------------------------------------------------------------------------------------- Timer


@pytest.mark.world_size(2)
def test_the_main_clock_counts() -> None:
    """Only the time of the main process decides when training stops."""
    trainer, module = setting()
    main = trainer.is_global_zero
    callback = Timer(timedelta(hours=1))
    callback._before["train"] = 0.0 if main else 7200.0  # on the other process, the time is up
    callback.on_train_start(trainer, module)
    callback.on_train_batch_end(trainer, module, None, None, 0)
    assert not trainer.should_stop
    callback._before["train"] = 7200.0 if main else 0.0
    callback.on_train_batch_end(trainer, module, None, None, 1)
    assert trainer.should_stop is main  # the other process stops at the next safe point
    trainer.should_stop = False
    callback.on_train_start(trainer, module)  # maybe no step follows, so all processes stop here
    assert trainer.should_stop
    trainer.should_stop = False
    by_epoch = Timer(timedelta(hours=1), interval="epoch")
    by_epoch.on_train_start(trainer, module)
    by_epoch._before["train"] = 7200.0 if main else 0.0
    by_epoch.on_train_batch_end(trainer, module, None, None, 0)
    assert not trainer.should_stop
    by_epoch.on_train_epoch_end(trainer, module)
    assert trainer.should_stop


# ------------------------------------------------------------------------------------------------------- NonFiniteGuard


def update(callback: NonFiniteGuard, trainer: Any, module: Any, losses: list[float], gradient: float = 1.0) -> None:
    for loss in losses:
        callback.on_before_backward(trainer, module, torch.tensor(loss))
    module.weight.grad = torch.tensor([[1.0, gradient]])
    callback.on_before_optimizer_step(trainer, module, torch.optim.SGD(module.parameters()))
    trainer.global_step += 1


@pytest.mark.world_size(3)
def test_all_ranks_skip_the_step() -> None:
    """If the loss or a gradient of one rank is not finite, all ranks skip the optimizer step."""
    trainer, module = setting()
    rank = trainer.strategy.world.rank
    callback = NonFiniteGuard(action="skip", max_consecutive=2, warn_after=5)
    callback.on_train_start(trainer, module)
    update(callback, trainer, module, [1.0])
    update(callback, trainer, module, [] if rank == 2 else [1.0, math.nan if rank == 1 else 1.0])
    assert (len(trainer.accelerator.skips), callback.skipped_updates, callback.consecutive_skips) == (1, 1, 1)
    update(callback, trainer, module, [] if rank == 0 else [1.0])  # resets consecutive_skips also on a rank without a loss
    assert callback.consecutive_skips == 0
    update(callback, trainer, module, [1.0], math.inf)
    with pytest.raises(NonFiniteError) as caught:
        update(callback, trainer, module, [math.nan if rank == 1 else 1.0], math.inf)
    gradient = "the gradient of weight (1 of 1 parameter)"
    told = f"in optimizer step 5: on rank 0, {gradient}; on rank 1, the loss; {gradient}; on rank 2, {gradient}."
    assert told in str(caught.value)
    assert len(trainer.accelerator.skips) == 3


@pytest.mark.world_size(2)
def test_a_process_without_anything_to_watch_takes_part() -> None:
    trainer, module = setting()
    callback = NonFiniteGuard(action="skip", check="loss", max_consecutive=1)
    callback.on_train_start(trainer, module)
    with pytest.raises(NonFiniteError, match="in optimizer step 1: on rank 1, the loss. "):
        update(callback, trainer, module, [math.nan] if trainer.strategy.world.rank else [])


# -------------------------------------------------------------------------------------------------------- MemoryMonitor


@pytest.mark.world_size(3)
def test_memory_is_summed_by_node() -> None:
    """Three processes use 1, 2 and 4 bytes. At first the first two are on one node, then the last two."""
    trainer, module = setting()
    rank = trainer.strategy.world.rank
    trainer.strategy.world.node = rank // 2
    memory_monitor.host_gauge = lambda: Gauge(lambda: (2**rank, 2**rank), lambda: True)  # this process runs no other test
    callback = MemoryMonitor(verbose=False)
    callback.setup(trainer, module, "fit")
    callback.on_fit_start(trainer, module)
    use = callback.stages["setup"]
    assert [process.node for process in use.processes] == [0, 0, 1]
    assert [process.host.end for process in use.processes] == [1, 2, 4]
    assert (use.host.end, use.together.end) == (4, 4)
    trainer.strategy.world.node = 0 if rank == 0 else 1
    callback.setup(trainer, module, "fit")
    callback.on_fit_start(trainer, module)
    assert callback.stages["setup"].together.end == 6


# ------------------------------------------------------------------------------------------------------ ModelCheckpoint


@pytest.mark.world_size(2)
def test_all_ranks_know_what_the_main_process_sees(tmp_path: Path) -> None:
    """Each rank has a folder of its own here."""
    trainer, _ = setting()
    main = trainer.is_global_zero
    folder = tmp_path / ("main" if main else "other")
    folder.mkdir()
    callback = ModelCheckpoint(str(folder), monitor="loss")
    callback.best_k_models = {"a": torch.tensor(1.0)}
    assert callback.check_monitor_top_k(trainer, torch.tensor(0.5 if main else 2.0))
    assert not callback.check_monitor_top_k(trainer, torch.tensor(2.0 if main else 0.5))
    assert callback.file_exists(folder if main else folder / "none", trainer)
    callback.to_yaml()
    assert (folder / "best_k_models.yaml").exists() is main


# --------------------------------------------------------------------------------------------- output of the main process


@pytest.mark.world_size(2)
def test_one_process_shows_the_bar_and_the_summary() -> None:
    trainer, module = setting()
    bar = TQDMProgressBar()
    bar.setup(trainer, module, "fit")
    assert bar.is_enabled is trainer.is_global_zero
    if not trainer.is_global_zero:
        ModelSummary().on_fit_start(trainer, None)  # type: ignore[arg-type]  # does not read the module
