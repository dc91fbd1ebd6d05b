"""State that is not tensors as strict JSON: plain values unchanged, everything else as an object with one tag.

Restored with the same type: `None`, bool, int, float, str, complex, bytes, bytearray, tuples, lists, sets, frozensets,
dicts with keys of any type, `Counter`, datetime, date, timedelta, `torch.dtype`, `torch.device`, numpy scalars and
arrays, tensors, values of types passed to `trainkit.checkpoint.register`. Restored as a plainer type: dict subclasses,
dataclass instances and Namespace as dicts, OmegaConf containers as dicts and lists, namedtuples and `torch.Size` as tuples,
int and str enums as their values, parameters as tensors. Anything else is an `UnsavableError` that names the path to it.
Reading creates only these types: no name in the text is ever looked up, except among the types that the running program has
registered.
"""

from __future__ import annotations

import base64
import json
import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from trainkit.console import with_article
from trainkit.errors import CorruptCheckpointError, UnsavableError
from trainkit.tagged_json.decode import SCALARS, Decoder
from trainkit.tagged_json.omegaconf import is_omegaconf, plain_container
from trainkit.tagged_json.registered import Registration, registration_of
from trainkit.tagged_json.strict_json import MAX_DEPTH, MAX_JSON_BYTES, strict_json
from trainkit.tagged_json.tensors import tensor_problem

__all__ = ["dumps", "loads", "unsavable"]

_PLAIN_INT = 1 << 1024  # larger integers are written in hexadecimal, which takes linear time to read
_TEXTS = frozenset({str, bool, type(None)})
# Keys of a dict and elements of a set must still be hashable when they are restored.
_HASHABLE = (
    *(type(None), int, float, str, bytes, complex, np.generic),
    *(torch.dtype, torch.device, PurePath, datetime, date, timedelta),
)


