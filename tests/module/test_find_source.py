"""`find_source` returns the loader that the user passed, otherwise that of the data module, otherwise that of the module."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit import DataModule, TrainModule
from trainkit.module.overridable_hooks import find_source


class Module(TrainModule):
    def train_dataloader(self) -> Any:
        return "module's"


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return "data module's"


@pytest.mark.parametrize(
    "given, datamodule, module, found",
    [
        ("given", Data(), Module(), "given"),
        (None, Data(), Module(), "data module's"),
        (None, DataModule(), Module(), "module's"),
        (None, None, Module(), "module's"),
        (None, None, TrainModule(), None),
        (None, DataModule(), TrainModule(), None),
        ([], None, Module(), []),
    ],
)
def test_the_nearest_source_counts(given: Any, datamodule: Any, module: Any, found: Any) -> None:
    assert find_source("train_dataloader", given, datamodule, module) == found


def test_each_stage_has_a_method_of_its_own() -> None:
    for method in ("val_dataloader", "test_dataloader", "predict_dataloader"):
        assert find_source(method, None, Data(), Module()) is None


def test_a_method_of_the_class_above_counts() -> None:
    class Further(Data):
        pass

    assert find_source("train_dataloader", None, Further(), Module()) == "data module's"
