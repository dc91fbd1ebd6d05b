"""Padding micro-batches: a rank without data takes part in the collectives of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainkit.metrics.store import MetricResults, MetricStore

if TYPE_CHECKING:
    from trainkit.trainer.plans import EvaluationPlan, FitPlan
    from trainkit.trainer.run import Run

__all__ = ["pad_evaluation", "pad_manual_step", "pad_training_step", "pad_without_forward", "without_effects"]


@contextmanager
def without_effects(run: Run, batch: Any) -> Iterator[None]:
    """Within it logged values are dropped; afterwards the module's buffers have their values from before."""
    outer = run.metrics
    run.metrics = MetricStore(lambda metrics, for_step: None, MetricResults())
    run.metrics.scope, run.metrics.batch = outer.scope, batch
    before = [(buffer, buffer.clone()) for buffer in run.module.buffers()]
    try:
        yield
    finally:
        run.metrics = outer
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def pad_without_forward(run: Run, plan: FitPlan, batch: Any, batch_idx: int) -> None:
    """Contribute zero gradients, for a strategy that can average gradients without a forward."""
    plan.backward(None)


def pad_manual_step(run: Run, plan: FitPlan, batch: Any, batch_idx: int) -> None:
    """Run the training step: under manual optimization only the module's code knows the collectives of a step."""
    with without_effects(run, batch):
        plan.training_step(batch, batch_idx)


def pad_training_step(run: Run, plan: FitPlan, batch: Any, batch_idx: int) -> None:
    """Run the training step with zero gradients, for a strategy whose forward has collectives."""
    with without_effects(run, batch):
        outputs = plan.training_step(batch, batch_idx)
        plan.backward(outputs["loss"] if isinstance(outputs, dict) else outputs)


def pad_evaluation(run: Run, plan: EvaluationPlan, batch: Any, batch_idx: int, index: int) -> None:
    """Run the step of an evaluation and drop its outputs."""
    with without_effects(run, batch):
        plan.step(batch, batch_idx, index)
