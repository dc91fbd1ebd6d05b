"""The inputs that determine which graph a step needs, and how two steps differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

__all__: list[str] = []

Inputs = tuple[tuple[str, Any], ...]
"""Names and values, such as `batch['x']` with a shape, `batch['x'].dtype`, `layer.weight.requires_grad`."""


class Change(NamedTuple):
    """An input that differs, with its value in each of the two steps."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = (list(one) if isinstance(one, tuple) else str(one).removeprefix("torch.") for one in self[1:])
        return f"{self.name}: {old} → {new}"

    @property
    def axes(self) -> list[int]:
        """The dimensions in which two shapes differ; none if they do not have the same number of dimensions."""
        if not (isinstance(self.old, tuple) and isinstance(self.new, tuple) and len(self.old) == len(self.new)):
            return []
        return [axis for axis, size in enumerate(self.new) if size != self.old[axis]]

    @property
    def kind(self) -> str:
        """What has changed, without the values."""
        last = self.name.rpartition(".")[2]
        axes = f" dimension {', '.join(map(str, self.axes))}" if self.axes else ""
        return last if last in ("requires_grad", "training") else self.name + axes

    @property
    def fix(self) -> str:
        """What the user can do about it."""
        if not self.name.startswith("batch"):
            return "Change it only once, or before training starts. Flags, and options of 0, 1 and -1, are part of the graph."
        if self.axes == [0]:
            return "Drop the short batch, DataLoader(drop_last=True), or pad it, XLAStrategy(pad_last_batch=True)."
        if isinstance(self.new, tuple) and isinstance(self.old, tuple):
            return "Each size needs its own graph: in collate_fn pad to one length, or to a few lengths."
        return "Let collate_fn return the same tensors with the same dtypes for all batches."


def inputs_of_batch(batch: Any) -> Inputs:
    """Shapes and dtypes of the tensors in nested dicts, lists, tuples and dataclasses."""
    tensors = [(path, leaf) for path, leaf in _leaves(batch, "batch") if isinstance(leaf, Tensor)]
    return tuple(pair for path, leaf in tensors for pair in ((path, tuple(leaf.shape)), (f"{path}.dtype", leaf.dtype)))


def numbers_in(batch: Any) -> list[str]:
    """The Python numbers of a batch."""
    return [f"{path} = {leaf!r}" for path, leaf in _leaves(batch, "batch") if isinstance(leaf, int | float)]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    elif isinstance(value, list | tuple):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        yield path, value
        return
    for name, item in items:
        yield from _leaves(item, path + name)


def inputs_of_state(module: nn.Module, optimizers: Iterable[Optimizer]) -> Inputs:
    """Flags of parameters and modules, and options of the optimizers. Walks through all modules, which takes long."""
    found: list[tuple[str, Any]] = [(f"{name}.requires_grad", one.requires_grad) for name, one in module.named_parameters()]
    found += [(f"{name or 'module'}.training", part.training) for name, part in module.named_modules()]
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            options: dict[str, Any] = {"parameters": len(group["params"])}
            # the value of a learning rate is not part of the graph
            options |= {k: _option(value) for k, value in group.items() if k not in ("params", "lr", "initial_lr")}
            found += [(f"optimizer {index}, group {number}, {name}", value) for name, value in options.items()]
    return tuple(found)


def _option(value: Any) -> str:
    """A number is an input of any value to the same graph; but 0, 1 and -1 are part of the graph, like flags."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_option, value))})"
    if isinstance(value, bool | str | None) or value in (0, 1, -1):
        return str(value)
    return "another number" if isinstance(value, int | float) else type(value).__name__


def nearest_changes(new: Inputs, seen: Iterable[Inputs]) -> list[Change]:
    """The changes from the most similar inputs, of several the latest; none if there is nothing to compare with."""
    after, found = dict(new), []
    for before in map(dict, seen):
        pairs = [Change(name, before.get(name, "missing"), after.get(name, "missing")) for name in after | before]
        found.append([change for change in pairs if change.old != change.new])
    return min(reversed(found), key=lambda one: (len(one), sum(len(change.axes) for change in one)), default=[])


def is_shorter(changes: list[Change]) -> bool:
    """Whether the only change is that the batch has fewer samples: the first dimensions are smaller."""
    return bool(changes) and all(change.axes == [0] and change.new[0] < change.old[0] for change in changes)
