"""A checkpoint written by an older trainkit still resumes bit-identically.

`before_rooms/` was written by version 0.1 at commit c3eca58, with the `write` function below. Its arithmetic is exact: all
values are small multiples of powers of two, so no machine rounds them differently. The parameters at the end depend on
the order of the samples, the augmentation, the dropout masks, the momentum and the learning rates.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from trainkit import Trainer, TrainModule
from trainkit.callbacks import EarlyStopping, ModelCheckpoint

FIXTURE = Path(__file__).parent / "before_rooms"
SAVED_AT = 3  # optimizer steps; an epoch has 2, one with four micro-batches and one with two


class Integers(Dataset[torch.Tensor]):
    """Sample i is (i, augmentation...): whole numbers, drawn from torch, numpy and `random` at each fetch."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [int(torch.randint(8, ())), int(numpy.random.randint(8)), random.randrange(8)]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Sums(TrainModule):
    """The loss is linear in the parameters, so its gradient is a sum of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.dropout = nn.Dropout(0.5)
        self.history: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.dropout(batch) * self.weights).sum() / 4
        self.log("train", loss.detach())
        self.history.append([self.trainer.global_step, batch_idx, batch[:, 0].tolist(), batch[:, 1:].sum().item(), loss.item()])
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", (batch[:, :1] * self.weights[:1]).sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(folder: Path, ckpt_path: Path | None = None, max_epochs: int = 5) -> dict[str, Any]:
    """Train in `folder` to the end and return what a user can see of the run."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        accumulate_grad_batches=4,
        max_epochs=max_epochs,
        seed=7,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        callbacks=[
            ModelCheckpoint(every_n_train_steps=SAVED_AT, save_top_k=-1),
            EarlyStopping("val", patience=100),
        ],
    )
    module = Sums()
    train_loader = DataLoader(Integers(), batch_size=4, shuffle=True)
    val_loader = DataLoader(Subset(Integers(), range(16)), batch_size=4)
    trainer.fit(module, train_loader, val_loader, ckpt_path=ckpt_path)
    optimizer = module.optimizers().state_dict()["state"][0]["momentum_buffer"]
    return {
        "history": module.history,
        "weights": module.weights.tolist(),
        "momentum": optimizer.tolist(),
        "metrics": {name: value.item() for name, value in sorted(trainer.callback_metrics.items())},
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
    }


def write(fixture: Path, scratch: Path) -> None:
    """Write the checkpoint, and what its run did after it, into `fixture`. This needs the old version of trainkit."""
    result = train(scratch)
    result["history"] = [entry for entry in result["history"] if entry[0] >= SAVED_AT]
    shutil.copytree(next(scratch.glob(f"**/step-{SAVED_AT:08d}")), fixture / "checkpoint")
    (fixture / "expected.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def recorded() -> dict[str, Any]:
    """What the run did. That version logged the loss of the last micro-batch of a window; now it is the window's mean."""
    expected: dict[str, Any] = json.loads((FIXTURE / "expected.json").read_text("utf-8"))
    last = [loss for step, _, _, _, loss in expected["history"] if step == expected["global_step"] - 1]
    assert expected["metrics"]["train"] == last[-1]
    expected["metrics"]["train"] = sum(last) / len(last)
    return expected


def test_it_resumes_bit_identically(tmp_path: Path) -> None:
    assert train(tmp_path, FIXTURE / "checkpoint") == recorded()


def test_the_whole_run_is_still_the_same(tmp_path: Path) -> None:
    expected = recorded()
    result = train(tmp_path)
    result["history"] = [entry for entry in result["history"] if entry[0] >= SAVED_AT]
    assert result == expected


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
