"""What users subclass to describe a training: `TrainModule`, `DataModule`, their overridable hooks and hyper-parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily

if TYPE_CHECKING:
    from trainkit.module.data_module import DataModule, LightningDataModule
    from trainkit.module.train_module import LightningModule, TrainModule

__all__ = ["DataModule", "LightningDataModule", "LightningModule", "TrainModule"]

_FILES = {
    "DataModule": "data_module",
    "LightningDataModule": "data_module",
    "LightningModule": "train_module",
    "TrainModule": "train_module",
}

__getattr__, __dir__ = lazily(globals(), _FILES)
