"""The smallest module that trains, and its data: `from helpers.runs.tiny import TinyModule, tiny_loader`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import TrainModule

__all__ = ["ManualModule", "TinyModule", "tiny_loader"]


class TinyModule(TrainModule):
    """Linear regression with four inputs and SGD; logs `train_loss`, `val_loss` and `test_loss`."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class ManualModule(TinyModule):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def tiny_loader(samples: int = 16, batch_size: int = 4, **options: object) -> DataLoader:
    """Inputs (samples, 4) and targets (samples, 1) that are a linear function of them, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) + 0.25
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size, **options)
