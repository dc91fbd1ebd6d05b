"""Batches: nested dicts, lists, tuples, named tuples and dataclasses of tensors.

`move` copies a batch to a device, `copy_to_host` a scalar from it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["batch_size", "copy_containers", "copy_to_host", "first_tensor", "leaves", "map_tensors", "move", "rebuild"]


def rebuild(value: Any, function: Callable[[Any], Any]) -> Any:
    """A container like `value` with `function` applied to each item; another value is returned unchanged."""
    kind = type(value)
    if isinstance(value, tuple | list):
        items = [function(item) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if kind is dict:
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, Mapping):
        return _mapping_like(value, {key: function(item) for key, item in value.items()})
    if _is_dataclass(value):
        # dataclasses.replace would run __post_init__ again and lose fields with init=False
        other = copy.copy(value)
        for name, item in _fields(value):
            object.__setattr__(other, name, function(item))
        return other
    return value


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[tuple[str, Any]]:
    """The names and values of the fields of a dataclass, without those that are not set."""
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the type of `value` (OrderedDict, defaultdict, BatchEncoding, …) with other items."""
    if not isinstance(value, MutableMapping):
        try:
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    other = copy.copy(value)
    other.update(items)
    return other


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to each tensor in a value; containers are rebuilt, other objects are shared.

    Args:
        value: A tensor, or tensors in dicts, lists, tuples, named tuples and dataclasses.
        function: Called with each tensor.

    Returns:
        The value with the results instead of the tensors.
    """
    if isinstance(value, Tensor):
        return function(value)
    return rebuild(value, lambda item: map_tensors(item, function))


def copy_containers(value: Any) -> Any:
    """`value` with copied containers and the same tensors, so that `batch.pop("labels")` does not affect it."""
    kind = type(value)
    if kind is tuple or kind is list or kind is dict:  # the common case, written out for speed: this runs in every step
        for item in value.values() if kind is dict else value:
            if not isinstance(item, Tensor):
                break
        else:
            return kind(value)
    return map_tensors(value, lambda tensor: tensor)


def move(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """`value` with its tensors, and other objects with a `.to(device)`, on the device.

    Args:
        value: A batch of dicts, lists, tuples, named tuples and dataclasses; other objects are shared.
        device: The device.
        non_blocking: Do not wait for copies from pinned memory.
    """
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    kind = type(value)
    if kind is tuple or kind is list:  # the common case, written out for speed: this runs in every step
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
        return value if result is None else result  # Some classes move in place and return None.
    return rebuild(value, lambda item: move(item, device, non_blocking))


def copy_to_host(value: Tensor) -> tuple[Tensor, Any]:
    """Start copying a scalar from a device to the host, without waiting for it.

    Returns:
        The copy, and the event to synchronize before it is read; `None` if it can be read directly.
    """
    if value.device.type != "cuda":
        return value, None
    host = torch.empty((), dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(value.device))
    return host, ready


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor with a dimension in a nested batch, depth first, or `None`."""
    return next((item for item in leaves(value) if isinstance(item, Tensor) and item.ndim > 0), None)


def leaves(value: Any) -> Iterator[Any]:
    """The items of nested dicts, lists, tuples and dataclasses, depth first."""
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        items = value
    elif _is_dataclass(value):
        items = [item for _, item in _fields(value)]
    else:
        yield value
        return
    for item in items:
        yield from leaves(item)


def batch_size(batch: Any) -> int:
    """The number of samples of a batch: the first dimension of its first tensor, else 1."""
    tensor = first_tensor(batch)
    return 1 if tensor is None else int(tensor.shape[0])
