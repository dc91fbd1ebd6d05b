"""The modules that tests of ZeRO train, and the configurations of the strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from helpers.fsdp.fsdp_cases import FSDP
from helpers.runs.parity import RegressionModule
from torch import Tensor, nn

from trainkit.strategies import DDPStrategy, FSDPStrategy, ZeROStrategy

__all__ = ["NVME", "STAGES", "Calm", "NoLosses", "Plain", "Sometimes", "Weighted", "Wide", "strategy"]

# Name → stage, offload_optimizer, offload_params. `strategy` also sets the threshold of stage 3 to 0: with the default, no
# parameter of a model as small as those of the tests is sharded.
STAGES: dict[str, tuple[int, str | None, str | None]] = {
    "zero1": (1, None, None),
    "zero1-cpu": (1, "cpu", None),
    "zero2": (2, None, None),
    "zero2-cpu": (2, "cpu", None),
    "zero3": (3, None, None),
    "zero3-cpu": (3, "cpu", None),
    "zero3-both-cpu": (3, "cpu", "cpu"),
}

NVME: dict[str, tuple[int, str | None, str | None]] = {
    "zero3-nvme": (3, "nvme", None),
    "zero3-both-nvme": (3, "nvme", "nvme"),
    "zero3-params-nvme": (3, "cpu", "nvme"),
}


def strategy(kind: str, **options: Any) -> Any:
    """Create the strategy for a name of `STAGES`, `NVME` or `FSDP`, `"ddp"` or `"auto"`."""
    if kind == "auto":
        return kind
    if kind in FSDP:
        return FSDPStrategy(**{"wrap": "Linear", **FSDP[kind], **options})
    if kind == "ddp":
        return DDPStrategy(**options)
    stage, optimizer, params = (STAGES | NVME)[kind]
    options = {"param_persistence_threshold": 0, **options} if stage == 3 else options
    if kind in NVME:
        options = {"nvme_path": Path.cwd(), **options}
    return ZeROStrategy(stage, offload_optimizer=optimizer, offload_params=params, **options)


class Plain(RegressionModule):
    """A `RegressionModule` with SGD without momentum; with momentum, a gradient of zero has another effect than None."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Sometimes(Plain):
    """A module in which some micro-batches use the layer `one`, others the layer `other`, and none the layer `never`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        generator = torch.Generator().manual_seed(4)
        self.one, self.other, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        for parameter in (*self.one.parameters(), *self.other.parameters()):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x, row = batch["x"].to(self.dtype), (batch_idx * self.trainer.world_size + self.trainer.global_rank) // 2
        out = self.net(x)
        if row % 2 == 1:
            out = out + self.other(x)
        elif self.trainer.global_step % 3:
            out = out + self.one(x)
        return (out - batch["y"].to(self.dtype)).square().mean()


class NoLosses(Plain):
    """A module that returns no loss for some micro-batches."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if {7, 20}.intersection(batch["id"].tolist()) else loss


class Weighted(RegressionModule):
    """A module in which some micro-batches have weight 0 and a NaN loss."""

    def batch_weight(self, batch: dict[str, Tensor]) -> float:
        return 0.0 if 7 in batch["id"].tolist() else 1.0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if 7 in batch["id"].tolist() else loss


class Calm(RegressionModule):
    """A `RegressionModule` with small learning rates, so that rounding in bfloat16 does not add up."""

    rates: ClassVar = {"adamw": 1e-3, "sgd": 5e-3}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss, computed in float32: bfloat16 does not have the digits that tests compare."""
        mask = batch["mask"].float()
        out = self.net(batch["x"].to(self.dtype)).float() - batch["y"].float()
        return (out.square() * mask).sum() / mask.sum()


class Wide(Calm):
    """Large layers, one of them frozen: each of two processes has at least 1 MiB of a layer, which can be offloaded to NVMe."""

    rates: ClassVar = {"adamw": 1e-4, "sgd": 1e-4}

    def __init__(self, layers: int = 2, **options: Any) -> None:
        super().__init__(**options)
        generator = torch.Generator().manual_seed(1)
        width = 728  # whose square is no multiple of 3
        inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.2), *inner, nn.Linear(width, 6))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        self.net[3].requires_grad_(False)
