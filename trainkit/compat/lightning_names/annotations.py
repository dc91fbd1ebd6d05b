"""Types for annotations of steps, loaders and `configure_optimizers`, under Lightning's names."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.names import absent

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

# Private in Lightning, and imported by projects all the same.
_DEVICE: TypeAlias = torch.device | str | int
_MAP_LOCATION_TYPE: TypeAlias = Any
_PATH: TypeAlias = str | PathLike[str]
_EVALUATE_OUTPUT: TypeAlias = list[Mapping[str, float]]
_PREDICT_OUTPUT: TypeAlias = list[Any] | list[list[Any]]


def __getattr__(name: str) -> Any:
    raise absent("trainkit.utilities.types", name, __all__)
