"""The accumulation window of sharded models: when gradients are reduced, and whether any rank had a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
        self._open = False  # the last backward pass was not that of the last micro-batch
        self._called: list[ShardedModel] = []  # the models with a forward in this window
        self._forwards: dict[int, int] = {}  # the number of forwards of each model at the last backward pass
        self._had_loss = False  # since the last `any_loss`
        self._pending: Pending | None = None  # all-reduce of whether any rank had a loss
        self._any_loss: bool | None = None  # its result, until the next backward pass

    @contextmanager
    def backward(self, micro: MicroBatch, had_loss: bool) -> Iterator[None]:
        """A context for a backward pass of a micro-batch, which may have several."""
        self._note_forwards()
        self._open, self._any_loss = not micro.last, None
        self._had_loss |= had_loss
        if micro.last and self._world.size > 1:
            if self._pending is not None:  # of a backward pass before, in your own training loop
                self._pending.wait()
            self._pending = self._world.begin_largest([self._had_loss])  # overlaps the backward pass
        with ExitStack() as ends:
            for model in self._models:
                model.forget()  # so that the backward pass can free them
                model.sync_gradients(micro.last or self._reduces_each)
                ends.enter_context(model.in_backward())
            with self._world.collectives:
                yield
        if micro.last:
            for model in self._models:
                model.note_unreduced()
            if self._check is not None:
                self._check()
            self._average([p for model in self._called for p in model.whole if p.requires_grad])

    def _note_forwards(self) -> None:
        called = [model for model in self._models if model.forwards != self._forwards.get(id(model), 0)]
        if called and not self._open:
            self._called = []  # otherwise it is another backward pass of the same forwards
        self._called += [model for model in called if model not in self._called]
        self._forwards = {id(model): model.forwards for model in self._models}

    def discard(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters that no backward pass has reduced."""
        if not self._open:
            return
        cleared = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if any(id(parameter) in cleared for parameter in model.sharded):
                model.drop_gradients()
        self._open = self._had_loss = False

    def skip(self, loss: Tensor | None, micro: MicroBatch, backward: Callable[[Tensor], Any]) -> None:
        """Run a backward pass with zero gradients, for the collectives in it: there is no loss, or its weight is 0.

        Args:
            loss: the loss.
            micro: the micro-batch.
            backward: runs the backward pass of a loss; the other ranks run the same.

        Raises:
            ModuleError: no forward was run, for which the other ranks wait; or it is unknown which one they have used.
        """
        roots = [output for model in self._models for output in model.outputs]
        if loss is None and self._world.size > 1:
            self._check_called()
        with self.backward(micro, had_loss=loss is not None), ExitStack() as masks:
            for model in self._models:
                masks.enter_context(model.masked())
            if loss is not None:
                backward(loss * 0.0)
            elif roots:
                torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])

    def _check_called(self) -> None:
        """Check that it is known which forwards the other ranks have run."""
        if sum(bool(model.outputs) for model in self._models) > 1:
            raise ModuleError(
                "backward(None): several models were called since the last backward pass, and it is not known which of them "
                "the losses of the other ranks depend on. Expected a loss that depends on the same outputs as theirs: "
                "accelerator.backward((outputs * 0.0).sum())"
            )
        if not any(model.has_run for model in self._models):
            raise ModuleError(
                "there is no loss, and the model was not called, but the other ranks wait for its forward: with FSDP each "
                "forward is a collective. Call the model before you return None from training_step, or pass None to backward."
            )

    def any_loss(self, had_loss: bool) -> bool:
        """Whether any rank had a loss in the window that has just ended, given whether this one had."""
        if self._pending is not None:
            (found,), self._pending = self._pending.wait(), None
            self._any_loss, self._had_loss = bool(found), False
        return had_loss if self._any_loss is None else self._any_loss
