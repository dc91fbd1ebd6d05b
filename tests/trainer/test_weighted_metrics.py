"""What `training_step` logs is weighted like the gradient if the module defines `batch_weight`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.runs.trainers import Memory, make_trainer
from helpers.worlds.worlds import run_world
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from trainkit import TrainModule
from trainkit.console import TrainkitWarning

# For each sample the number of its tokens that count, and the loss of each of them. The last micro-batch has no tokens.
TOKENS = torch.tensor([1.0, 2.0, 8.0, 1.0, 3.0, 0.0, 5.0, 2.0, 1.0, 1.0, 0.0, 0.0])
LOSSES = torch.arange(12.0)
MEAN = float((TOKENS * LOSSES).sum() / TOKENS.sum())


class Weighed(TrainModule):
    """The loss of a micro-batch is the mean over its tokens, plus a parameter that stays 0; NaN without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = torch.nn.Parameter(torch.zeros(()))

    def batch_weight(self, batch: list[Tensor]) -> float:
        return float(batch[0].sum())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, losses = batch
        loss = (tokens * losses).sum() / tokens.sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"samples": losses.mean()}, on_step=False, on_epoch=True, batch_size=len(losses))
        return loss + self.zero

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", batch[1].mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Unweighed(Weighed):
    batch_weight = TrainModule.batch_weight


def logged(
    kind: type[Weighed], strategy: str = "auto", window: int = 1, tokens: Tensor = TOKENS
) -> dict[str, dict[int, float]]:
    """The metrics of an epoch, by name and step."""
    memory, data = Memory(), TensorDataset(tokens, LOSSES)
    options = {"strategy": strategy, "accumulate_grad_batches": window, "logger": memory, "log_every_n_steps": 1}
    make_trainer(**options).fit(kind(), DataLoader(data, 2), DataLoader(data, 2))
    return {name: memory.of(name) for name in ("loss_step", "loss_epoch", "samples", "val")}


# --------------------------------------------------------------------------------------- the value of a step is its window's


