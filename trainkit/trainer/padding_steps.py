"""Micro-batches without data: a rank that has none takes part in the collectives of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainkit.console import notice
from trainkit.data.micro_batch import NO_BATCH, MicroBatch, MicroBatchKind
from trainkit.errors import DataError
from trainkit.metrics.metric_objects import metric_objects, object_state, set_state
from trainkit.metrics.store import MetricResults, MetricStore
from trainkit.nested import map_tensors

if TYPE_CHECKING:
    from trainkit.trainer.plans import EvaluationPlan, FitPlan
    from trainkit.trainer.run import Run

__all__ = [
    "pad_alone",
    "pad_evaluation",
    "pad_manual_step",
    "pad_training_step",
    "pad_without_forward",
    "without_data",
    "without_effects",
]


@contextmanager
def without_effects(run: Run, batch: Any) -> Iterator[None]:
    """Within it logged values are dropped; afterwards buffers and torchmetrics objects have their values from before."""
    outer = run.metrics
    run.metrics = MetricStore(lambda metrics, for_step: None, MetricResults())
    run.metrics.scope, run.metrics.batch = outer.scope, batch
    before = [(buffer, buffer.clone()) for buffer in run.module.buffers()]
    objects = metric_objects(run.module).values()
    states = [(metric, map_tensors(object_state(metric), torch.clone)) for metric in objects]  # which change in place
    try:
        yield
    finally:
        run.metrics = outer
        for metric, state in states:
            set_state(metric, state)
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def without_data(plan: FitPlan, micro: MicroBatch) -> MicroBatch:
    """The micro-batch where the training loader yielded `None`: this rank has no data in it.

    Raises:
        DataError: the other ranks wait in the training step.
    """
    if plan.several and plan.loader.pads:
        raise DataError(
            "the training loader yielded None instead of a batch. With several processes, manual optimization and strategies "
            "that shard parameters need a batch in every step. Return a usable one from the collate_fn, for example: "
            "return default_collate(kept or [fallback_sample])"
        )
    notice("the training loader yielded None instead of a batch. Such batches are skipped.", everywhere=True)
    return micro._replace(batch=NO_BATCH, kind=MicroBatchKind.NONE, share=0.0)


def pad_alone(run: Run, plan: FitPlan, batch: Any, batch_idx: int) -> None:
    """Do nothing: there are no other ranks."""


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
