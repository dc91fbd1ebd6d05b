"""The accumulation window of a model that is called through one engine: its micro-batches, one after the other."""

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
    """What an engine has to know of the window that is being worked on.

    Args:
        engine: reduces gradients.
        strategy: tells which micro-batch is current.
        world: the processes.

    Attributes:
        engine: as given.
    """

    def __init__(self, engine: Engine, strategy: Strategy, world: World) -> None:
        self.engine, self._strategy, self._world = engine, strategy, world
        self._begun = self._had_loss = False
        self._order_before = 0  # of the gradients of the window before
        self._said: Pending | None = None  # whether any process has had a loss

    def step(self, *args: Any) -> Any:
        """The engine's forward, in ``training_step``, which is called once for each micro-batch."""
        if self._strategy.micro_batch.first:
            self._begin()
        if self.engine.stage < 3:
            return self.engine.forward(*args)
        with self._world.collectives:  # parameters are gathered
            return self.engine.forward(*args)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's forward, in a loop of the user's own, who may call his model several times in a micro-batch."""
        if not torch.is_grad_enabled():
            return self.engine.evaluate(*args, **kwargs)
        if not self._begun and self._strategy.micro_batch.first:
            self._begin()
        return self.engine.forward(*args, **kwargs)

    def _begin(self) -> None:
        self.engine.begin_window(self._strategy.micro_batch.uneven)
        self._begun, self._had_loss, self._order_before = True, False, self.engine.order

    def backward(self, loss: Tensor, micro: MicroBatch, **kwargs: Any) -> None:
        """The backward pass of a micro-batch."""
        self._had_loss = True
        self._end_micro_batch(micro)
        self.engine.backward(loss, micro.first, micro.last, **kwargs)

    def skip(self, loss: Tensor | None, micro: MicroBatch) -> None:
        """Instead of it: there is no loss, or one that counts for nothing."""
        if not self._begun:
            self._begin()
        self._had_loss = self._had_loss or loss is not None
        self._end_micro_batch(micro)
        if self._world.size > 1:
            self.engine.backward_of_nothing(loss, micro.first, micro.last)

    def _end_micro_batch(self, micro: MicroBatch) -> None:
        """At the last micro-batch of a window the ranks exchange whether there was a loss."""
        if micro.last:
            self._begun = False
            if self._world.size > 1:
                order = self._order_before
                self._said = self._world.begin_largest([self._had_loss, order, -order])  # while the gradients are reduced

    def any_loss(self) -> bool:
        """Whether any process has had a loss in the window that has just ended.

        Raises:
            ModuleError: in the window before, gradients have come in different orders on different processes.
        """
        if self._said is not None:
            had_loss, largest, smallest = self._said.wait()
            self._had_loss, self._said = bool(had_loss), None
            if largest != -smallest:
                raise ModuleError(
                    "in the last update gradients came in another order on one process than on another, and under "
                    f"ZeRO-{self.engine.stage} they are added up as they come: those of different parameters were mixed. Use "
                    "the same layers in the same order on all processes, or strategy='zero1' or 'ddp'; and go on from a "
                    "checkpoint from before that."
                )
        return self._had_loss
