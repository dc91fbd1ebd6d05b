"""Warnings about modules in eval mode, and about how loaders shuffle and fetch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from trainkit.console import notice, warn
from trainkit.data.combined import CombinedLoader, restartable

if TYPE_CHECKING:
    from trainkit.trainer.run import Run

__all__ = ["notice_few_workers", "notice_iterator", "notice_overfitting", "warn_eval_mode", "warn_shuffled"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SHOWN = 5  # names in a message


def warn_eval_mode(module: nn.Module) -> None:
    """Warn about modules that are trained in eval mode, with dropout and batch statistics turned off.

    A module without trainable parameters may be frozen on purpose, and so may the statistics of a BatchNorm: they are not
    named.
    """
    found: list[str] = []
    for name, part in module.named_modules():
        inside = any(name == outer or name.startswith(f"{outer}.") for outer in found)
        if not (part.training or inside or isinstance(part, _NORMS)) and any(p.requires_grad for p in part.parameters()):
            found.append(name)
            if not name:
                break
    if not found:
        return
    if found == [""]:
        which, fix = type(module).__name__, "module"
    else:
        more = ", …" if len(found) > _SHOWN else ""
        which, fix = ", ".join(found[:_SHOWN]) + more, f"module.{found[0]}"
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
