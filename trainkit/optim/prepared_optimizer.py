"""`PreparedOptimizer`: what `Accelerator.prepare` returns for an optimizer. It steps when an accumulation window is full."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PreparedOptimizer", "Stepper", "clear_gradients", "toggle", "untoggle"]


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
        optimizer: the wrapped optimizer.
    """

    def __init__(self, optimizer: Optimizer, accelerator: Stepper) -> None:
        # without Optimizer.__init__, which would create separate groups and state
        self.optimizer = optimizer
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: the object is being copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedOptimizer:
        return PreparedOptimizer(copy.deepcopy(self.optimizer, memo), self._accelerator)  # of the same accelerator

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
            sync_grad: no effect: with several processes gradients are averaged in the optimizer step.
        """
        return self._toggled()

    @contextmanager
    def _toggled(self) -> Iterator[None]:
        before = toggle(self, self._accelerator.optimizers)
        try:
            yield
        finally:
            untoggle(before)


def toggle(optimizer: Optimizer, optimizers: Iterable[Optimizer]) -> dict[Tensor, bool]:
    """Let gradients flow only into this optimizer's parameters, not into those of the other `optimizers`.

    Returns:
        The other parameters, each with its `requires_grad` before; `untoggle` restores it.
    """
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [p for o in optimizers for group in o.param_groups for p in group["params"] if id(p) not in own]
    before = {p: p.requires_grad for p in others}
    for p in before:
        p.requires_grad = False
    return before


def untoggle(before: Mapping[Tensor, bool]) -> None:
    """Undo `toggle`, given what it returned."""
    for parameter, requires_grad in before.items():
        parameter.requires_grad = requires_grad


def clear_gradients(optimizer: Optimizer) -> None:
    """`optimizer.zero_grad()`, but without its record for torch's profiler, which takes longer than clearing the gradients.

    For an optimizer that overrides `zero_grad`, calls it.
    """
    method = optimizer.zero_grad
    if getattr(method, "__func__", None) is not Optimizer.zero_grad:
        method()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
