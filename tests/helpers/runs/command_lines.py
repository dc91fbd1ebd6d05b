"""A module and data for `TrainkitCLI`: `from helpers.runs.command_lines import Configured, Numbers, command_line`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from helpers.runs.tiny import TinyModule, tiny_loader
from torch import nn

from trainkit import DataModule, TrainModule
from trainkit.cli import TrainkitCLI

__all__ = ["QUIET", "Configured", "Numbers", "Wider", "command_line", "config_files"]

QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")


class Configured(TinyModule):
    """A `TinyModule` with arguments of several types.

    Args:
        encoder: A module before the layer.
        width: Number of inputs of the layer.
        dropout: Probability of dropout.
        size: A pair of numbers.
        rate: The learning rate.
    """

    def __init__(
        self,
        encoder: nn.Module | None = None,
        width: int = 4,
        dropout: float = 0.1,
        size: tuple[int, int] = (1, 2),
        rate: float = 0.1,
    ) -> None:
        super().__init__(rate)
        self.save_hyperparameters()
        self.layer = nn.Sequential(encoder or nn.Identity(), nn.Dropout(dropout), nn.Linear(width, 1))


class Wider(Configured):
    """A subclass with another default."""

    def __init__(self, encoder: nn.Module | None = None, width: int = 6, teacher: TrainModule | None = None) -> None:
        super().__init__(encoder, width)
        self.teacher = teacher


class Numbers(DataModule):
    """The data of `tiny_loader`.

    Args:
        batch_size: Number of samples in a batch.
        samples: Number of samples.
    """

    def __init__(self, batch_size: int = 4, samples: int = 16) -> None:
        super().__init__()
        self.batch_size, self.samples = batch_size, samples
        self.width = 4

    def train_dataloader(self) -> Any:
        return tiny_loader(self.samples, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return tiny_loader(self.samples, self.batch_size)

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()


def command_line(*arguments: str, kind: type[TrainkitCLI] = TrainkitCLI, quiet: bool = True, **options: Any) -> TrainkitCLI:
    """What `kind(Configured, Numbers)` does in a script that is started with these arguments."""
    given = [*arguments, *(QUIET if quiet else ())]
    classes = {"model_class": Configured, "datamodule_class": Numbers}
    with mock.patch("sys.argv", ["train.py", *given]):
        return kind(**{**classes, **options})


def config_files(folder: str | Path = ".") -> list[str]:
    """The names of the configuration files of runs, in order."""
    return sorted(path.name for path in Path(folder).rglob("config*.yaml"))