class Steps(Weighed):
    """Logs by step with each kind of reduction; keeps what monitors, bar and loggers see after each optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, losses = batch
        loss = (tokens * losses).sum() / tokens.sum().clamp(min=1.0)
        self.log("loss", loss, prog_bar=True)
        self.log("own", loss, batch_size=1)
        for how in ("sum", "min", "max"):
            self.log(how, losses[0], reduce_fx=how)
        self.log("order", losses[0], reduce_fx=in_order)
        self.log("first", losses[0]) if batch_idx % 4 < 2 else None  # only in a part of the window
        self.log("twice", 100.0)
        self.log("twice", losses[0])  # the last value of a micro-batch counts
        return loss + self.zero

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        names = [*self.trainer.callback_metrics]
        self.seen.append({name: float(self.trainer.callback_metrics[name]) for name in names})


def in_order(values: Tensor) -> Tensor:
    """The values as digits in base 100."""
    return (values * 100.0 ** torch.arange(len(values)).flip(0)).sum()


def steps(strategy: str, window: int) -> tuple[list[dict[str, float]], list[dict[str, float]], dict[str, float]]:
    memory, module = Memory(), Steps()
    trainer = make_trainer(strategy=strategy, accumulate_grad_batches=window, logger=memory, log_every_n_steps=1)
    trainer.fit(module, DataLoader(TensorDataset(TOKENS, LOSSES), 1))
    return [row for _, row in memory.rows], module.seen, dict(trainer.progress_bar_metrics)


def check_steps(rows: list[dict[str, float]]) -> None:
    """Windows of four samples, by hand: tokens 1, 2, 8, 1; 3, 0, 5, 2; 1, 1, 0, 0 and losses 0 to 11."""
    assert [row["loss"] for row in rows] == pytest.approx([(0 + 2 + 16 + 3) / 12, (12 + 0 + 30 + 14) / 10, (8 + 9) / 2])
    assert [row["own"] for row in rows] == pytest.approx([6 / 4, (4 + 0 + 6 + 7) / 4, (8 + 9 + 0 + 0) / 4])
    assert [row["sum"] for row in rows] == [6.0, 22.0, 38.0]
    assert [row["min"] for row in rows] == [0.0, 4.0, 8.0]
    assert [row["max"] for row in rows] == [3.0, 7.0, 11.0]
    assert [row["order"] for row in rows] == [10203.0, 4050607.0, 8091011.0]
    assert [row["twice"] for row in rows] == pytest.approx([(0 + 2 + 16 + 3) / 12, (12 + 0 + 30 + 14) / 10, (8 + 9) / 2])


def test_a_step_is_reduced_over_its_window() -> None:
    rows, seen, bar = steps("auto", 4)
    check_steps(rows)
    assert [row["first"] for row in rows] == pytest.approx([2 / 3, 12 / 3, (8 + 9) / 2])
    for row, after in zip(rows, seen[3::4], strict=True):  # monitors see the same at the end of the window
        assert after.items() >= {name: value for name, value in row.items() if name != "epoch"}.items()
    assert [after["loss"] for after in seen[:4]] == pytest.approx([0.0, 2 / 3, 18 / 11, 21 / 12])  # and so far within it
    assert bar["loss"] == pytest.approx(8.5)


def test_a_step_is_reduced_over_its_window_and_the_processes() -> None:
    (rows, _, bar), (_, _, other) = run_world(2, steps, "ddp", 2)
    check_steps(rows)
    assert bar == other == {"loss": pytest.approx(8.5)}


@pytest.mark.parametrize("window", [1, 2, 4])
def test_the_mean_of_an_epoch_is_over_tokens(window: int) -> None:
    """An explicit `batch_size` and the metrics of a validation keep their weights."""
    found = logged(Weighed, window=window)
    assert [*found["loss_epoch"].values()] == [pytest.approx(MEAN)]
    assert [*found["samples"].values()] == [*found["val"].values()] == [pytest.approx(5.5)]


def test_without_batch_weight_it_is_over_samples() -> None:
    """So the tests of tokens can fail."""
    tokens = TOKENS.clamp(min=1.0)
    pairs = zip(tokens.view(6, 2), LOSSES.view(6, 2), strict=True)
    expected = sum(float((own * losses).sum() / own.sum()) for own, losses in pairs) / 6
    assert [*logged(Unweighed, tokens=tokens)["loss_epoch"].values()] == [pytest.approx(expected)]


def test_an_epoch_without_weight_has_no_mean() -> None:
    with pytest.warns(TrainkitWarning, match="batch_weight returned 0"):
        values = logged(Weighed, tokens=torch.zeros(12))["loss_epoch"].values()
    assert values
    assert all(map(math.isnan, values))


def test_over_two_processes() -> None:
    """The value of a step is the mean over the tokens of the micro-batches of both, that of the epoch over all."""
    found, _ = run_world(2, logged, Weighed, "ddp")
    assert [*found["loss_epoch"].values()] == [pytest.approx(MEAN)]
    weights, sums = TOKENS.view(3, 4).sum(1), (TOKENS * LOSSES).view(3, 4).sum(1)
    assert [*found["loss_step"].values()] == pytest.approx((sums / weights).tolist())


def test_a_resumed_epoch_has_the_same_mean(run_dir: Any) -> None:
    """The weights of an interrupted epoch are in the checkpoint."""

    class Saving(Weighed):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.saves and batch_idx == 2:
                self.trainer.save_checkpoint("middle")

    def fit(saves: bool, **options: Any) -> dict[int, float]:
        memory, module = Memory(), Saving()
        module.saves = saves
        make_trainer(logger=memory).fit(module, DataLoader(TensorDataset(TOKENS, LOSSES), 2), **options)
        return memory.of("loss_epoch")

    whole = fit(True)
    assert [*whole.values()] == [pytest.approx(MEAN)]
    assert fit(False, ckpt_path="middle") == whole
