"""Steps that count for nothing: a process that has no micro-batch takes part in what the others wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from trainkit.metrics.store import MetricResults, MetricStore

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["fill_evaluation", "fill_manual_step", "fill_nothing", "fill_step", "unnoticed"]


@contextmanager
def unnoticed(trainer: Trainer, batch: Any) -> Iterator[None]:
    """Within it what is logged is lost, and afterwards the module's buffers are as they were."""
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


def fill_nothing(trainer: Trainer, batch: Any, batch_idx: int) -> None:
    """Where gradients are reduced without a forward: they are zero here."""
    trainer._fit_plan.backward(None)


def fill_manual_step(trainer: Trainer, batch: Any, batch_idx: int) -> None:
    """Under manual optimization only the module's code tells what others wait for."""
    with unnoticed(trainer, batch):
        trainer._fit_plan.training_step(batch, batch_idx)


def fill_step(trainer: Trainer, batch: Any, batch_idx: int) -> None:
    """Where a forward has collectives: it is run, and its gradients are zero."""
    with unnoticed(trainer, batch):
        outputs = trainer._fit_plan.training_step(batch, batch_idx)
        trainer._fit_plan.backward(outputs["loss"] if isinstance(outputs, dict) else outputs)


def fill_evaluation(trainer: Trainer, batch: Any, batch_idx: int, index: int) -> None:
    """The same in an evaluation, whose outputs are dropped."""
    plan = trainer._active_plan
    assert plan is not None
    with unnoticed(trainer, batch):
        plan.step(batch, batch_idx, index)
