"""``Accelerator.backward(loss, weight=)``: micro-batches that count by a weight which only the loop knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.data.window import Window, checked_weight
from trainkit.distributed import World
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.strategy import Strategy

__all__ = ["Weighing"]


class Weighing:
    """The weights of the window that is being worked on, and what its gradients are to be divided by.

    The sum of a window's weights is known when its last micro-batch is worked on. Until then losses are scaled by what the
    first row lets one expect, and gradients corrected at the end: so float16 has to hold nothing larger than otherwise.

    Args:
        window: of the accelerator.
        world: the processes.
        strategy: whose gradients they are.

    Raises:
        UnsupportedArgumentError: several micro-batches in a window whose gradients are not to be had.
    """

    def __init__(self, window: Window, world: World, strategy: Strategy) -> None:
        if strategy.sharded_state and window.size > 1:
            raise UnsupportedArgumentError(
                "backward(weight=) with gradient_accumulation_steps > 1 needs the gradients of a window whole, and they are "
                "divided here. Say the weight when the batch is read: accelerator.prepare(loader, batch_weight=lambda batch: "
                "float((batch['labels'] != -100).sum()))"
            )
        self._window, self._world = window, world
        self._weighed: bool | None = None  # whether the micro-batches of the window have weights
        self._sum = 0.0
        self._expected = 1.0
        self._factor = 1.0

    def share(self, weight: float | Tensor | None) -> float:
        """What the loss of the current micro-batch is multiplied by. Collective at the first and the last of a window.

        Raises:
            ConfigurationError: some micro-batches of the window have a weight, and this one has none, or the other way round.
            DataError: no finite number ≥ 0.
        """
        window, given = self._window, weight is not None
        if window.first:
            self._weighed, self._sum = given, 0.0
        elif given is not self._weighed:
            raise ConfigurationError(
                "backward(weight=) was called for some micro-batches of a window and not for others, so they cannot be "
                "compared. Give the weight of each."
            )
        if weight is None:
            self._factor = 1.0
            return window.share
        mine = 0.0 if window.filler else checked_weight(weight, "backward(weight=) must be", "weight=")
        self._sum += mine
        size = self._world.size
        total = 0.0
        if window.first:
            (total,) = self._world.sums([mine])
            self._expected = (total or 1.0) * window.size
        if window.full:
            if window.size > 1:
                (total,) = self._world.sums([self._sum])
            window.empty = total <= 0.0
            self._factor = self._expected / total if total > 0.0 else 1.0
        return mine * size / self._expected

    def settle(self, optimizers: Iterable[Optimizer]) -> None:
        """Correct the gradients of a window that is complete."""
        if self._factor == 1.0:
            return
        found: dict[int, Any] = {
            id(p): p.grad for own in optimizers for group in own.param_groups for p in group["params"] if p.grad is not None
        }
        if found:
            with torch.no_grad():
                torch._foreach_mul_(list(found.values()), self._factor)
        self._factor = 1.0
