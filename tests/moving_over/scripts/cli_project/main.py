"""A project with a command line: arguments of module and data, a link between them, an optimizer by name."""

import json
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(pl.LightningDataModule):
    """Handwritten digits.

    Args:
        batch_size: samples per batch.
        classes: number of digits to keep.
    """

    def __init__(self, batch_size: int = 32, classes: int = 10):
        super().__init__()
        self.batch_size, self.classes = batch_size, classes

    def setup(self, stage: str):
        x, y = load_digits(return_X_y=True)
        keep = y < self.classes
        self.data = TensorDataset(torch.tensor(x[keep], dtype=torch.float32) / 16, torch.tensor(y[keep]))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size)

    test_dataloader = val_dataloader


class Classifier(pl.LightningModule):
    """A perceptron.

    Args:
        classes: number of outputs.
        hidden: width of the hidden layer.
        activation: between the layers.
    """

    def __init__(self, classes: int, hidden: int = 16, activation: nn.Module | None = None):
        super().__init__()
        self.save_hyperparameters(ignore="activation")
        self.net = nn.Sequential(nn.Linear(64, hidden), activation or nn.ReLU(), nn.Linear(hidden, classes))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self._loss(batch))

    def _loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


class CLI(LightningCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.classes", "model.classes")
        parser.set_defaults({"trainer.enable_model_summary": False})


def main():
    cli = CLI(Classifier, Digits, seed_everything_default=4, save_config_kwargs={"overwrite": True})
    metrics = {name: value.item() for name, value in cli.trainer.callback_metrics.items()}
    optimizer = type(cli.trainer.optimizers[0]).__name__ if sys.argv[1] == "fit" else None
    found = {"losses": cli.model.losses, "metrics": metrics, "optimizer": optimizer}
    print(json.dumps({**found, "outputs": cli.model.net[2].out_features}))


if __name__ == "__main__":
    main()
