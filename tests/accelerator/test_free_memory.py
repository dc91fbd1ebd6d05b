"""`free_memory` undoes everything, also if a part of it fails or another rank does not call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world, start_world
from torch import nn
from torch.distributed.tensor import DTensor

from trainkit import Accelerator
from trainkit.errors import CollectiveError, ConfigurationError
from trainkit.strategy import Strategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


def prepared(**arguments: Any) -> tuple[Accelerator, nn.Module, Any, Any]:
    """The accelerator, the user's model, and what was prepared."""
    torch.manual_seed(0)
    accelerator, net = Accelerator(cpu=True, **arguments), nn.Sequential(Block(), Block(), nn.Linear(4, 1))
    return accelerator, net, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("part", ["_checkpointing", "_step_checks"])
def test_an_error_in_one_part_is_raised_after_the_others(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise OSError("the disk is full")

    torn_down: list[Strategy] = []
    monkeypatch.setattr(Strategy, "teardown", lambda strategy: torn_down.append(strategy))
    accelerator, net, *_ = prepared(activation_checkpointing=True, dynamo_backend="aot_eager")
    monkeypatch.setattr(getattr(accelerator, part), "close", fails)
    assert "forward" in vars(net[0])
    with pytest.raises(OSError, match="the disk is full"):
        accelerator.free_memory()
    assert torn_down == [accelerator.strategy]
    assert all("forward" not in vars(block) for block in net)
    assert not accelerator._models.recomputed


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
    optimizer.zero_grad()


def sharded(net: nn.Module) -> set[bool]:
    return {isinstance(parameter, DTensor) for parameter in net.parameters()}


def fails_alone(waits: bool) -> None:
    """Rank 0 raises an error and frees memory on its way out. Rank 1 waits for it, in a step or in another verb."""
    accelerator, net, model, optimizer = prepared(strategy="fsdp")
    step(accelerator, model, optimizer)
    try:
        if accelerator.is_main_process:
            raise ValueError("this loop fails")
        if not waits:
            step(accelerator, model, optimizer)
        accelerator.wait_for_everyone()
    finally:
        accelerator.free_memory()
        assert sharded(net) == {True}


@pytest.mark.parametrize("waits", [True, False])
def test_after_the_error_of_one_rank_nothing_waits_for_the_others(waits: bool) -> None:
    (fine, said), (other_fine, other) = start_world(2, fails_alone, waits).ends(30)
    assert not fine
    assert said.rstrip().endswith("ValueError: this loop fails"), said
    assert not other_fine
    assert "different calls: rank 0: free_memory" in other or not waits


def catches_on_all() -> tuple[set[bool], list[float]]:
    """All ranks leave the loop by the same error, and free memory while they handle it."""
    accelerator, net, model, optimizer = prepared(strategy="fsdp")
    try:
        step(accelerator, model, optimizer)
        raise StopIteration
    except StopIteration:
        accelerator.free_memory()
    step(accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    accelerator.free_memory()
    return sharded(net), [float(parameter.sum()) for parameter in net.parameters()]


def test_parameters_are_whole_after_an_error_of_all_ranks() -> None:
    first, second = run_world(2, catches_on_all)
    assert first == second
    assert first[0] == {False}


def frees_alone() -> None:
    """Without an error that is handled, what is wrong is raised. A module with shards is refused from then on."""
    accelerator, net, model, optimizer = prepared(strategy="fsdp")
    step(accelerator, model, optimizer)
    call = accelerator.free_memory if accelerator.is_main_process else accelerator.wait_for_everyone
    with pytest.raises(CollectiveError, match=r"different calls: rank 0: free_memory .*; rank 1: wait_for_everyone "):
        call()
    if accelerator.is_main_process:
        for strategy in (Strategy("cpu"), accelerator.strategy):
            with pytest.raises(ConfigurationError, match=r"6 parameters are sharded \(DTensor\): .* failed"):
                strategy.prepare_module(net)


def test_a_rank_that_frees_memory_alone_is_told() -> None:
    run_world(2, frees_alone)
