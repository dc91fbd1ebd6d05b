"""The accumulation window of sharded models: when gradients are reduced, and whether any rank had a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from trainkit.distributed.world import Pending, World
from trainkit.errors import ModuleError
from trainkit.micro_batch import MicroBatch
from trainkit.strategies.fsdp.sharded_model import ShardedModel

__all__ = ["GradientWindow"]


class GradientWindow:
    """Runs the backward passes of a window.

    Args:
        models: the sharded models.
        world: the processes.
        each: reduce gradients in each micro-batch, and not once in a window.
        average: averages the gradients of parameters that are not sharded.
    """

    def __init__(
        self, models: Sequence[ShardedModel], world: World, each: bool, average: Callable[[list[Tensor]], None]
    ) -> None:
        self._models, self._world, self._each, self._average = models, world, each, average
        self._had_loss = False
        self._pending: Pending | None = None  # all-reduce of whether any rank had a loss

    @contextmanager
    def backward(self, micro: MicroBatch, had_loss: bool) -> Iterator[None]:
        """A context for the backward pass of a micro-batch.

        Raises:
            ModuleError: a parameter has no reduced gradient at the end of the window.
        """
        self._had_loss = had_loss or (self._had_loss and not micro.first)
        if micro.last and self._world.size > 1:
            self._pending = self._world.begin_largest([self._had_loss])  # overlaps the backward pass
        called = [model for model in self._models if model.outputs]  # none under manual optimization
        for model in self._models:
            model.begin_backward(micro.first, micro.last, micro.last or self._each)
        with self._world.collectives:
            yield
        for model in called:
            model.forget()
        if micro.last:
            self._end(called)

    def _end(self, called: list[ShardedModel]) -> None:
        for model in called:
            model.check_gradients()
        self._average([p for model in called for p in model.whole if p.requires_grad])

    def skip(self, loss: Tensor | None, micro: MicroBatch, backward: Callable[[Tensor], Any]) -> None:
        """Run a backward pass with zero gradients, for the collectives in it: there is no loss, or its weight is 0.

        Args:
            loss: the loss.
            micro: the micro-batch.
            backward: runs the backward pass of a loss; the other ranks run the same.

        Raises:
            ModuleError: no forward was run, for which the other ranks wait.
        """
        roots = [output for model in self._models for output in model.outputs]
        if loss is None and not any(model.has_run for model in self._models) and self._world.size > 1:
            raise ModuleError(
                "there is no loss, and the model was not called, but the other ranks wait for its forward: with FSDP each "
                "forward is a collective. Call the model before you return None from training_step, or pass None to backward."
            )
        with self.backward(micro, had_loss=loss is not None), ExitStack() as masks:
            for model in self._models:
                masks.enter_context(model.masked())
            if loss is not None:
                backward(loss * 0.0)
            elif roots:
                torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])

    def any_loss(self, had_loss: bool) -> bool:
        """Whether any rank had a loss in the window that has just ended, given whether this one had."""
        if self._pending is None:
            return had_loss
        (found,), self._pending = self._pending.wait(), None
        return bool(found)
