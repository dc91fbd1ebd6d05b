"""The model that `prepare` returns to a training loop."""

from __future__ import annotations

import copy
import os
from functools import cache
from typing import Any

import pytest
import torch
from helpers.runs.replicas import Net, NoLoss, by_hand, flat, inputs, joined, together
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.errors import LossError, ModuleError


class Named(Net):
    greeting = "hello"

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)  # a name that wrappers use

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0 * sum(p.sum() for p in self.module.parameters())

    def loss(self, seed: int) -> Tensor:
        return self(inputs(seed)).square().mean()


def backward(strategy: Any, loss: Tensor) -> None:
    strategy.backward(loss)


@pytest.mark.world_size(2)
def test_it_behaves_like_the_users_model() -> None:
    strategy, module = joined(), Named()
    model: Any = strategy.wrap(strategy.prepare_module(module))
    assert strategy.unwrap(model) is module
    assert strategy.unwrap(module) is module
    assert list(model.state_dict()) == list(module.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert [name for name, _ in model.named_buffers()] == ["forwards"]
    assert all(a is b for a, b in zip(model.parameters(), module.parameters(), strict=True))
    model.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
    assert set(flat(module)) == {1.0}
    assert (model.greeting, model.training) == ("hello", True)
    assert not model.eval().training
    assert not module.training
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        model.nonsense
    twin = copy.deepcopy(model)
    assert type(twin) is Named
    assert flat(twin) == flat(module)
    with torch.no_grad():
        assert torch.equal(model(inputs(1)), module(inputs(1)))


@pytest.mark.world_size(2)
def test_gradients_that_would_not_be_averaged() -> None:
    strategy = joined()
    model: Any = strategy.wrap(strategy.prepare_module(Named()))
    hint = r"no prepared model was called since the last backward pass.*model\(...\), not one of its methods. .*loss1 \+ loss2"
    with pytest.raises(ModuleError, match=hint):
        strategy.backward(model.loss(1))
    loss = model(inputs(1)).square().mean()
    strategy.backward(loss.exp(), retain_graph=True)
    with pytest.raises(ModuleError, match=hint):
        strategy.backward(loss)


@pytest.mark.world_size(2)
def test_a_model_that_is_frozen_and_unfrozen() -> None:
    strategy, module = joined(), Net().requires_grad_(False)
    model = strategy.wrap(strategy.prepare_module(module))
    assert not model(inputs(1)).requires_grad
    module.last.requires_grad_(True)
    strategy.backward(model(inputs(1 + strategy.rank)).square().mean())
    gathered = strategy.all_gather(module.last.weight.grad)
    assert torch.equal(*gathered)
    module.first.requires_grad_(True)
    strategy.backward(model(inputs(3 + strategy.rank)).square().mean())
    assert torch.equal(*strategy.all_gather(module.first.weight.grad))


# Two models


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.net = nn.Linear(4, 1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        self.net = nn.Linear(4, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).tanh()


def train_alternately(seeds: list[list[int]], frozen: bool) -> list[float]:
    """For each list of seeds, a step of the critic and one of the generator. Several processes use one seed each."""
    several = "WORLD_SIZE" in os.environ
    strategy = joined() if several else None
    plain_maker, plain_critic = Maker().double(), Critic().double()
    maker: Any = plain_maker if strategy is None else strategy.wrap(strategy.prepare_module(plain_maker))
    critic: Any = plain_critic if strategy is None else strategy.wrap(strategy.prepare_module(plain_critic))
    learn_maker, learn_critic = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, critic))
    for window in seeds:
        mine = window if strategy is None else [window[strategy.rank]]
        for learner, sign in ((learn_critic, 1.0), (learn_maker, -1.0)):
            learn_maker.zero_grad()
            learn_critic.zero_grad()
            plain_critic.requires_grad_(sign == 1.0 or not frozen)
            for seed in mine:
                made = maker(inputs(seed, torch.float64))
                loss = sign * critic(made.detach() if sign == 1.0 else made) / len(mine)
                loss.backward() if strategy is None else strategy.backward(loss)
            learner.step()
    return [*flat(plain_maker), *flat(plain_critic)]


def test_two_models_that_are_trained_alternately() -> None:
    seeds = [[1, 2], [3, 4], [5, 6]]
    for frozen in (False, True):
        results = run_world(2, train_alternately, seeds, frozen)
        assert results[0] == results[1]
        assert results[0] == pytest.approx(train_alternately(seeds, frozen), rel=1e-11)


