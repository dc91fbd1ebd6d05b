"""Compiled blocks under ZeRO stages 1 and 2 train like blocks that are not compiled, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.runs.blocks import BlockModule, Counting, block_loader
from helpers.runs.trainers import make_trainer, parameters_of
from helpers.worlds.worlds import run_world
from helpers.zero.zero_cases import strategy
from torch.nn import functional as F

from trainkit import Accelerator
from trainkit.errors import UnsupportedArgumentError
from trainkit.utils import TorchDynamoPlugin

pytestmark = pytest.mark.zero  # they take long


def by_trainer(kind: str, precision: str, compiled: bool) -> tuple[list[list[float]], int]:
    """The parameters after two epochs, and the number of graphs."""
    module, backend = BlockModule(), Counting(autograd=True)
    trainer = make_trainer(
        strategy=strategy(kind, device="cpu"),
        precision=precision,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        compile={"backend": backend} if compiled else None,
    )
    trainer.fit(module, block_loader(40), block_loader())
    return [value.flatten().tolist() for value in parameters_of(module).values()], backend.graphs


def by_own_loop(kind: str, compiled: bool) -> tuple[list[list[float]], int]:
    """The same with an `Accelerator`."""
    backend = Counting(autograd=True)
    plugin = TorchDynamoPlugin(backend) if compiled else None
    torch.manual_seed(3)
    accelerator = Accelerator(strategy=strategy(kind, device="cpu"), dynamo_plugin=plugin)
    module = BlockModule()
    model, optimizer, loader = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01), block_loader())
    for inputs, targets in loader:
        accelerator.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return [value.flatten().tolist() for value in parameters_of(module).values()], backend.graphs


@pytest.mark.parametrize("kind", ["zero1", "zero1-cpu", "zero2", "zero2-cpu"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("size", [1, 2])
def test_blocks(kind: str, precision: str, size: int) -> None:
    compiled, plain = (run_world(size, by_trainer, kind, precision, how) for how in (True, False))
    for (parameters, graphs), (expected, none) in zip(compiled, plain, strict=True):
        assert parameters == expected
        assert (graphs >= 2, none) == (True, 0)


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_blocks_of_an_own_loop(kind: str) -> None:
    compiled, plain = (run_world(2, by_own_loop, kind, how) for how in (True, False))
    for (parameters, graphs), (expected, none) in zip(compiled, plain, strict=True):
        assert parameters == expected
        assert (graphs >= 1, none) == (True, 0)


@pytest.mark.parametrize(
    "kind, how, message",
    [
        ("zero3", "regional", "compile='regional' does not work with ZeROStrategy, whose hooks"),
        ("zero3", True, "compile=True does not work with ZeROStrategy, whose hooks"),
        ("zero2", "whole", "compile='whole' does not work with ZeROStrategy, whose engine can run compiled blocks"),
    ],
)
def test_refusals(kind: str, how: Any, message: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=message):
        make_trainer(strategy=strategy(kind, device="cpu"), compile=how)
