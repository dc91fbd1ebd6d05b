"""Optimizers over sharded parameters: made before or after the model is sharded, and those that torch cannot step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.fsdp.fsdp_runs import PLAN, assert_like_one_process, joined_fsdp
from helpers.runs.replicas import Net, by_hand, flat, inputs
from torch import nn
from torch.distributed.tensor import DTensor

from trainkit.errors import OptimizerError


def train(module: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step of a plain loop."""
    optimizer.zero_grad()
    module(inputs(seed, torch.float64)).square().mean().backward()
    optimizer.step()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups, the second one in the reverse order of the module."""
    groups = [{"params": [module.last.weight], "lr": 0.02}, {"params": [module.last.bias, *module.first.parameters()]}]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)


@pytest.mark.world_size(2)
def test_an_optimizer_that_was_made_before() -> None:
    """With and without state, it steps the sharded parameters like one that was made after."""
    for steps in (0, 2):
        plain = Net().double()
        expected, module = adamw(plain), Net().double()
        found = adamw(module)
        for seed in range(steps):
            train(plain, expected, seed)
            train(module, found, seed)
        strategy = joined_fsdp()
        model = strategy.wrap(strategy.prepare_module(module))
        strategy.prepare_optimizer(found, module)
        listed = [p for group in found.param_groups for p in group["params"]]
        own = [module.last.weight, module.last.bias, *module.first.parameters()]
        assert [id(p) for p in listed] == [id(p) for p in own]
        assert all(isinstance(p, DTensor) for p in listed)
        assert set(map(id, found.state)) == (set(map(id, own)) if steps else set())
        for seed in range(10, 13):
            train(plain, expected, seed)
            found.zero_grad()
            strategy.backward(model(inputs(seed, torch.float64)).square().mean())
            strategy.optimizer_step(found)
        assert all(state["exp_avg"].to_local().shape == p.to_local().shape for p, state in found.state.items())
        strategy.teardown()
        assert flat(module) == pytest.approx(flat(plain), rel=1e-10)


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.world_size(2)
def test_implementations_of_torch() -> None:
    for kind in KINDS.values():
        for option in ({}, {"foreach": True}):
            assert_like_one_process(optimizer=lambda m, k=kind, o=option: k(m.parameters(), lr=0.05, **o))
    assert_like_one_process(optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True))


class Mine(torch.optim.Rprop):
    """A subclass of one that does not work."""


@pytest.mark.world_size(2)
def test_refused_optimizers() -> None:
    strategy = joined_fsdp(ignored_modules="last")
    module = strategy.prepare_module(Net().double())
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop, torch.optim.SparseAdam, Mine):
        with pytest.raises(OptimizerError, match=f"{kind.__name__} does not work on sharded parameters"):
            strategy.prepare_optimizer(kind(module.parameters()), module)
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        with pytest.raises(OptimizerError, match=rf"{kind.__name__}\(fused=True\) does not work on sharded parameters"):
            strategy.prepare_optimizer(kind(module.first.parameters(), lr=0.1, fused=True), module)
        strategy.prepare_optimizer(kind(module.last.parameters(), lr=0.1, fused=True), module)  # ignored: they are whole
    for option in ("foreach", "fused"):
        mixed = torch.optim.AdamW(module.parameters(), **{option: True})
        with pytest.raises(OptimizerError, match=f"group 0 of AdamW has sharded parameters and whole ones.*{option}=True"):
            strategy.prepare_optimizer(mixed, module)
    groups = [{"params": [*part.parameters()]} for part in (module.first, module.last)]
    strategy.prepare_optimizer(torch.optim.AdamW(groups, fused=True), module)


class Rows(torch.optim.SGD):
    """Its state has one number for each row of a parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = parameter.detach().reshape(len(parameter), -1).sum(1)
        super().step(closure)


@pytest.mark.world_size(2)
def test_sharded_state_of_another_shape_cannot_be_saved() -> None:
    strategy = joined_fsdp()
    module = strategy.prepare_module(Net().double())
    optimizer = strategy.prepare_optimizer(Rows(module.parameters()), module)
    strategy.optimizer_step(optimizer)
    with pytest.raises(OptimizerError, match=r"Rows has sharded state of another shape than its parameter \(rows: \(8,\), the"):
        strategy.stored_optimizer(optimizer)
    strategy.teardown()


@pytest.mark.world_size(2)
def test_the_loss_scaler_and_whole_parameters() -> None:
    strategy = joined_fsdp(ignored_modules="last", precision="16-mixed")
    module = strategy.prepare_module(Net())
    with pytest.raises(OptimizerError, match="the loss scaler of torch cannot unscale"):
        strategy.prepare_optimizer(torch.optim.AdamW(module.parameters()), module)


def test_the_comparison_can_fail() -> None:
    """The cases above differ from each other in more than rounding."""
    ends = [by_hand(PLAN, Net().double(), lambda m, k=k: k(m.parameters(), lr=0.05)) for k in KINDS.values()]
    assert all(flat(a) != pytest.approx(flat(b), rel=1e-3) for a, b in itertools.pairwise(ends))
