"""The optimizer step at the end of a window: when it is due, and what must have come before it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.accelerator.accumulation import CallWindow
from trainkit.accelerator.gradients import GradientVerbs
from trainkit.console import counted
from trainkit.errors import ConfigurationError, OptimizerError
from trainkit.optim.parameter_names import foreign_parameters, shape_of
from trainkit.optim.prepared import PreparedOptimizer

__all__ = ["StepVerbs"]


_FIX = {
    False: "Replace layers in __init__ or configure_model, or return a new optimizer from configure_optimizers: "
    "torch.optim.{}(self.parameters()).",
    True: "Replace layers first: optimizer = torch.optim.{0}(model.parameters()); model, optimizer = "
    "accelerator.prepare(model, optimizer). Prepare the other model too, if it is one: accelerator.prepare(model, other, "
    "optimizer).",
}


class StepVerbs(GradientVerbs):
    """The methods of `trainkit.Accelerator` that run optimizer steps.

    Attributes:
        before_step: Called with the optimizer before an optimizer step.
        optimizer_step_was_skipped: Whether the last step of any optimizer was skipped, though the window was full.
        overflows: Number of steps that were skipped because a scaled gradient overflowed.
        updates: Number of optimizer steps so far.
        updating: An optimizer step is in progress.
        owners: The modules whose parameters are trained: the prepared ones, or that of a `Trainer`.
    """

    before_step: Callable[[Optimizer], None] | None
    optimizer_step_was_skipped: bool
    overflows: int
    updates: int
    updating: bool
    owners: Sequence[nn.Module]
    _watched: ExitStack

    def _begin_stepping(self) -> None:
        """Return to the state before the first optimizer step."""
        self.updates = self.overflows = 0
        self.updating = self.skip_requested = self.step_pending = self.optimizer_step_was_skipped = False
        self._updated: dict[int, bool] = {}  # of each optimizer, by its id, whether its last step was not skipped
        self._checked: set[int] = set()  # ids of the optimizers whose parameters have been checked
        self._backwards = 0  # number of backward passes
        self._backwards_at_step: dict[int, int] = {}  # the same at the last step of each optimizer, by its id

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Run the optimizer step if the accumulation window is full. `optimizer.step()` of a prepared optimizer calls it.

        Args:
            optimizer: A prepared optimizer, or torch's own object in it.
            closure: Computes the loss and its gradients again (LBFGS).

        Returns:
            Whether the step was made: not inside a window, nor if it was skipped because a scaled gradient overflowed,
            `skip_update` was called, or the window's weight is 0.

        Raises:
            ConfigurationError: The gradients come from `loss.backward()`, which this configuration cannot use.
            OptimizerError: It has parameters that the model does not have any more.
        """
        micro = self.accumulation.current
        own = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        if not micro.last:
            self.accumulation.note_verb(self.step, own, closure)
            return False
        self.step_pending = False
        if id(own) not in self._checked:
            self._check_parameters(own)
        if self._own:
            self._begin_own_step(own, closure)
        if closure is None:
            self._average([own])
        elif self.strategy.world.size > 1:
            closure = partial(self._averaged_closure, own, closure)
        if self.before_step is not None:
            self.before_step(own)
        if self.skip_requested or micro.empty:
            self.strategy.precision.discard(own)
            self.strategy.sync_buffers()
            updated = False
            self.skip_requested = self.skip_requested and self._own  # a Trainer requests it for each step
        else:
            self.updating = True  # stays so if an error leaves the parameters between two steps
            updated = self.strategy.optimizer_step(own, closure)
            self.updating = False
            self.overflows += not updated
            if self.strategy.precision.autocast_dtype is not None:
                torch.clear_autocast_cache()  # otherwise a forward in the same step would use copies of the old parameters
        self._averaged.discard(id(own))
        self._updated[id(own)] = updated
        # in your own training loop with several optimizers: whether any was skipped
        self.optimizer_step_was_skipped = not (all(self._updated.values()) if self._own else updated)
        self.updates += updated
        return updated

    def has_updated(self, optimizer: Any) -> bool:
        """Whether the last step of an optimizer, prepared or torch's own, was made and not skipped."""
        own = optimizer.optimizer if isinstance(optimizer, PreparedOptimizer) else optimizer
        return self._updated.get(id(own), not self.optimizer_step_was_skipped)

    def skip_update(self) -> None:
        """Skip the optimizer step of the current window, for all optimizers: parameters and optimizer state do not change.

        Call it on all processes or on none.
        """
        self.skip_requested = True

    # ------------------------------------------------------------------------------- what would silently go wrong

    @property
    def _is_needed(self) -> bool:
        """Whether an optimizer step needs more than torch's own `loss.backward()` and `optimizer.step()`."""
        strategy = self.strategy
        return (
            self.accumulation.size > 1
            or strategy.precision.scaler is not None
            or strategy.accumulates_in_engine
            or self.averages_in_step
        )

    def recheck_parameters(self) -> None:
        """Let the next step of each optimizer check again that the models have its parameters."""
        self._checked.clear()

    def _check_parameters(self, own: Optimizer) -> None:
        """Refuse an optimizer that trains parameters of a layer that has been replaced.

        Raises:
            OptimizerError: the message has the shape of the first one, and the line to write.
        """
        self._checked.add(id(own))
        foreign = foreign_parameters(own, self.owners)
        if not foreign:
            return
        if self._own:  # your own training loop may also train what no prepared model has, if it does not save that
            had, count = self._owned.get(id(own), set()), sum(len(group["params"]) for group in own.param_groups)
            mixed = 0 < len(foreign) < count and any(isinstance(p, nn.Parameter) for p in foreign)
            if not mixed and not any(id(p) in had for p in foreign):
                return
        name, shape = type(own).__name__, shape_of(foreign[0])
        raise OptimizerError(
            f"{name} trains {counted(len(foreign), 'parameter')} that the model does not have (the first of shape {shape}): no "
            "output of the model depends on them, and no checkpoint can hold their state. They belong to a layer that was "
            "replaced after the optimizer was created, or to another model. Expected an optimizer of the model's parameters. "
            f"{_FIX[self._own].format(name)} To change a layer later, copy into it: "
            "model.layer.load_state_dict(new.state_dict())"
        )

    def _end_late(self, window: CallWindow) -> None:
        """The loader has ended inside a window of calls: do what the loop does with a window that is full.

        What the loop calls after a backward pass (clipping, `step` of optimizers and schedulers, `zero_grad`) has had no effect
        then, and is called again. Where it does not step, the window stays open.
        """
        # those of a full window if there are more: it has those under `if sync_gradients:` too
        verbs = list(window.verbs if len(window.verbs) >= len(window.full) else window.full)
        if not any(verb == self.step and args[1] is None for verb, args in verbs):  # a closure would compute a loss again
            return
        self.accumulation.end_late(window, uneven=self.strategy.reduces_late)
        self.strategy.end_window()
        weighing = self._weighing.get(self.accumulation.key)
        if weighing is not None:
            weighing.end_late()
        self._correct_gradients()
        for verb, args in verbs:
            verb(*args)

    def _begin_own_step(self, own: Optimizer, closure: Callable[[], Any] | None) -> None:
        """In your own training loop, the checks before a step."""
        self.accumulation.note_verb(self.step, own, closure)
        self._check_backward(own, closure)
        if self._compares:
            self._compare("step", [p for group in own.param_groups for p in group["params"]])

    def _check_backward(self, own: Optimizer, closure: Callable[[], Any] | None) -> None:
        """Gradients of `loss.backward()` are not scaled to their share of the window, and ZeRO does not see them."""
        before = self._backwards_at_step.get(id(own), 0)
        self._backwards_at_step[id(own)] = self._backwards
        if closure is not None or before < self._backwards or not self._is_needed:
            return
        # without gradients a step changes nothing; under ZeRO they cannot be seen
        if self.strategy.accumulates_in_engine or any(
            p.grad is not None for group in own.param_groups for p in group["params"]
        ):
            raise ConfigurationError(
                "step: there has been no accelerator.backward(loss) since the last step of this optimizer. Call "
                "accelerator.backward(loss) instead of loss.backward(): it scales the loss and passes the gradients to the "
                "strategy. If a batch has nothing to learn from: accelerator.backward(None)."
            )

    def _watch_steps(self, given: Optimizer) -> None:
        """Refuse `step` of an optimizer that was passed to `prepare`, if only `step` of what it returned is right."""
        if not self._own:
            return
        reference = weakref.ref(self)

        def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            accelerator = reference()
            if accelerator is not None and not accelerator.updating and accelerator._is_needed:
                raise ConfigurationError(
                    f"{type(optimizer).__name__}.step() was called on the optimizer that was passed to prepare, which ignores "
                    "gradient accumulation, the loss scale and the strategy. Use what prepare returned: model, optimizer = "
                    "accelerator.prepare(model, optimizer)"
                )

        self._watched.callback(given.register_step_pre_hook(refuse).remove)
