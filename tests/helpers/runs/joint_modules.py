"""Modules whose optimizers step together, for several processes."""

from __future__ import annotations

from typing import Any

import torch
from helpers.runs.tiny import TinyModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

__all__ = ["OneOverflows", "OneUnused"]


class OneOverflows(TinyModule):
    """In step 1 the gradient of Adam overflows, on rank 1 only.

    Args:
        first: Makes the other optimizer.
    """

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.first = first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1 and self.trainer.global_rank == 1:
            loss = loss + (self.layer.bias - self.layer.bias.detach()).sum() * 1e38 * 1e38
        return loss

    def configure_optimizers(self) -> Any:
        first = self.first([self.layer.weight], lr=0.1)
        second = torch.optim.Adam([self.layer.bias], lr=0.1)
        return [first, second], [{"scheduler": CosineAnnealingLR(first, 9), "interval": "step"}]


class OneUnused(TinyModule):
    """The loss does not depend on the parameters of the second optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1), torch.optim.Adam(self.other.parameters())
