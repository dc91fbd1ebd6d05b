"""What the tests of whole runs share: ``from trainers import make_trainer, Recorder``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainkit import Callback, Trainer
from trainkit.loggers import Logger

__all__ = ["Memory", "Recorder", "make_trainer", "parameters_of", "same"]


class Memory(Logger):
    """A logger that keeps what it is given: one (step, metrics) for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.hyperparameters: dict[str, Any] = {}
        self.status: str | None = None

    def write_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def write_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.hyperparameters.update(params)

    def finalize(self, status: str) -> None:
        self.status = status

    def of(self, name: str) -> dict[int, float]:
        """The values of one metric by step."""
        return {step: metrics[name] for step, metrics in self.rows if name in metrics}


class Recorder(Callback):
    """Notes, for each micro-batch of training and each validation, where the run was."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []  # (epoch, batch_idx)
        self.validations: list[int] = []  # global_step
        self.sanity_checks = 0
        self.epochs: list[int] = []  # those whose end was seen

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append((trainer.current_epoch, batch_idx))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(trainer.current_epoch)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if trainer.sanity_checking:
            self.sanity_checks += 1
        else:
            self.validations.append(trainer.global_step)


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    """A Trainer on the CPU that prints nothing, logs nowhere and checks nothing before training."""
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "seed": 1,
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **arguments})


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A copy of the module's parameters and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two results of :func:`parameters_of` agree bit for bit."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and first[name].equal(second[name]) for name in first
    )
