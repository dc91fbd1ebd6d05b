"""Where the metrics of a run go: CSV, JSON lines, TensorBoard, Weights & Biases.

Each class is loaded when its name is first used, so that none of the optional packages is imported before that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.loggers.base import Logger
    from trainkit.loggers.csv_logs import CSVLogger
    from trainkit.loggers.jsonl import JSONLLogger
    from trainkit.loggers.tensorboard import TensorBoardLogger
    from trainkit.loggers.wandb_logs import WandbLogger

__all__ = ["CSVLogger", "JSONLLogger", "Logger", "TensorBoardLogger", "WandbLogger"]

_MODULES = {
    "CSVLogger": "trainkit.loggers.csv_logs",
    "JSONLLogger": "trainkit.loggers.jsonl",
    "Logger": "trainkit.loggers.base",
    "TensorBoardLogger": "trainkit.loggers.tensorboard",
    "WandbLogger": "trainkit.loggers.wandb_logs",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
