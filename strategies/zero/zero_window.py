"""The accumulation window of an engine that runs the model's forward: its micro-batches in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.distributed.world import Pending, World
from trainkit.errors import ModuleError
from trainkit.micro_batch import MicroBatch
from trainkit.strategies.zero.engine import Engine
from trainkit.strategy import Strategy

__all__ = ["EngineWindow"]


class EngineWindow:
    """Tracks the current accumulation window of an engine.

    Args:
        engine: the engine that reduces the gradients.
        strategy: the strategy, whose `micro_batch` is the current one.
        world: the processes.

    Attributes:
        engine: the engine.
    """

    def __init__(self, engine: Engine, strategy: Strategy, world: World) -> None:
        self.engine, self._strategy, self._world = engine, strategy, world
        self._begun = self._had_loss = False
        self._last_order = 0  # gradient order of the previous accumulation window
        self._pending: Pending | None = None  # all-reduce of whether any process had a loss

    def step(self, *args: Any) -> Any:
        """Run `training_step` in the engine's forward, once per micro-batch."""
        if self._strategy.micro_batch.first:
            self._begin()
        if self.engine.stage < 3:
            return self.engine.forward(*args)
        with self._world.collectives:  # the forward gathers parameters
            return self.engine.forward(*args)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine's forward in the user's own training loop, which may call it several times per micro-batch."""
        if not torch.is_grad_enabled():
            return self.engine.evaluate(*args, **kwargs)
        if not self._begun and self._strategy.micro_batch.first:
            self._begin()
        return self.engine.forward(*args, **kwargs)

    def _begin(self) -> None:
        self.engine.begin_window(self._strategy.micro_batch.uneven)
        self._begun, self._had_loss, self._last_order = True, False, self.engine.order

    def backward(self, loss: Tensor, micro: MicroBatch, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch."""
        self._had_loss = True
        self.end(micro)
        self.engine.backward(loss, micro.first, micro.last, **kwargs)

    def skip(self, loss: Tensor | None, micro: MicroBatch) -> None:
        """Called instead of `backward` if there is no loss, or one with weight 0."""
        if not self._begun:
            self._begin()
        self._had_loss = self._had_loss or loss is not None
        self.end(micro)
        if self._world.size > 1:
            self.engine.backward_zero_gradients(loss, micro.first, micro.last)

    def end(self, micro: MicroBatch) -> None:
        """At the last micro-batch of an accumulation window, start to all-reduce whether any rank had a loss."""
        if micro.last:
            self._begun = False
            if self._world.size > 1:
                order = self._last_order  # compared in the same all-reduce, which overlaps the gradient reduction
                self._pending = self._world.begin_largest([self._had_loss, order, -order])

    def any_loss(self) -> bool:
        """Whether any process had a loss in the accumulation window that has just ended.

        Raises:
            ModuleError: in the previous accumulation window, the processes computed gradients in different orders.
        """
        if self._pending is not None:
            had_loss, largest, smallest = self._pending.wait()
            self._had_loss, self._pending = bool(had_loss), None
            if largest != -smallest:
                raise ModuleError(
                    "in the previous optimizer step the processes computed gradients in different orders. "
                    f"ZeRO-{self.engine.stage} reduces gradients in that order, so it summed gradients of different "
                    "parameters. Run the same layers in the same order on all processes, or use strategy='zero1' or 'ddp'. "
                    "Resume from a checkpoint saved before that step."
                )
        return self._had_loss
