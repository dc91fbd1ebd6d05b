"""Callbacks in whole runs on several processes."""

from __future__ import annotations

import contextlib
import io
import math
import os
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor

from trainkit import Callback
from trainkit.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, NonFiniteGuard, ThroughputMonitor, Timer


def state(module: TinyModule) -> list[float]:
    return [value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()]


# ------------------------------------------------------------------------------------- all processes stop at the same step


class Worsens(TinyModule):
    """The validation metric gets worse after the third epoch. The training metric `own` differs between the ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("own", 1.0 if self.global_rank else 10.0 - self.current_epoch, on_epoch=False)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(abs(self.current_epoch - 2)))


def stopped(monitor: str, at_train_end: bool) -> Any:
    callback = EarlyStopping(monitor, patience=2, check_on_train_epoch_end=at_train_end)
    trainer = make_trainer(callback, max_epochs=8, strategy="ddp", log_every_n_steps=1)
    trainer.fit(Worsens(), tiny_loader(20), tiny_loader(4))
    return trainer.global_step, trainer.current_epoch, callback.wait_count, callback.best_score.item(), callback.stopped_epoch


@pytest.mark.parametrize("at_train_end", [False, True])
def test_early_stopping(at_train_end: bool) -> None:
    first, second = run_world(2, stopped, "val", at_train_end)
    assert first == second == (15, 5, 2, 0.0, 4)


def test_early_stopping_by_a_value_of_a_step() -> None:
    first, second = run_world(2, stopped, "own", True)
    assert first == second
    assert first[2] == 0


# ------------------------------------------------------------------------------------------------- the norm of gradients


def norms(strategy: str, **arguments: Any) -> dict[int, float]:
    torch.manual_seed(0)
    logger = Memory()
    make_trainer(strategy=strategy, log_grad_norm=True, log_every_n_steps=2, logger=logger, **arguments).fit(
        TinyModule(), tiny_loader(16, batch_size=2)
    )
    return logger.of("grad_norm")


def check_norms(strategy: str) -> None:
    """The logged norm is that of the mean gradient over all processes, as on one process with the same global batches."""
    logged, _ = run_world(2, norms, strategy)  # the main process logs
    assert [*logged] == [2, 4]
    assert logged == pytest.approx(norms("auto", accumulate_grad_batches=2), rel=1e-5)


def test_log_grad_norm() -> None:
    check_norms("ddp")


@pytest.mark.zero
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_log_grad_norm_of_sharded_gradients(strategy: str) -> None:
    check_norms(strategy)


class Shares(Worsens):
    """The metric `own` differs between the ranks; the metric `both` is logged in training and in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("own", 1.0 + self.global_rank)
        self.log("both", 100.0 + self.global_rank, on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("both", float(self.current_epoch + self.global_rank), on_step=True, on_epoch=True)


class Told(Memory):
    """Counts the calls of `after_save_checkpoint`."""

    told = 0

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.told += 1


def ranked(folder: str) -> Any:
    best = {
        name: ModelCheckpoint(f"{folder}/{name}", monitor=name, save_top_k=-1, save_last="link") for name in ("own", "both")
    }
    logger = Told()
    trainer = make_trainer(*best.values(), max_epochs=2, strategy="ddp", enable_checkpointing=True, logger=logger)
    trainer.fit(Shares(), tiny_loader(16), tiny_loader(8))
    scores = {name: sorted(score.item() for score in callback.best_k_models.values()) for name, callback in best.items()}
    return scores, sorted(trainer.callback_metrics), trainer.callback_metrics["both"].item(), logger.told


def test_checkpoints_are_ranked_by_what_all_processes_have_logged(tmp_path: Any) -> None:
    """Checkpoints are ranked by values that are reduced over all ranks.

    A training metric is ranked at the end of its epoch. A name that training and validation log is ranked by validation's
    value; its values of validation steps are not in `callback_metrics`. The main process's loggers get each of them.
    """
    names = ["both", "both_epoch", "both_step", "own"]  # both_step is of a training step
    expected = {"own": [1.5, 1.5], "both": [0.5, 1.5]}, names, 1.5
    assert run_world(2, ranked, str(tmp_path)) == [(*expected, 4), (*expected, 0)]
    assert [os.readlink(tmp_path / name / "last") for name in ("own", "both")] == ["step-00000004"] * 2


class Late(Callback):
    """On one rank the time is up after three optimizer steps."""

    def __init__(self, timer: Timer, rank: int) -> None:
        self.timer, self.rank = timer, rank

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step, trainer.global_rank) == (3, self.rank):
            self.timer._before["train"] = 1e6


def timed(rank: int, interval: str) -> Any:
    timer = Timer("00:01:00:00", interval=interval)
    trainer = make_trainer(Late(timer, rank), timer, max_epochs=4, strategy="ddp")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer.fit(TinyModule(), tiny_loader(40))
    return trainer.global_step, "Time limit" in printed.getvalue()


