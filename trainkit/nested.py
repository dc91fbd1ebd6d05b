"""Batches as users build them: nested dicts, lists, tuples, named tuples and dataclasses of tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["batch_size", "copied", "first_tensor", "leaves", "map_tensors", "move", "rebuild"]


def rebuild(value: Any, function: Callable[[Any], Any]) -> Any:
    """A container like ``value`` with ``function`` applied to each item; what is no container is returned as it is."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([function(item) for item in value])
    if kind is dict:
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [function(item) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, list):
        return kind([function(item) for item in value])
    if isinstance(value, Mapping):
        return _mapping_like(value, {key: function(item) for key, item in value.items()})
    if _is_dataclass(value):
        # not dataclasses.replace: it runs __post_init__ again and loses what stands in fields that are no arguments
        twin = copy.copy(value)
        for name, item in _fields(value):
            object.__setattr__(twin, name, function(item))
        return twin
    return value


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[tuple[str, Any]]:
    """The names and values of the fields of a dataclass that have been set."""
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of ``value`` (OrderedDict, defaultdict, BatchEncoding, …) that holds ``items``."""
    if not isinstance(value, MutableMapping):
        try:
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    twin = copy.copy(value)
    twin.update(items)
    return twin


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """``value`` with ``function`` applied to each tensor in it; containers are rebuilt, everything else is kept."""
    if isinstance(value, Tensor):
        return function(value)
    return rebuild(value, lambda item: map_tensors(item, function))


def copied(value: Any) -> Any:
    """``value`` with containers of its own and the same tensors: the other may be taken apart, ``batch.pop("labels")``."""
    kind = type(value)
    if kind is tuple or kind is list or kind is dict:  # written out: the common batch, and this runs at every step
        for item in value.values() if kind is dict else value:
            if not isinstance(item, Tensor):
                break
        else:
            return kind(value)
    return map_tensors(value, lambda tensor: tensor)


def move(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """``value`` with its tensors, and whatever else has a ``.to(device)``, on the device.

    Args:
        value: a batch; dicts, lists, tuples, named tuples and dataclasses are searched, other objects kept.
        device: where to.
        non_blocking: do not wait for copies out of pinned memory.
    """
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    kind = type(value)
    if kind is tuple or kind is list:  # written out: the common batch, and this runs at every step
        moved = []
        for item in value:
            if not isinstance(item, Tensor):
                item = move(item, device, non_blocking)
            elif item.device != device:
                item = item.to(device, non_blocking=non_blocking)
            moved.append(item)
        return kind(moved)
    to = getattr(value, "to", None)
    if callable(to) and not isinstance(value, type):
        result = to(device)
        return value if result is None else result  # some classes move in place and return nothing
    return rebuild(value, lambda item: move(item, device, non_blocking))


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor with a dimension in a nested batch, depth first, or ``None``."""
    if isinstance(value, Tensor):
        return value if value.ndim > 0 else None
    if isinstance(value, Mapping):
        value = list(value.values())
    elif _is_dataclass(value):
        value = [item for _, item in _fields(value)]
    if isinstance(value, list | tuple):
        for item in value:
            found = first_tensor(item)
            if found is not None:
                return found
    return None


def leaves(value: Any) -> Iterator[Any]:
    """What is in nested dicts, lists, tuples and dataclasses and is none of these, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif _is_dataclass(value):
        for _, item in _fields(value):
            yield from leaves(item)
    else:
        yield value


def batch_size(batch: Any) -> int:
    """The number of samples of a batch: the first dimension of its first tensor, else 1."""
    tensor = first_tensor(batch)
    return 1 if tensor is None else int(tensor.shape[0])
