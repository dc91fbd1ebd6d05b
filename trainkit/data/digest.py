"""A digest of a batch, to compare the batches of several processes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Set
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["digest"]

_PART = 1 << 20  # bytes at each end of an array that are hashed: enough to distinguish batches, and fast
_DEEP = 20  # largest nesting depth; deeper objects count by their type


def digest(batch: Any) -> str:
    """A digest that is equal for equal batches in every process, and almost certainly different for different ones.

    Tensors, arrays, numbers and strings count by value, containers and objects by their contents, and everything else by type.
    """
    hasher = hashlib.blake2b(digest_size=16)
    _add(hasher, batch, 0)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any, depth: int) -> None:
    hasher.update(f"<{type(value).__qualname__}>".encode())
    if isinstance(value, Tensor):
        _add_tensor(hasher, value, depth)
    elif isinstance(value, np.ndarray | np.generic):
        _add_array(hasher, np.asarray(value), depth)
    elif isinstance(value, str):
        hasher.update(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        hasher.update(value)
    elif value is None or isinstance(value, bool | int | float | complex):
        hasher.update(repr(value).encode())
    elif isinstance(value, Set) and depth < _DEEP:
        hasher.update("".join(sorted(map(digest, value))).encode())  # a set has no order
    elif depth < _DEEP:
        for item in _parts(value):
            _add(hasher, item, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    """The keys and values of a mapping, the items of a list, the fields of a dataclass, or an object's attributes."""
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, list | tuple):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return [getattr(value, "__dict__", None)]


def _add_tensor(hasher: Any, tensor: Tensor, depth: int) -> None:
    if tensor.is_nested:
        return _add(hasher, list(tensor.unbind()), depth + 1)
    tensor = tensor.detach()
    hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.layout}".encode())
    if tensor.layout is torch.sparse_coo:
        sparse = tensor.coalesce()
        _add(hasher, [sparse.indices(), sparse.values()], depth + 1)
    elif tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta":
        flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        _add_bytes(hasher, flat.view(torch.uint8).numpy())


def _add_array(hasher: Any, array: Any, depth: int) -> None:
    hasher.update(f"{array.dtype}{array.shape}".encode())
    if array.dtype.hasobject:
        _add(hasher, array.tolist(), depth + 1)
    else:
        _add_bytes(hasher, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _add_bytes(hasher: Any, data: Any) -> None:
    if data.nbytes <= 2 * _PART:
        hasher.update(data)
    else:
        hasher.update(data[:_PART])
        hasher.update(data[-_PART:])
