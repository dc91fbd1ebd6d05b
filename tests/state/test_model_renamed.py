"""Parameters with other names: what is loaded anyway, and what the error says of the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from trainkit.errors import StateMismatchError
from trainkit.state.model import ModelState, capture_model, plan_model


def plain() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def with_observers(layer: nn.Module) -> None:
    layer.train().qconfig = torch.ao.quantization.get_default_qat_qconfig()  # type: ignore[assignment]


def adapted(layer: Any) -> None:
    layer.base_layer = nn.Linear(3, 4)
    del layer.weight, layer.bias


KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "torch.nn.utils.prune": (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "prune.identity(layer, 'weight')"),
    "torch.nn.utils.parametrize": (parametrizations.weight_norm, "parametrizations.weight_norm(layer, 'weight')"),
    "torch.nn.utils.parametrize (": (parametrizations.orthogonal, "parametrizations.weight_norm(layer, 'weight')"),
    "torch.nn.utils.weight_norm": (weight_norm, "torch.nn.utils.weight_norm(layer, 'weight')"),
    "torch.nn.utils.spectral_norm": (spectral_norm, "torch.nn.utils.spectral_norm(layer, 'weight')"),
    "torch.ao.quantization": (with_observers, "torch.ao.quantization.prepare_qat(model)"),
    "an adapter of PEFT": (adapted, "peft.inject_adapter_in_model"),
}


def changed(kind: str) -> nn.Module:
    module = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of them are deprecated
        KINDS[kind][0](module[0])  # type: ignore[index]
        return torch.ao.quantization.prepare_qat(module.train()) if "quantization" in kind else module


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_says_what_the_names_mean(kind: str) -> None:
    module, name = changed(kind), kind.removesuffix(" (")
    with pytest.raises(StateMismatchError) as saved:
        plan_model(plain(), capture_model(module), what="it", fold_masks=False)
    assert f" by {name}" in str(saved.value)
    assert "before loading, in __init__ or configure_model: " in str(saved.value)
    assert KINDS[kind][1] in str(saved.value)
    with pytest.raises(StateMismatchError) as here:
        plan_model(module, capture_model(plain()), what="it")
    assert f" by {name}" in str(here.value)
    assert "Fix: load the weights into the model before you apply it." in str(here.value)
    assert str(saved.value).count(" by ") == str(here.value).count(" by ") == 1
    plan_model(changed(kind), capture_model(module), what="it")()  # the same structure


@pytest.mark.parametrize("part", ["_orig_mod", "module", "_checkpoint_wrapped_module"])
def test_parts_of_wrappers(part: str) -> None:
    tensors = {f"0.{part}.{name}" if name.startswith("0.") else name: value for name, value in plain().state_dict().items()}
    tensors = {name.replace(f"0.{part}.0.", f"0.{part}."): value for name, value in tensors.items()}
    with pytest.raises(
        StateMismatchError, match=rf"'0\.{part}\.weight' in the checkpoint is '0\.weight' in the model, renamed"
    ):
        plan_model(plain(), ModelState(tensors), what="it")


def test_other_names_are_not_explained() -> None:
    with pytest.raises(StateMismatchError) as error:
        plan_model(plain(), ModelState({"a_orig": torch.ones(1), "a_mask": torch.ones(1)}), what="it")
    assert "renamed" not in str(error.value)


def test_pruned_parameters_are_multiplied() -> None:
    module = changed("torch.nn.utils.prune")
    module[1].register_buffer("window_mask", torch.ones(1))  # type: ignore[index]
    target = plain()
    target[1].register_buffer("window_mask", torch.zeros(1))  # type: ignore[index]
    notices = plan_model(target, capture_model(module), what="it")()
    assert notices == ["loaded <name>_orig × <name>_mask of the checkpoint, without the mask, as: 0.weight"]
    assert target[0].weight.equal(module[0].weight)  # type: ignore[index]
    assert (target[0].weight == 0).sum() == 6  # type: ignore[index]
    assert target[1].window_mask.item() == 1  # type: ignore[index]


def test_observers_get_the_shapes_of_the_checkpoint() -> None:
    module, target = changed("torch.ao.quantization"), changed("torch.ao.quantization")
    module(torch.randn(5, 3))
    plan_model(target, capture_model(module), what="it")()
    assert all(value.equal(target.state_dict()[name]) for name, value in module.state_dict().items())
    inputs = torch.randn(5, 3)
    assert torch.equal(module.eval()(inputs), target.eval()(inputs))
