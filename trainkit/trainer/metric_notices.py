"""Warnings about metrics: monitored under a misspelled name or with the wrong mode, logged twice under one name, or logged by
step too rarely.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from trainkit.console import notice, warn
from trainkit.module.monitors import of_validation, why_no_validation

if TYPE_CHECKING:
    from trainkit.trainer.run import Run

__all__ = ["check_monitors", "warn_of_modes", "warn_rare_logs", "warn_shared_names"]

_LIKELY = 0.85  # similarity (difflib's ratio) of a misspelled name to the right one; val_los and val_loss: 0.93
_DATALOADER = "/dataloader_idx_"
# words in the names of metrics
_LARGER_IS_BETTER = frozenset(("acc", "accuracy", "auc", "auroc", "bleu", "dice", "f1", "iou", "miou", "precision", "recall"))
_SMALLER_IS_BETTER = frozenset(("err", "error", "loss", "mae", "mse", "nll", "perplexity", "rmse", "wer"))


def check_monitors(run: Run, logged: Collection[str] | None) -> None:
    """Warn about monitors that will likely never be logged, before time is spent on training.

    A name that validation did not log may still be one of training, so there is a warning only for a name that is almost one
    that validation logged, or that begins with "val".

    Args:
        run: the run.
        logged: what validation logged in the sanity check; `None`: this fit has no validation.
    """
    reason = why_no_validation(run.module.trainer) if logged is None else None
    for owner, monitor, _ in _monitors(run):
        if reason is not None and of_validation(monitor):
            warn(
                f"{owner} monitors {monitor!r}, but this fit has no validation: {reason}. Ignore this if training logs "
                f"{monitor!r} itself."
            )
        near = _near(monitor, logged or (), 0.6 if of_validation(monitor) else _LIKELY)
        if near is not None:
            warn(
                f"{owner} monitors {monitor!r}, which validation did not log in the sanity check. Did you mean {near!r}? "
                f"Ignore this if {monitor!r} is logged later."
            )


def warn_shared_names(run: Run, trained: Collection[str]) -> None:
    """Print a notice if a monitored metric is logged both in training and in validation.

    Args:
        run: the run.
        trained: what training logged in this epoch.
    """
    for owner, monitor, _ in _monitors(run):
        if monitor in trained and monitor in run.results.evaluated:
            notice(
                f"{monitor!r} is logged in training and in validation; {owner} monitors the value of validation. Use two "
                f"names to tell them apart: self.log('train_{monitor}', value)"
            )


def warn_of_modes(run: Run) -> None:
    """Warn if a callback or scheduler takes the lowest accuracy for the best, because "min" is the default of `mode`."""
    for owner, monitor, mode in _monitors(run):
        words = set(re.findall(r"f1|[a-z]+", monitor.lower()))
        if mode == "min" and words & _LARGER_IS_BETTER and not words & _SMALLER_IS_BETTER:
            warn(f"{owner}(monitor={monitor!r}) has mode='min': the lowest value is the best. If the highest is: mode='max'")


def warn_rare_logs(run: Run) -> None:
    """Print a notice if an epoch has fewer optimizer steps than `log_every_n_steps`."""
    every, steps = run.arguments.log_every_n_steps, run.max_batches / run.accumulation
    if run.loggers and every is not None and steps < every:
        notice(
            f"an epoch has {math.ceil(steps)} optimizer steps, fewer than log_every_n_steps={every}: values logged by step "
            f"reach the loggers only every {every} steps. To log more often: Trainer(log_every_n_steps=1)"
        )


def _monitors(run: Run) -> Iterator[tuple[str, str, Any]]:
    """The name of each callback or scheduler with a monitor, its monitor and its mode."""
    for callback in run.callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            yield type(callback).__name__, monitor, getattr(callback, "mode", None)
    for config in run.schedulers if run.module.automatic_optimization else ():  # otherwise the user advances them
        if config.reduce_on_plateau and config.monitor is not None:
            yield type(config.scheduler).__name__, config.monitor, getattr(config.scheduler, "mode", None)


def _near(name: str, logged: Collection[str], cutoff: float) -> str | None:
    """The logged name that was likely meant; `None` if `name` was logged or no name is similar."""
    if name in logged:
        return None
    of_loaders = sorted(one for one in logged if one.startswith(name + _DATALOADER))
    names = {one.lower(): one for one in logged}
    match = of_loaders or [names[one] for one in difflib.get_close_matches(name.lower(), names, n=1, cutoff=cutoff)]
    return match[0] if match else None
