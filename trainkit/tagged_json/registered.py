"""`trainkit.checkpoint.register`: lets checkpoints store values of further types."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from trainkit.errors import ConfigurationError

__all__ = ["Registration", "Unregistered", "qualified_name", "register", "registration_named", "registration_of"]

T = TypeVar("T")

# Stored without registration, and restored with the same type.
_STORED = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(list, tuple, set, frozenset, dict, Counter),
    *(date, datetime, timedelta, torch.dtype, torch.device, torch.Tensor, np.ndarray),
)


@dataclass(frozen=True)
class Registration:
    """How a type is stored.

    Attributes:
        name: The name of the type in checkpoints.
        kind: The type.
        encode: Converts a value to something that a checkpoint can store.
        decode: Converts that back.
    """

    name: str
    kind: builtins.type[Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Unregistered(NamedTuple):
    """A placeholder for a value of a registered type, for readers that do not need the value and have not registered the type.

    Attributes:
        name: The name of the type in the checkpoint.
        value: What `encode` returned.
    """

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
    earlier = [own for own in (_by_kind.get(type), _by_name.get(name)) if own is not None]
    if earlier and not replace:
        raise _registered_already(type, name, earlier[0])
    for own in earlier:
        _by_kind.pop(own.kind, None)
        _by_name.pop(own.name, None)
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


def registration_named(name: str) -> Registration | None:
    """The registration with this name in checkpoints; `None` if there is none."""
    return _by_name.get(name)


def qualified_name(kind: builtins.type[Any]) -> str:
    """The module and the name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
