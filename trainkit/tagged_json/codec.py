"""State that is not tensors as strict JSON: plain values unchanged, everything else as an object with one tag.

Restored with the same type: `None`, bool, int, float, str, complex, bytes, bytearray, tuples, lists, sets, frozensets,
dicts with keys of any type, `Counter`, datetime, date, timedelta, `torch.dtype`, `torch.device`, numpy scalars and
arrays, also those of text and of objects, tensors, values of types passed to `trainkit.checkpoint.register`. Restored as a
plainer type: dict subclasses, dataclass instances and Namespace as dicts, OmegaConf containers as dicts and lists, namedtuples
and `torch.Size` as tuples, int and str enums as their values, parameters as tensors. Anything else is an `UnsavableError` that
names the path to it.
Reading creates only these types: no name in the text is ever looked up, except among the types that the running program has
registered.
"""

from __future__ import annotations

import base64
import builtins
import json
import math
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from trainkit.console import with_article
from trainkit.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, UnsavableError
from trainkit.tagged_json.tensors import tensor_problem

__all__ = [
    "MAX_DEPTH",
    "MAX_JSON_BYTES",
    "Unregistered",
    "dumps",
    "from_bytes",
    "is_omegaconf",
    "loads",
    "plain_container",
    "qualified_name",
    "register",
    "registration_of",
    "strict_json",
    "to_bytes",
    "unsavable",
]

T = TypeVar("T")

MAX_JSON_BYTES = 64 * 2**20
"""JSON with more bytes is rejected unread."""
MAX_DEPTH = 100
"""Levels of nested arrays and objects; deeper JSON is rejected before it is parsed."""

