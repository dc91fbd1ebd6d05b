"""What `Accelerator.prepare` returns for an optimizer and a scheduler: their steps act when an accumulation window is full."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.console import warn
from trainkit.optim.optimizer_gradients import clear_gradients, toggle, untoggle

__all__ = ["PreparedOptimizer", "PreparedScheduler", "Stepper"]


class Stepper(Protocol):
    """What prepared optimizers and schedulers need from the `Accelerator` that prepared them."""

    strategy: Any
    step_pending: bool

    @property
    def loaders(self) -> Iterable[Any]:
        """The prepared loaders."""

    @property
    def optimizers(self) -> Iterable[Optimizer]:
        """The prepared optimizers."""

    @property
    def clears_gradients(self) -> bool:
        """Whether `zero_grad` clears gradients at this point of the accumulation window."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its accumulation window."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in an accumulation window."""

    @property
    def steps_of_scheduler(self) -> int:
        """Number of steps that a prepared scheduler makes with an optimizer step; 0: one for each call."""

    def _note_verb(self, verb: Callable[..., Any], *args: Any) -> None:
        """The loop calls `verb(*args)` after a backward pass: if the window turns out to have ended there, call it again."""

    def has_updated(self, optimizer: Optimizer | None) -> bool:
        """Whether the last step of an optimizer, or of any, changed parameters."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Make an optimizer step if it is due; returns whether it was made."""


class PreparedOptimizer(Optimizer):
    """An optimizer whose `step` acts only when the accumulation window is full; `zero_grad` acts then and when one begins.

    It is an `Optimizer`, so that torch's schedulers accept it. Its parameter groups, state and defaults are those of the
    wrapped optimizer.

    Attributes:
        optimizer: The wrapped optimizer.
    """

    def __init__(self, optimizer: Optimizer, accelerator: Stepper) -> None:
        # without Optimizer.__init__, which would create separate groups and state
        self.optimizer = optimizer
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # An object that is being copied has no optimizer yet.
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedOptimizer:
        # The copy belongs to the same accelerator.
        return PreparedOptimizer(copy.deepcopy(self.optimizer, memo), self._accelerator)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether its last step changed no parameters, because a scaled gradient overflowed or the step was skipped."""
        return not self._accelerator.has_updated(self)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """`trainkit.Accelerator.step` of this optimizer."""
        return self._accelerator.step(self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to zero, after the last backward pass of a window or before its first.

        Call it at the end or at the beginning of the loop's body: inside a window it does nothing.
        """
        self._accelerator._note_verb(self.zero_grad, set_to_none)
        if self._accelerator.clears_gradients:
            self._accelerator.step_pending = False
            if set_to_none:
                clear_gradients(self.optimizer)
            else:
                self.optimizer.zero_grad(set_to_none=False)
            self._accelerator.strategy.discard_gradients(self.optimizer)
            self._accelerator.strategy.precision.discard(self.optimizer)

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        """A context in which gradients flow only into this optimizer's parameters. Lightning's name; see `toggle_optimizer`.

        Args:
            sync_grad: No effect: with several processes gradients are averaged in the optimizer step.
        """
        return self._toggle()

    @contextmanager
    def _toggle(self) -> Iterator[None]:
        before = toggle(self, self._accelerator.optimizers)
        try:
            yield
        finally:
            untoggle(before)


# Attributes of the schedulers of torch and transformers with their number of steps.
_HORIZONS = ("total_steps", "T_max", "total_iters")
_PAGE = "docs/how-to/learning-rate-schedules.md#in-your-own-training-loop"


class PreparedScheduler:
    """A scheduler whose `step` acts only after an optimizer step: not inside a window, not after a skipped step.

    As in Accelerate, it then makes one step for each process, because schedules are written for the number of batches that one
    process would have; with `split_batches` it makes one step. With `step_scheduler_with_optimizer=False`, and for a scheduler
    that is not torch's, each call makes one step.

    Args:
        scheduler: The user's scheduler.
        accelerator: The accelerator.
        once: It makes one step with each optimizer step, as DeepSpeed's schedules do.

    Attributes:
        scheduler: As above.
    """

    def __init__(self, scheduler: Any, accelerator: Stepper, once: bool = False) -> None:
        self.scheduler = scheduler
        self._accelerator = accelerator
        self._once = once
        # for a scheduler that is not torch's each call is one step, as in Accelerate
        self._steps = int(once) or (accelerator.steps_of_scheduler if isinstance(scheduler, LRScheduler) else 0)
        # Both lengths are the same, or each call is one step.
        self._checked = self._steps in (0, 1)
        self._steps_after_end = 0

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedScheduler:
        return PreparedScheduler(copy.deepcopy(self.scheduler, memo), self._accelerator, self._once)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Make the steps of the schedule that belong to the last optimizer step, if any."""
        accelerator = self._accelerator
        if self._steps == 0:
            self.scheduler.step(*args, **kwargs)
            return
        accelerator._note_verb(partial(self.step, **kwargs) if kwargs else self.step, *args)
        if not (accelerator.sync_gradients and accelerator.has_updated(getattr(self.scheduler, "optimizer", None))):
            return
        if not self._checked:
            text = self._length_warning(self._steps)
            if text is not None:
                warn(text)
        for _ in range(self._steps):
            # at its end a schedule may have fewer steps left; OneCycleLR raises an error beyond it
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", math.inf):
                self.scheduler.step(*args, **kwargs)

    def _length_warning(self, steps: int) -> str | None:
        """The warning, once, if the schedule seems to have the length of the prepared loader."""
        accelerator = self._accelerator
        horizon = min(_horizons(self.scheduler), default=None)
        loader = next(iter(accelerator.loaders), None)
        whole = None if loader is None else loader.micro_batches
        if horizon is None or loader is None or whole is None:
            self._checked = True
            return None
        here = len(loader)
        if getattr(self.scheduler, "last_epoch", 0) >= horizon:
            self._steps_after_end += steps
        # the last optimizer step of an epoch may be for fewer batches than processes, but counts the same number of steps
        over = self._steps_after_end > steps * (loader.epoch + 2)
        if not _fits(horizon, here, accelerator) or (_fits(horizon, whole, accelerator) and not over):
            return None
        self._checked = True
        return (
            f"{type(self.scheduler).__name__} ends after {horizon} steps, and makes {steps} steps with each optimizer step, "
            f"one for each process. {horizon} matches the {here} batches of the prepared loader, so it ends too early: it must "
            f"match the {whole} batches of the loader before prepare. Create it with the length before prepare; or use "
            "Accelerator(split_batches=True), where both lengths are the same, or "
            "Accelerator(step_scheduler_with_optimizer=False), where each scheduler.step() is one step. "
            f"See {_PAGE}."
        )


def _fits(horizon: int, batches: int, accelerator: Stepper) -> bool:
    """Whether a length is a whole number of epochs with this number of batches, in batches or in optimizer steps."""
    steps = accelerator.gradient_accumulation_steps
    return any(length > 1 and horizon % length == 0 for length in {batches, batches // steps, -(-batches // steps)})


def _horizons(scheduler: Any) -> Iterator[int]:
    """The numbers of steps after which a schedule ends, as far as its attributes show them."""
    for name in _HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            yield value
    for function in getattr(scheduler, "lr_lambdas", ()):
        if isinstance(function, partial) and isinstance(function.keywords.get("num_training_steps"), int):
            yield function.keywords["num_training_steps"]
