"""In hooks at the end of an epoch, `trainer.callback_metrics` has the values of this epoch, for callbacks and the module."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torchmetrics
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor

from trainkit import Callback, Trainer
from trainkit.errors import MetricError

Seen = list[tuple[str, dict[str, float]]]


def add(seen: Seen, hook: str, trainer: Any) -> None:
    seen.append((hook, {name: value.item() for name, value in trainer.callback_metrics.items()}))


class Numbered(TinyModule):
    """Logs the number of batches so far on this rank, plus ten times the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = {"x": 0.0, "val_x": 0.0}

    def next(self, name: str) -> float:
        self.batches[name] += 1
        return self.batches[name] + 10 * self.global_rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("x", self.next("x"), on_step=True, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_x", self.next("val_x"))


class Reading(Numbered):
    """Records the metrics in its own hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []

    def on_train_epoch_end(self) -> None:
        add(self.seen, "train", self.trainer)

    def on_validation_epoch_end(self) -> None:
        add(self.seen, "validation", self.trainer)


class Reader(Callback):
    def __init__(self) -> None:
        self.seen: Seen = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        add(self.seen, "train", trainer)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        add(self.seen, "validation", trainer)


EXPECTED: Seen = [  # four batches per epoch and validation; the first entry is the sanity check, with two batches
    ("validation", {"val_x": 1.5}),
    ("validation", {"x": 4.0, "x_step": 4.0, "val_x": 4.5}),
    ("train", {"x": 2.5, "x_step": 4.0, "x_epoch": 2.5, "val_x": 4.5}),
    ("validation", {"x": 8.0, "x_step": 8.0, "x_epoch": 2.5, "val_x": 8.5}),
    ("train", {"x": 6.5, "x_step": 8.0, "x_epoch": 6.5, "val_x": 8.5}),
]


@pytest.mark.parametrize("who", ["module", "callback"])
def test_they_see_the_values_of_this_epoch(who: str) -> None:
    module, callback, logger = Reading() if who == "module" else Numbered(), Reader(), Memory()
    callbacks = [] if who == "module" else [callback]
    trainer = make_trainer(*callbacks, logger=logger, max_epochs=2, num_sanity_val_steps=2, log_every_n_steps=1)
    trainer.fit(module, tiny_loader(), tiny_loader())
    assert (module.seen if isinstance(module, Reading) else callback.seen) == EXPECTED
    assert logger.of("x_epoch") == {4: 2.5, 8: 6.5}
    assert len([row for _, row in logger.rows if "x_epoch" in row]) == 2  # each value is logged once


def test_a_value_that_the_hook_logs_comes_to_those_of_the_epoch() -> None:
    """Values that the hook itself logs are logged with the other values of the epoch."""

    class Adding(Reading):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            self.log("twice", 2 * self.trainer.callback_metrics["x_epoch"])

    logger = Memory()
    make_trainer(logger=logger, max_epochs=2).fit(Adding(), tiny_loader())
    assert logger.of("twice") == {4: 5.0, 8: 13.0}


def test_a_name_of_the_step_is_still_refused_in_the_hook() -> None:
    class Again(Numbered):
        def on_train_epoch_end(self) -> None:
            self.log("x", 1.0)

    with pytest.raises(MetricError, match=r"log\('x'\) was called twice in one epoch with different options"):
        make_trainer().fit(Again(), tiny_loader())


def test_a_torchmetrics_object_is_reset_after_the_hook() -> None:
    class WithObject(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.SumMetric()
            self.seen: list[tuple[float, float]] = []

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.metric(1.0)
            self.log("sum", self.metric, on_step=False, on_epoch=True)
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            self.seen.append((self.trainer.callback_metrics["sum"].item(), self.metric.compute().item()))

    module, logger = WithObject(), Memory()
    make_trainer(logger=logger, max_epochs=2).fit(module, tiny_loader())
    assert module.seen == [(4.0, 4.0), (4.0, 4.0)]
    assert logger.of("sum") == {4: 4.0, 8: 4.0}


def on_two_processes(everywhere: bool) -> tuple[Seen, Seen]:
    callback = Reader()
    callbacks = [callback] if everywhere or os.environ["RANK"] == "0" else []
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", strategy="ddp", max_epochs=1, num_sanity_val_steps=0, callbacks=callbacks, **quiet)
    trainer.fit(Numbered(), tiny_loader(), tiny_loader())
    return callback.seen, [("after", {name: value.item() for name, value in trainer.callback_metrics.items()})]


@pytest.mark.parametrize("everywhere", [True, False])
def test_on_several_processes_the_values_are_those_of_all(everywhere: bool) -> None:
    """Values are reduced over all ranks, and a callback that only one rank has causes no hang.

    Each rank has two batches: rank 0 logs 1 and 2, rank 1 logs 11 and 12.
    """
    after = {"x": 6.5, "x_step": 7.0, "x_epoch": 6.5, "val_x": 6.5}
    seen = [("validation", {"x": 7.0, "x_step": 7.0, "val_x": 6.5}), ("train", after)]
    first, second = run_world(2, on_two_processes, everywhere)
    assert first == (seen, [("after", after)])
    assert second == (seen if everywhere else [], [("after", after)])
