"""Metrics become plain numbers, and hyper-parameters plain YAML. For other values, the error names the key."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, MetricError
from trainkit.loggers import CSVLogger, Logger


class Memory(Logger):
    """A logger that keeps everything in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        self.rows.append((step, dict(metrics)))


def test_values_become_plain_numbers() -> None:
    logger = Memory()
    values = {
        "int": 3, "bool": True, "float": 0.5, "numpy": np.float32(0.25), "numpy_int": np.int64(7),
        "array": np.array([1.5]), "tensor": torch.tensor(2.5, requires_grad=True), "tensor_int": torch.tensor([2]),
        "bfloat16": torch.tensor(1.5, dtype=torch.bfloat16), "nan": float("nan"), "inf": torch.tensor(torch.inf),
    }  # fmt: skip
    logger.log_metrics(values, 1)
    [(_, row)] = logger.rows
    assert {type(value) for value in row.values()} == {int, float}
    assert str(row) == str({
        "int": 3, "bool": 1, "float": 0.5, "numpy": 0.25, "numpy_int": 7, "array": 1.5, "tensor": 2.5, "tensor_int": 2,
        "bfloat16": 1.5, "nan": float("nan"), "inf": float("inf"),
    })  # fmt: skip


@pytest.mark.parametrize("value, words", [
    ("0.5", "str '0.5'"), (None, "NoneType None"), (1j, "complex"),
    (torch.zeros(3), r"Tensor of shape \(3,\).*mean\(\)"),
    (np.zeros((2, 2)), r"ndarray of shape \(2, 2\)"), ({"a": 1}, "loss/"), ([1.0], "list"),
    (torch.tensor(1j), "Tensor of shape"),
])  # fmt: skip
def test_what_is_no_number_is_refused_by_name(value: Any, words: str) -> None:
    logger = Memory()
    with pytest.raises(MetricError, match=f"(?s)Metric 'loss': expected one real number.*{words}"):
        logger.log_metrics({"fine": 1.0, "loss": value}, 0)
    assert logger.rows == []


@pytest.mark.parametrize("name", ["", 3, None])
def test_metrics_have_names(name: Any) -> None:
    with pytest.raises(MetricError, match="expected a name"):
        Memory().log_metrics({name: 1.0}, 0)


class Color(enum.Enum):
    RED = 1


@dataclass
class Config:
    lr: float
    hidden: tuple[int, ...]
    where: Path


class Opaque:
    def __str__(self) -> str:
        return "opaque thing"


def test_hyperparameters_are_plain_yaml(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.warns(TrainkitWarning) as warned:
        logger.log_hyperparams({
            "config": Config(0.1, (8, 16), Path("data")), "color": Color.RED, "dtype": torch.float32,
            "device": torch.device("cpu"), "function": torch.nn.functional.relu, "kind": torch.nn.ReLU,
            "numpy": np.float64(0.5), "scalar": torch.tensor(3), "set": {2, 1}, "none": None, "nan": float("nan"),
            "opaque": Opaque(), "list": [Opaque(), 1], 3: "a key", "text": "naïve: # {x}",
            "api_key": "S3cr-t", "db": {"url": Path("ftp://me:S3cr-t@h")}, "eot_token": "<eot>", "new_token": 5,
        })  # fmt: skip
    assert [str(one.message) for one in warned] == [
        "CSVLogger: these hyper-parameters are not plain values and were written as text: opaque, list[0]"
    ]
    assert warned[0].filename == __file__
    logger.log_hyperparams(argparse.Namespace(added=1, none="now text"))
    logger.log_hyperparams(None)
    read = yaml.safe_load((tmp_path / "default/version_0/hparams.yaml").read_text("utf-8"))
    assert str(read.pop("nan")) == "nan"
    assert read == {
        "config": {"lr": 0.1, "hidden": [8, 16], "where": "data"}, "color": "RED", "dtype": "torch.float32",
        "device": "cpu", "function": "torch.nn.functional.relu", "kind": "torch.nn.modules.activation.ReLU",
        "numpy": 0.5, "scalar": 3, "set": [1, 2], "none": "now text", "opaque": "opaque thing",
        "list": ["opaque thing", 1], "3": "a key", "text": "naïve: # {x}", "added": 1,
        "api_key": "***", "db": {"url": "ftp:/***@h"}, "eot_token": "<eot>", "new_token": 5,
    }  # fmt: skip


def test_hyperparameters_that_contain_themselves_end_somewhere(tmp_path: Path) -> None:
    params: dict[str, Any] = {"a": 1}
    params["self"] = params
    with pytest.warns(TrainkitWarning, match="self.self"):
        CSVLogger(tmp_path).log_hyperparams(params)


def test_hyperparameters_must_have_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a dict.*got list.*dict\(lr=1e-3\)"):
        CSVLogger(tmp_path).log_hyperparams([1, 2])
    assert list(tmp_path.iterdir()) == []


def test_a_hyperparameter_file_of_someone_else_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "default" / "version_0" / "hparams.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("a: !!python/object:some.Thing {}\n")
    CSVLogger(tmp_path, version=0).log_hyperparams({"b": 1})
    assert yaml.safe_load(path.read_text()) == {"b": 1}
