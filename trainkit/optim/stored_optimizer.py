"""What a checkpoint saves instead of an optimizer whose state a strategy shards over the processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.errors import StateMismatchError
from trainkit.optim.parameter_names import ParameterNames

__all__ = ["StoredOptimizer", "empty_copy", "placeholder_parameter"]


def placeholder_parameter(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of this shape and dtype on the CPU, without values: all its elements are one, in memory of one element."""
    return nn.Parameter(torch.empty((), dtype=dtype).expand(shape), requires_grad=False)


def empty_copy(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class with the same options and groups, and without state; `__init__` is not called."""
    kind = type(optimizer)
    if hasattr(kind, "__del__"):  # which would free what the copy shares with the original
        kind = type(kind.__name__, (kind,), {"__del__": lambda self: None, "__module__": kind.__module__})
    made: Optimizer = object.__new__(kind)
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})  # a scheduler's wrapper
    made.state = type(optimizer.state)(dict)
    return made


class StoredOptimizer:
    """A placeholder for an optimizer: of its class, with its options, but with whole parameters and whole state.

    Args:
        original: the user's optimizer.
        placeholders: `id(parameter)` → its placeholder, for each parameter of the groups.

    Attributes:
        optimizer: the optimizer that is saved and loaded; its state is empty.
    """

    def __init__(self, original: Optimizer, placeholders: Mapping[int, nn.Parameter]) -> None:
        self._original, self.placeholders = original, placeholders
        self.optimizer = empty_copy(original)
        self.optimizer.param_groups = [
            {**group, "params": [placeholders[id(p)] for p in group["params"]]} for group in original.param_groups
        ]

    def names(self, names: Mapping[int, str]) -> ParameterNames:
        """The names of the parameters, by the ids of the placeholders."""
        found = ParameterNames()
        for group in self._original.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    placeholder, name = self.placeholders[id(parameter)], names[id(parameter)]
                    found[id(placeholder)] = name
                    found.parameters[name] = placeholder
        return found

    def check(self, described: Any, what: str) -> None:
        """Check that the state can be sharded.

        Raises:
            StateMismatchError: state that is neither one number nor has its parameter's shape, or that belongs to no parameter.
        """
        if not isinstance(described, dict):
            return  # reported elsewhere
        odd = [key for key in ("opaque", "entries", "more") if described.get(key)]
        for name, about in (described.get("state") or {}).items():
            if isinstance(about, dict):
                odd += [f"{name}: {slot}" for key in ("irregular", "lists") for slot in about.get(key) or ()]
        if odd:
            raise StateMismatchError(
                f"{what}: ZeRO cannot shard this state of the optimizer over the processes: {', '.join(odd[:5])}. "
                "Resume with another strategy."
            )

    def copy_options(self) -> None:
        """Copy the loaded options to the user's groups."""
        for ours, theirs in zip(self._original.param_groups, self.optimizer.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """The loaded state of a parameter."""
        found: dict[str, Any] = self.optimizer.state.get(self.placeholders[id(parameter)], {})
        return found
