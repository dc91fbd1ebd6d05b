"""Messages about a monitored metric that was not logged, for callbacks and schedulers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainkit.errors import nearest
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["how_to_log", "not_logged", "of_validation", "why_no_validation"]


def not_logged(run: Trainer, owner: str, monitor: str, logged: Iterable[str]) -> str:
    """The first sentences of a message about a metric that was never logged.

    Args:
        run: The Trainer.
        owner: The class of the callback or scheduler.
        monitor: The monitored metric.
        logged: The logged metrics.
    """
    known = sorted(logged)
    near, reason = nearest(monitor, known), why_no_validation(run)
    if reason is not None:
        reason = f" This fit has no validation: {reason}."
        near = "" if of_validation(monitor) else near  # the user did not mean a training metric
    elif monitor in run.logged_metrics:
        reason = f" Validation logs it by step only: use self.log({monitor!r}, value, on_epoch=True)."
    return (
        f"{owner} monitors {monitor!r}, which was not logged.{reason or ''} Logged so far: "
        f"{', '.join(map(repr, known)) or 'nothing'}.{near}"
    )


def how_to_log(monitor: str) -> str:
    """The rest of that message: the fix."""
    return f"To monitor {monitor!r}, log it in validation_step or training_step: self.log({monitor!r}, value)"


def why_no_validation(run: Trainer) -> str | None:
    """Why a fit has no validation, and the fix; `None` if it has one, or if no fit is running."""
    if run.stage != "fit" or any(count > 0 for count in run.num_val_batches):
        return None
    if run._arguments.limit_val_batches == 0:
        return "limit_val_batches=0 turns it off. Remove that argument"
    if not is_overridden(run.lightning_module, "validation_step", TrainModule):
        return f"{type(run.lightning_module).__name__} has no validation_step. Define one"
    return "no validation loader was given. Pass one, trainer.fit(module, train_loader, val_loader)"


def of_validation(monitor: str) -> bool:
    """Whether the name of a metric begins with "val"."""
    return monitor.lower().startswith("val")
