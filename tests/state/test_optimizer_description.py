"""Optimizers with unusual state, and malformed descriptions of optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.resume.saved_state import differences, frozen_copy, restore_optimizer, through_json, unchanged
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import SGD, Adam, Optimizer

from trainkit import Accelerator, Strategy
from trainkit.errors import CorruptCheckpointError, StateMismatchError, UnsavableError
from trainkit.optim.parameter_names import parameter_names
from trainkit.state.optimizer import OptimizerState, capture_optimizer, plan_optimizer, same_groups
from trainkit.state.saved_values import copy_value

WHAT = "the checkpoint step-4"


def net() -> nn.Linear:
    return nn.Linear(3, 2)


def saved(module: nn.Module, optimizer: Optimizer, index: int = 0) -> OptimizerState:
    state = capture_optimizer(optimizer, index, parameter_names([module]))
    return OptimizerState(frozen_copy(state.tensors), through_json(state.described), state.irregular)


def load(module: nn.Module, optimizer: Optimizer, state: OptimizerState, index: int = 0) -> list[str]:
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    return restore_optimizer(optimizer, index, parameter_names([module]), state.tensors, state.described, dtypes, WHAT)


def stepped(module: nn.Module, kind: Callable[..., Optimizer] = Adam, **options: Any) -> Optimizer:
    optimizer = kind(module.parameters(), lr=0.1, **options)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


class Odd(SGD):
    """An optimizer whose state dict has an entry that torch's own optimizers do not have."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": {"alpha": 0.5, "weights": [torch.ones(2)]}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow = state_dict.pop("slow")
        super().load_state_dict(state_dict)


def odd_state(module: nn.Linear) -> dict[str, Any]:
    """Nested state; the slot `list.1` has the name under which the second tensor of the slot `list` could be stored."""
    return {
        "pair": (torch.ones(2, 3), None, 4),
        "empty": [],
        "a/b": torch.ones(2),
        "deep": {"x": [torch.zeros(1), "text"], 3: torch.ones(1)},
        "flag": True,
        "word": "letters",
        "list": [torch.ones(1), torch.zeros(1)],
        "list.1": torch.full((2, 3), 7.0),
    }


def test_unusual_state_is_restored() -> None:
    module, other = net(), net()
    optimizer, resumed = Odd(module.parameters(), 0.1), Odd(other.parameters(), 0.1)
    optimizer.state[module.weight] = odd_state(module)
    optimizer.state["updates"] = {"count": 5, "mean": torch.ones(2)}
    state = saved(module, optimizer)
    assert set(state.irregular) == {"0/weight/pair.0", "0//updates", "0//slow"}
    load(other, resumed, state)
    assert differences(odd_state(module), resumed.state[other.weight]) == []
    assert differences({"count": 5, "mean": torch.ones(2)}, resumed.state["updates"]) == []
    assert differences({"alpha": 0.5, "weights": [torch.ones(2)]}, resumed.slow) == []


