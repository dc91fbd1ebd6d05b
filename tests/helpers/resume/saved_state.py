"""Helpers for tests of saved state: a round trip through JSON, and comparisons bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.state.model import ModelState, capture_model, plan_model
from trainkit.state.optimizer import plan_optimizer
from trainkit.state.saved_values import same_bits
from trainkit.tagged_json.codec import dumps, loads

__all__ = [
    "Extra",
    "differences",
    "frozen_copy",
    "restore_model",
    "restore_optimizer",
    "stored",
    "through_json",
    "unchanged",
]


def through_json(value: Any) -> Any:
    """The value after a round trip through JSON and tensors, as read from a checkpoint."""
    tensors: dict[str, Tensor] = {}
    encoded = dumps(value, tensors)
    return loads(encoded, {"state.safetensors": {k: t.detach().clone() for k, t in tensors.items()}}, "state.json")


def frozen_copy(value: Any) -> Any:
    """A copy that shares no tensor with the original, to compare with it later."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: frozen_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(frozen_copy(item) for item in value)
    return value


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """The places at which two nested values differ in type, dtype, shape or a bit; an empty list if they are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if same_bits(a, b) and a.device == b.device else [f"{path}: {a!r} and {b!r}"]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if set(a) != set(b):
            return [f"{path}: keys {list(a)} and {list(b)}"]
        return [d for key in a for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return [d for n, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{n}")]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} and {b!r}"]


def stored(module: nn.Module, save: Any = "all") -> ModelState:
    """The state of a module as read from a checkpoint: contiguous tensors that share no memory with it."""
    state = capture_model(module, save)
    tensors = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.tensors.items()}
    extra, trained, configs = (through_json(part) for part in (state.extra, state.trained, state.configs))
    return ModelState(tensors, dict(state.aliases), extra, trained, state.fingerprint, configs)


class Extra(nn.Module):
    """A module with extra state, a persistent buffer and one that is not persistent."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.extra = {"seen": (1, 2), "mean": torch.ones(2)} if extra is None else extra
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if state == "bad":
            raise ValueError("not mine")
        self.extra = state


class unchanged:  # noqa: N801
    """`with unchanged(module, optimizer):` fails if anything in them is not the same afterwards, bit for bit."""

    def __init__(self, *objects: Any) -> None:
        self._objects = objects

    def __enter__(self) -> None:
        self._before = [self._of(thing) for thing in self._objects]

    def __exit__(self, *error: object) -> None:
        for thing, before in zip(self._objects, self._before, strict=True):
            assert differences(before, self._of(thing)) == []

    def _of(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            trained = {name: p.requires_grad for name, p in thing.named_parameters()}
            return frozen_copy({"state": thing.state_dict(), "trained": trained})
        if isinstance(thing, torch.optim.Optimizer):
            state = frozen_copy({id(key): value for key, value in thing.state.items()})
            groups = [{**group, "params": [id(p) for p in group["params"]]} for group in thing.param_groups]
            return frozen_copy({"state": state, "groups": groups})
        return frozen_copy({key: value for key, value in vars(thing).items() if not callable(value)})


def restore_model(*given: Any, **options: Any) -> list[str]:
    """Compare and load a model's state; returns the notices for the user."""
    return plan_model(*given, **options)()


def restore_optimizer(*given: Any, **options: Any) -> list[str]:
    """Compare and load an optimizer's state; returns the notices for the user."""
    return plan_optimizer(*given, **options)()
