"""An optimizer as a checkpoint sees it, where a strategy keeps its state in parts over the processes."""

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
    """A parameter of this shape and dtype on the CPU, whose memory is never touched, so it is not allocated."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def empty_copy(optimizer: Optimizer) -> Optimizer:
    """Another optimizer of the same kind with the same options and groups, and with no state; `__init__` is not called."""
    kind = type(optimizer)
    if hasattr(kind, "__del__"):  # which would take away what the two have in common
        kind = type(kind.__name__, (kind,), {"__del__": lambda self: None, "__module__": kind.__module__})
    made: Optimizer = object.__new__(kind)
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})  # a scheduler's wrapper
    made.state = type(optimizer.state)(dict)
    return made


class StoredOptimizer:
    """A placeholder for an optimizer: of its class, with its options, with whole parameters and whole state.

    Args:
        original: the user's.
        placeholders: `id(parameter)` → what stands in for it, for each parameter of the groups.

    Attributes:
        optimizer: what is saved and loaded; its state is empty.
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
        """Refuse what cannot be held in parts.

        Raises:
            StateMismatchError: state that is not one number or of its parameter's shape, or that is the whole optimizer's.
        """
        if not isinstance(described, dict):
            return  # which is said elsewhere
        odd = [key for key in ("opaque", "entries", "more") if described.get(key)]
        for name, about in (described.get("state") or {}).items():
            if isinstance(about, dict):
                odd += [f"{name}: {slot}" for key in ("irregular", "lists") for slot in about.get(key) or ()]
        if odd:
            raise StateMismatchError(
                f"{what}: the optimizer's state cannot be divided over the processes as ZeRO does it: {', '.join(odd[:5])}. "
                "Resume with another strategy."
            )

    def copy_options(self) -> None:
        """Put the options that were loaded into the user's groups."""
        for ours, theirs in zip(self._original.param_groups, self.optimizer.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    def state(self, parameter: Tensor) -> dict[str, Any]:
        """What has been loaded for a parameter."""
        found: dict[str, Any] = self.optimizer.state.get(self.placeholders[id(parameter)], {})
        return found