def dumps(value: Any, tensors: dict[str, Tensor], *, file: str = "state.safetensors", where: str = "") -> bytes:
    """Encode a value as tagged JSON.

    Args:
        value: the value; see the module docstring for supported types.
        tensors: receives the tensors and numpy arrays in the value, by a key made of the path to each, such as
            `"callbacks/EarlyStopping/best_score"`. They share the memory of those in `value` where possible.
        file: the file that will contain `tensors`.
        where: the name of `value` in messages; `"state"` if empty.

    Returns:
        ASCII text; equal values give the same text, regardless of the order of their sets.

    Raises:
        UnsavableError: something in it cannot be stored; names the path, such as `state["callbacks"]["Mine"]["fn"]`.
    """
    encoder = _Encoder(tensors, file, where or "state")
    plain = encoder.plain(value, 0)
    text = json.dumps(plain, allow_nan=False, check_circular=False, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_JSON_BYTES:  # strict_json would reject it
        raise UnsavableError(
            f"{where or 'state'} cannot be stored: {len(text):,} bytes of JSON, expected at most {MAX_JSON_BYTES:,}. Fix: "
            "store long lists of numbers as tensors: torch.tensor(numbers)"
        )
    return text


def unsavable(value: Any, where: str) -> tuple[str, type] | None:
    """Why `dumps` cannot store a value, and the type that is unsupported; `None` if it can store the value."""
    encoder = _Encoder({}, "state.safetensors", where)
    try:
        encoder.plain(value, 0)
    except UnsavableError as error:
        return str(error), encoder.unsupported
    return None


def loads(
    data: bytes | memoryview, tensors: Mapping[str, Mapping[str, Tensor]], what: str, *, unregistered: bool = False
) -> Any:
    """Decode the result of `dumps`.

    Args:
        data: the text.
        tensors: file name → key → tensor, for the references in the text. Tensors are returned as these same objects, arrays
            as views of them.
        what: the file, for messages.
        unregistered: return values of registered types as `registered.Unregistered`; no `decode` is called.

    Raises:
        CorruptCheckpointError: the text is malformed, or refers to a tensor that does not exist.
        CheckpointError: it has a value of a type that is not registered, or a `decode` failed.
    """
    decoder = Decoder(tensors, what, unregistered)
    try:
        return strict_json(data, what, decoder.object)
    except CorruptCheckpointError:
        decoder.named(strict_json(data, what), "")  # the same error, with the key of the value
        raise


class _Encoder:
    """One call of `dumps`; `depth` is the number of JSON arrays and objects around the value."""

    def __init__(self, tensors: dict[str, Tensor], file: str, where: str) -> None:
        self._tensors, self._file, self._where = tensors, file, where
        self.unsupported: type = object  # the type that cannot be stored
        self._path: list[Any] = []
        self._parents: set[int] = set()  # ids of the containers that contain the value
        self._stored: dict[int, tuple[str, object]] = {}  # id → reference, and the object, so that its id is not used again

    def refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        keys = "".join(f"[{json.dumps(k) if isinstance(k, str) else _key_text(k)}]" for k in self._path[:MAX_DEPTH])
        raise UnsavableError(f"{self._where}{keys:.2000} cannot be stored: {reason}") from cause

    def plain(self, value: Any, depth: int) -> Any:
        """The value in the form that the `json` module accepts."""
        kind = type(value)
        if value is None or kind is str or kind is bool:
            return value
        if kind is int:
            return value if -_PLAIN_INT < value < _PLAIN_INT else self.tag("int", hex(value), depth)
        if kind is float:
            return value if math.isfinite(value) else self.tag("float", repr(value), depth)
        if (own := registration_of(kind)) is not None:
            return self.registered(value, own, depth)
        if is_omegaconf(value):
            return self.plain(plain_container(value), depth)
        if kind in (list, dict, tuple, set, frozenset) or isinstance(value, (Mapping, list, tuple, set, frozenset, Namespace)):
            return self.container(value, depth)
        if isinstance(value, Tensor):
            return self.tag("tensor", self.tensor(value, value), depth)
        if isinstance(value, np.ndarray):
            return self.tag("array", self.array(value), depth)
        return self.other(value, depth)

    def tag(self, name: str, payload: Any, depth: int) -> dict[str, Any]:
        self.check_depth(depth + isinstance(payload, list))
        return {f"${name}": payload}

    def registered(self, value: Any, own: Registration, depth: int) -> Any:
        self.enter(value, depth)
        try:
            encoded = own.encode(value)
        except Exception as error:
            self.unsupported = own.kind
            self.refuse(f"encode, registered for {own.name}, raised {type(error).__name__}: {error}", error)
        result = self.tag("registered", [own.name, self.plain(encoded, depth + 2)], depth)
        self._parents.discard(id(value))
        return result

    # ----------------------------------------------------------------------------------------------- containers

    def enter(self, value: Any, depth: int) -> None:
        if id(value) in self._parents:
            self.refuse("it contains itself")
        self.check_depth(depth)
        self._parents.add(id(value))

    def check_depth(self, depth: int) -> None:
        if depth >= MAX_DEPTH:
            self.refuse(f"it is nested more than {MAX_DEPTH} levels deep")

    def container(self, value: Any, depth: int) -> Any:
        self.enter(value, depth)
        result: Any
        if isinstance(value, Counter):
            result = self.tag("counter", self.pairs(value, depth + 2), depth)
        elif isinstance(value, Mapping):
            result = self.mapping(value, depth)
        elif isinstance(value, list):
            result = self.items(value, depth)
        elif isinstance(value, tuple):
            result = self.tag("tuple", self.items(value, depth + 1), depth)
        elif isinstance(value, (set, frozenset)):
            for element in value:
                self.check_hashable(element, "an element of a set")
            # sorted, since the order of a set differs between processes
            elements = sorted((self.plain(element, depth + 2) for element in value), key=json.dumps)
            result = self.tag("set" if isinstance(value, set) else "frozenset", elements, depth)
        elif is_dataclass(value):
            result = self.mapping({field.name: getattr(value, field.name) for field in fields(value)}, depth)
        else:
            result = self.mapping(vars(value), depth)
        self._parents.discard(id(value))
        return result

    def items(self, values: list[Any] | tuple[Any, ...], depth: int) -> Any:
        self.check_depth(depth)
        if _all_plain(values):
            return values
        result = []
        for index, value in enumerate(values):
            self._path.append(index)
            result.append(self.plain(value, depth + 1))
            self._path.pop()
        return result

    def mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        if not all(isinstance(key, str) and not isinstance(key, np.generic) for key in value):
            return self.tag("map", self.pairs(value, depth + 2), depth)
        result = {}
        for key, item in value.items():
            self._path.append(key)
            text = str.__str__(key)
            result["$" + text if text.startswith("$") else text] = self.plain(item, depth + 1)
            self._path.pop()
        return result

    def pairs(self, value: Mapping[Any, Any], depth: int) -> list[list[Any]]:
        self.check_depth(depth)
        result = []
        for key, item in value.items():
            self._path.append(key)
            self.check_hashable(key, "a key")
            result.append([self.plain(key, depth + 1), self.plain(item, depth + 1)])
            self._path.pop()
        return result

    def check_hashable(self, value: Any, role: str) -> None:
        if isinstance(value, (tuple, frozenset)):
            for element in value:
                self.check_hashable(element, role)
        elif not isinstance(value, _HASHABLE):
            self.refuse(
                f"{role} is {with_article(type(value).__name__)}, which would not be restored as one; use its name or number"
            )

    # -------------------------------------------------------------------------------------------------- leaves

    def tensor(self, value: Tensor, owner: object) -> str:
        """Add a tensor to `tensors`, once for each `owner`. Returns the reference to it."""
        if (known := self._stored.get(id(owner))) is not None:
            return known[0]
        if problem := tensor_problem(value):
            self.refuse(problem)
        path = "/".join(_key_text(key) for key in self._path) or "value"
        path = path.encode("utf-8", "backslashreplace").decode()[:500]
        key, number = path, 1
        while key in self._tensors or key == "__metadata__":
            number += 1
            key = f"{path}~{number}"
        self._tensors[key] = value.detach()
        self._stored[id(owner)] = (f"{self._file}#{key}", owner)
        return self._stored[id(owner)][0]

    def array(self, value: np.ndarray[Any, Any]) -> str:
        if type(value) not in (np.ndarray, np.memmap):
            self.refuse(f"it is {with_article(type(value).__name__)}, a subclass of numpy.ndarray; store numpy.asarray(…)")
        native = np.ascontiguousarray(value, value.dtype.newbyteorder("=")).reshape(value.shape)
        if not native.flags.writeable:
            native = native.copy()  # torch warns of read-only memory
        try:
            tensor = torch.from_numpy(native)
        except TypeError:
            self.refuse(f"torch has no dtype for a numpy array of {value.dtype}; store its tolist(), or an array of numbers")
        return self.tensor(tensor, value)

    def numpy_scalar(self, value: np.generic, depth: int) -> Any:
        # str and bytes directly: item() removes zeros at their end
        text = next((base for base in (str, bytes) if isinstance(value, base)), None)
        name = text.__name__ if text else value.dtype.name
        if name not in SCALARS:
            self.refuse(f"it is a numpy.{type(value).__name__}; store its item()")
        return self.tag("scalar", [name, self.plain(_exact(value, text) if text else value.item(), depth + 2)], depth)

    def other(self, value: Any, depth: int) -> Any:
        if isinstance(value, np.generic):
            return self.numpy_scalar(value, depth)
        if isinstance(value, Enum) and not isinstance(value, (int, str)):
            self.refuse(f"it is {with_article(type(value).__name__)}; store its .value")
        for base in (str, int, float):
            if isinstance(value, base):
                return self.plain(_exact(value, base), depth)
        if type(value) is complex:
            return self.tag("complex", [self.plain(value.real, depth + 2), self.plain(value.imag, depth + 2)], depth)
        if (leaf := _leaf(value)) is not None:
            return self.tag(*leaf, depth)
        if isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, (type, torch.nn.Module))):
            return self.container(value, depth)
        self.unsupported = type(value)
        self.refuse(_advice(value))


