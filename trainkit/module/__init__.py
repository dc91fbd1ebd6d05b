"""What users subclass to describe a training: `TrainModule`, `DataModule`, their overridable hooks and hyper-parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.lazy import lazily

if TYPE_CHECKING:
    from trainkit.module.data_module import DataModule
    from trainkit.module.train_module import TrainModule

__all__ = ["DataModule", "TrainModule"]

__getattr__, __dir__ = lazily(globals(), {"DataModule": "data_module", "TrainModule": "train_module"})
