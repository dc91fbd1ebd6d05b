"""What `step_of` returns does what `optimizer.step()` does, and what reads torch's records of a step still finds them."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from trainkit import Accelerator
from trainkit.optim import torch_step
from trainkit.optim.torch_step import PUBLIC_STEP, StepGuard, step_of

KINDS: list[Callable[[Any], Optimizer]] = [
    lambda p: SGD(p, 0.1, momentum=0.9),
    lambda p: AdamW(p, 0.1, foreach=True),
    lambda p: Adam(p, 0.1, amsgrad=True, fused=True),
    lambda p: torch.optim.RMSprop(p, 0.1),
]


class Twice(AdamW):
    """Steps twice: a subclass whose `step` calls that of torch."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step()


def with_gradients(make: Callable[[Any], Optimizer]) -> tuple[Optimizer, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2, generator=generator)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(3, 2, generator=generator)
    return make(parameters), parameters


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels that are recorded for a profiler."""
    step_of(with_gradients(KINDS[0])[0])  # the first one compares torch with what is known of it
    labels: list[str] = []
    original = torch.autograd.profiler.record_function.__init__

    def note(self: Any, name: str, *args: Any) -> None:
        labels.append(name)
        original(self, name, *args)

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__init__", note)
    return labels


@pytest.mark.parametrize("make", [*KINDS, Twice])
@pytest.mark.parametrize("scheduled", [False, True])
def test_it_computes_what_step_computes(make: Callable[[Any], Optimizer], scheduled: bool, records: list[str]) -> None:
    """Also the state of the optimizer is bit-equal; torch records no label but those that a subclass causes itself."""
    one, first = with_gradients(make)
    other, second = with_gradients(make)
    if scheduled:
        schedules = [lr_scheduler.LambdaLR(each, lambda n: 0.5**n) for each in (one, other)]
    for _ in range(3):
        records.clear()
        step_of(one)()
        assert records == ["Optimizer.step#Twice.step"] * 2 * (make is Twice)
        other.step()
        if scheduled:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch warns if it has not seen a step of the optimizer
                for schedule in schedules:
                    schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert str(one.state_dict()) == str(other.state_dict())


def test_a_closure_is_called_and_its_loss_returned() -> None:
    optimizer, _ = with_gradients(KINDS[0])
    assert step_of(optimizer)(lambda: 7.0) == 7.0


def test_a_profiler_sees_the_label(records: list[str]) -> None:
    """The trace of a training with the profiler is as torch makes it: one label for each step."""
    loader = tiny_loader(12)
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        make_trainer(max_epochs=1).fit(TinyModule(), loader)
        accelerator = Accelerator()
        module = nn.Linear(4, 1)
        module, optimizer, loader = accelerator.prepare(module, AdamW(module.parameters()), loader)
        for inputs, targets in loader:
            accelerator.backward((module(inputs) - targets).square().mean())
            optimizer.step()
    names = [event.name for event in recording.events() if event.name.startswith("Optimizer.step")]
    assert names == ["Optimizer.step#SGD.step"] * 3 + ["Optimizer.step#AdamW.step"] * 3
    records.clear()
    make_trainer(max_epochs=1).fit(TinyModule(), loader)
    assert not [label for label in records if "Optimizer" in label], "without a profiler there is no label"


@pytest.mark.parametrize("where", ["before", "after", "before any", "after any"])
def test_hooks_are_called(where: str) -> None:
    optimizer, _ = with_gradients(KINDS[1])
    register = {
        "before": optimizer.register_step_pre_hook,
        "after": optimizer.register_step_post_hook,
        "before any": register_optimizer_step_pre_hook,
        "after any": register_optimizer_step_post_hook,
    }[where]
    calls: list[Any] = []
    step_of(optimizer)()
    handle = register(lambda *args: calls.append(args[0]))
    try:
        step_of(optimizer)()
    finally:
        handle.remove()
    step_of(optimizer)()
    assert calls == [optimizer]


def test_a_guard_is_asked_and_costs_no_record(records: list[str]) -> None:
    optimizer, parameters = with_gradients(KINDS[0])
    asked: list[Optimizer] = []
    optimizer.register_step_pre_hook(StepGuard(asked.append))
    step_of(optimizer)()
    assert asked == [optimizer]
    assert not records

    def refuse(_: Optimizer) -> None:
        raise PermissionError

    optimizer.register_step_pre_hook(StepGuard(refuse))
    before = copy.deepcopy(parameters)
    with pytest.raises(PermissionError):
        step_of(optimizer)()
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_the_user_replaces_is_called(scheduled: bool) -> None:
    """On the object, on the class, and around a scheduler's wrapper."""
    calls: list[str] = []

    class Own(SGD):
        pass

    optimizer, _ = with_gradients(lambda p: Own(p, 0.1))
    if scheduled:
        lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    usual = optimizer.step
    optimizer.step = lambda closure=None: calls.append("object") or usual(closure)  # type: ignore[method-assign]
    step_of(optimizer)()
    del optimizer.step
    Own.step = lambda self, closure=None: calls.append("class")  # type: ignore[method-assign]
    step_of(optimizer)()
    assert calls == ["object", "class"]


def test_a_compiled_step_is_called() -> None:
    optimizer, parameters = with_gradients(KINDS[0])
    other, expected = with_gradients(KINDS[0])
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
    step_of(optimizer)()
    other.step()
    assert compiled
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def test_what_is_no_optimizer_of_torch_is_stepped() -> None:
    class Other:
        steps = 0

        def step(self, closure: Any = None) -> None:
            self.steps += 1

    other: Any = Other()
    step_of(other)()
    assert other.steps == 1


def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch, records: list[str]) -> None:
    monkeypatch.setattr(torch_step, "_wrappers", None)
    monkeypatch.setenv(PUBLIC_STEP, "1")
    optimizer, _ = with_gradients(KINDS[0])
    step_of(optimizer)()
    assert records == ["Optimizer.step#SGD.step"]


@pytest.mark.parametrize("lacks", ["register_optimizer_step_post_hook", "profile_hook_step", "LambdaLR"])
def test_another_torch_is_called_as_usual(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """If torch's private parts are not as this version knows them, `step` is called."""
    optimizer, _ = with_gradients(KINDS[0])
    if lacks == "LambdaLR":
        monkeypatch.delattr(lr_scheduler, lacks)
    elif lacks == "profile_hook_step":
        monkeypatch.setattr(Optimizer, lacks, staticmethod(lambda function: lambda *args: function(*args)))
    else:
        monkeypatch.setattr(torch_step.torch_optimizer, lacks, lambda hook: RemovableHandle(OrderedDict()))
    monkeypatch.setattr(torch_step, "_wrappers", None)
    calls: list[Any] = []
    optimizer.step = lambda closure=None: calls.append(closure)  # type: ignore[method-assign]
    assert torch_step._Wrappers().recorded is torch_step._UNKNOWN
    step_of(optimizer)()
    assert calls == [None]


def test_a_scheduler_is_known() -> None:
    """Otherwise the fast call would not be used in most trainings, and nothing else would tell."""
    wrappers = torch_step._Wrappers()
    assert torch_step._UNKNOWN not in (wrappers.recorded, wrappers.scheduled)