def _leaf(value: Any) -> tuple[str, Any] | None:
    """The tag and the payload of a value without parts; `None` for other values."""
    kind = type(value)
    if kind in (bytes, bytearray):
        return kind.__name__, base64.b64encode(value).decode("ascii")
    if isinstance(value, type(PurePath())):
        return "path", value.as_posix()
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device", str(value)
    if kind in (datetime, date):
        return kind.__name__, value.isoformat()
    if kind is timedelta:
        return "timedelta", [value.days, value.seconds, value.microseconds]
    return None


def _all_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether `json` accepts the values unchanged; checked by a few passes in C, for long lists of numbers."""
    kinds = set(map(type, values))
    if kinds <= _TEXTS:
        return True
    if kinds == {int}:
        return bool(min(values) > -_PLAIN_INT and max(values) < _PLAIN_INT)
    return kinds == {float} and all(map(math.isfinite, values))


def _exact(value: Any, base: type) -> Any:
    """The value as its base class, even if the subclass overrides `str()` or `int()`."""
    convert: dict[type, Callable[[Any], Any]] = {
        str: str.__str__,
        int: int.__int__,
        float: float.__float__,
        bytes: lambda data: bytes(memoryview(data)),
    }
    return convert[base](value)


def _advice(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.nn.Module):
        return f"it is a module ({kind}); store its state_dict()"
    if isinstance(value, torch.Generator):
        return "it is a torch.Generator; store its get_state()"
    if callable(value):
        return (
            f"it is code ({getattr(value, '__qualname__', kind)}); remove it from the state, and create it again after loading"
        )
    if isinstance(value, Iterable):
        return f"it is {with_article(kind)}; store it as a list: list(…)"
    return (
        f"it is {with_article(kind)}; store its content as numbers, strings, tensors, lists and dicts, or register its type: "
        f"trainkit.checkpoint.register({type(value).__name__}, encode, decode)"
    )


def _key_text(key: Any) -> str:
    """A key in a path; an integer of thousands of digits has no decimal form."""
    if isinstance(key, str):
        return str.__str__(key)
    return hex(key)[:40] if isinstance(key, int) and abs(key) >= _PLAIN_INT else f"{key!r:.100}"
