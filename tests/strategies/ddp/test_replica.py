"""`DDPStrategy` when the set of trained parameters changes, and with many kinds of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.runs.replicas import Net, NoLoss, Plan, by_hand, flat, inputs, joined, over_strategy, together
from helpers.worlds.worlds import run_world
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trainkit.console import TrainkitWarning
from trainkit.errors import LossError, ModuleError
from trainkit.strategies.ddp.replica import FixedDDP


def same(one: list[float], other: list[float], tolerance: float = 1e-11) -> None:
    scale = max(map(abs, other))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= tolerance * scale


# Parameters that are frozen and unfrozen


PLAN: Plan = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19], [20, NoLoss]]


def fine_tune(module: nn.Module, window: int) -> None:
    """Train the first layer from the second accumulation window on; in the fourth, train only the first layer."""
    assert isinstance(module, Net)
    module.first.requires_grad_(window >= 1)
    module.last.requires_grad_(window != 3)


def tuned(options: dict[str, Any]) -> list[float]:
    return flat(over_strategy(joined(**options), PLAN, Net().double(), before=fine_tune))


def test_freezing_and_unfreezing() -> None:
    variants: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
    for results in together(2, {str(options): (tuned, options) for options in variants}).values():
        assert results[0] == results[1]
        same(results[0], flat(by_hand(PLAN, Net().double(), before=fine_tune)))


@pytest.mark.world_size(2)
def test_freezing_under_a_static_graph() -> None:
    module = over_strategy(joined(static_graph=True), PLAN[:-1], Net().double(), before=fine_tune)
    same(flat(module), flat(by_hand(PLAN[:-1], Net().double(), before=fine_tune)))


@pytest.mark.world_size(2)
def test_freezing_on_one_process_only() -> None:
    strategy = joined()

    def before(module: nn.Module, window: int) -> None:
        module.get_parameter("first.bias").requires_grad_(window == 0)
        module.get_parameter("last.bias").requires_grad_(window == 0 or strategy.rank == 0)

    hint = r"train different parameters, .*: rank 0 trains 3 of 4, rank 1 trains 2 of 4\. Freeze"
    with pytest.raises(ModuleError, match=hint):
        over_strategy(strategy, [[1, 2], [3, 4]], Net(), before=before)


@pytest.mark.world_size(2)
def test_a_module_with_nothing_to_train() -> None:
    strategy = joined()
    module = Net().requires_grad_(False)
    step = strategy.step_function(strategy.prepare_module(module), module, "training_step")
    loss = step(3, 0)
    assert not loss.requires_grad
    strategy.skip_backward(torch.zeros(()))
    assert strategy.any_loss(False)
    assert torch.equal(*strategy.all_gather(step(3, 0)))


# Parameters without a gradient


class Branching(Net):
    """Uses one of two branches, depending on the seed of the input, and never the third."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.odd, self.even, self.never = nn.Linear(8, 1), nn.Linear(8, 1), nn.Linear(8, 1)
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)

    def training_step(self, item: Any, batch_idx: int) -> Tensor | None:
        if item is NoLoss:
            return None
        hidden = self.first(inputs(item, torch.float64)).tanh()
        out: Tensor = self.odd(hidden) if item % 2 else self.even(hidden)
        return (out + self.last(hidden)).square().mean()


def decaying(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that changes every parameter that has a gradient, even a zero one."""
    return torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)


UNUSED: Plan = [[1, 2], [3, 5], [4, NoLoss], [6, 8], [NoLoss, 10], [7], [14, 16], [9, 12], [NoLoss], [NoLoss, NoLoss], [2, 1]]


def branch(options: dict[str, Any]) -> list[float]:
    return flat(over_strategy(joined(**options), UNUSED, Branching().double(), decaying))


def test_unused_parameters_get_no_gradient() -> None:
    options = {"find_unused_parameters": True}
    jobs = {"values": (branch, options), "views": (branch, {**options, "gradient_as_bucket_view": True})}
    for results in together(2, jobs).values():
        assert results[0] == results[1]
        same(results[0], flat(by_hand(UNUSED, Branching().double(), decaying)))


@pytest.mark.world_size(2)
def test_an_unused_parameter_is_named_in_the_first_step() -> None:
    fix = r"or use strategy=DDPStrategy\(find_unused_parameters=True\)"
    with pytest.raises(ModuleError, match=f"the loss does not depend on odd.weight, odd.bias, never.weight, .*{fix}"):
        over_strategy(joined(), [[2, 4]], Branching().double())


@pytest.mark.world_size(2)
def test_no_loss_under_a_static_graph() -> None:
    with pytest.raises(LossError, match="training_step returned no loss, .*static_graph=True .*Remove static_graph=True"):
        over_strategy(joined(static_graph=True), [[1, 2], [NoLoss, NoLoss]], Net())


# Models


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(width=4)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.again(x))


class Wave(Net):
    """A model with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.tensor([0.5 + 1.0j, 2.0 - 0.25j]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.phase.prod() * (0.1 + 0.2j)).real


class Mixed(Net):
    """A model with parameters of two dtypes, a frozen parameter, and one of shape (0,)."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.full((2,), 0.5, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0))
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.small.sum().float() + self.nothing.sum()


class Recomputing(Net):
    """Its first layer is recomputed in each backward pass in a way that only a static graph supports."""

    def forward(self, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return self.first(x).tanh()

        x = x.requires_grad_()
        hidden: Tensor = checkpoint(part, x, use_reentrant=True) + checkpoint(part, 2 * x, use_reentrant=True)
        return self.last(hidden)


class Embedded(Net):
    """A model with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, sparse=True)
        self.table.weight.data = torch.arange(24.0).view(6, 4).sin()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table((x[:, 0].abs() * 3).long() % 6))


