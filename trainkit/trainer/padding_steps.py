"""Padding micro-batches: a rank without data takes part in the collectives of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainkit.metrics.store import MetricResults, MetricStore

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["pad_evaluation", "pad_manual_step", "pad_training_step", "pad_without_forward", "without_effects"]


@contextmanager
def without_effects(trainer: Trainer, batch: Any) -> Iterator[None]:
    """Within it logged values are dropped; afterwards the module's buffers have their values from before."""
    outer = trainer._metrics
    trainer._metrics = MetricStore(lambda metrics, for_step: None, MetricResults())
    trainer._metrics.scope, trainer._metrics.batch = outer.scope, batch
    before = [(buffer, buffer.clone()) for buffer in trainer.lightning_module.buffers()]
    try:
        yield
    finally:
        trainer._metrics = outer
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def pad_without_forward(trainer: Trainer, batch: Any, batch_idx: int) -> None:
    """Take part with zero gradients, for a strategy that can average them without a forward."""
    trainer._fit_plan.backward(None)


def pad_manual_step(trainer: Trainer, batch: Any, batch_idx: int) -> None:
    """Run the training step: under manual optimization only the module's code knows the collectives of a step."""
    with without_effects(trainer, batch):
        trainer._fit_plan.training_step(batch, batch_idx)


def pad_training_step(trainer: Trainer, batch: Any, batch_idx: int) -> None:
    """Run the training step with zero gradients, for a strategy whose forward has collectives."""
    with without_effects(trainer, batch):
        outputs = trainer._fit_plan.training_step(batch, batch_idx)
        trainer._fit_plan.backward(outputs["loss"] if isinstance(outputs, dict) else outputs)


def pad_evaluation(trainer: Trainer, batch: Any, batch_idx: int, index: int) -> None:
    """Run the step of an evaluation and drop its outputs."""
    plan = trainer._active_plan
    assert plan is not None
    with without_effects(trainer, batch):
        plan.step(batch, batch_idx, index)
