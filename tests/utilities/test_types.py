"""Types and exceptions under Lightning's names."""

from __future__ import annotations

from typing import get_type_hints

import pytest
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainkit import errors
from trainkit.utilities.exceptions import MisconfigurationException, SIGTERMException
from trainkit.utilities.types import (
    EVAL_DATALOADERS,
    STEP_OUTPUT,
    TRAIN_DATALOADERS,
    LRSchedulerTypeTuple,
    OptimizerLRScheduler,
    OptimizerLRSchedulerConfig,
)


def test_annotations_can_be_read() -> None:
    class Module:
        def training_step(self, batch: Tensor) -> STEP_OUTPUT: ...
        def train_dataloader(self) -> TRAIN_DATALOADERS: ...
        def val_dataloader(self) -> EVAL_DATALOADERS: ...
        def configure_optimizers(self) -> OptimizerLRScheduler: ...

    hints = [get_type_hints(method)["return"] for name, method in vars(Module).items() if not name.startswith("_")]
    assert hints == [STEP_OUTPUT, TRAIN_DATALOADERS, EVAL_DATALOADERS, OptimizerLRScheduler]
    assert OptimizerLRSchedulerConfig(optimizer=1, lr_scheduler=2) == {"optimizer": 1, "lr_scheduler": 2}
    assert ReduceLROnPlateau in LRSchedulerTypeTuple


def test_exceptions() -> None:
    assert MisconfigurationException is errors.ConfigurationError
    assert SIGTERMException is errors.Preempted


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ImportError, match=r"^trainkit\.utilities\.types has no LRSchedulerConfig\. Use: trainer\."):
        from trainkit.utilities.types import LRSchedulerConfig  # noqa: F401
    with pytest.raises(ImportError, match=r"^trainkit\.utilities\.rank_zero has no WarningCache\. Use: "):
        from trainkit.utilities.rank_zero import WarningCache  # noqa: F401