class Opaque(SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"mine": [torch.ones(2), 3]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mine = state_dict["mine"]


def test_a_state_dict_of_another_form_is_stored_unchanged() -> None:
    module, other = net(), net()
    state = saved(module, Opaque(module.parameters(), 0.1), 2)
    assert state.tensors == {}
    assert state.irregular == ["2//"]
    resumed = Opaque(other.parameters(), 0.1)
    load(other, resumed, state, 2)
    assert differences([torch.ones(2), 3], resumed.mine) == []
    with pytest.raises(StateMismatchError, match="group 0: only in the checkpoint: weight"):
        load(other, Opaque([other.bias], 0.1), state, 2)


class Refusing(SGD):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.broken = True
        raise KeyError("mine")


def test_what_its_own_load_refuses_leaves_no_trace() -> None:
    # if the optimizer's own load_state_dict raises an error, the optimizer is not changed
    module, other = net(), net()
    optimizer = Refusing([module.weight], 0.1, momentum=0.9)
    module.weight.grad = torch.ones(2, 3)
    optimizer.step()
    optimizer.add_param_group({"params": [module.bias], "lr": 3.0})
    resumed = Refusing([other.weight], 0.7, momentum=0.9)
    other.weight.grad = torch.ones(2, 3)
    resumed.step()
    groups, held = resumed.param_groups, resumed.state
    with unchanged(other, resumed), pytest.raises(StateMismatchError, match="KeyError: 'mine'"):
        load(other, resumed, saved(module, optimizer))
    assert resumed.param_groups is groups
    assert resumed.state is held
    assert not hasattr(resumed, "broken")


def test_a_prepared_optimizer_is_its_own() -> None:
    # a prepared optimizer has the same saved state as the optimizer that it wraps
    module, other = net(), net()
    _, prepared = Accelerator(strategy=Strategy(device="cpu")).prepare(module, stepped(module))
    state = saved(module, prepared)
    assert state.described["class"] == "Adam"
    resumed = Adam(other.parameters(), 0.5)
    load(other, resumed, state)
    assert torch.equal(resumed.state[other.weight]["exp_avg"], prepared.state[module.weight]["exp_avg"])
    _, prepared_too = Accelerator(strategy=Strategy(device="cpu")).prepare(other, Adam(other.parameters(), 0.5))
    load(other, prepared_too, state)
    assert prepared_too.param_groups[0]["lr"] == 0.1


def test_a_function_among_the_options_is_named() -> None:
    module = net()
    optimizer = SGD([{"params": module.parameters(), "scale": lambda x: x}], 0.1)
    with pytest.raises(UnsavableError, match="scale"):
        saved(module, optimizer)


def test_a_copy_of_a_view_has_memory_of_its_own() -> None:
    buffer = torch.zeros(1_000_000)
    copy = copy_value({"a": [buffer[:2]], "b": (buffer[3],)})
    assert copy["a"][0].untyped_storage().nbytes() == 8
    assert isinstance(copy["b"], tuple)


def _tampered() -> dict[str, Callable[[dict[str, Any], dict[str, Tensor]], object]]:
    return {
        "no class": lambda d, t: d.pop("class"),
        "class no text": lambda d, t: d.update({"class": 3}),
        "no groups": lambda d, t: d.pop("groups"),
        "groups a map": lambda d, t: d.update(groups={}),
        "group a number": lambda d, t: d["groups"].append(1),
        "group of numbers": lambda d, t: d["groups"][0].update(parameters=[1, 2]),
        "name twice": lambda d, t: d["groups"][0]["parameters"].append("weight"),
        "options a list": lambda d, t: d["groups"][0].update(options=[]),
        "params as option": lambda d, t: d["groups"][0]["options"].update(params=[0]),
        "state a list": lambda d, t: d.update(state=[]),
        "state of a stranger": lambda d, t: d["state"].update(stranger={}),
        "slots a number": lambda d, t: d["state"].update(weight=1),
        "values a list": lambda d, t: d["state"].update(weight={"values": []}),
        "lists a list": lambda d, t: d["state"].update(weight={"lists": []}),
        "endless list": lambda d, t: d["state"].update(
            weight={"lists": {"x": {"tuple": False, "length": 10**12, "values": {}}}}
        ),
        "list with a gap": lambda d, t: d["state"].update(
            weight={"lists": {"x": {"tuple": False, "length": 2, "values": {"0": 1, "7": 2}}}}
        ),
        "negative list": lambda d, t: d["state"].update(weight={"lists": {"x": {"tuple": False, "length": -1, "values": {}}}}),
        "irregular numbers": lambda d, t: d["state"].update(weight={"irregular": [1]}),
        "entry with a number": lambda d, t: d.update(entries={0: {}}),
        "tensor of no parameter": lambda d, t: t.update({"0/stranger/exp_avg": torch.ones(1)}),
        "tensor without a slot": lambda d, t: t.update({"0/exp_avg": torch.ones(1)}),
    }


@pytest.mark.parametrize("name", _tampered())
def test_a_malformed_description_is_refused(name: str) -> None:
    module, other = net(), net()
    state = saved(module, stepped(module))
    _tampered()[name](state.described, state.tensors)
    resumed = stepped(other)
    with unchanged(other, resumed), pytest.raises(CorruptCheckpointError, match=f"{WHAT}: the description of optimizer 0"):
        load(other, resumed, state)


@pytest.mark.parametrize("described", [None, [], 3, "text", {}])
def test_no_description_at_all(described: Any) -> None:
    module = net()
    with pytest.raises(CorruptCheckpointError, match="malformed"):
        load(module, stepped(module), OptimizerState({}, described))


def test_tensors_of_other_optimizers_are_passed_over() -> None:
    module, other = net(), net()
    state = saved(module, stepped(module))
    state.tensors["1/stranger/exp_avg"] = torch.ones(1)
    load(other, stepped(other), state)


def test_names_of_an_earlier_version_for_pruned_parameters() -> None:
    """It stored the state of a pruned `weight` under `weight_orig`."""
    module: Any = nn.Linear(3, 2)
    optimizer = Adam([module.weight, module.bias], 0.1)
    prune.identity(module, "weight")
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = capture_optimizer(optimizer, 0, parameter_names([module]))
    assert state.described["groups"][0]["parameters"] == ["weight", "bias"]
    old = {id(module.weight_orig): "weight_orig", id(module.bias): "bias"}
    state = capture_optimizer(optimizer, 0, old)
    for strict in (True, False):
        again = Adam([module.weight_orig, module.bias], 0.1)
        plan = plan_optimizer(again, 0, parameter_names([module]), state.tensors, state.described, {}, "it", strict=strict)
        assert plan() == []
        assert differences(again.state_dict(), optimizer.state_dict()) == []
        assert same_groups(again, parameter_names([module]), state.described)
