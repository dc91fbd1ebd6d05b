"""Messages about a monitored metric that was not logged, for callbacks and schedulers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from trainkit.errors import nearest
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule

__all__ = ["MonitoredRun", "how_to_log", "not_logged", "of_validation", "why_no_validation"]


class MonitoredRun(Protocol):
    """What a ``Trainer`` tells about its validation."""

    _arguments: Any  # with limit_val_batches

    @property
    def stage(self) -> str | None:
        """ "fit", "validate", "test" or "predict"; ``None`` outside a run."""

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader."""

    @property
    def lightning_module(self) -> TrainModule:
        """The user's module."""

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """What the loggers got last."""


def not_logged(run: MonitoredRun, owner: str, monitor: str, logged: Iterable[str]) -> str:
    """The first sentences of an error or warning about a monitor that was never logged.

    Args:
        run: the Trainer.
        owner: the class of the callback or scheduler.
        monitor: the metric.
        logged: the metrics that there are.
    """
    known = sorted(logged)
    near, reason = nearest(monitor, known), why_no_validation(run)
    if reason is not None:
        reason = f" This fit has no validation: {reason}."
        near = "" if of_validation(monitor) else near  # of all names those of training are not what was meant
    elif monitor in run.logged_metrics:
        reason = f" Validation logs it by step only: use self.log({monitor!r}, value, on_epoch=True)."
    return (
        f"{owner} monitors {monitor!r}, which was not logged.{reason or ''} Logged so far: "
        f"{', '.join(map(repr, known)) or 'nothing'}.{near}"
    )


def how_to_log(monitor: str, logged: Iterable[str]) -> str:
    """The rest of that message: the fix, unless another name was likely meant."""
    log = "If not, log it" if nearest(monitor, sorted(logged)) else "Log it"
    return f"{log}, in validation_step or training_step: self.log({monitor!r}, value); or monitor another one"


def why_no_validation(run: MonitoredRun) -> str | None:
    """Why a fit validates nothing, and the fix; ``None`` if it does validate, or where none is running."""
    if run.stage != "fit" or any(count > 0 for count in run.num_val_batches):
        return None
    if run._arguments.limit_val_batches == 0:
        return "limit_val_batches=0 turns it off. Remove that argument"
    if not is_overridden(run.lightning_module, "validation_step", TrainModule):
        return f"{type(run.lightning_module).__name__} has no validation_step. Define one"
    return "no validation loader was given. Pass one, trainer.fit(module, train_loader, val_loader)"


def of_validation(monitor: str) -> bool:
    """Whether the name of a metric says that it is one of validation."""
    return monitor.lower().startswith("val")
