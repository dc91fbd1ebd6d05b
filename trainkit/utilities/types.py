"""Types for annotations of steps, loaders and `configure_optimizers`, under Lightning's names."""

from __future__ import annotations

from typing import Any

from trainkit.compat.lightning_names import (
    _DEVICE,
    _EVALUATE_OUTPUT,
    _MAP_LOCATION_TYPE,
    _PATH,
    _PREDICT_OUTPUT,
    EVAL_DATALOADERS,
    STEP_OUTPUT,
    TRAIN_DATALOADERS,
    LRSchedulerConfigType,
    LRSchedulerPLType,
    LRSchedulerType,
    LRSchedulerTypeTuple,
    LRSchedulerTypeUnion,
    OptimizerConfig,
    OptimizerLRScheduler,
    OptimizerLRSchedulerConfig,
)
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


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, __all__)
