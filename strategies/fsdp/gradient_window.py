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
        reduces_each: reduce gradients in each micro-batch, and not once in a window.
        average: averages the gradients of parameters that are not sharded.
        check: called at the end of each window, before that.
    """

    def __init__(
        self,
        models: Sequence[ShardedModel],
        world: World,
        reduces_each: bool,
        average: Callable[[list[Tensor]], None],
        check: Callable[[], None] | None = None,
    ) -> None:
        self._models, self._world, self._reduces_each, self._average, self._check = models, world, reduces_each, average, check
        self._open: MicroBatch | None = None  # the last micro-batch of a window that has not ended
        self._called: list[ShardedModel] = []  # the models with a forward in this window
        self._forwards: dict[int, int] = {}  # their number in each model, at the last backward pass
        self._had_loss = False  # since the last `any_loss`
        self._pending: Pending | None = None  # all-reduce of whether any rank had a loss

    @contextmanager
    def backward(self, micro: MicroBatch, had_loss: bool) -> Iterator[None]:
        """A context for a backward pass of a micro-batch, which may have several."""
        self._begin(micro)
        self._had_loss |= had_loss
        if micro.last and self._world.size > 1:
            if self._pending is not None:  # of a backward pass before, in your own training loop
                self._pending.wait()
            self._pending = self._world.begin_largest([self._had_loss])  # overlaps the backward pass
        for model in self._models:
            model.forget()  # so that the backward pass can free them
            model.sync_gradients(micro.last or self._reduces_each)
        with self._world.collectives:
            yield
        if micro.last:
            for model in self._models:
                model.note_unreduced()
            if self._check is not None:
                self._check()
            self._average([p for model in self._called for p in model.whole if p.requires_grad])

    def _begin(self, micro: MicroBatch) -> None:
        before = self._open
        if before is not None and micro.first and (micro.index != before.index or micro.batch is not before.batch):
            for model in self._models:
                model.drop_gradients()  # of a window that was left
            self._open, self._had_loss = None, False
        called = [model for model in self._models if model.forwards != self._forwards.get(id(model), 0)]
        if called and self._open is None:
            self._called = []  # otherwise it is another backward pass of the same forwards
        self._called += [model for model in called if model not in self._called]
        self._forwards = {id(model): model.forwards for model in self._models}
        self._open = None if micro.last else micro

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
        self._had_loss = False
        if self._pending is None:
            return had_loss
        (found,), self._pending = self._pending.wait(), None
        return bool(found)
