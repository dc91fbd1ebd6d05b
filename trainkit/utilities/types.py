"""Types for annotations of steps, loaders and `configure_optimizers`, under Lightning's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.lazy import absent

__all__ = [
    "EVAL_DATALOADERS",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "LRSchedulerConfigType",
    "LRSchedulerPLType",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
]

STEP_OUTPUT: TypeAlias = Tensor | Mapping[str, Any] | None
"""What `training_step` returns."""

TRAIN_DATALOADERS: TypeAlias = Any
"""What `train_dataloader` returns."""

EVAL_DATALOADERS: TypeAlias = Any
"""What `val_dataloader`, `test_dataloader` and `predict_dataloader` return."""

OptimizerLRScheduler: TypeAlias = Any
"""What `configure_optimizers` returns."""

OptimizerConfig: TypeAlias = dict[str, Any]
"""A dict with an optimizer, which `configure_optimizers` may return."""

OptimizerLRSchedulerConfig: TypeAlias = dict[str, Any]
"""A dict with an optimizer and a scheduler, which `configure_optimizers` may return."""

LRSchedulerConfigType: TypeAlias = dict[str, Any]
"""A dict with a scheduler and its options: `scheduler`, `interval`, `frequency`, `monitor`, `strict`, `name`."""

LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
"""A scheduler of torch."""

LRSchedulerPLType: TypeAlias = LRScheduler | ReduceLROnPlateau
"""A scheduler of torch."""

LRSchedulerType: TypeAlias = type[LRScheduler] | type[ReduceLROnPlateau]
"""A class of schedulers of torch."""

LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
"""The base classes of torch's schedulers, for `isinstance`."""


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
