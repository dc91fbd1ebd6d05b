"""Messages about a monitored metric that was not logged, for callbacks and schedulers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainkit.errors import nearest
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["how_to_log", "not_logged", "of_validation", "validation_hint", "why_no_validation"]


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
    elif (setting := _why_not_yet(run)) is not None:
        reason = f" No validation was due yet: {setting}."
    elif monitor in run.logged_metrics:
        reason = f" Validation logs it by step only: use self.log({monitor!r}, value, on_epoch=True)."
    return (
        f"{owner} monitors {monitor!r}, which was not logged.{reason or ''} Logged so far: "
        f"{', '.join(map(repr, known)) or 'nothing'}.{near}"
    )


def how_to_log(monitor: str) -> str:
    """The rest of that message: the fix."""
    return f"To monitor {monitor!r}, log it in validation_step or training_step: self.log({monitor!r}, value)"


def validation_hint(run: Trainer) -> str:
    """The fix for a scheduler that waits for a metric of a validation that was not due yet; else an empty string."""
    if _why_not_yet(run) is None:
        return ""
    every = run._arguments.check_val_every_n_epoch
    epochs = f'"frequency": {every}' if every is not None and every > 1 else '"frequency": n'
    return (
        ' To advance the scheduler after each validation, return {"scheduler": scheduler, "monitor": ..., "interval": "step"} '
        f'for "lr_scheduler" in configure_optimizers; or {epochs}, to advance it only after epochs with a validation.'
    )


def _why_not_yet(run: Trainer) -> str | None:
    """Why a fit that has validation has not validated so far; `None` if it has, or has none."""
    validation = run._run.validation
    if run.stage != "fit" or validation is None or validation.count > 0:
        return None
    arguments = run._arguments
    if arguments.val_every_n_steps is not None:
        return f"val_every_n_steps={arguments.val_every_n_steps}"
    if arguments.check_val_every_n_epoch not in (None, 1):
        return f"check_val_every_n_epoch={arguments.check_val_every_n_epoch}"
    return f"val_check_interval={arguments.val_check_interval}"


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
    """Whether the name of a metric begins with "val" or "eval"."""
    return monitor.lower().startswith(("val", "eval"))
