"""Digests of batches and samples, to compare what several processes read, or one process before and after a resume."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainkit.nested import first_tensor, rebuild

__all__ = ["ReadRecord", "digest", "overlap"]

_PART = 1 << 20  # bytes at each end of an array that are hashed: enough to distinguish batches, and fast
_QUICK = 1 << 14  # the same for batches of which every one is recorded
_DEEP = 20  # largest nesting depth; deeper objects count by their type
_SKETCH = 64  # samples that stand for all that were read: those with the smallest digests
_SAMPLES = 4096  # samples of an epoch from which they are chosen
_COMPARED = 8  # processes that are compared pair by pair
_DISTINCT = 0.9  # share of different samples from which on equal ones mean something: labels or single tokens repeat anyway


def digest(batch: Any, part: int = _PART) -> str:
    """A digest that is equal for equal batches in every process, and almost certainly different for different ones.

    Tensors, arrays, images, numbers and strings count by value, containers and objects by their contents, objects without
    attributes by what pickle would store of them, and what cannot be pickled by type.
    Of a large array, `part` bytes at each end count.
    """
    hasher = hashlib.blake2b(digest_size=16)
    _add(_Hasher(hasher.update, part), batch, 0)
    return hasher.hexdigest()


class _Hasher(NamedTuple):
    update: Callable[[Any], None]
    part: int


def _add(hasher: _Hasher, value: Any, depth: int) -> None:
    hasher.update(f"<{type(value).__qualname__}>".encode())
    if isinstance(value, Tensor):
        _add_tensor(hasher, value, depth)
    elif isinstance(value, np.ndarray | np.generic):
        _add_array(hasher, np.asarray(value), depth)
    elif isinstance(value, str):
        hasher.update(value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        hasher.update(value)
    elif isinstance(value, type):
        hasher.update(value.__qualname__.encode())
    elif isinstance(getattr(value, "__array_interface__", None), Mapping):  # an image of PIL has its pixels nowhere else
        _add_array(hasher, np.asarray(value), depth)
    elif value is None or isinstance(value, bool | int | float | complex):
        hasher.update(repr(value).encode())
    elif isinstance(value, Set) and depth < _DEEP:
        hasher.update("".join(sorted(map(digest, value))).encode())  # a set has no order
    elif depth < _DEEP:
        for item in _parts(value):
            _add(hasher, item, depth + 1)


def _parts(value: Any) -> Iterable[Any]:
    """The keys and values of a mapping, the items of a list, the fields of a dataclass, or the parts of an object."""
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, list | tuple):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if hasattr(value, "__dict__"):
        return [value.__dict__]
    return _pickled(value)


def _pickled(value: Any) -> Iterable[Any]:
    """What pickle would store of an object without attributes, such as one of a class with slots, a date, or a table."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # it cannot be pickled, and raises whatever it likes
        return ()
    return [list(part) if isinstance(part, Iterator) else part for part in reduced[1:]] if isinstance(reduced, tuple) else ()


def _add_tensor(hasher: _Hasher, tensor: Tensor, depth: int) -> None:
    if tensor.is_nested:
        return _add(hasher, list(tensor.unbind()), depth + 1)
    tensor = tensor.detach()
    hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.layout}".encode())
    if tensor.layout is torch.sparse_coo:
        sparse = tensor.coalesce()
        _add(hasher, [sparse.indices(), sparse.values()], depth + 1)
    elif tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta":
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        if len(flat) > 2 * hasher.part:  # before it is copied from a device
            flat = torch.cat([flat[: hasher.part], flat[-hasher.part :]])
        hasher.update(flat.cpu().numpy())


def _add_array(hasher: _Hasher, array: Any, depth: int) -> None:
    hasher.update(f"{array.dtype}{array.shape}".encode())
    if array.dtype.hasobject:
        _add(hasher, array.tolist(), depth + 1)
    else:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for piece in [data] if len(data) <= 2 * hasher.part else [data[: hasher.part], data[-hasher.part :]]:
            hasher.update(piece)


class ReadRecord:
    """What a process has read of a stream since an epoch began, by content.

    Attributes:
        last: the digest of the last batch; `None` before the first one.
        chain: a number below 2^48, equal on processes that have read the same batches in the same order.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self.last: str | None = None
        self.chain, self._seen = 0, 0
        self._samples: set[str] = set()

    def add(self, batch: Any) -> None:
        """Record a batch."""
        self.last = self.of(batch)
        self.chain = int(hashlib.blake2b(f"{self.chain} {self.last}".encode(), digest_size=6).hexdigest(), 16)

    @staticmethod
    def of(batch: Any) -> str:
        """What `last` is after `add(batch)`."""
        return digest(batch, _QUICK)

    def add_samples(self, batch: Any) -> None:
        """Record the samples of a batch, up to a few thousand in an epoch."""
        for sample in _samples_of(batch) if self._seen < _SAMPLES and batch is not None else ():
            self._samples.add(digest(sample))
            self._seen += 1

    def sketch(self) -> list[str] | None:
        """The smallest digests of the samples; `None` if many samples are equal, so that digests tell nothing."""
        if len(self._samples) < _DISTINCT * self._seen:
            return None
        return sorted(self._samples)[:_SKETCH]


def overlap(sketches: Sequence[list[str] | None]) -> float:
    """The largest share of samples that two processes have in common, estimated from their sketches; 0 if unknown.

    The smallest digests of a union are a random sample of it (A. Broder, On the resemblance and containment of documents,
    1997): the share of them that both have is the share of all samples that both have.
    """
    known = [set(sketch) for sketch in sketches if sketch]
    shares = [0.0]
    for one, other in combinations(known[:_COMPARED], 2):
        smallest = sorted(one | other)[:_SKETCH]
        shares.append(sum(each in one and each in other for each in smallest) / len(smallest))
    return max(shares)


def _samples_of(batch: Any) -> Iterator[Any]:
    """The samples of a batch; a batch in which they cannot be told apart counts as one."""
    tensor = first_tensor(batch)
    if tensor is None:
        yield from batch if isinstance(batch, list | tuple) else [batch]
    else:
        size = len(tensor)
        yield from (_sample_of(batch, row, size) for row in range(size))


def _sample_of(value: Any, row: int, size: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return value[row] if value.ndim and len(value) == size else value
    plain = isinstance(value, list | tuple) and len(value) == size and not isinstance(value[0], Tensor | np.ndarray | Mapping)
    return value[row] if plain else rebuild(value, lambda item: _sample_of(item, row, size))
