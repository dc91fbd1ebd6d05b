"""Trainers that save checkpoints, for tests of resuming: `from helpers.resume.saving import Adam, SaveIn, saved`."""

from __future__ import annotations

from typing import Any

import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import nn

from trainkit import Callback, Trainer

__all__ = ["Adam", "SaveIn", "saved", "saving"]


class Adam(TinyModule):
    """A `TinyModule` with Adam (which has a state), a learning-rate schedule by step, and hyper-parameters."""

    def __init__(self, learning_rate: float = 0.1, width: int = 4) -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()
        torch.manual_seed(3)  # all instances begin with the same values
        self.layer = nn.Linear(width, 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def saved(*callbacks: Callback, module: Any = None, **arguments: Any) -> Trainer:
    """A Trainer after a fit that has saved to `runs/version_0/checkpoints`."""
    trainer = saving(*callbacks, **arguments)
    trainer.fit(module or Adam(), tiny_loader(shuffle=True), tiny_loader(8))
    return trainer


def saving(*callbacks: Callback, **arguments: Any) -> Trainer:
    """A Trainer that saves to `runs/version_0/checkpoints`."""
    return make_trainer(*callbacks, **{"enable_checkpointing": True, "default_root_dir": "runs", **arguments})


class SaveIn(Callback):
    """Saves to the path `there` when a hook is called for the n-th time, sanity check not counted."""

    def __init__(self, hook: str, number: int = 1) -> None:
        self.calls, self.number = 0, number
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        self.calls += 1
        if self.calls == self.number:
            trainer.save_checkpoint("there")
