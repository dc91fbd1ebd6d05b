"""Every scheduler of torch: the learning rates after a resume are those of an uninterrupted run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.resume.saved_state import restore_optimizer, through_json, unchanged
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from trainkit import Accelerator, Strategy
from trainkit.errors import CorruptCheckpointError, StateMismatchError
from trainkit.optim.parameter_names import parameter_names
from trainkit.state.optimizer import capture_optimizer
from trainkit.state.scheduler import capture_scheduler, restore_scheduler


class Warmup:
    """A function for `LambdaLR` that is an object with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, self.calls / 30)


def chained(optimizer: Optimizer) -> ChainedScheduler:
    inner = ChainedScheduler([ConstantLR(optimizer, 0.5, 4), ExponentialLR(optimizer, 0.95)], optimizer)
    return ChainedScheduler([inner, LinearLR(optimizer, 0.2, total_iters=9)], optimizer)


def sequential(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 12), ExponentialLR(optimizer, 0.9)]
    return SequentialLR(optimizer, parts, [5, 14])


Make = Callable[[Optimizer], Any]
CASES: dict[str, Make] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR object": lambda o: LambdaLR(o, [Warmup(), Warmup()]),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda step: 0.97),
    "StepLR": lambda o: StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o: MultiStepLR(o, [3, 9, 9, 15], 0.5),
    "ConstantLR": lambda o: ConstantLR(o, 0.3, 9),
    "LinearLR": lambda o: LinearLR(o, 0.1, total_iters=13),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.93),
    "SequentialLR": sequential,
    "PolynomialLR": lambda o: PolynomialLR(o, 20, 2.0),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 10, 1e-4),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1),
    "CyclicLR": lambda o: CyclicLR(o, 0.001, 0.1, 3, 5, mode="triangular2"),
    "CyclicLR function": lambda o: CyclicLR(o, 0.001, 0.1, 4, scale_fn=lambda x: 1 / (1 + x), scale_mode="iterations"),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.1, 30),
    "OneCycleLR linear": lambda o: OneCycleLR(o, [0.1, 0.2], 30, anneal_strategy="linear", three_phase=True),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=12),
    "SWALR linear": lambda o: SWALR(o, [0.05, 0.5], anneal_epochs=12, anneal_strategy="linear"),
}


def build(make: Make, kind: type[Optimizer] = SGD, tensor: bool = False) -> tuple[nn.Module, Optimizer, Any]:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    rates: list[Any] = [torch.tensor(0.1), torch.tensor(0.02)] if tensor else [0.1, 0.02]
    options: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {}
    groups = [{"params": [net.weight], "lr": rates[0]}, {"params": [net.bias], "lr": rates[1]}]
    optimizer = kind(groups, lr=rates[0], **options)
    return net, optimizer, make(optimizer)


def advance(optimizer: Optimizer, scheduler: Any, steps: range) -> list[Any]:
    """Step optimizer and scheduler; returns the learning rate and momentum of each group after each step."""
    seen = []
    for step in steps:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step([3.0, 2.0, 2.5, 2.4, 2.6, 1.0][step % 6])
        else:
            scheduler.step()
        seen.append([[float(g["lr"]), g.get("momentum"), g.get("betas")] for g in optimizer.param_groups])
        seen.append([float(rate) for rate in scheduler.get_last_lr()])
    return seen


def resume(net: nn.Module, optimizer: Optimizer, scheduler: Any, other: nn.Module, resumed: Optimizer, schedule: Any) -> None:
    state = capture_optimizer(optimizer, 0, parameter_names([net]))
    described, stored = through_json(state.described), through_json(capture_scheduler(scheduler))
    restore_optimizer(resumed, 0, parameter_names([other]), dict(state.tensors), described, {}, "checkpoint")
    restore_scheduler(schedule, stored, "checkpoint")


def test_every_scheduler_of_torch_has_a_case() -> None:
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} == {name.split()[0] for name in CASES}


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("name", CASES)
def test_rates_after_a_resume_are_those_without(name: str, steps: int) -> None:
    net, optimizer, scheduler = build(CASES[name])
    advance(optimizer, scheduler, range(steps))
    other, resumed, schedule = build(CASES[name])
    resume(net, optimizer, scheduler, other, resumed, schedule)
    expected = advance(optimizer, scheduler, range(steps, steps + 20))
    assert advance(resumed, schedule, range(steps, steps + 20)) == expected
    assert len({str(rates) for rates in expected}) > 2


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_cycled_momentum(name: str, kind: type[Optimizer]) -> None:
    net, optimizer, scheduler = build(CASES[name], kind)
    advance(optimizer, scheduler, range(7))
    other, resumed, schedule = build(CASES[name], kind)
    resume(net, optimizer, scheduler, other, resumed, schedule)
    expected = advance(optimizer, scheduler, range(7, 27))
    assert advance(resumed, schedule, range(7, 27)) == expected
    assert len({str(seen[0][1:]) for seen in expected[::2]}) > 5


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "ExponentialLR", "LambdaLR", "SequentialLR", "OneCycleLR"])
def test_rates_that_are_tensors(name: str) -> None:
    net, optimizer, scheduler = build(CASES[name], tensor=True)
    if optimizer.param_groups[0]["lr"] is optimizer.param_groups[0]["initial_lr"]:
        pytest.skip("this torch (2.9) lets the steps of a SequentialLR change the rate that they start from")
    advance(optimizer, scheduler, range(7))
    other, resumed, schedule = build(CASES[name], tensor=True)
    resume(net, optimizer, scheduler, other, resumed, schedule)
    assert advance(resumed, schedule, range(7, 27)) == advance(optimizer, scheduler, range(7, 27))
    assert isinstance(resumed.param_groups[0]["lr"], torch.Tensor)


