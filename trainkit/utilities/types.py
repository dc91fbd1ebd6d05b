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
TRAIN_DATALOADERS: TypeAlias = Any
EVAL_DATALOADERS: TypeAlias = Any

LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
LRSchedulerPLType: TypeAlias = LRScheduler | ReduceLROnPlateau
LRSchedulerType: TypeAlias = type[LRScheduler] | type[ReduceLROnPlateau]
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)

# What `configure_optimizers` returns: see `TrainModule.configure_optimizers`.
OptimizerLRScheduler: TypeAlias = Any
OptimizerConfig: TypeAlias = dict[str, Any]
OptimizerLRSchedulerConfig: TypeAlias = dict[str, Any]
LRSchedulerConfigType: TypeAlias = dict[str, Any]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
