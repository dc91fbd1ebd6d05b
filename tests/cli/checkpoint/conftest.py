"""Fixtures that write checkpoints: `save` without a training run, `run_folder` with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import about
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import nn

from trainkit.checkpoint.checkpoint_plan import CheckpointContent, CheckpointPlan
from trainkit.checkpoint.commit import commit
from trainkit.precision import Precision
from trainkit.state.training_objects import TrainingObjects, capture

Save = Callable[..., Path]


class Momentum(TinyModule):
    """Has optimizer state and hyper-parameters."""

    def __init__(self, learning_rate: float = 0.1, name: str = "line") -> None:
        super().__init__(learning_rate)
        self.save_hyperparameters()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """`save(module, name="ck", save="all", optimizers=(), state={}, **manifest)` writes a checkpoint of a module."""

    def write(
        *modules: nn.Module,
        name: str = "ck",
        save: Any = "all",
        optimizers: Sequence[Any] = (),
        state: dict[str, Any] | None = None,
        shard: int = 5 * 10**9,
        **manifest: Any,
    ) -> Path:
        taken = capture(TrainingObjects(list(modules), list(optimizers), [], Precision()), save=save)
        taken.choose_files(modules)
        contents = {"model": save, "optimizer": True, "resumable": True}
        described = {"contents": contents, "aliases": taken.aliases, "irregular": taken.irregular, "step": 7, "epoch": 2}
        described |= {"run_id": "feedface00112233", **manifest}
        content = CheckpointContent(
            taken.tensors,
            {**taken.state, **(state or {})},
            about(**described),
            taken.attachments,
            shard,
            model_files=taken.model_files,
        )
        commit(CheckpointPlan(content), tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The checkpoint folder of a run of two epochs: checkpoints of steps 4 and 8."""
    root = tmp_path / "run"
    make_trainer(max_epochs=2, default_root_dir=root, enable_checkpointing=True).fit(Momentum(), tiny_loader(), tiny_loader())
    return root / "version_0" / "checkpoints"
