"""The state of a module: it is restored completely, or an error is raised and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.resume.saved_state import Extra, differences, frozen_copy, restore_model, stored, unchanged
from torch import nn
from torch.nn.utils import parametrizations

from trainkit.errors import ConfigurationError, CorruptCheckpointError, StateMismatchError
from trainkit.state.model import ModelState, capture_model, fingerprint_frozen, plan_model

WHAT = "the checkpoint step-4"


def scramble(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.ones(tensor.shape) * 3)
    return module


def same(a: nn.Module, b: nn.Module) -> bool:
    return differences(dict(a.state_dict()), dict(b.state_dict())) == []


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def normed(kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(kind(nn.Linear(3, 4)), nn.BatchNorm1d(4))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 2),
    "batch norm": lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)),
    "tied": Tied,
    "extra": lambda: nn.Sequential(nn.Linear(2, 2), Extra()),
    "weight norm": lambda: normed(parametrizations.weight_norm),
    "spectral norm": lambda: normed(parametrizations.spectral_norm),
    "orthogonal": lambda: normed(parametrizations.orthogonal),
    "zero and scalar": lambda: nn.ParameterDict({"empty": torch.ones(0, 3), "none": torch.ones(0), "scalar": torch.ones(())}),
    "complex": lambda: nn.ParameterDict(
        {"c": torch.tensor([1 + 2j, float("nan") * 1j]), "d": torch.ones(2, dtype=torch.cdouble)}
    ),
    "half": lambda: nn.Linear(3, 2).bfloat16(),
    "float8": lambda: nn.ParameterDict({"w": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn)}),
    "lstm": lambda: nn.LSTM(3, 4, 2),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "channels last": lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
    "frozen": lambda: nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_restored_bit_by_bit(name: str) -> None:
    torch.manual_seed(1)
    module = MODULES[name]()
    state = stored(module)
    assert set(state.tensors) | set(state.aliases) | set(state.extra) == set(module.state_dict())
    other = scramble(MODULES[name]())
    assert name == "zero and scalar" or not same(module, other)
    memory = {name: p.data_ptr() for name, p in other.named_parameters()}
    assert restore_model(other, state, what=WHAT) == []
    assert same(module, other)
    assert memory == {name: p.data_ptr() for name, p in other.named_parameters()}
    again = stored(other)
    assert differences({**again.tensors}, {**state.tensors}) == []
    assert again.aliases == state.aliases


def test_nothing_is_copied_and_buffers_that_are_not_persistent_stay_out() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Extra())
    state = capture_model(module)
    assert list(state.tensors) == ["0.weight", "0.bias", "1.kept"]
    assert state.tensors["0.weight"].data_ptr() == module[0].weight.data_ptr()
    assert not state.tensors["0.weight"].requires_grad
    other = nn.Sequential(nn.Linear(2, 2), Extra({}))
    restore_model(other, stored(module), what=WHAT)
    assert differences(other[1].extra, {"seen": (1, 2), "mean": torch.ones(2)}) == []


def test_save_must_be_all_or_trainable() -> None:
    # the argument `save` must be "all" or "trainable"
    with pytest.raises(ConfigurationError, match="'all' or 'trainable', not 'some'"):
        capture_model(nn.Linear(1, 1), "some")  # type: ignore[arg-type]


def test_a_plan_changes_nothing() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with unchanged(other):
        load = plan_model(other, stored(module), what=WHAT)
    load()
    assert same(module, other)


def test_metrics_that_keep_their_state_themselves() -> None:
    # persistent metrics of torchmetrics are restored
    torchmetrics = pytest.importorskip("torchmetrics")

    def make() -> nn.Module:
        return nn.ModuleList([nn.Linear(1, 1), torchmetrics.MeanMetric(), torchmetrics.CatMetric()])

    module, other = make(), make()
    for metric in [*module[1:], *other[1:]]:
        metric.persistent(True)
    for metric in module[1:]:
        metric.update(torch.tensor([1.0, 4.0]))
    state = stored(module)
    assert set(state.tensors) >= {"1.mean_value", "1.weight"}
    assert restore_model(other, state, what=WHAT) == []
    assert differences(dict(module.state_dict()), dict(other.state_dict())) == []
    before = frozen_copy(state.tensors)
    for metric in other[1:]:
        metric.update(torch.tensor([7.0]))
    assert differences(before, state.tensors) == []


# ---------------------------------------------------------------------------------------------------- shared memory


def test_tied_parameters_are_stored_once_under_the_first_name() -> None:
    state = capture_model(Tied())
    assert list(state.tensors) == ["embed.weight"]
    assert state.aliases == {"head.weight": "embed.weight"}


def test_parameters_of_two_objects_on_one_memory_are_tied() -> None:
    module = Tied(tied=False)
    module.head.weight = nn.Parameter(module.embed.weight.detach())
    assert capture_model(module).aliases == {"head.weight": "embed.weight"}


def test_empty_parameters_are_not_tied() -> None:
    state = capture_model(nn.ParameterList([torch.ones(0), torch.ones(0)]))
    assert state.aliases == {}
    assert len(state.tensors) == 2


def test_tied_in_the_checkpoint_only() -> None:
    module, other = Tied(), Tied(tied=False)
    notices = restore_model(other, stored(module), what=WHAT)
    assert notices == [
        "head.weight was tied to embed.weight when saved, but is not tied in this model: both got the same values"
    ]
    assert torch.equal(other.head.weight, module.embed.weight)
    assert torch.equal(other.embed.weight, module.embed.weight)


def test_tied_in_the_model_only() -> None:
    module, other = Tied(tied=False), Tied()
    with unchanged(other), pytest.raises(StateMismatchError, match="embed.weight, head.weight share memory in the model, but"):
        restore_model(other, stored(module), what=WHAT)
    with torch.no_grad():
        module.head.weight.copy_(module.embed.weight)
    notices = restore_model(other, stored(module), what=WHAT)
    assert notices == ["embed.weight, head.weight share memory in this model, but did not when saved; their values are equal"]
    assert torch.equal(other.head.weight, module.head.weight)


def test_one_name_of_two_that_are_tied_is_enough() -> None:
    # a checkpoint may contain only one of two names that are tied in the model
    state = stored(Tied())
    state.aliases.clear()
    other = Tied()
    assert restore_model(other, state, what=WHAT) == ["head.weight is tied to embed.weight in this model and gets its value"]
    assert torch.equal(other.head.weight, state.tensors["embed.weight"])


# ------------------------------------------------------------------------------------------- what cannot be loaded


class Picky(nn.Module):
    """Changes its weight and extra state while loading, then raises an error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(2, 2), Extra({"n": 1})

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        with torch.no_grad():
            self.layer.weight.zero_()
        self.extra.set_extra_state("half")
        raise ValueError("not this one")