_MAX_DIGITS = 1100  # int() takes quadratic time; larger integers are written in hexadecimal
_LARGEST_DECIMAL = 1 << 1024
_MAX_SAME_HASH = 200  # each key of a dict is compared with all earlier ones that have the same hash

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_SCALARS: dict[str, type[np.generic]] = {
    name: getattr(np, name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {"bool": np.bool_, "str": np.str_, "bytes": np.bytes_}
# Keys of a dict and elements of a set must still be hashable when they are restored.
_HASHABLE = (
    *(type(None), int, float, str, bytes, complex, np.generic),
    *(torch.dtype, torch.device, PurePath, datetime, date, timedelta),
)
# Arrays of these kinds (objects, bytes, text) have no tensor: their elements are stored one by one.
_ELEMENT_KINDS = "OSU"
_MOST_TEXT_BYTES = 4 * MAX_JSON_BYTES  # numpy pads each text to the longest one, so a short JSON could fill the memory
# Types that are stored without registration, and restored with the same type.
_STORED = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(list, tuple, set, frozenset, dict, Counter),
    *(date, datetime, timedelta, torch.dtype, torch.device, torch.Tensor, np.ndarray),
)


def dumps(value: Any, tensors: dict[str, Tensor], *, file: str = "state.safetensors", where: str = "") -> bytes:
    """Encode a value as tagged JSON: ASCII text, the same for equal values, regardless of the order of their sets.

    Args:
        value: The value; see the module docstring for supported types.
        tensors: Receives the tensors and numpy arrays in the value, by a key made of the path to each, such as
            `"callbacks/EarlyStopping/best_score"`. They share the memory of those in `value` where possible.
        file: The file that will contain `tensors`.
        where: The name of `value` in messages; `"state"` if empty.

    Raises:
        UnsavableError: Something in it cannot be stored; names the path, such as `state["callbacks"]["Mine"]["fn"]`.
    """
    encoder = _Encoder(tensors, file, where or "state")
    plain = encoder.encode(value, 0)
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
        encoder.encode(value, 0)
    except UnsavableError as error:
        return str(error), encoder.unsupported
    return None


def loads(
    data: bytes | memoryview, tensors: Mapping[str, Mapping[str, Tensor]], what: str, *, unregistered: bool = False
) -> Any:
    """Decode the result of `dumps`.

    Args:
        data: The text.
        tensors: File name → key → tensor, for the references in the text. Tensors are returned as these same objects, arrays
            as views of them.
        what: The file, for messages.
        unregistered: Return values of registered types as `Unregistered`; no `decode` is called.

    Raises:
        CheckpointError: It has a value of a type that is not registered, or a `decode` failed; as a `CorruptCheckpointError`:
            the text is malformed, or refers to a tensor that does not exist.
    """
    decoder = _Decoder(tensors, what, unregistered)
    try:
        return strict_json(data, what, decoder.decode)
    except CorruptCheckpointError:
        decoder.decode_tree(strict_json(data, what), "")  # This raises the same error, with the key of the value.
        raise


_MESSAGE_FILE = "tensors"
_LENGTH_BYTES = 8


def to_bytes(value: Any) -> bytes:
    """A value as bytes, for exchange between ranks: the length of its JSON, the JSON of `dumps`, a safetensors file."""
    tensors: dict[str, Tensor] = {}
    text = dumps(value, tensors, file=_MESSAGE_FILE, where="a value for other ranks")
    # safetensors rejects tensors that share memory
    copies = {key: tensor.cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + safetensors.torch.save(copies)


def from_bytes(data: bytes | memoryview) -> Any:
    """The value that was passed to `to_bytes`; its tensors are copies on the CPU."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    tensors = safetensors.torch.load(bytes(data[end:]))
    return loads(data[_LENGTH_BYTES:end], {_MESSAGE_FILE: tensors}, "a value of another rank")


def strict_json(data: bytes | memoryview, what: str, hook: Callable[[dict[str, Any]], Any] = lambda value: value) -> Any:
    """Parse JSON that may be damaged or hostile: duplicate keys, `NaN`, `1e999` and deep nesting are errors.

    `hook` is called with each object, the innermost first; its result replaces the object. `what` is the file, for messages.

    Raises:
        CorruptCheckpointError: It is malformed, larger than `MAX_JSON_BYTES` or deeper than `MAX_DEPTH`.
    """

    def refuse(reason: str) -> NoReturn:
        raise CorruptCheckpointError(f"{what}: {reason}")

    def from_pairs(pairs: list[tuple[str, Any]]) -> Any:
        value = dict(pairs)
        if len(value) != len(pairs):
            refuse(f"the key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r:.200} occurs more than once")
        return hook(value)

    def number(text: str, kind: Callable[[str], float]) -> float:
        if len(text) > _MAX_DIGITS:
            refuse(f"a number has {len(text):,} characters, expected at most {_MAX_DIGITS:,}")
        value = kind(text)
        return value if kind is int or math.isfinite(value) else refuse(f"the number {text:.40} is too large")

    if len(data) > MAX_JSON_BYTES:
        refuse(f"{len(data):,} bytes of JSON, expected at most {MAX_JSON_BYTES:,}")
    unescaped = bytes(data).replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = re.sub(rb'"[^"]*"?', b"", unescaped).translate(None, bytes(set(range(256)) - set(b"[]{}")))
    steps = np.frombuffer(brackets.translate(bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")), np.int8)
    if (depth := steps.cumsum(dtype=np.int32).max(initial=0)) > MAX_DEPTH:
        refuse(f"JSON nested {depth:,} levels deep, expected at most {MAX_DEPTH}")
    try:
        return json.JSONDecoder(
            object_pairs_hook=from_pairs,
            parse_float=lambda text: number(text, float),
            parse_int=lambda text: number(text, int),
            parse_constant=lambda name: refuse(f"{name} is not valid JSON"),
        ).decode(str(data, "utf-8"))
    except (RecursionError, ValueError) as error:  # ValueError: UnicodeDecodeError and JSONDecodeError, with the position
        refuse(f"not valid JSON: {error}")


def is_omegaconf(value: Any) -> bool:
    """Whether a value is a `DictConfig` or a `ListConfig` of OmegaConf, which is never imported here."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def plain_container(value: Any) -> Any:
    """A container of OmegaConf as dicts and lists; any other value unchanged.

    Interpolations are resolved, or none of them if one cannot be resolved. Missing values become `"???"`, enums their names,
    structured configurations dicts.
    """
    if not is_omegaconf(value):
        return value
    omegaconf = sys.modules["omegaconf"]
    convert = omegaconf.OmegaConf.to_container
    try:
        return convert(value, resolve=True, enum_to_str=True)
    except omegaconf.errors.OmegaConfBaseException:
        return convert(value, resolve=False, enum_to_str=True)


# ------------------------------------------------------------------------------------------------------------ encoding


class _Encoder:
    """One call of `dumps`; `depth` is the number of JSON arrays and objects around the value."""

    def __init__(self, tensors: dict[str, Tensor], file: str, where: str) -> None:
        self._tensors = tensors
        self._file = file
        self._where = where
        self.unsupported: type = object  # the type that cannot be stored
        self._path: list[Any] = []
        self._parents: set[int] = set()  # ids of the containers that contain the value
        self._stored: dict[int, tuple[str, object]] = {}  # id → reference, and the object, so that its id is not used again

    def refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        keys = "".join(f"[{json.dumps(k) if isinstance(k, str) else _key_text(k)}]" for k in self._path[:MAX_DEPTH])
        raise UnsavableError(f"{self._where}{keys:.2000} cannot be stored: {reason}") from cause

    def encode(self, value: Any, depth: int) -> Any:
        """The value in the form that the `json` module accepts."""
        kind = type(value)
        if value is None or kind is str or kind is bool:
            return value
        if kind is int:
            return value if -_LARGEST_DECIMAL < value < _LARGEST_DECIMAL else self.tag("int", hex(value), depth)
        if kind is float:
            return value if math.isfinite(value) else self.tag("float", repr(value), depth)
        if (registration := registration_of(kind)) is not None:
            return self.registered(value, registration, depth)
        if is_omegaconf(value):
            return self.encode(plain_container(value), depth)
        if isinstance(value, (Mapping, list, tuple, set, frozenset, Namespace)):
            return self.container(value, depth)
        if isinstance(value, Tensor):
            return self.tag("tensor", self.tensor(value, value), depth)
        if isinstance(value, np.ndarray):
            return self.numpy_array(value, depth)
        return self.other(value, depth)

    def tag(self, name: str, payload: Any, depth: int) -> dict[str, Any]:
        self.check_depth(depth + isinstance(payload, list))
        return {f"${name}": payload}

    def registered(self, value: Any, registration: Registration, depth: int) -> Any:
        self.enter(value, depth)
        try:
            encoded = registration.encode(value)
        except Exception as error:
            self.unsupported = registration.kind
            self.refuse(f"encode, registered for {registration.name}, raised {type(error).__name__}: {error}", error)
        result = self.tag("registered", [registration.name, self.encode(encoded, depth + 2)], depth)
        self._parents.discard(id(value))
        return result

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
        if isinstance(value, Counter):  # MultiStepLR has its milestones in one
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
            elements = sorted((self.encode(element, depth + 2) for element in value), key=json.dumps)
            result = self.tag("set" if isinstance(value, set) else "frozenset", elements, depth)
        elif is_dataclass(value):
            result = self.mapping({field.name: getattr(value, field.name) for field in fields(value)}, depth)
        else:
            result = self.mapping(vars(value), depth)
        self._parents.discard(id(value))
        return result

    def inside(self, key: Any, value: Any, depth: int) -> Any:
        self._path.append(key)
        result = self.encode(value, depth)
        self._path.pop()
        return result

    def items(self, values: list[Any] | tuple[Any, ...], depth: int) -> Any:
        self.check_depth(depth)
        if _all_plain(values):
            return values
        return [self.inside(index, value, depth + 1) for index, value in enumerate(values)]

    def mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        if not all(isinstance(key, str) and not isinstance(key, np.generic) for key in value):
            return self.tag("map", self.pairs(value, depth + 2), depth)
        texts = ((str.__str__(key), key, item) for key, item in value.items())
        return {"$" * text.startswith("$") + text: self.inside(key, item, depth + 1) for text, key, item in texts}

    def pairs(self, value: Mapping[Any, Any], depth: int) -> list[list[Any]]:
        self.check_depth(depth)
        result = []
        for key, item in value.items():
            self._path.append(key)
            self.check_hashable(key, "a key")
            result.append([self.encode(key, depth + 1), self.encode(item, depth + 1)])
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

    def tensor(self, value: Tensor, owner: object) -> str:
        """Add a tensor to `tensors`, once for each `owner`. Returns the reference to it."""
        if id(owner) not in self._stored:
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

    def numpy_array(self, value: np.ndarray[Any, Any], depth: int) -> Any:
        if type(value) not in (np.ndarray, np.memmap):
            self.refuse(f"it is {with_article(type(value).__name__)}, a subclass of numpy.ndarray; store numpy.asarray(…)")
        if value.dtype.kind not in _ELEMENT_KINDS:
            return self.tag("array", self.number_array(value), depth)
        if value.dtype.kind != "O" and value.nbytes > _MOST_TEXT_BYTES:
            self.refuse(f"its {value.nbytes:,} bytes of text are more than {_MOST_TEXT_BYTES:,}; store its tolist()")
        self.enter(value, depth)
        code = value.dtype.str.lstrip("<>|")
        payload = [code, list(value.shape), self.items(value.ravel().tolist(), depth + 2)]
        self._parents.discard(id(value))
        return self.tag("elements", payload, depth)

    def number_array(self, value: np.ndarray[Any, Any]) -> str:
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
        if name not in _SCALARS:
            self.refuse(f"it is a numpy.{type(value).__name__}; store its item()")
        return self.tag("scalar", [name, self.encode(_BASES[text](value) if text else value.item(), depth + 2)], depth)

    def other(self, value: Any, depth: int) -> Any:
        if isinstance(value, np.generic):
            return self.numpy_scalar(value, depth)
        if isinstance(value, Enum) and not isinstance(value, (int, str)):
            self.refuse(f"it is {with_article(type(value).__name__)}; store its .value")
        for base in (str, int, float):
            if isinstance(value, base):
                return self.encode(_BASES[base](value), depth)
        if type(value) is complex:
            return self.tag("complex", [self.encode(value.real, depth + 2), self.encode(value.imag, depth + 2)], depth)
        for name, (kind, to_payload, _) in _LEAVES.items():
            if type(value) is kind or (kind is _PATH and isinstance(value, _PATH)):
                return self.tag(name, to_payload(value), depth)
        if is_dataclass(value) and not isinstance(value, (type, torch.nn.Module)):
            return self.container(value, depth)
        self.unsupported = type(value)
        self.refuse(_advice(value))


# A value as its base class, even if the subclass overrides `str()` or `int()`.
_BASES: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: lambda data: bytes(memoryview(data)),
}


def _all_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether `json` accepts the values unchanged; checked by a few passes in C, for long lists of numbers."""
    kinds = set(map(type, values))
    if kinds <= {str, bool, type(None)}:
        return True
    if kinds == {int}:
        return bool(min(values) > -_LARGEST_DECIMAL and max(values) < _LARGEST_DECIMAL)
    return kinds == {float} and all(map(math.isfinite, values))


def _advice(value: Any) -> str:
    kind = qualified_name(type(value))
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
    return hex(key)[:40] if isinstance(key, int) and abs(key) >= _LARGEST_DECIMAL else f"{key!r:.100}"


# ------------------------------------------------------------------------------------------------------------ decoding


class _Decoder:
    """One call of `loads`. Inner tags are decoded first, so the parts of a payload are decoded already."""

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], what: str, unregistered: bool = False) -> None:
        self._tensors = tensors
        self._what = what
        self._unregistered = unregistered
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._tags: dict[str, Callable[[Any], Any]] = {
            "$array": self._array,
            "$complex": lambda v: complex(*_list(v, float, 2)),
            "$counter": lambda v: Counter(_pairs(v)),
            "$elements": _elements,
            "$float": lambda v: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[_text(v)],
            "$frozenset": lambda v: _set(v, frozenset),
            "$int": lambda v: int(_text(v), 16),
            "$map": _pairs,
            "$registered": self._registered,
            "$scalar": _scalar,
            "$set": lambda v: _set(v, set),
            "$tensor": self._tensor,
            "$tuple": lambda v: tuple(_list(v)),
            **{f"${name}": decode for name, (_, _, decode) in _LEAVES.items()},
        }

    def decode(self, value: dict[str, Any]) -> Any:
        """The value of a JSON object."""
        key = next((key for key in value if key[:1] == "$"), None)
        if key is None:
            return value
        if len(value) == 1 and not key.startswith("$$"):
            return self._tagged(key, value[key])
        if all(key[:1] != "$" or key[:2] == "$$" for key in value):
            return {key[1:] if key[:1] == "$" else key: item for key, item in value.items()}
        raise CorruptCheckpointError(f"{self._what}: the tag {key!r:.40} must be the only key of its object")

    def decode_tree(self, value: Any, path: str) -> Any:
        """The decoded value; an error names the path to the value that cannot be decoded."""
        if isinstance(value, list):
            return [self.decode_tree(item, f"{path}[{number}]") for number, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        inner = {}
        for key, item in value.items():
            is_tag = key.startswith("$") and not key.startswith("$$")
            inner[key] = self.decode_tree(item, path if is_tag else f"{path}[{key!r:.100}]")
        try:
            return self.decode(inner)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error}, at {path}" if path else str(error)) from error.__cause__

    def _tagged(self, tag: str, payload: Any) -> Any:
        decode = self._tags.get(tag)
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
        registration = _by_name.get(_text(name))
        if registration is None:
            short = name.rpartition(".")[2]
            raise CheckpointError(
                f"{self._what} contains a value of the type {name!r:.200}, which this program has not registered. Fix: before "
                f"loading, call trainkit.checkpoint.register({short}, encode, decode, name={name!r:.200})"
            )
        try:
            return registration.decode(value)
        except Exception as error:
            raise CheckpointError(
                f"{self._what}: decode, registered for {name!r:.200}, raised {type(error).__name__}: {error!s:.500}. It "
                f"was called with the {type(value).__name__} that encode returned when saving. Fix: make decode accept it."
            ) from error

    def _tensor(self, reference: Any) -> Tensor:
        file, _, key = _text(reference).partition("#")
        tensor = self._tensors.get(file, {}).get(key)
        if tensor is None:
            raise CorruptCheckpointError(f"{self._what}: refers to the tensor {reference!r:.200}, which does not exist")
        return tensor

    def _array(self, reference: Any) -> np.ndarray[Any, Any]:
        if reference not in self._arrays:
            self._arrays[reference] = self._tensor(reference).detach().numpy()
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


def _to_base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _base64(value: Any) -> bytes:
    return base64.b64decode(_text(value), validate=True)


def _check_hashes(keys: list[Any]) -> None:
    """A file may contain numbers chosen to have the same hash, and a dict of n of them takes n² comparisons."""
    if len(keys) > _MAX_SAME_HASH and max(Counter(map(hash, keys)).values()) > _MAX_SAME_HASH:
        raise ValueError("too many keys have the same hash")


def _set(value: Any, kind: Callable[[Iterable[Any]], Any]) -> Any:
    elements = _list(value)
    _check_hashes(elements)
    result = kind(elements)
    if len(result) != len(elements):
        raise ValueError("an element occurs twice")
    return result


def _pairs(value: Any) -> dict[Any, Any]:
    pairs = [_list(pair, length=2) for pair in _list(value)]
    _check_hashes([key for key, _ in pairs])
    result: dict[Any, Any] = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _scalar(value: Any) -> np.generic:
    name, item = _list(value, length=2)
    kind: Any = _SCALARS[_text(name)]
    if issubclass(kind, np.integer):
        bounds = np.iinfo(kind)
        if type(item) is not int or not bounds.min <= item <= bounds.max:
            raise ValueError(f"expected {name}, got {item!r:.40}")
    elif type(item) is not type(kind().item()):
        raise TypeError(f"expected {name}, got {item!r:.40}")
    scalar: np.generic = kind(item)
    return scalar


def _elements(value: Any) -> np.ndarray[Any, Any]:
    """An array of objects (`"O"`), of text (`"U8"`, at most 8 characters each) or of bytes (`"S8"`)."""
    code, shape, elements = _list(value, length=3)
    if not re.fullmatch("O|[SU][0-9]{1,8}", _text(code)) or any(size < 0 for size in _list(shape, int)):
        raise ValueError(f"expected a dtype such as 'U8' and a shape, got {code!r:.40} and {shape!r:.40}")
    array: np.ndarray[Any, Any]
    if code == "O":
        array = np.fromiter(_list(elements), object, len(elements))
    else:
        dtype = np.dtype(code)
        longest = max(map(len, _list(elements, str if code[0] == "U" else bytes)), default=0)
        if longest > int(code[1:]) or dtype.itemsize * len(elements) > _MOST_TEXT_BYTES:
            raise ValueError(f"{len(elements):,} elements of up to {longest:,} characters do not fit into {code}")
        array = np.array(elements, dtype)
    array = array.reshape(shape)
    return array


# Values without parts: tag → type, its payload, the value of a payload.
_PATH = type(PurePath())
_LEAVES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytearray": (bytearray, _to_base64, lambda v: bytearray(_base64(v))),
    "bytes": (bytes, _to_base64, _base64),
    "date": (date, date.isoformat, lambda v: date.fromisoformat(_text(v))),
    "datetime": (datetime, datetime.isoformat, lambda v: datetime.fromisoformat(_text(v))),
    "device": (torch.device, str, lambda v: torch.device(_text(v))),
    "dtype": (torch.dtype, lambda value: str(value).removeprefix("torch."), lambda v: _DTYPES[_text(v)]),
    "path": (_PATH, PurePath.as_posix, lambda v: Path(_text(v))),
    "timedelta": (timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda v: timedelta(*_list(v, int, 3))),
}


# ---------------------------------------------------------------------------------------------------- registered types


class Registration(NamedTuple):
    """How a type is stored: its name in checkpoints, the class, and the two functions of `register`."""

    name: str
    kind: builtins.type[Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Unregistered(NamedTuple):
    """The name of a registered type and what `encode` returned, for readers that have not registered the type."""

    name: str
    value: Any


_by_kind: dict[builtins.type[Any], Registration] = {}
_by_name: dict[str, Registration] = {}


def register(
    type: builtins.type[T],
    encode: Callable[[T], Any],
    decode: Callable[[Any], T],
    *,
    name: str | None = None,
    replace: bool = False,
) -> None:
    """Let checkpoints store values of your own type, in hyper-parameters, the state of callbacks or anywhere else.

    Call it where the type is defined, so that every program that saves or loads such a checkpoint has called it. No code is
    stored: a checkpoint contains the name and what `encode` returned, and only a type that the running program has
    registered is decoded.

    Args:
        type: The class. Its subclasses are not included: register them too.
        encode: Called with a value; returns what a checkpoint can store: numbers, text, lists, dicts, tensors, numpy
            arrays, values of other registered types.
        decode: Called with what `encode` returned; returns the value.
        name: The name of the type in checkpoints. Default: its module and its name. Give one, and keep it, if the class may
            be moved or renamed, or is defined in a script.
        replace: Replace an earlier registration of the type or the name; for notebooks.

    Raises:
        ConfigurationError: An argument has the wrong type, or the type or the name is registered already.

    Example:
        ```python
        from fractions import Fraction

        register(Fraction, lambda f: [f.numerator, f.denominator], lambda pair: Fraction(*pair))
        ```
    """
    _check_arguments(type, encode, decode, name)
    name = name or qualified_name(type)
    earlier = [registration for registration in (_by_kind.get(type), _by_name.get(name)) if registration is not None]
    if earlier and not replace:
        raise _registered_already(type, name, earlier[0])
    for registration in earlier:
        _by_kind.pop(registration.kind, None)
        _by_name.pop(registration.name, None)
    _by_kind[type] = _by_name[name] = Registration(name, type, encode, decode)


def _check_arguments(kind: Any, encode: Any, decode: Any, name: Any) -> None:
    example = "trainkit.checkpoint.register(Vocabulary, encode=Vocabulary.to_dict, decode=Vocabulary.from_dict)"
    if not isinstance(kind, type):
        raise ConfigurationError(f"register: expected a class, got {kind!r}. Fix: {example}")
    if kind in _STORED:
        raise ConfigurationError(f"register: {kind.__qualname__} can be stored without registration. Fix: remove the call.")
    for what, function in (("encode", encode), ("decode", decode)):
        if not callable(function):
            raise ConfigurationError(f"register: expected a function for {what}, got {function!r}. Fix: {example}")
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigurationError(f"register: expected a string for name, got {name!r}. Fix: name='my_project.Vocabulary'")


def _registered_already(kind: builtins.type[Any], name: str, earlier: Registration) -> ConfigurationError:
    if earlier.kind is kind:
        reason = f", as {earlier.name!r}. " if earlier.name != name else ". "
        fix = "or, to replace the first registration: "
    else:
        reason = f": the name {name!r} belongs to another class, {earlier.kind!r}. "
        fix = "choose another name: name='...'; or, to replace the other registration: "
    return ConfigurationError(
        f"register: {qualified_name(kind)} is registered already{reason}Call register once for each type, where it is defined; "
        f"{fix}register(..., replace=True)"
    )


def registration_of(kind: builtins.type[Any]) -> Registration | None:
    """The registration of exactly this type; `None` if it is not registered."""
    return _by_kind.get(kind)


def qualified_name(kind: builtins.type[Any]) -> str:
    """The module and the name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
