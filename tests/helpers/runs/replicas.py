"""Train with the methods of a strategy on several processes, and with a plain loop on one process, to compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from helpers.worlds.worlds import run_world
from torch import Tensor, nn

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.micro_batch import NO_BATCH, WHOLE_WINDOW, MicroBatch, MicroBatchKind
from trainkit.strategies import DDPStrategy

__all__ = ["Net", "NoLoss", "Plan", "by_hand", "flat", "joined", "over_strategy", "own_loop"]


class NoLoss:
    """In a plan: a micro-batch whose step returns no loss."""


Plan = Sequence[Sequence[Any]]
"""The windows of a training, each a list of micro-batches in their global order.

A micro-batch is the seed of its inputs, `NoLoss`, or the negative of a seed: it counts for nothing, and its loss is NaN.
"""


class Net(nn.Module):
    """A small network with the methods of a `TrainModule`; its buffer counts the forwards in this process."""

    automatic_optimization = True

    def __init__(self, width: int = 8, seed: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 1)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.last(self.first(x).tanh())

    def training_step(self, item: Any, batch_idx: int) -> Tensor | None:
        if item is NoLoss:
            return None
        loss = self(inputs(abs(item), self.first.weight.dtype)).square().mean()
        return loss * torch.nan if item < 0 else loss


def together(size: int, jobs: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Call several functions, one after another, on each of `size` processes. This starts the processes only once.

    Args:
        size: Number of processes.
        jobs: Name → a function and its arguments.

    Returns:
        Name → the results by rank.
    """
    by_rank = run_world(size, _work, [*jobs.values()])
    return {name: [results[i] for results in by_rank] for i, name in enumerate(jobs)}


def _work(jobs: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*arguments) for function, *arguments in jobs]


def inputs(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def flat(module: nn.Module) -> list[float]:
    """All parameters as a list of numbers: exact, and easy to send to another process."""
    values = [p.detach() for p in module.parameters()]
    return [x for p in values for x in (torch.view_as_real(p) if p.is_complex() else p).double().flatten().tolist()]


def joined(**options: Any) -> DDPStrategy:
    """A `DDPStrategy` that has joined the process group, in a process of `run_world`."""
    strategy = DDPStrategy(**{"timeout": timedelta(seconds=60), **options})
    strategy.join(RequestedDevices("cpu"))
    return strategy


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def weight(item: Any) -> float:
    return 0.0 if item is not NoLoss and item < 0 else 1.0


def by_hand(
    plan: Plan,
    module: nn.Module,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    before: Callable[[nn.Module, int], None] = lambda module, window: None,
) -> nn.Module:
    """Train on one process: the gradient is the mean over the window; a window without a loss makes no optimizer step."""
    optimizer = make(module)
    for number, window in enumerate(plan):
        before(module, number)
        optimizer.zero_grad()
        total = sum(map(weight, window))
        losses = [(module.training_step(item, 0), item) for item in window]
        for loss, item in losses:
            if loss is not None and weight(item):
                (loss / total).backward()
        if total and any(loss is not None for loss, _ in losses):
            optimizer.step()
    return module


def micro_batches(items: Sequence[Any], rank: int, size: int) -> Iterator[MicroBatch]:
    """The micro-batches of a rank in a window, as a prepared loader yields them."""
    mine, total = items[rank::size], sum(map(weight, items))
    facts = {"empty": total == 0, "uneven": len(items) % size != 0}
    if not mine:
        yield MicroBatch(NO_BATCH, 0, True, True, 0.0, MicroBatchKind.NONE, **facts)
    for i, item in enumerate(mine):
        share = size * weight(item) / total if total else 0.0
        yield MicroBatch(item, i, i == 0, i == len(mine) - 1, share, **facts)


def over_strategy(
    strategy: DDPStrategy,
    plan: Plan,
    module: nn.Module,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    before: Callable[[nn.Module, int], None] = lambda module, window: None,
    compiler: Any = None,
) -> nn.Module:
    """Train like the `Trainer`: the strategy calls `training_step`."""
    rank, size = strategy.data_world.rank, strategy.data_world.size
    step = strategy.step_function(strategy.prepare_module(module), module, "training_step", compiler)
    optimizer = strategy.prepare_optimizer(make(module), module)
    for number, items in enumerate(plan):
        before(module, number)
        optimizer.zero_grad()
        had_loss = False
        for micro in micro_batches(items, rank, size):
            strategy.begin_micro_batch(micro)
            loss = None if micro.batch is NO_BATCH else step(micro.batch, 0)
            if loss is None or micro.share == 0.0:
                strategy.skip_backward(loss, micro)
            else:
                strategy.backward(loss * micro.share, micro)
            had_loss = had_loss or loss is not None
        if micro.uneven:
            strategy.reduce_gradients(module.parameters(), micro)
        if not micro.empty and strategy.any_loss(had_loss):
            strategy.optimizer_step(optimizer)
    return module


def own_loop(
    strategy: DDPStrategy,
    plan: Plan,
    module: Net,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    hold: bool = False,
) -> nn.Module:
    """Train like your own training loop: it calls the model. A rank without a micro-batch runs another one with share 0.

    Args:
        strategy: A strategy that has joined the process group.
        plan: The windows, without `NoLoss`.
        module: The module to train.
        make: Creates the optimizer.
        hold: Use `model.no_sync()` in all but the last micro-batch of a window; the strategy does not know the windows.
    """
    rank, size = strategy.rank, strategy.world_size
    model: Any = strategy.wrap(strategy.prepare_module(module))
    optimizer = make(model)
    for items in plan:
        optimizer.zero_grad()
        for micro in micro_batches(items, rank, size):
            item = 1 if micro.batch is NO_BATCH else abs(micro.batch)
            told = WHOLE_WINDOW if hold else micro
            strategy.begin_micro_batch(told)
            with model.no_sync() if hold and not micro.last else nullcontext():
                loss = model(inputs(item, module.first.weight.dtype)).square().mean()
                if micro.share == 0.0:
                    strategy.skip_backward(torch.zeros(()), told)
                else:
                    strategy.backward(loss * micro.share, told)
        if micro.uneven:
            strategy.reduce_gradients(model.parameters(), told)
        strategy.optimizer_step(optimizer)
    return module
