"""Trainers, modules and callbacks for tests of whole runs: `from helpers.runs.trainers import make_trainer, Recorder`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helpers.runs.tiny import TinyModule, tiny_loader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from trainkit import Callback, Trainer
from trainkit.loggers import Logger

__all__ = ["Measuring", "Memory", "Recorder", "Seen", "Watching", "exact_loss", "make_trainer", "parameters_of", "run", "same"]


class Memory(Logger):
    """A logger that keeps metrics in memory: one (step, metrics) for each call."""

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
    """Records the position of the run at each training micro-batch and each validation."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []  # (epoch, batch_idx)
        self.validations: list[int] = []  # global_step
        self.sanity_checks = 0
        self.epochs: list[int] = []  # epochs that have ended

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append((trainer.current_epoch, batch_idx))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append(trainer.current_epoch)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if trainer.sanity_checking:
            self.sanity_checks += 1
        else:
            self.validations.append(trainer.global_step)


class Watching(Callback):
    """Records the parameters, the learning rate and `global_step` after each micro-batch."""

    def __init__(self) -> None:
        self.after: list[tuple[int, float, dict[str, Tensor]]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.after.append((trainer.global_step, rate, parameters_of(module)))


class Seen(TinyModule):
    """Records the first input of each training and validation batch."""

    def __init__(self) -> None:
        super().__init__()
        self.training_inputs: list[float] = []
        self.validation_inputs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.training_inputs.append(float(batch[0][0, 0]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_inputs.append(float(batch[0][0, 0]))
        super().validation_step(batch, batch_idx)


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    """A Trainer on the CPU without output (but with a given progress bar), logging, checkpoints and sanity check."""
    defaults = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": any(getattr(callback, "is_progress_bar", False) for callback in callbacks),
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "seed": 1,
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **arguments})


def run(
    batches: int = 4, validation: int | None = 2, *callbacks: Callback, module: Any = None, **arguments: Any
) -> tuple[Trainer, Recorder]:
    """Fit a module with `batches` training and `validation` validation batches; returns the Trainer and its `Recorder`."""
    recorder = Recorder()
    trainer = make_trainer(recorder, *callbacks, **arguments)
    loaders = [tiny_loader(4 * batches)] + ([] if validation is None else [tiny_loader(4 * validation)])
    trainer.fit(module or TinyModule(), *loaders)
    return trainer, recorder


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A copy of the module's parameters and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two results of `parameters_of` agree bit for bit."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and first[name].equal(second[name]) for name in first
    )


class Measuring(TinyModule):
    """Logs its loss and other metrics in `validate` and `test`, for one loader or several."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("largest", batch[0].max(), reduce_fx="max")
        self.log("smallest", batch[0].min(), reduce_fx="min")
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        return loss

    test_step = validation_step


def exact_loss(module: TinyModule, loader: DataLoader) -> float:
    """The mean loss over all samples of a loader, computed at once in float64."""
    inputs, targets = (part.double() for part in loader.dataset.tensors)
    layer = nn.Linear(4, 1).double()
    layer.load_state_dict(module.layer.state_dict())
    return float(F.mse_loss(layer(inputs), targets).detach())