@pytest.mark.parametrize("interval, steps", [("step", 5), ("epoch", 5)])
def test_the_time_of_the_main_process_ends_training_on_all(interval: str, steps: int) -> None:
    assert run_world(2, timed, 0, interval) == [(steps, True), (steps, False)]


def test_the_time_of_another_process_does_not_count() -> None:
    assert run_world(2, timed, 1, "step") == [(20, False)] * 2


# ----------------------------------------------------------------------------------------------- skipped optimizer steps


class Breaks(TinyModule):
    """In one micro-batch of rank 1 the loss is NaN, but its gradients are finite, so other ranks do not see it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        broken = self.global_rank == 1 and batch_idx == 2
        return loss + torch.tensor(math.nan) if broken else loss


def skipped() -> Any:
    guard = NonFiniteGuard(action="skip")
    module = Breaks()
    trainer = make_trainer(guard, strategy="ddp")
    steps: list[tuple[int, list[float]]] = []

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.append((trainer.global_step, state(module)))

    trainer.callbacks.append(Notes())
    trainer.fit(module, tiny_loader(44))
    return steps, guard.skipped_updates, state(module)


def test_all_processes_skip_the_same_update() -> None:
    (first, skips, ended), (second, others, also) = run_world(2, skipped)
    assert (skips, others) == (1, 1)
    assert [step for step, _ in first] == [1, 2, 2, 3, 4, 5]
    assert [step for step, _ in second] == [1, 2, 2, 3, 4]  # it has five of the eleven batches
    assert first[1][1] == first[2][1]
    assert [values for _, values in first[:5]] == [values for _, values in second]
    assert ended == also


# -------------------------------------------------------------------------------------------------------------- what is logged


class Rates(ThroughputMonitor):
    """A `ThroughputMonitor` with a known rate on each rank."""

    def _rates(self, first: Any, last: Any, world: Any) -> dict[str, float]:
        super()._rates(first, last, world)
        return {"rate": [1.0, 4.0][int(self._module.global_rank)] * world.size}  # type: ignore[union-attr]


def logged(samples: int) -> Any:
    logger = Memory()
    trainer = make_trainer(
        Rates(batch_size_fn=lambda batch: 1),
        LearningRateMonitor("step"),
        logger=logger,
        strategy="ddp",
        log_every_n_steps=1,
        gradient_clip_val=1e6,
        max_epochs=2,
    )
    trainer.fit(TinyModule(), tiny_loader(samples))
    return logger.rows


def test_what_callbacks_log_is_reduced() -> None:
    """Values that callbacks log are reduced over the ranks, and only the main process logs them.

    13 samples are four batches, the last of which has a single sample.
    """
    main, other = run_world(2, logged, 13)
    assert other == []
    assert [row["rate"] for _, row in main if "rate" in row] == [5.0] * 3  # the mean, not weighted by batch size
    assert [row["lr-SGD"] for _, row in main if "lr-SGD" in row] == [0.1] * 4
    assert [step for step, row in main if row.get("grad_norm", 0) > 0] == [1, 2, 3, 4]


def test_what_callbacks_log_where_a_process_has_no_batch() -> None:
    """Rank 1 has no batch in the third step of each epoch; the values are logged all the same."""
    main, _ = run_world(2, logged, 17)
    assert [step for step, row in main if "rate" in row] == [2, 3, 4, 5, 6]
    assert [row["lr-SGD"] for _, row in main if "lr-SGD" in row] == [0.1] * 6
    assert [step for step, row in main if row.get("grad_norm", 0) > 0] == [1, 2, 3, 4, 5, 6]


class LateLoss(TinyModule):
    """Rank 1 has no loss in its first two batches, so it cannot count FLOPs in them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if self.global_rank == 1 and batch_idx < 2 else self.loss(batch)


def counted() -> tuple[list[tuple[int, dict[str, float]]], float | None]:
    logger, monitor = Memory(), ThroughputMonitor(measure_flops=True)
    trainer = make_trainer(monitor, logger=logger, strategy="ddp", log_every_n_steps=1)
    trainer.fit(LateLoss(), tiny_loader(40))
    return logger.rows, monitor.flops_per_sample


def test_flops_that_one_process_counts_later() -> None:
    (rows, first), (_, second) = run_world(2, counted)
    assert first == second
    rates = {step: row["throughput/tflops_per_device"] for step, row in rows if "throughput/tflops_per_device" in row}
    assert list(rates) == [2, 3, 4, 5]
    assert all(rate > 0.0 for rate in rates.values())  # of the ranks that have counted FLOPs


def shown() -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer = make_trainer(strategy="ddp", enable_progress_bar=True, enable_model_summary=True)
        assert trainer.progress_bar_callback is not None  # every process has it, although only one shows it
        trainer.fit(TinyModule(), tiny_loader(18), tiny_loader(6))
    return printed.getvalue()


def test_the_main_process_shows_the_run() -> None:
    main, other = run_world(2, shown)
    assert other == ""
    assert "3/3 batches" in main
    assert "5         Trainable params" in main