def test_a_resume_right_before_the_first_scheduler_step_does_not_warn() -> None:
    """torch must not warn that the scheduler was stepped before the optimizer."""
    net, optimizer, scheduler = build(CASES["StepLR"])
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    other, resumed, schedule = build(CASES["StepLR"])
    resume(net, optimizer, scheduler, other, resumed, schedule)
    schedule.step()


# ------------------------------------------------------------------------------------------------- schedulers of users


class Wrapper(LRScheduler):
    """Warms up, then uses the scheduler that it contains; some of its attributes are functions."""

    def __init__(self, optimizer: Optimizer, after: LRScheduler) -> None:
        self.after, self.shape, self.shapes, self.told = after, lambda x: x, [len, 1], {"f": print, "n": 1}
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > 3:
            self.after.step()
            return list(self.after.get_last_lr())
        return [base * self.shape(self.last_epoch / 3) for base in self.base_lrs]


def test_a_scheduler_in_a_scheduler_and_functions() -> None:
    make: Make = lambda o: Wrapper(o, CosineAnnealingLR(o, 9))  # noqa: E731
    net, optimizer, scheduler = build(make)
    advance(optimizer, scheduler, range(6))
    state = capture_scheduler(scheduler)
    assert "shape" not in state["state"]
    assert "shapes" not in state["state"]
    assert state["state"]["told"] == {"n": 1}
    other, resumed, schedule = build(make)
    resume(net, optimizer, scheduler, other, resumed, schedule)
    assert schedule.shapes == [len, 1]
    assert isinstance(schedule.after, CosineAnnealingLR)
    assert advance(resumed, schedule, range(6, 20)) == advance(optimizer, scheduler, range(6, 20))


def test_a_prepared_scheduler_is_its_own() -> None:
    # a prepared scheduler has the same saved state as the scheduler that it wraps
    net, optimizer, _ = build(CASES["StepLR"])
    *_, scheduler = Accelerator(strategy=Strategy(device="cpu")).prepare(net, optimizer, StepLR(optimizer, 2, 0.5))
    state = capture_scheduler(scheduler)
    assert state["class"] == "StepLR"
    restore_scheduler(scheduler, through_json(state))


def test_what_is_loaded_is_not_shared() -> None:
    # a change of the restored scheduler does not change the state that was loaded
    _, _, scheduler = build(CASES["ExponentialLR"])
    stored = through_json(capture_scheduler(scheduler))
    _, _, first = build(CASES["ExponentialLR"])
    restore_scheduler(first, stored)
    first.base_lrs[0] = 99.0
    assert stored["state"]["base_lrs"] == [0.1, 0.02]


@pytest.mark.parametrize(
    "saved, other, words",
    [
        ("StepLR", "ExponentialLR", "the state of StepLR, but this run has ExponentialLR"),
        (
            "SequentialLR",
            "ChainedScheduler",
            r"SequentialLR\(LinearLR, CosineAnnealingLR, ExponentialLR\), but this run has Chained",
        ),
        ("LambdaLR object", "LambdaLR function and object", "load_state_dict failed"),
    ],
)
def test_another_scheduler_is_refused(saved: str, other: str, words: str) -> None:
    _, optimizer, scheduler = build(CASES[saved])
    advance(optimizer, scheduler, range(3))
    make = CASES.get(other, lambda o: LambdaLR(o, [Warmup(), lambda step: 1.0]))
    _, resumed, schedule = build(make)
    if other not in CASES:
        schedule.lr_lambdas.pop()
    with unchanged(resumed, schedule), pytest.raises(StateMismatchError, match=words):
        restore_scheduler(schedule, through_json(capture_scheduler(scheduler)), "the checkpoint step-3")


def test_a_chain_of_other_parts_is_refused() -> None:
    _, _, scheduler = build(sequential)
    _, _, shorter = build(lambda o: SequentialLR(o, [LinearLR(o), ExponentialLR(o, 0.9)], [5]))
    with pytest.raises(StateMismatchError, match=r"this run has SequentialLR\(LinearLR, ExponentialLR\)"):
        restore_scheduler(shorter, capture_scheduler(scheduler))


@pytest.mark.parametrize("state", [None, {}, [], {"class": "StepLR"}, {"class": 1, "state": {}, "inner": {}}])
def test_a_malformed_state_is_refused(state: Any) -> None:
    _, _, scheduler = build(CASES["StepLR"])
    with pytest.raises(CorruptCheckpointError, match="malformed"):
        restore_scheduler(scheduler, state)