@pytest.mark.world_size(2)
def test_a_compiled_model() -> None:
    strategy, module = joined(), Net().double()
    model = strategy.wrap(strategy.prepare_module(torch.compile(module, backend="eager")))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for window in [[1, 2], [3, 4]]:
        optimizer.zero_grad()
        strategy.backward(model(inputs(window[strategy.rank], torch.float64)).square().mean())
        strategy.optimizer_step(optimizer)
    assert flat(module) == pytest.approx(flat(by_hand([[1, 2], [3, 4]], Net().double())), rel=1e-11)
    assert strategy.unwrap(strategy.unwrap(model)) is module
    assert not isinstance(strategy.unwrap(model), DistributedDataParallel)


# No loss, and losses of only some of the models


def pair(kind: str, nothing: bool) -> list[float]:
    """Train two models of the same size. With `nothing`, rank 1 has no loss in the second step."""
    strategy = joined() if "WORLD_SIZE" in os.environ else None
    plain = [Net(seed=1).double(), Net(seed=2).double()]
    first, second = plain if strategy is None else [strategy.wrap(strategy.prepare_module(m)) for m in plain]
    optimizer = torch.optim.SGD([p for m in plain for p in m.parameters()], lr=0.1)
    for number, seeds in enumerate([[1, 2], [3, 4], [5, 6]]):
        optimizer.zero_grad()
        for rank, seed in enumerate(seeds):
            if strategy is not None and rank != strategy.rank:
                continue
            x = inputs(seed, torch.float64)
            one = first(x)
            other = second(x * one if kind == "chain" else x)
            losses = {
                "each": [one.square().mean(), other.exp().mean()],
                "the last first": [other.exp().mean(), one.square().mean()],
                "both": [one.square().mean() + other.exp().mean()],
                "chain": [other.square().mean()],
            }[kind]
            empty = nothing and number == 1 and rank == 1
            for loss in losses:
                if strategy is not None:
                    strategy.backward(None if empty else loss)
                elif not empty:
                    (loss / len(seeds)).backward(retain_graph=True)
        optimizer.step() if strategy is None else strategy.optimizer_step(optimizer)
    return [x for module in plain for x in flat(module)]


PAIRS = [("each", False), ("the last first", False), ("both", False), ("both", True), ("chain", True)]


@cache
def pairs() -> dict[str, list[list[float]]]:
    return together(2, {f"{kind}, {nothing}": (pair, kind, nothing) for kind, nothing in PAIRS})


@pytest.mark.parametrize("kind, nothing", PAIRS)
def test_two_models_that_are_called_before_a_backward_pass(kind: str, nothing: bool) -> None:
    results = pairs()[f"{kind}, {nothing}"]
    assert results[0] == results[1]
    assert results[0] == pytest.approx(pair(kind, nothing), rel=1e-11)


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_no_loss_and_the_model_is_not_called(find_unused_parameters: bool) -> None:
    results = run_world(2, uncalled, find_unused_parameters)
    assert results[0] == results[1] == pytest.approx(flat(by_hand([[1, 2], [3, NoLoss], [5, 6]], Net().double())), rel=1e-11)


def uncalled(find_unused_parameters: bool) -> list[float]:
    strategy, module = joined(find_unused_parameters=find_unused_parameters), Net().double()
    model = strategy.wrap(strategy.prepare_module(module))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, seeds in enumerate([[1, 2], [3, 4], [5, 6]]):
        optimizer.zero_grad()
        empty = number == 1 and strategy.rank == 1
        strategy.backward(None if empty else model(inputs(seeds[strategy.rank], torch.float64)).square().mean())
        strategy.optimizer_step(optimizer)
    return flat(module)


@pytest.mark.world_size(2)
def test_no_loss_with_several_uncalled_models() -> None:
    strategy = joined()
    for seed in (1, 2):
        strategy.wrap(strategy.prepare_module(Net(seed=seed)))
    with pytest.raises(ModuleError, match=r"several prepared models, .* it is unclear which .* Call the models first"):
        strategy.backward(None)


@pytest.mark.world_size(2)
def test_no_loss_of_a_model_under_a_static_graph() -> None:
    strategy = joined(static_graph=True)
    strategy.wrap(strategy.prepare_module(Net()))
    with pytest.raises(LossError, match="with static_graph=True all steps must be like the first. Remove static_graph=True"):
        strategy.backward(None)


# Parameters that are in no model


@pytest.mark.world_size(2)
def test_parameters_whose_gradients_are_not_averaged() -> None:
    strategy, module, other = joined(), Net(), nn.Linear(1, 3)
    model = strategy.wrap(strategy.prepare_module(module))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for grown in (False, True):
        strategy.backward(other(model(inputs(1))).sum())
        if grown:
            optimizer.add_param_group({"params": list(other.parameters())})
            hint = r"SGD has 2 parameters \(the first of shape \(3, 1\)\) that were not in a module .* not averaged"
            before = flat(module)
            with pytest.raises(ModuleError, match=hint):
                strategy.optimizer_step(optimizer)
            assert flat(module) == before
        else:
            strategy.optimizer_step(optimizer)
