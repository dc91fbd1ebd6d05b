"""A GAN: two optimizers under manual optimization."""

from __future__ import annotations

from typing import Any

import torch
from helpers.runs.parity import Noisy
from helpers.runs.trainers import make_trainer
from helpers.zero.zero_cases import strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import TrainModule

__all__ = ["Gan", "gan"]


class Gan(TrainModule):
    """Two optimizers, one of which is clipped; the generator's loss leaves gradients in the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        self.losses: list[tuple[float, float]] = []

    def judged(self, x: Tensor) -> Tensor:
        """Returns float32, like losses, since float16 is less precise than the comparison."""
        return self.discriminator(x).float()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        x, y = batch["x"].float(), batch["y"].float()
        of_generator, of_discriminator = self.optimizers()
        made = self.judged(self.generator(x)).square().mean()
        of_generator.zero_grad()
        self.manual_backward(made)
        self.clip_gradients(of_generator, 0.01)
        of_generator.step()
        told = (self.judged(y) - 1).square().mean() + self.judged(self.generator(x).detach()).square().mean()
        of_discriminator.zero_grad()
        self.manual_backward(told)
        of_discriminator.step()
        self.losses.append((made.item(), told.item()))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.02),
        ]


def gan(kind: str, precision: str) -> list[tuple[float, float]]:
    """The losses of a GAN trained with a strategy; see `zero_cases.strategy`."""
    module = Gan()
    trainer = make_trainer(strategy=strategy(kind), seed=5, max_epochs=2, precision=precision)
    trainer.fit(module, DataLoader(Noisy(16), 2, shuffle=True))
    return module.losses
