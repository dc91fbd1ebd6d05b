"""Classify handwritten digits: the smallest complete use of the Trainer.

    python examples/digits.py --max-epochs 30

Trains a small convolutional network on scikit-learn's 1,797 digits of 8 × 8 pixels, stops when the validation loss no
longer falls, and tests it on digits that it has not seen. Takes seconds on a CPU; needs scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainkit import DataModule, Trainer, TrainModule, seed_everything
from trainkit.callbacks import EarlyStopping
from trainkit.loggers import CSVLogger

Batch = list[Tensor]  # images (B, 1, 8, 8) and labels (B,)


class Digits(DataModule):
    """Two thirds of the digits to train on, a sixth to validate on, a sixth to test on."""

    def __init__(self, batch_size: int = 32) -> None:
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        data = TensorDataset(images, torch.tensor(labels))
        generator = torch.Generator().manual_seed(0)  # the same split whatever the seed of the run
        self.train, self.val, self.test = random_split(data, [1197, 300, 300], generator)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=300)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=300)


class Classifier(TrainModule):
    """Two convolutions and a linear layer."""

    def __init__(self, channels: int = 16, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(channels * 16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: Batch, stage: str) -> None:
        images, labels = batch
        logits = self(images)
        self.log(f"{stage}_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log(f"{stage}_accuracy", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def main(argv: Sequence[str] | None = None) -> float:
    """Train and test; returns the fraction of test digits that were classified correctly."""
    parser = argparse.ArgumentParser(description="Classify handwritten digits.")
    parser.add_argument("--max-epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="trainkit_runs/digits", help="where logs go")
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    trainer = Trainer(
        max_epochs=args.max_epochs,
        precision=args.precision,
        logger=CSVLogger(),
        callbacks=[EarlyStopping("val_loss", patience=3)],
        default_root_dir=args.root,
        log_every_n_steps=10,
    )
    model, data = Classifier(), Digits(args.batch_size)
    trainer.fit(model, datamodule=data)
    [metrics] = trainer.test(model, datamodule=data)
    print(f"test accuracy {metrics['test_accuracy']:.3f} after {trainer.global_step} steps; logs in {trainer.log_dir}")
    return metrics["test_accuracy"]


if __name__ == "__main__":
    main()
