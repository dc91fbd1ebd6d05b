"""Train a GAN by manual optimization: two optimizers, each stepped by `training_step` itself.

    python examples/gan.py --max-steps 3000

A generator learns to draw points from eight Gaussians on a circle. Generators like to miss some of them ("mode
collapse"), so success can be measured: all eight are covered, and few points lie between them. Takes seconds on a CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer, TrainModule, seed_everything
from trainkit.loggers import CSVLogger

MODES = 8
RADIUS = 2.0
SPREAD = 0.1  # standard deviation of each Gaussian


class Coverage(NamedTuple):
    """How well generated points fit the eight Gaussians."""

    modes: int  # Gaussians that at least a twentieth of all points belong to
    near: float  # fraction of points within three standard deviations of a center


def centres() -> Tensor:
    """The centers of the Gaussians, shape (8, 2)."""
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)


def real_points(count: int) -> Tensor:
    """Points of the distribution to learn, shape (count, 2)."""
    return centres()[torch.randint(MODES, (count,))] + SPREAD * torch.randn(count, 2)


def coverage(points: Tensor) -> Coverage:
    """Count the Gaussians that points, shape (N, 2), lie in."""
    distance, nearest = torch.cdist(points, centres()).min(dim=1)
    near = distance < 3 * SPREAD
    counts = torch.bincount(nearest[near], minlength=MODES)
    return Coverage(int((counts >= len(points) / 20).sum()), float(near.float().mean()))


def perceptron(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs)
    )


class GAN(TrainModule):
    """A generator and a discriminator with the loss of Goodfellow et al., "Generative Adversarial Nets" (2014).

    A penalty keeps the gradient of the discriminator at real points small, so that the two networks converge instead of
    circling around each other (Mescheder et al., "Which Training Methods for GANs do actually Converge?", 2018).
    """

    def __init__(self, width: int = 64, learning_rate: float = 2e-3, penalty: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = perceptron(width, 2)
        self.discriminator = perceptron(width, 1)

    def forward(self, noise: Tensor) -> Tensor:
        points: Tensor = self.generator(noise)
        return points

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0].requires_grad_()
        optimizers: Any = self.optimizers()
        for_generator, for_discriminator = optimizers
        fake = self(torch.randn_like(real))

        self.toggle_optimizer(for_discriminator)
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        discriminator_loss = F.softplus(-on_real).mean() + F.softplus(on_fake).mean()
        [slope] = torch.autograd.grad(on_real.sum(), real, create_graph=True)
        for_discriminator.zero_grad()
        self.manual_backward(discriminator_loss + self.hparams.penalty * slope.square().sum(dim=1).mean())
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)

        self.toggle_optimizer(for_generator)
        generator_loss = F.softplus(-self.discriminator(fake)).mean()
        for_generator.zero_grad()
        self.manual_backward(generator_loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        schedulers: Any = self.lr_schedulers()
        for scheduler in schedulers:  # with manual optimization, you also step the schedulers
            scheduler.step()
        self.log_dict({"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}, prog_bar=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        rate, steps = self.hparams.learning_rate, int(self.trainer.max_steps)
        networks = (self.generator, self.discriminator)
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(network.parameters(), lr=rate, betas=(0.5, 0.99)) for network in networks
        ]
        return optimizers, [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.05, total_iters=steps) for o in optimizers]

    @torch.no_grad()
    def sample(self, count: int, seed: int = 0) -> Tensor:
        """Generated points on the CPU, shape (count, 2)."""
        noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
        points: Tensor = self(noise.to(self.device)).cpu()
        return points


def main(argv: Sequence[str] | None = None) -> Coverage:
    """Train, and return how well the generated points cover the eight Gaussians."""
    parser = argparse.ArgumentParser(description="A GAN by manual optimization.")
    parser.add_argument("--max-steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="trainkit_runs/gan", help="where logs go")
    args = parser.parse_args(argv)

    seed_everything(args.seed)
    points = TensorDataset(real_points(args.max_steps * args.batch_size))
    trainer = Trainer(max_steps=args.max_steps, logger=CSVLogger(), default_root_dir=args.root)
    model = GAN()
    trainer.fit(model, DataLoader(points, batch_size=args.batch_size, shuffle=True))

    result = coverage(model.sample(2000))
    print(f"{result.modes} of {MODES} modes covered, {result.near:.0%} of the points in one of them")
    return result


if __name__ == "__main__":
    main()
