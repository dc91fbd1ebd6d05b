"""Kill a run, start it again, and get the result of a run that was never killed.

    python examples/resume.py --root runs/whole                 # an uninterrupted run
    python examples/resume.py --root runs/killed --kill-at 70   # ends itself with SIGKILL at step 70
    python examples/resume.py --root runs/killed                # resumes: the same digest as the first

Trains a small network with dropout on noisy, shuffled points of two spirals, and saves every 20 optimizer steps. For the
resume it needs only `ckpt_path="auto"` and the seed. Takes seconds on a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainkit import Callback, Trainer, TrainModule, seed_everything
from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers import CSVLogger

Sample = tuple[Tensor, Tensor]  # a point (2,) and its spiral ()


class Spirals(Dataset[Sample]):
    """Points of two spirals. Each time a point is fetched, numpy adds noise to it."""

    def __init__(self, points: int = 500) -> None:
        radius = np.sqrt(np.linspace(0.02, 1.0, points))
        self.label = np.arange(points) % 2
        angle = 4.0 * radius + np.pi * self.label
        self.point = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)

    def __len__(self) -> int:
        return len(self.point)

    def __getitem__(self, index: int) -> Sample:
        moved = self.point[index] + 0.02 * np.random.randn(2)
        return torch.tensor(moved, dtype=torch.float32), torch.tensor(int(self.label[index]))


class Classifier(TrainModule):
    """Predicts on which spiral a point lies."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2)
        )

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        points, labels = batch
        loss = F.cross_entropy(self.net(points), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class KillAt(Callback):
    """Kills the process without warning: nothing is flushed, nothing is closed, no `finally` runs."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has only SIGTERM, which does the same


def digest(module: nn.Module) -> str:
    """The first digits of the SHA-256 of all parameters."""
    whole = hashlib.sha256()
    for parameter in module.parameters():
        whole.update(parameter.detach().cpu().numpy().tobytes())
    return whole.hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> str:
    """Train, resuming from the newest checkpoint if there is one; returns the digest of the final parameters."""
    parser = argparse.ArgumentParser(description="Kill a run, start it again, and get the same result.")
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="end the process with SIGKILL after this step")
    parser.add_argument("--num-workers", type=int, default=0, help="may change at a resume")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="trainkit_runs/resume", help="where logs and checkpoints go")
    args = parser.parse_args(argv)

    seed_everything(args.seed)  # also determines the initial parameters
    model = Classifier()
    loader = DataLoader(Spirals(), batch_size=64, shuffle=True, num_workers=args.num_workers)
    checkpoints = ModelCheckpoint(every_n_train_steps=20, every_n_epochs=5)
    trainer = Trainer(
        max_epochs=args.max_epochs,
        precision=args.precision,
        logger=CSVLogger(),
        callbacks=[checkpoints, *([KillAt(args.kill_at)] if args.kill_at else [])],
        default_root_dir=args.root,
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path="auto")
    result = digest(model)
    print(f"digest {result} after {trainer.global_step} optimizer steps; the last checkpoint is {checkpoints.last_model_path}")
    return result


if __name__ == "__main__":
    main()
