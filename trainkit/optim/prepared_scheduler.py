"""`PreparedScheduler`: what `Accelerator.prepare` returns for a scheduler, which advances with the optimizer steps."""

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

# Where torch's schedulers, and those of transformers, keep the number of their steps.
_HORIZONS = ("total_steps", "T_max", "total_iters")
_PAGE = "docs/how-to/learning-rate-schedules.md#in-your-own-training-loop"


class PreparedScheduler:
    """A scheduler whose `step` acts only with an update that happened: not inside a window, not after a skipped update.

    As in Accelerate it takes a step for each process then, as schedules are written for what one process would do with the
    loader; one only with `split_batches`. With `step_scheduler_with_optimizer=False`, and of a scheduler that is not
    torch's, each call is one step of the user's.

    Attributes:
        scheduler: the user's own.
    """

    def __init__(self, scheduler: Any, accelerator: Stepper) -> None:
        self.scheduler = scheduler
        self._accelerator = accelerator
        # a scheduler of a class of its own counts as it likes: each call is one, as with Accelerate
        self._steps = accelerator.steps_of_scheduler if isinstance(scheduler, LRScheduler) else 0
        self._told = self._steps in (0, 1)  # both lengths are the same, or the steps are the user's
        self._beyond = 0  # steps after its end

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedScheduler:
        return PreparedScheduler(copy.deepcopy(self.scheduler, memo), self._accelerator)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule."""
        accelerator = self._accelerator
        if self._steps == 0:
            self.scheduler.step(*args, **kwargs)
            return
        if not (accelerator.sync_gradients and accelerator.has_updated(getattr(self.scheduler, "optimizer", None))):
            return
        if not self._told:
            text = self._doubt(self._steps)
            if text is not None:
                warn(text)
        for _ in range(self._steps):
            # the last update of a schedule may have fewer steps left: OneCycleLR refuses to go beyond its end
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", math.inf):
                self.scheduler.step(*args, **kwargs)

    def _doubt(self, steps: int) -> str | None:
        """What to say, once, if the schedule seems to be made for the length of the prepared loader."""
        accelerator = self._accelerator
        horizon = min(_horizons(self.scheduler), default=None)
        loader = next(iter(accelerator.loaders), None)
        whole = None if loader is None else loader.micro_batches
        if horizon is None or loader is None or whole is None:
            self._told = True
            return None
        here = len(loader)
        if getattr(self.scheduler, "last_epoch", 0) >= horizon:
            self._beyond += steps
        # the last update of each epoch may be for less than a row, and takes as many steps
        over = self._beyond > steps * (loader.epoch + 2)
        if not _fits(horizon, here, accelerator) or (_fits(horizon, whole, accelerator) and not over):
            return None
        self._told = True
        return (
            f"{type(self.scheduler).__name__} is over after {horizon} steps, and takes {steps} with each update, one for each "
            f"process. {horizon} fits the {here} batches of the prepared loader, so it ends too early; it must fit the {whole} "
            "of the loader as it was before prepare. Build it on that length; or use Accelerator(split_batches=True), where "
            "both are the same, or Accelerator(step_scheduler_with_optimizer=False), where each scheduler.step() is one step. "
            f"See {_PAGE}."
        )


def _fits(horizon: int, batches: int, accelerator: Stepper) -> bool:
    """Whether it is a number of epochs of that many batches, counted in batches or in optimizer steps."""
    steps = accelerator.gradient_accumulation_steps
    return any(length > 1 and horizon % length == 0 for length in {batches, batches // steps, -(-batches // steps)})


def _horizons(scheduler: Any) -> Iterator[int]:
    """The numbers of steps after which a schedule is over, as far as they can be read."""
    for name in _HORIZONS:
        value = getattr(scheduler, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            yield value
    for function in getattr(scheduler, "lr_lambdas", ()):
        if isinstance(function, partial) and isinstance(function.keywords.get("num_training_steps"), int):
            yield function.keywords["num_training_steps"]
