"""`optimizer.step()` without torch's record for a profiler where nothing would read it.

torch wraps `step` of every class of optimizers: the wrapper opens a record for the profiler, and calls the hooks of the step.
The record takes 20 µs if it is not in the processor's cache, a tenth of the step of a small network. A learning-rate scheduler
puts another wrapper on the optimizer itself, to note that it has made a step.

All that trainkit knows of these private parts of torch is in this file. It is compared with torch's public behavior once, at
the first step. Where anything is unusual, `step_of` returns `optimizer.step`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import Any

import torch
from torch.autograd import profiler
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

__all__ = ["PUBLIC_STEP", "StepGuard", "step_of"]

PUBLIC_STEP = "TRAINKIT_PUBLIC_STEP"
"""The environment variable with which `step_of` returns `optimizer.step`: for a tool that reads torch's records and does not
start torch's profiler, such as `torch.profiler.ExecutionTraceObserver`, or a profiler that is attached from outside."""


class StepGuard:
    """A step pre-hook that only checks who calls `step`. Other hooks may do anything, so torch has to call them.

    Args:
        check: Called with the optimizer before each step. It raises an error if the step is not allowed.
    """

    def __init__(self, check: Callable[[Optimizer], None]) -> None:
        self.check = check

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called by torch."""
        self.check(optimizer)


def step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """What to call for `optimizer.step`, now: the step itself, without the wrappers of torch that would do nothing.

    It is `optimizer.step` if a profiler runs, if the step has hooks besides a `StepGuard`, if `step` of the optimizer or of its
    class is anything else than what torch and its schedulers make of it, inside a compiled function, and with the environment
    variable `TRAINKIT_PUBLIC_STEP=1`.
    """
    global _wrappers
    if _wrappers is None:
        _wrappers = _Wrappers()
    of_class: Any = type(optimizer).step
    attributes = optimizer.__dict__
    if (
        profiler._is_profiler_enabled
        or getattr(of_class, "__code__", None) is not _wrappers.recorded
        or attributes.get("_optimizer_step_post_hooks", True)
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch.compiler.is_compiling()
    ):
        return optimizer.step
    for hook in attributes["_optimizer_step_pre_hooks"].values():
        if type(hook) is not StepGuard:
            return optimizer.step
        hook.check(optimizer)
    on_instance: Any = attributes.get("step")
    if on_instance is not None:
        if getattr(on_instance, "__code__", None) is not _wrappers.scheduled or on_instance.__wrapped__ is not of_class:
            return optimizer.step
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what the scheduler's wrapper does
    return MethodType(of_class.__wrapped__, optimizer)


class _Wrappers:
    """What torch's wrappers are recognized by.

    Attributes:
        recorded: The code of the wrapper on the class of an optimizer.
        scheduled: The code of the wrapper that a learning-rate scheduler puts on an optimizer.
    """

    def __init__(self) -> None:
        self.recorded: Any = _UNKNOWN
        self.scheduled: Any = _UNKNOWN
        if os.environ.get(PUBLIC_STEP, "0") in ("", "0"):
            with suppress(AttributeError, LookupError, TypeError):  # raised if torch has other names or arguments
                self.recorded, self.scheduled = _compare_with_public_behavior()


_UNKNOWN = object()  # is not the code of any function
_wrappers: _Wrappers | None = None


def _compare_with_public_behavior() -> tuple[Any, Any]:
    """The codes of both wrappers, or `_UNKNOWN` where what `step_of` returns would not do what `optimizer.step` does.

    Raises:
        AttributeError, LookupError, TypeError: Something is missing that `step_of` reads.
    """

    def step(self: Any, closure: Any = None) -> None:
        steps.append(closure)

    steps: list[Any] = []
    probe: Any = type("Probe", (Optimizer,), {"step": step})([torch.zeros(1)], {"lr": 1.0})
    of_class, attributes = type(probe).step, vars(probe)
    hooks = [
        (probe.register_step_pre_hook, attributes["_optimizer_step_pre_hooks"]),
        (probe.register_step_post_hook, attributes["_optimizer_step_post_hooks"]),
        (torch_optimizer.register_optimizer_step_pre_hook, torch_optimizer._global_optimizer_pre_hooks),
        (torch_optimizer.register_optimizer_step_post_hook, torch_optimizer._global_optimizer_post_hooks),
    ]
    for register, registered in hooks:
        before = dict(registered)
        handle = register(lambda *_: None)
        if len(registered) != len(before) + 1:
            return _UNKNOWN, _UNKNOWN
        handle.remove()
    if of_class.__wrapped__ is not step or "step" in attributes or not isinstance(profiler._is_profiler_enabled, bool):
        return _UNKNOWN, _UNKNOWN
    lr_scheduler.LambdaLR(probe, lambda _: 1.0)
    on_instance, noted = attributes["step"], getattr(probe, "_opt_called", False)
    probe.step("closure")
    scheduled = on_instance.__wrapped__ is of_class and not noted and probe._opt_called is True and steps == ["closure"]
    return of_class.__code__, on_instance.__code__ if scheduled else _UNKNOWN
