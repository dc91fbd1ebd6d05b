"""Loggers: CSV, JSON lines, TensorBoard, Weights & Biases, MLflow, Comet. Each class is loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.loggers.base import Logger
    from trainkit.loggers.comet_logs import CometLogger
    from trainkit.loggers.csv_logs import CSVLogger, JSONLLogger
    from trainkit.loggers.mlflow_logs import MLFlowLogger
    from trainkit.loggers.tensorboard import TensorBoardLogger
    from trainkit.loggers.wandb_logs import WandbLogger

__all__ = ["CSVLogger", "CometLogger", "JSONLLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]

_FILES = {
    "CSVLogger": "csv_logs",
    "CometLogger": "comet_logs",
    "JSONLLogger": "csv_logs",
    "Logger": "base",
    "MLFlowLogger": "mlflow_logs",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb_logs",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
