"""Windows of your own training loop with several forwards and backward passes train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import Accelerator
from trainkit.strategies import FSDPStrategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Scaled(nn.Module):
    """Two blocks, which are units, and a scalar, which is whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def two_forwards(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    first, second = model(x).square().mean(), model(x + 1).square().mean()
    accelerator.backward(first)
    accelerator.backward(second)


def two_losses(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    accelerator.backward(model(x).square().mean())
    accelerator.backward(model(x - 1).abs().mean())


def same_forward(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    loss = model(x).square().mean()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)


def loss_and_none(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    accelerator.backward(model(x).square().mean())
    model(x)
    accelerator.backward(None)


def none(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    model(x)
    accelerator.backward(None)


def none_on_one_rank(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    loss = model(x).square().mean()
    accelerator.backward(loss if accelerator.is_main_process else None)


def after_evaluation(accelerator: Accelerator, model: Any, x: Tensor) -> None:
    loss = model(x).square().mean()
    with torch.no_grad():
        model(x + 1)
    accelerator.backward(loss)


LOOPS = {loop.__name__: loop for loop in (two_forwards, two_losses, same_forward, loss_and_none, none, none_on_one_rank)}
LOOPS["after_evaluation"] = after_evaluation


def trained(strategy: Any, loop: str, window: int, batch: int = 2) -> list[Any]:
    """The parameters after three optimizer steps with weight decay."""
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=window)
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    data = torch.randn(12 * window, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch))
    for x in loader:
        with accelerator.accumulate(model):
            LOOPS[loop](accelerator, model, x)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()
    return [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("loop", LOOPS)
def test_as_with_the_same_global_batches(loop: str) -> None:
    """As one process with batches of twice the size, or as DDP if one rank has no loss. DDP refuses two of these loops."""
    for window in (1, 2):
        if loop == "none_on_one_rank":
            expected = run_world(2, trained, "ddp", loop, window)[0]
        else:
            expected = trained("single", loop, window, 4)
        start = [parameter.detach() for parameter in Scaled().parameters()]
        assert all(map(torch.equal, expected, start)) == (loop == "none")
        for found in run_world(2, trained, FSDPStrategy(), loop, window):
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def cleared() -> list[bool]:
    """Which parameters of the head change, after its bias is left out of a step, as DINO does with its last layer."""
    accelerator = Accelerator(cpu=True, strategy=FSDPStrategy())
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.head.parameters()]
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4, dtype=torch.float64)).sum())
    model.module.head.bias.grad = None
    optimizer.step()
    accelerator.free_memory()
    return [not torch.equal(a, b) for a, b in zip(before, accelerator.unwrap_model(model).head.parameters(), strict=True)]


def test_a_gradient_that_the_user_clears_is_no_missing_one() -> None:
    assert run_world(2, cleared) == [[True, False]] * 2
