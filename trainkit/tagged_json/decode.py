"""Decodes the tags of `trainkit.tagged_json.encode` from untrusted text."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.errors import CheckpointError, CorruptCheckpointError
from trainkit.tagged_json.registered import Unregistered, registration_named

__all__ = ["SCALARS", "Decoder"]

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
SCALARS: dict[str, type[np.generic]] = {
    name: getattr(np, name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {"bool": np.bool_, "str": np.str_, "bytes": np.bytes_}
_TAG = re.compile(r"\$(?!\$)")
_MAX_SAME_HASH = 200  # keys with the same hash; each is compared with all before it


class Decoder:
    """One call of `loads`. Inner tags are decoded first, so the parts of a payload are decoded already."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], what: str, unregistered: bool = False) -> None:
        self._tensors, self._what, self._unregistered = tensors, what, unregistered
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._decode: dict[str, Callable[[Any], Any]] = {
            "$array": self._array,
            "$bytearray": lambda v: bytearray(_base64(v)),
            "$bytes": _base64,
            "$complex": lambda v: complex(*_list(v, float, 2)),
            "$counter": lambda v: Counter(_pairs(v)),
            "$date": lambda v: date.fromisoformat(_text(v)),
            "$datetime": lambda v: datetime.fromisoformat(_text(v)),
            "$device": lambda v: torch.device(_text(v)),
            "$dtype": lambda v: _DTYPES[_text(v)],
            "$float": lambda v: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[_text(v)],
            "$frozenset": lambda v: _set(v, frozenset),
            "$int": lambda v: int(_text(v), 16),
            "$map": _pairs,
            "$path": lambda v: Path(_text(v)),
            "$registered": self._registered,
            "$scalar": _scalar,
            "$set": lambda v: _set(v, set),
            "$tensor": self._tensor,
            "$timedelta": lambda v: timedelta(*_list(v, int, 3)),
            "$tuple": lambda v: tuple(_list(v)),
        }

    def object(self, value: dict[str, Any]) -> Any:
        """The value of a JSON object."""
        for key in value:
            if key[:1] == "$":
                break
        else:
            return value
        if len(value) == 1 and not key.startswith("$$"):
            return self._tagged(key, value[key])
        if all(key[:1] != "$" or key[:2] == "$$" for key in value):
            return {key[1:] if key[:1] == "$" else key: item for key, item in value.items()}
        raise CorruptCheckpointError(f"{self._what}: the tag {key!r:.40} must be the only key of its object")

    def named(self, value: Any, path: str) -> Any:
        """The decoded value; an error names the path to the value that cannot be decoded."""
        if isinstance(value, list):
            return [self.named(item, f"{path}[{number}]") for number, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        found = {key: self.named(item, path if _TAG.match(key) else f"{path}[{key!r:.100}]") for key, item in value.items()}
        try:
            return self.object(found)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error}, at {path}" if path else str(error)) from error.__cause__

    def _tagged(self, tag: str, payload: Any) -> Any:
        decode = self._decode.get(tag)
        if decode is None:
            raise CorruptCheckpointError(f"{self._what}: unknown tag {tag!r:.40}. Was it written by a newer trainkit?")
        try:
            return decode(payload)
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # torch and numpy raise different errors for invalid values
            raise CorruptCheckpointError(f"{self._what}: malformed {tag} ({type(error).__name__}: {error!s:.200})") from error

    def _registered(self, payload: Any) -> Any:
        name, value = _list(payload, length=2)
        if self._unregistered:
            return Unregistered(_text(name), value)
        own = registration_named(_text(name))
        if own is None:
            short = name.rpartition(".")[2]
            raise CheckpointError(
                f"{self._what} contains a value of the type {name!r:.200}, which this program has not registered. Fix: before "
                f"loading, call trainkit.checkpoint.register({short}, encode, decode, name={name!r:.200})"
            )
        try:
            return own.decode(value)
        except Exception as error:
            raise CheckpointError(
                f"{self._what}: decode, registered for {name!r:.200}, raised {type(error).__name__}: {error!s:.500}. It "
                f"was called with the {type(value).__name__} that encode returned when saving. Fix: make decode accept it."
            ) from error

    def _tensor(self, reference: Any) -> Tensor:
        file, _, key = _text(reference).partition("#")
        try:
            return self._tensors[file][key]
        except KeyError:
            raise CorruptCheckpointError(
                f"{self._what}: refers to the tensor {reference!r:.200}, which does not exist"
            ) from None

    def _array(self, reference: Any) -> np.ndarray[Any, Any]:
        tensor = self._tensor(reference)
        if reference not in self._arrays:
            self._arrays[reference] = tensor.detach().numpy()
        return self._arrays[reference]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("expected a string")
    return value


def _list(value: Any, kind: type | None = None, length: int | None = None) -> list[Any]:
    if type(value) is not list or (length is not None and len(value) != length):
        raise TypeError("expected a list" + (f" of length {length}" if length is not None else ""))
    if kind is not None and any(type(item) is not kind for item in value):
        raise TypeError(f"expected a list of {kind.__name__}")
    return value


def _base64(value: Any) -> bytes:
    return base64.b64decode(_text(value), validate=True)


def _check_hashes(keys: Iterable[Any], count: int) -> None:
    """A file may contain numbers chosen to have the same hash, and a dict of n of them takes n² comparisons."""
    if count > _MAX_SAME_HASH and max(Counter(map(hash, keys)).values()) > _MAX_SAME_HASH:
        raise ValueError("too many keys have the same hash")


def _set(value: Any, kind: Callable[[Iterable[Any]], Any]) -> Any:
    elements = _list(value)
    _check_hashes(elements, len(elements))
    result = kind(elements)
    if len(result) != len(elements):
        raise ValueError("an element occurs twice")
    return result


def _pairs(value: Any) -> dict[Any, Any]:
    for pair in _list(value):
        _list(pair, length=2)
    _check_hashes((key for key, _ in value), len(value))
    result: dict[Any, Any] = dict(value)
    if len(result) != len(value):
        raise ValueError("a key occurs twice")
    return result


def _scalar(value: Any) -> np.generic:
    name, item = _list(value, length=2)
    kind: Any = SCALARS[_text(name)]
    if issubclass(kind, np.integer):
        bounds = np.iinfo(kind)
        if type(item) is not int or not bounds.min <= item <= bounds.max:
            raise ValueError(f"expected {name}, got {item!r:.40}")
    elif type(item) is not type(kind().item()):
        raise TypeError(f"expected {name}, got {item!r:.40}")
    scalar: np.generic = kind(item)
    return scalar
