"""Functions and data sent to new processes: functions are sent by value, and errors name what cannot be sent."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainkit import Accelerator, DataModule, TrainModule
from trainkit.errors import ConfigurationError
from trainkit.launch.notebook import dump_call, dump_result, load
from trainkit.strategies import DDPStrategy, ZeROStrategy

LOCK = threading.Lock()


class Locked:
    def __init__(self) -> None:
        self.inside = {"lock": LOCK}

    def run(self) -> None: ...


def of_a_cell(function: Any) -> Any:
    """Return the function as if it were defined in a notebook cell, whose module cannot be imported."""
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    made.__module__ = "__main__"
    return made


def uses_a_lock() -> Any:
    return LOCK


def test_functions_are_sent_by_value() -> None:
    class Thing:
        def __init__(self, value: int) -> None:
            self.value = value

    offset = 3
    function, (thing, scale) = load(dump_call(lambda thing, scale: thing.value * scale + offset, (Thing(2), 5)))
    assert function(thing, scale) == 13
    assert isinstance(thing, Thing)  # it is loaded as the same class in this process


def test_a_model_keeps_its_ties() -> None:
    """A sent model keeps its tied weights."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    _, (other, strategies) = load(dump_call(print, (model, [DDPStrategy(), ZeROStrategy(stage=2)])))
    assert other[0].weight is other[1].weight
    assert torch.equal(other[0].weight, model[0].weight)
    assert [strategy.name for strategy in strategies] == ["ddp", "zero2"]  # strategies that have not joined can be sent


def test_modules_and_data_of_the_framework() -> None:
    class Mine(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

    class Data(DataModule):
        size = 7

    _, (module, data) = load(dump_call(print, (Mine(), Data())))
    assert (type(module).__name__, data.size) == ("Mine", 7)
    assert list(module.state_dict()) == ["net.weight", "net.bias"]


@pytest.mark.parametrize("function, args, what", [
    (print, ((i for i in range(3)),), "argument 0 (of type generator) cannot"),
    (print, (1, {"a": [0, LOCK]}), "argument 1['a'][1] (of type lock) cannot"),
    (print, (Locked(),), "argument 0.inside['lock'] (of type lock) cannot"),
    (Locked().run, (), "the object of the function run.inside['lock'] (of type lock) cannot"),
    (functools.partial(print, LOCK), (), "the function partial[1] (of type lock) cannot"),
    (of_a_cell(uses_a_lock), (), "LOCK, used by the function uses_a_lock (of type lock) cannot"),
    (lambda: (lambda: LOCK)(), (), "LOCK, used by the function <lambda> (of type lock) cannot"),
    (lambda held=LOCK: 1, (), "held, used by the function <lambda> (of type lock) cannot"),
])  # fmt: skip
def test_what_cannot_be_sent_is_named(function: Callable[..., Any], args: tuple[Any, ...], what: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        dump_call(of_a_cell(function) if isinstance(function, types.LambdaType) else function, args)
    text = str(caught.value)
    assert what in text
    assert "be sent to other processes: TypeError: cannot pickle" in text
    assert text.endswith("Create it inside the function, or pass the values that it is built from.")


def test_bound_objects_are_refused() -> None:
    """An `Accelerator` or a joined strategy cannot be sent: with a copy, each process would train alone."""
    accelerator = Accelerator()

    def train() -> None:
        accelerator.print("x")

    for function, args, what in [
        (train, (), "accelerator, used by the function train (of type Accelerator)"),
        (print, (accelerator,), "argument 0 (of type Accelerator)"),
        (print, ([accelerator.strategy],), "argument 0[0] (of type "),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            dump_call(function, args)  # type: ignore[arg-type]
        assert what in str(caught.value)
        assert "it belongs to this process. Create it inside the function" in str(caught.value)


def test_results() -> None:
    """Results are sent back without their autograd graph. Errors name the part that cannot be sent."""
    loss = torch.tensor(2.0, requires_grad=True) * 3
    found = load(dump_result({"loss": loss, "n": 2}))
    assert (found["loss"].item(), found["n"]) == (6.0, 2)
    with pytest.raises(
        ConfigurationError, match=r"has returned, but the result\[0\] \(of type lock\) cannot be sent back: TypeE"
    ):
        dump_result([LOCK])
    with pytest.raises(ConfigurationError, match=r"belongs to this process.*or accelerator\.unwrap_model\(model\)"):
        dump_result(Accelerator())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_arrive_on_the_cpu() -> None:
    model = nn.Linear(2, 2).cuda()
    _, (other, tensor) = load(dump_call(print, (model, torch.ones(2, device="cuda", requires_grad=True))))
    assert {p.device.type for p in other.parameters()} | {tensor.device.type} == {"cpu"}
    assert isinstance(other.weight, nn.Parameter)
    assert tensor.requires_grad


def test_modules_go_by_name() -> None:
    """A function of an imported module is sent by name, and its module must exist in the new process."""
    made = types.ModuleType("made_here")
    exec("def train(): return 1", vars(made))
    sys.modules["made_here"] = made
    data = dump_call(made.train, ())
    del sys.modules["made_here"]
    with pytest.raises(ModuleNotFoundError, match="made_here"):
        load(data)
