"""A module of repeated blocks with dropout, for strategies that work on blocks."""

from __future__ import annotations

from typing import Any

import torch
from helpers.runs.parity import RegressionModule
from torch import Tensor, nn

__all__ = ["Headed", "Stack"]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(6, 10), nn.Linear(10, 6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(self.inner(x).tanh()))


class Stack(RegressionModule):
    """A `RegressionModule` of three blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net = nn.Sequential(nn.Linear(6, 6), *(Block() for _ in range(3)))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


class Headed(nn.Module):
    """The blocks of a `Stack`, and a head, which belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Stack().net
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))
