"""Warnings about what is likely a mistake: misspelled metrics, modules in eval mode, how loaders shuffle and fetch."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from trainkit.console import notice, warn
from trainkit.data.combined import CombinedLoader, restartable
from trainkit.module.monitors import of_validation, why_no_validation
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.optim.joint_optimizer import JointOptimizer

if TYPE_CHECKING:
    from trainkit.trainer.run import Run

__all__ = [
    "announce_fit",
    "check_monitors",
    "notice_accumulated_steps",
    "notice_few_workers",
    "notice_iterator",
    "notice_overfitting",
    "warn_eval_mode",
    "warn_shared_names",
    "warn_shuffled",
]


_MISSPELLED_RATIO = 0.85  # similarity (difflib's ratio) of a misspelled name to the right one; val_los and val_loss: 0.93
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
        near = _near(monitor, logged or (), 0.6 if of_validation(monitor) else _MISSPELLED_RATIO)
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


def _warn_of_modes(run: Run) -> None:
    """Warn if a callback or scheduler takes the lowest accuracy for the best, because "min" is the default of `mode`.

    And if `restore_best` takes the highest error for the best, because its name does not end in "loss".
    """
    for owner, monitor, mode in _monitors(run):
        words = set(re.findall(r"f1|[a-z]+", monitor.lower()))
        if mode == "max" and monitor == run.arguments.restore_best and words & _SMALLER_IS_BETTER - {"loss"}:
            warn(
                f"restore_best={monitor!r} has mode='max': the highest value is the best. If the lowest is: "
                f"restore_best=ModelCheckpoint(monitor={monitor!r}, mode='min')"
            )
        if mode == "min" and words & _LARGER_IS_BETTER and not words & _SMALLER_IS_BETTER:
            warn(f"{owner}(monitor={monitor!r}) has mode='min': the lowest value is the best. If the highest is: mode='max'")


def announce_fit(run: Run, optimizer: Optimizer | None) -> None:
    """Say where and for how long a fit runs and which optimizers step together, and warn of what the user cannot mean."""
    arguments, strategy = run.arguments, run.strategy
    if arguments.ends_by_default:
        notice(f"neither max_epochs nor max_steps nor max_time was given: training for up to {arguments.max_epochs} epochs.")
    notice(f"fit on {strategy.where}, {strategy.precision.name}, seed {run.seed}.")
    if isinstance(optimizer, JointOptimizer):
        notice(
            f"{optimizer.names} step together after each backward pass. To step them in turns, as a GAN does, set "
            "self.automatic_optimization = False in the module."
        )
    _warn_rare_logs(run)
    _warn_of_modes(run)


def _warn_rare_logs(run: Run) -> None:
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


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NAMES_SHOWN = 5  # names in a message


def warn_eval_mode(module: nn.Module) -> None:
    """Warn about modules that are trained in eval mode, with dropout and batch statistics turned off.

    A module without trainable parameters may be frozen on purpose, and so may the statistics of a BatchNorm: they are not
    named.
    """
    names: list[str] = []
    for name, part in module.named_modules():
        inside = any(name == outer or name.startswith(f"{outer}.") for outer in names)
        if not (part.training or inside or isinstance(part, _NORMS)) and any(p.requires_grad for p in part.parameters()):
            names.append(name)
            if not name:
                break
    if not names:
        return
    if names == [""]:
        which, fix = type(module).__name__, "module"
    else:
        more = ", …" if len(names) > _NAMES_SHOWN else ""
        which, fix = ", ".join(names[:_NAMES_SHOWN]) + more, f"module.{names[0]}"
    warn(
        f"in eval mode at the start of training: {which}. Dropout is off there and BatchNorm keeps its statistics, but the "
        f"parameters are trained. Call {fix}.train(); or freeze what is not trained: {fix}.requires_grad_(False)"
    )


def warn_shuffled(run: Run, name: str, source: Any, partial: bool) -> None:
    """Warn about an evaluation loader that shuffles, where that changes the result.

    Predictions then come in another order than the data, and a limit selects other samples in each epoch. Metrics of a whole
    data set do not depend on the order.

    Args:
        run: the run.
        name: "validation", "test" or "predict".
        source: the loader.
        partial: a limit excludes some of its batches.
    """
    if not _shuffles(source):
        return
    if name == "predict":
        warn(
            "the loader of predict shuffles, so the predictions are not in the order of the dataset. Fix: "
            "DataLoader(…, shuffle=False)"
        )
    elif partial and not run.arguments.fast_dev_run:
        warn(
            f"the {name} loader shuffles and a limit excludes some of its batches: each epoch evaluates other samples, so the "
            "metrics of epochs cannot be compared. Fix: DataLoader(…, shuffle=False)"
        )


def notice_overfitting(run: Run, source: Any) -> None:
    """Print a notice that `overfit_batches` turns shuffling off."""
    if run.arguments.overfit_batches and _shuffles(source):
        notice("overfit_batches: the training loader is read without shuffling, so that each epoch has the same batches.")


def notice_iterator(run: Run, source: Any) -> None:
    """Print a notice that an iterator without a limit either does not end, or has nothing for the second epoch."""
    arguments = run.arguments
    limited = arguments.limit_train_batches != 1.0 or isinstance(arguments.limit_train_batches, int)
    if isinstance(source, Iterator) and not limited and arguments.max_steps == -1 and arguments.max_epochs != 1:
        name = type(source).__name__
        notice(
            f"{name} is an iterator: the first epoch lasts until it ends, and the next one has nothing to read. Pass "
            f"{restartable(source)}. If it does not end, limit the batches of an epoch: Trainer(limit_train_batches=100)"
        )


def notice_accumulated_steps(run: Run) -> None:
    """Print a notice if the module overrides a hook that accumulation calls less often than once for each batch."""
    schedule = run.accumulation_schedule
    accumulates = run.accumulation > 1 if schedule is None else schedule.going_to_accumulate_grad_batches()
    names = [name for name in ("optimizer_step", "optimizer_zero_grad") if is_overridden(run.module, name, TrainModule)]
    if accumulates and names:
        name, verb = " and ".join(names), "is" if len(names) == 1 else "are"
        notice(
            f"{type(run.module).__name__}.{name} {verb} called once for each accumulation window, not for each batch. Move "
            "what each batch needs to on_train_batch_end."
        )


def notice_few_workers(source: Any, device_type: str, cores: int | None = None) -> None:
    """Print a notice if the training process itself fetches the data while a GPU waits, though there are idle cores.

    On the CPU workers would compete with the computation, and tensors in memory need none.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None and hasattr(os, "sched_getaffinity") else cores or os.cpu_count() or 1
    if isinstance(source, CombinedLoader):
        for part in source.flattened:
            notice_few_workers(part, device_type, cores)
    elif (
        isinstance(source, DataLoader)
        and device_type == "cuda"
        and source.num_workers == 0
        and cores > 2
        and not isinstance(source.dataset, TensorDataset)
    ):
        notice(
            "the training loader has num_workers=0: the training process fetches each batch, and the GPU waits meanwhile. If "
            f"that takes long, use DataLoader(…, num_workers={min(4, cores - 1)})"
        )


def _shuffles(source: Any) -> bool:
    """Whether a loader shuffles because of `shuffle=True`; samplers of the user's may order on purpose."""
    if isinstance(source, CombinedLoader):
        return any(map(_shuffles, source.flattened))
    if not isinstance(source, DataLoader):
        return False
    sampler = getattr(source.batch_sampler, "sampler", source.sampler)
    plain = source.batch_sampler is None or type(source.batch_sampler) is BatchSampler
    return plain and isinstance(sampler, RandomSampler) and not isinstance(sampler, SequentialSampler)
