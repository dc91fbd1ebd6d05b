"""The number of XLA compilations: two at the start and one for each further shape; nothing else in a run compiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.trainers import Memory
from helpers.xla.xla_cases import FEW, KINDS, Masked, Net, Notes, Numbers, Trained, loader, quiet, train, under
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from trainkit import Callback
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.folder import list_checkpoints

pytestmark = pytest.mark.xla

SAMPLES = 77  # ten batches, the last of five samples


def after(trained: Trained, updates: int) -> int:
    """The number of compiled graphs after a number of optimizer steps."""
    return next(count for made, count in zip(trained.updates, trained.compilations, strict=True) if made == updates)


def later(trained: Trained) -> dict[tuple[int, int], int]:
    """Compilations after the second optimizer step: (epoch, micro-batch) → number of graphs."""
    before, found = after(trained, 2), {}
    for place, count, made in zip(trained.places, trained.compilations, trained.updates, strict=True):
        if made > 2 and count > before:
            found[place], before = count - before, count
    return found


# ------------------------------------------------------------------------------------------- learning-rate schedules


def ends_at_zero(step: int) -> float:
    return max(0.0, 1.0 - step / 15)


def through_one(step: int) -> float:
    """Rises from 0 to 2, and falls to 0. At 2, a learning rate of 0.5 becomes exactly 1."""
    return step / 5 if step <= 10 else max(0.0, (18 - step) / 4)


class TwoGroups(Net):
    """Two parameter groups, whose learning rates pass through 0 and exactly 1, and are sometimes equal."""

    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        groups = [{"params": [first], "lr": 0.5}, {"params": rest, "lr": 0.5}]
        made: torch.optim.Optimizer
        if self.optimizer == "sgd":
            made = torch.optim.SGD(groups, lr=0.5, momentum=0.9, weight_decay=1e-4)
        else:
            made = torch.optim.AdamW(groups, lr=0.5, weight_decay=1e-4)
        factors: list[Callable[[int], float]] = [through_one, lambda step: through_one(max(0, step - 1))]
        return {"optimizer": made, "lr_scheduler": {"scheduler": LambdaLR(made, factors), "interval": "step"}}


def scheduled(kind: str, make: type[Net], optimizer: str) -> Trained:
    module = make(optimizer, ends_at_zero) if make is Net else make(optimizer)
    return train(kind, module, loader(kind, Numbers(SAMPLES)), max_epochs=2, val_dataloaders=loader(kind, Numbers(16)))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("make, optimizer", [(Net, "adamw"), (TwoGroups, "adamw"), (TwoGroups, "sgd")])
def test_schedules(make: type[Net], optimizer: str, kind: str) -> None:
    """Learning rates of 0 and 1 compile nothing; the only further graphs are those of the short batch and of the evaluation."""
    trained = under(kind, scheduled, make, optimizer)
    assert 0.0 in trained.rates
    if make is TwoGroups:
        assert {0.0, 1.0} <= set(trained.rates)
    assert after(trained, 2) == 2
    assert later(trained) == {(0, 9): 1, (1, 0): 1}


def filled_up(kind: str) -> Trained:
    return train(kind, Masked(), loader(kind, Numbers(SAMPLES)), max_epochs=2, options={"pad_last_batch": True})


@pytest.mark.parametrize("kind", FEW)
def test_a_padded_short_batch_has_the_same_graph(kind: str) -> None:
    assert later(under(kind, filled_up)) == {}


# --------------------------------------------------------------------------------------- what happens between steps


class Logging(Net):
    """Logs with all kinds of options."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("largest", batch["x"].max(), on_epoch=True, reduce_fx="max")
        self.log("root", loss.detach().sqrt(), on_step=False, on_epoch=True)
        self.log("number", float(batch_idx))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)


