"""A module with repeated blocks, and a backend of `torch.compile` that counts graphs: `from helpers.runs.blocks import …`."""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.data import DataLoader, TensorDataset

from trainkit import TrainModule

__all__ = ["Block", "BlockModule", "Counting", "block_loader"]


class Counting:
    """A backend that counts the graphs that it gets, and runs them without compiling them further.

    Args:
        autograd: Trace the backward pass too, as inductor does.
    """

    def __init__(self, autograd: bool = False) -> None:
        self.graphs = 0
        self._run = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward)) if autograd else _as_it_is

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self._run(graph, inputs)


def _as_it_is(graph: Any, inputs: Any) -> Any:
    return graph.forward


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.dropout(self.outer(torch.relu(self.inner(inputs))))


class BlockModule(TrainModule):
    """Regression with three blocks and AdamW; logs `train_loss` in one way and `val_loss` in another."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.last = nn.Linear(4, self.width), nn.Linear(self.width, 1)
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(3))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / self.width**0.5

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = self.run_block(block, hidden)
        return self.last(hidden)

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(hidden)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log_dict({"val_loss": nn.functional.mse_loss(self(batch[0]), batch[1]), "size": len(batch[0])})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def block_loader(samples: int = 22, batch_size: int = 4) -> DataLoader[Any]:
    """Batches for `BlockModule`; with the default sizes the last one is short."""
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(6))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size, shuffle=True)
