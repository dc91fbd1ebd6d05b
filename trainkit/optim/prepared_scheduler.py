"""`PreparedScheduler`: what `Accelerator.prepare` returns for a scheduler. It steps when the optimizer does."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainkit.console import warn
from trainkit.optim.prepared_optimizer import Stepper

__all__ = ["PreparedScheduler"]

# Attributes of the schedulers of torch and transformers with their number of steps.
_HORIZONS = ("total_steps", "T_max", "total_iters")
_PAGE = "docs/how-to/learning-rate-schedules.md#in-your-own-training-loop"


class PreparedScheduler:
    """A scheduler whose `step` acts only after an optimizer step: not inside a window, not after a skipped step.

    As in Accelerate, it then makes one step for each process, because schedules are written for the number of batches that one
    process would have; with `split_batches` it makes one step. With `step_scheduler_with_optimizer=False`, and for a scheduler
    that is not torch's, each call makes one step.

    Attributes:
        scheduler: the user's scheduler.
    """

    def __init__(self, scheduler: Any, accelerator: Stepper) -> None:
        self.scheduler = scheduler
        self._accelerator = accelerator
        # for a scheduler that is not torch's each call is one step, as in Accelerate
        self._steps = accelerator.steps_of_scheduler if isinstance(scheduler, LRScheduler) else 0
        self._checked = self._steps in (0, 1)  # both lengths are the same, or each call is one step
        self._beyond = 0  # number of steps after the end of the schedule

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedScheduler:
        return PreparedScheduler(copy.deepcopy(self.scheduler, memo), self._accelerator)

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
            self._beyond += steps
        # the last optimizer step of an epoch may be for fewer batches than processes, but counts the same number of steps
        over = self._beyond > steps * (loader.epoch + 2)
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
