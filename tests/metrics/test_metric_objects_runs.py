"""Objects of torchmetrics passed to `log`: the value of the batch by step, and the value of `compute` by epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import Memory, make_trainer
from torch import Tensor

from trainkit.errors import MetricError


class WithMetrics(TinyModule):
    """Holds a torchmetrics object; `use(module, metric, batch)` is called in each training step."""

    def __init__(self, use: Callable[[Any, Any, list[Tensor]], Any]) -> None:
        super().__init__()
        self.use = [use]
        self.metric = torchmetrics.MeanSquaredError()
        self.several = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}, prefix="all/"
        )
        self.errors: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.errors.append((self(batch[0]) - batch[1]).detach().square())
        self.use[0](self, self.metric, batch)
        return self.loss(batch)


def with_metrics(use: Callable[[Any, Any, list[Tensor]], Any], log_every_n_steps: int = 1) -> tuple[WithMetrics, Memory]:
    logger, module = Memory(), WithMetrics(use)
    make_trainer(logger=logger, log_every_n_steps=log_every_n_steps, max_epochs=2).fit(
        module, tiny_loader(10, 4)
    )  # batches of 4, 4, 2
    return module, logger


def test_a_torchmetrics_object_by_step_and_epoch() -> None:
    module, logger = with_metrics(lambda m, metric, batch: (metric(m(batch[0]), batch[1]), m.log("mse", metric, on_epoch=True)))
    by_step = [error.mean().item() for error in module.errors]
    assert list(logger.of("mse_step").values()) == pytest.approx(by_step)
    epochs = [torch.cat(module.errors[:3]).mean().item(), torch.cat(module.errors[3:]).mean().item()]  # reset after each epoch
    assert logger.of("mse_epoch") == {3: pytest.approx(epochs[0]), 6: pytest.approx(epochs[1])}


def test_a_torchmetrics_object_that_is_only_updated() -> None:
    def use(module: Any, metric: Any, batch: list[Tensor]) -> None:
        metric.update(module(batch[0]), batch[1])
        module.log("mse", metric, on_step=False, on_epoch=True)

    module, logger = with_metrics(use)
    epochs = [torch.cat(module.errors[:3]).mean().item(), torch.cat(module.errors[3:]).mean().item()]
    assert logger.of("mse") == {3: pytest.approx(epochs[0]), 6: pytest.approx(epochs[1])}


def test_a_torchmetrics_object_without_a_value_of_the_batch() -> None:
    with pytest.raises(MetricError, match=r"has no value for this batch, because update\(\) does not .* Call metric\(preds"):
        with_metrics(lambda m, metric, batch: (metric.update(m(batch[0]), batch[1]), m.log("mse", metric)))


def test_a_collection_of_torchmetrics_objects() -> None:
    module, logger = with_metrics(lambda m, _, batch: (m.several(m(batch[0]), batch[1]), m.log_dict(m.several, on_epoch=True)))
    first = torch.cat(module.errors[:3])
    assert logger.of("all/mse_epoch")[3] == pytest.approx(first.mean().item())
    assert logger.of("all/mae_epoch")[3] == pytest.approx(first.sqrt().mean().item())
    with pytest.raises(MetricError, match=r"MetricCollection contains several metrics\. Use self\.log_dict\(collection\)"):
        with_metrics(lambda m, _, batch: (m.several(m(batch[0]), batch[1]), m.log("all", m.several)))
    tracker = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=True)
    with pytest.raises(
        MetricError, match=r"MetricTracker keeps the values of earlier epochs, .*self\.log\('all', tracker\.comp"
    ):
        with_metrics(lambda m, _, batch: m.log("all", tracker))


def test_one_name_stands_for_one_torchmetrics_object() -> None:
    def other(module: Any, metric: Any, batch: list[Tensor]) -> None:
        value = metric if len(module.errors) == 1 else module.several["mse"]
        value(module(batch[0]), batch[1])
        module.log("mse", value)

    with pytest.raises(MetricError, match="the name was already used in this epoch for another Metric or for numbers"):
        with_metrics(other)
    with pytest.raises(MetricError, match="the name was already used in this epoch for another Metric or for numbers"):
        with_metrics(
            lambda m, metric, batch: m.log("x", (metric(m(batch[0]), batch[1]), metric)[1] if len(m.errors) == 1 else 1.0)
        )


def test_a_torchmetrics_object_that_was_not_logged_in_an_epoch_is_not_computed() -> None:
    def use(module: Any, metric: Any, batch: list[Tensor]) -> None:
        if module.current_epoch == 0:
            metric(module(batch[0]), batch[1])
            module.log("mse", metric, on_step=True, on_epoch=True)

    for every in (1, 2, 50):  # with 2, a value of a step waits for a log boundary in the next epoch
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torchmetrics warns of compute() before update()
            _, logger = with_metrics(use, log_every_n_steps=every)
        assert list(logger.of("mse_epoch")) == [3]