def logged(kind: str, every: int, bar: bool) -> tuple[Trained, dict[int, float]]:
    notes, memory = Notes(), Memory()
    trainer = quiet(
        kind,
        notes,
        max_epochs=2,
        logger=memory,
        log_every_n_steps=every,
        enable_progress_bar=bar,
        gradient_clip_val=1.0,
        val_check_interval=5,
    )
    trainer.fit(Logging(), loader(kind, Numbers(80)), loader(kind, Numbers(16)))
    return notes.trained, memory.of("loss_step")


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("every, bar", [(1, False), (5, True)])
def test_logging_and_validation(kind: str, every: int, bar: bool) -> None:
    """Logged values are read after they are computed, which compiles nothing; the only further graph is the evaluation's."""
    trained, rows = under(kind, logged, every, bar)
    assert list(rows) == list(range(every, 21, every))
    assert sum(later(trained).values()) == 1
    assert list(later(trained)) == [(0, 5)]
    assert all(abs(rows[step] - trained.losses[step - 1]) < 1e-7 for step in rows)


def accumulated(kind: str, samples: int) -> Trained:
    arguments = {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0, "max_epochs": 2}
    return train(kind, Net("adamw", ends_at_zero), loader(kind, Numbers(samples)), **arguments)


@pytest.mark.parametrize("kind", FEW)
def test_accumulation(kind: str) -> None:
    """At most six graphs: for the first, middle and last micro-batch of a window, before and after the optimizer has state."""
    trained = under(kind, accumulated, 128)
    assert after(trained, 2) <= 6
    assert later(trained) == {}
    trained = under(kind, accumulated, 80)  # ten micro-batches: the last window of an epoch has two
    assert later(trained) == {}


def saved(kind: str, folder: Path) -> Trained:
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=4, save_top_k=0)
    return train(kind, Net("adamw", ends_at_zero), loader(kind, Numbers(80)), saving, max_epochs=2, enable_checkpointing=True)


@pytest.mark.parametrize("kind", FEW)
def test_saving(kind: str, run_dir: Path) -> None:
    trained = under(kind, saved, run_dir / "checkpoints")
    assert len(list((run_dir / "checkpoints").iterdir())) >= 1
    assert after(trained, 2) == 2
    assert later(trained) == {}


def gone_on(kind: str, folder: Path) -> list[int]:
    """Resume from the newest checkpoint; returns the graphs that were compiled after each micro-batch."""
    notes = Notes()
    quiet(kind, notes, max_epochs=4).fit(Net("adamw", ends_at_zero), loader(kind, Numbers(80)), ckpt_path=folder)
    return notes.trained.compilations


@pytest.mark.parametrize("kind", list(KINDS))
def test_resuming(kind: str, run_dir: Path) -> None:
    """After a resume, the optimizer already has state, so on one device a single graph is enough.

    On several devices there is a second one: it shards the loaded state, or the first step determines the sharding.
    """
    under(kind, saved, run_dir / "checkpoints")
    newest, *_ = list_checkpoints(run_dir / "checkpoints")
    compilations = under(kind, gone_on, newest.path)
    assert len(compilations) == 20
    assert compilations[1] == (1 if kind == "one" else 2)
    assert compilations[1:] == compilations[1:2] * 19, "the second update was the last to be compiled"


# ---------------------------------------------------------------------------------------------- graphs that are run


class Counted(Callback):
    """The number of graphs that had run at the end of each micro-batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        import torch_xla.debug.metrics as metrics

        self.counts.append(metrics.metric_data("TensorsGraphSize")[0])  # recorded whenever a graph runs


def run(kind: str, window: int, clip: float | None, workers: int) -> list[int]:
    counted = Counted()
    trainer = quiet(kind, counted, max_epochs=2, accumulate_grad_batches=window, gradient_clip_val=clip)
    trainer.fit(Net("adamw", ends_at_zero), loader(kind, Numbers(96), num_workers=workers, shuffle=True))
    return counted.counts


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("window, clip, workers", [(1, None, 0), (1, 1.0, 2), (4, 1.0, 0)])
def test_one_graph_is_run_for_each_micro_batch(kind: str, window: int, clip: float | None, workers: int) -> None:
    counts = under(kind, run, window, clip, workers)
    assert len(counts) == 24
    between = [b - a for a, b in itertools.pairwise(counts)]
    assert between == [1] * 23