def descent(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


SHORT: Plan = [[1, 2], [3, 4], [5, NoLoss], [6], [7, 8]]
ALWAYS: Plan = [[1, 2], [3, 4], [5, 6], [7, 8]]


def model(kind: type[Net], plan: Plan, options: dict[str, Any], compiled: bool = False) -> list[float]:
    compiler = torch.compile(backend="eager") if compiled else None
    return flat(over_strategy(joined(**options), plan, kind(), descent, compiler=compiler))


MODELS: dict[str, tuple[type[Net], Plan, dict[str, Any]]] = {
    "tied": (Tied, SHORT, {}),
    "complex": (Wave, SHORT, {}),
    "complex, compressed": (Wave, ALWAYS, {"comm_hook": "fp16"}),
    "two dtypes": (Mixed, SHORT, {}),
    "two dtypes, unused": (Mixed, SHORT, {"find_unused_parameters": True}),
    "sparse": (Embedded, SHORT, {}),
    "checkpointed": (Recomputing, ALWAYS, {"static_graph": True}),
}


@cache
def models() -> dict[str, list[list[float]]]:
    return together(2, {name: (model, *case) for name, case in MODELS.items()})


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    kind, plan, options = MODELS[name]
    results = models()[name]
    assert results[0] == results[1]
    same(results[0], flat(by_hand(plan, kind(), descent)), 0.01 if kind is Mixed or "comm_hook" in options else 1e-5)


@pytest.mark.slow
def test_a_compiled_step() -> None:
    results = run_world(2, model, Net, SHORT, {}, True)
    assert results[0] == results[1]
    same(results[0], flat(by_hand(SHORT, Net(), descent)), 1e-5)


# -------------------------------------------------------------------------------------------------------- fixed buckets


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def fixed(module: nn.Module, **options: Any) -> nn.Module:
    return FixedDDP(module, lambda: True, **{"bucket_cap_mb": 0.01, **options})


def plain(module: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.01, **options})


def train(make: Callable[..., nn.Module], options: dict[str, Any], stop: int | None) -> list[float]:
    """Train six steps; before step `stop`, create DDP again, as in a new process."""
    rank = joined().rank
    module = network()
    ddp = make(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        if step == stop:
            ddp._remove_autograd_hooks()  # type: ignore[operator]
            ddp = make(module, **options)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    return flat(module)


OPTIONS: dict[str, dict[str, Any]] = {
    "two buckets": {},
    "one bucket": {"bucket_cap_mb": 25},
    "static, two buckets": {"static_graph": True},
    "static, one bucket": {"static_graph": True, "bucket_cap_mb": 25},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
}


@cache
def trained() -> dict[str, list[list[float]]]:
    """The results of all cases, computed on three processes."""
    jobs: dict[str, Any] = {f"{name}, {stop}": (train, fixed, o, stop) for name, o in OPTIONS.items() for stop in (None, 3)}
    jobs |= {f"torch's {name}, {stop}": (train, plain, OPTIONS[name], stop) for name in DIFFERING for stop in (None, 3)}
    return together(3, jobs)


DIFFERING = ("two buckets", "one bucket", "static, one bucket")


@pytest.mark.parametrize("name", OPTIONS)
def test_a_restart_changes_no_bit(name: str) -> None:
    whole, resumed = (trained()[f"{name}, {stop}"] for stop in (None, 3))
    assert whole[0] == whole[1] == whole[2]
    assert whole == resumed


@pytest.mark.parametrize("name", DIFFERING)
def test_torchs_own_buckets_change_bits(name: str) -> None:
    """With torch's own DDP, a restart changes bits, so the test above can fail."""
    whole, resumed = (trained()[f"torch's {name}, {stop}"] for stop in (None, 3))
    assert whole[0] == whole[1] == whole[2]
    assert whole != resumed


@pytest.mark.world_size(2)
def test_the_buckets_are_final_in_the_first_step() -> None:
    joined()
    for options in OPTIONS.values():
        seen: list[int] = []

        def hook(seen: list[int], bucket: Any) -> Any:
            seen.append(bucket.buffer().numel())
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        hook.__annotations__.clear()
        module = network()
        ddp = fixed(module, **options)
        ddp.register_comm_hook(seen, hook)  # type: ignore[operator]
        for _ in range(3):
            ddp(torch.ones(2, 5)).sum().backward()
        expected = [64 * 64 + 64 + 3 * 64 + 3, 64 + 5 * 64]
        if options.get("bucket_cap_mb") == 25:
            expected = [sum(expected)]
        if options.get("find_unused_parameters"):
            expected = [64 + 3 * 64 + 3, 64 * 64 + 64 + 5 * 64]
        assert seen == expected * 3


def test_a_torch_whose_buckets_cannot_be_fixed() -> None:
    """Its reducer lacks the methods that rebuild buckets, or they do nothing."""

    class Other:
        def _push_all_rebuilt_params(self) -> None:
            pass

        def _rebuild_buckets(self) -> bool:
            return False

    for reducer in (object(), Other()):
        ddp = FixedDDP.__new__(FixedDDP)
        ddp.__dict__["reducer"] = reducer
        with pytest.warns(TrainkitWarning, match="rebuilds its buckets after the first step, .*may differ in the last bit"):
            ddp._build_buckets()
