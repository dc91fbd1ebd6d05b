"""Use a `MetricStore` like the training loop, and keep its output: `from helpers.runs.metric_runs import Run`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainkit.distributed.world import World
from trainkit.metrics.store import MetricResults, MetricStore, Scope

__all__ = ["Run", "Step", "epoch", "evaluation", "many", "same", "sized", "value_of"]


class Run:
    """A `MetricStore`; `rows` is what it passed to the loggers: (for_step, metrics), or (step, metrics) if it passed a step."""

    def __init__(self, world: World | None = None) -> None:
        self.rows: list[tuple[Any, dict[str, float]]] = []
        self.results = MetricResults()
        self.world = world or World()
        self.store = MetricStore(self._emit, self.results, world=self.world)

    def _emit(self, metrics: dict[str, float], for_step: bool, step: int | None = None) -> None:
        self.rows.append((for_step if step is None else step, dict(metrics)))

    def log(self, name: str, value: Any, **options: Any) -> None:
        defaults = {
            "prog_bar": False,
            "logger": None,
            "on_step": None,
            "on_epoch": None,
            "reduce_fx": "mean",
            "enable_graph": False,
            "add_dataloader_idx": True,
            "batch_size": None,
            "rank_zero_only": False,
        }
        self.store.log(name, value, **{**defaults, **options})

    def end(self, scope: Scope = Scope.TRAIN_EPOCH) -> dict[str, float]:
        """End the epoch; returns its metrics."""
        self.store.batch, self.store.scope = None, scope
        return self.store.flush_epoch()


Step = Callable[[Run, int], None]


def sized(m: int) -> torch.Tensor:
    """Micro-batch number m; micro-batches have different sizes."""
    return torch.zeros(m % 5 + 1, 2)


def epoch(run: Run, step: Step, batches: int, *, first: int = 0, every: int = 4) -> None:
    """Simulate a training epoch: call `step(run, m)` for each micro-batch of this rank, and log after each `every` of them.

    Args:
        run: The store.
        step: Called for global micro-batch m; logs metrics.
        batches: Number of global micro-batches in the epoch.
        first: Global micro-batch to begin with.
        every: Number of micro-batches of a rank between logged steps.
    """
    store, world = run.store, run.world
    for row, start in enumerate(range(first, batches, world.size), first // world.size):
        m = start + world.rank
        store.scope = Scope.TRAIN_BATCH
        if m < batches:
            store.stamp, store.batch = row, sized(m)
            step(run, m)
        if (row + 1) % every == 0:
            store.flush_step()


def evaluation(run: Run, step: Step, batches: int) -> dict[str, float]:
    """Simulate an evaluation over `batches` global micro-batches; returns its metrics."""
    store, world = run.store, run.world
    store.discard()
    count = 0
    for start in range(0, batches, world.size):
        m, there = start + world.rank, min(world.size, batches - start)
        store.scope = Scope.EVAL_BATCH
        if m < batches:
            store.stamp, store.batch = count, sized(m)
            step(run, m)
        count += there
        if any(world.exchange(store.pending)):
            if world.size == 1:
                store.flush_step()
            else:
                store.flush_row(world, m < batches, count)
    return run.end(Scope.EVAL_EPOCH)


def value_of(m: int) -> Tensor:
    """The value of micro-batch m; magnitudes differ so much that a sum in float32 or a mean without weights is wrong."""
    return torch.randn((), generator=torch.Generator().manual_seed(m), dtype=torch.float64) * 10 ** (m % 7)


def many(run: Run, m: int) -> None:
    """Log metrics with all kinds of options."""
    value = value_of(m)
    run.log("both", value, on_step=True, on_epoch=True, prog_bar=True)
    run.log("mean", value, on_step=False, on_epoch=True)
    run.log("weighed", value.float(), on_step=False, on_epoch=True, batch_size=m % 3)
    run.log("sum", value, on_step=False, on_epoch=True, reduce_fx=torch.sum)
    run.log("min", float(value), on_step=False, on_epoch=True, reduce_fx=min)
    run.log("max", m, on_step=False, on_epoch=True, reduce_fx="max")
    run.log("own", value, on_step=False, on_epoch=True, reduce_fx=lambda values: values[len(values) // 3])
    run.log("silent", value, on_step=False, on_epoch=True, logger=False)


def _close(one: Any, other: Any) -> bool:
    return math.isclose(float(one), float(other), rel_tol=1e-12, abs_tol=1e-7) or (math.isnan(one) and math.isnan(other))


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two results agree, except for the rounding that differs between one and several processes."""
    return first.keys() == second.keys() and all(_close(first[name], second[name]) for name in first)