def test_a_module_whose_own_load_fails_is_restored() -> None:
    for module, other in ((nn.Sequential(nn.Linear(2, 2), Extra("bad")), nn.Sequential(nn.Linear(2, 2), Extra())),):
        with unchanged(other), pytest.raises(StateMismatchError, match="load_state_dict failed: not mine"):
            restore_model(other, stored(module), what=WHAT)
    other = nn.Sequential(nn.Linear(2, 2), Picky())
    with unchanged(other), pytest.raises(StateMismatchError, match="not this one\nThe model was restored"):
        restore_model(other, stored(scramble(nn.Sequential(nn.Linear(2, 2), Picky()))), what=WHAT)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.aliases.update(other="nowhere"),
        lambda s: s.aliases.update(weight="bias"),
        lambda s: s.trained.update(weight="yes"),
        lambda s: setattr(s, "trained", []),
        lambda s: setattr(s, "extra", []),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(change: Callable[[ModelState], object]) -> None:
    state, other = stored(nn.Linear(2, 2)), nn.Linear(2, 2)
    change(state)
    with unchanged(other), pytest.raises(CorruptCheckpointError, match=WHAT):
        restore_model(other, state, what=WHAT)


# ---------------------------------------------------------------------------------------------------------------- lazy


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


def test_lazy_parameters_get_their_shape() -> None:
    module, other = lazy(), lazy()
    module(torch.randn(4, 5))
    assert restore_model(other, stored(module), what=WHAT) == []
    assert differences(dict(module.state_dict()), dict(other.state_dict())) == []
    other.eval(), module.eval()
    inputs = torch.randn(2, 5)
    assert torch.equal(module(inputs), other(inputs))


def test_lazy_parameters_without_a_shape_are_not_stored() -> None:
    state, other = stored(lazy()), lazy()
    assert set(state.trained) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert list(state.tensors) == ["1.num_batches_tracked"]
    assert restore_model(other, state, what=WHAT) == []
    other(torch.randn(4, 5))
    with unchanged(other), pytest.raises(StateMismatchError, match=r"missing in the checkpoint \(6\): 0.weight, "):
        restore_model(other, state, what=WHAT)
    with pytest.raises(StateMismatchError, match=r"missing in the checkpoint \(1\): 1.weight"):
        restore_model(nn.Sequential(nn.Identity(), nn.LazyLinear(2, bias=False)), ModelState(), what=WHAT)


def test_lazy_parameters_may_be_frozen() -> None:
    module, other = lazy(), lazy()
    for parameter in module.parameters():
        parameter.requires_grad = False
    state = stored(module, "trainable")
    assert state.fingerprint == fingerprint_frozen(module) != fingerprint_frozen(other)
    assert restore_model(other, state, what=WHAT) == ["requires_grad of 4 parameters was set to False, as in the checkpoint"]
    assert not any(parameter.requires_grad for parameter in other.parameters())
