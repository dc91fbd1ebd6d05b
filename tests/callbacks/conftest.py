"""Fixtures for callbacks: a trainer that only has attributes, for one hook at a time, and real trainers for whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit import Callback, Trainer
from trainkit.distributed.world import World
from trainkit.loggers import Logger
from trainkit.precision import Precision


class Clock:
    """Replaces the module `time` in the file of a callback. Only the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class FakeModule(torch.nn.Linear):
    """A module with two parameters and the methods of `TrainModule` that callbacks use; records what is logged and printed."""

    automatic_optimization = True
    global_rank = 0

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.logged: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.printed: list[str] = []

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged[name] = value
        self.options = options

    def log_dict(self, values: dict[str, Any], **options: Any) -> None:
        for name, value in values.items():
            self.log(name, value, **options)

    def print(self, text: str) -> None:
        self.printed.append(text)


@pytest.fixture
def module() -> Any:
    return FakeModule()


@pytest.fixture
def trainer() -> Any:
    """The attributes of a `Trainer` that callbacks read during `fit`: epochs of ten batches, validations of two."""
    skips: list[int] = []
    return SimpleNamespace(
        accelerator=SimpleNamespace(skip_update=lambda: skips.append(1), skips=skips, sync_gradients=True),
        _arguments=SimpleNamespace(limit_val_batches=1.0),
        callback_metrics={},
        current_epoch=0,
        fast_dev_run=False,
        global_step=0,
        lightning_module=None,
        is_global_zero=True,
        logged_metrics={},
        loggers=[object()],
        lr_scheduler_configs=[],
        accumulate_grad_batches=1,
        max_epochs=2,
        max_steps=-1,
        num_predict_batches=[3],
        num_sanity_val_batches=[1],
        num_test_batches=[3],
        num_training_batches=10,
        num_val_batches=[2],
        optimizers=[],
        precision="32-true",
        precision_plugin=Precision("32-true"),
        scaler=None,
        progress_bar_metrics={},
        sanity_checking=False,
        should_log=True,
        should_stop=False,
        stage="fit",
        strategy=SimpleNamespace(
            data_world=World(),
            device=torch.device("cpu"),
            gradient_norm=lambda optimizer: None,
            lazy_tensors=False,
            shards_parameters=False,
            world=World(),
        ),
        _run=SimpleNamespace(
            find_logged_step=lambda name: math.inf,  # each value is new
            train_metrics=SimpleNamespace(in_bar=dict),
            train_loader=None,
            progress=SimpleNamespace(epoch_start=0),
            validation=None,
        ),
        world_size=1,
    )


class RecordingLogger(Logger):
    """Records the step and the metrics of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def write_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def write_hyperparams(self, params: Mapping[str, Any]) -> None:
        pass

    def of(self, name: str) -> dict[int, float]:
        """The values of one metric, by step."""
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}


@pytest.fixture
def make_trainer() -> Callable[..., Trainer]:
    """Creates a `Trainer` on the CPU that shows only a given progress bar, and logs every step into a `RecordingLogger`."""

    def make(*callbacks: Callback, **arguments: Any) -> Trainer:
        defaults = {
            "accelerator": "cpu",
            "logger": RecordingLogger(),
            "enable_progress_bar": any(getattr(callback, "is_progress_bar", False) for callback in callbacks),
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "max_epochs": 1,
            "seed": 1,
        }
        return Trainer(callbacks=list(callbacks), **{**defaults, **arguments})

    return make
