"""Hyper-parameters of a checkpoint as a class expects them: members of enumerations, and values with attributes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import isclass
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from trainkit.module.hparams import HyperParameters

__all__ = ["NamedValues", "annotations_of", "with_attributes", "with_members"]

_known: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class NamedValues(tuple[Any, ...]):
    """A tuple whose items are also attributes, as of a named tuple."""

    _fields: tuple[str, ...] = ()

    def __new__(cls, *items: Any) -> NamedValues:
        return super().__new__(cls, items)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[self._fields.index(name)]
        except ValueError:
            raise AttributeError(f"no value {name!r}; known: {list(self._fields)}.") from None


def annotations_of(kind: type) -> dict[str, Any]:
    """The annotations of the arguments of `__init__`, also those of base classes; without those that name nothing."""
    found: dict[str, Any] = {}
    for one in reversed(kind.__mro__):
        if (init := vars(one).get("__init__")) is not None and hasattr(init, "__annotations__"):
            if init not in _known:
                _known[init] = _evaluated(init.__annotations__, getattr(init, "__globals__", {}))
            found.update(_known[init])
    return found


def _evaluated(annotations: Mapping[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, annotation in annotations.items():
        try:
            found.update(get_type_hints(SimpleNamespace(__annotations__={name: annotation}), names))
        except Exception:  # a name that only type checkers know
            continue
    return found


def with_members(value: Any, annotation: Any, default: Any = None) -> Any:
    """A value with the members of enumerations that an annotation, or a default, names the class of.

    Other values stay as they are.

    Args:
        value: The value of an argument; members are stored by value.
        annotation: Its annotation, or `None`.
        default: Its default.
    """
    kinds = list(_alternatives(annotation))
    for kind in [*kinds, type(default)]:
        if isclass(kind) and issubclass(kind, Enum) and (type(value) not in kinds or issubclass(kind, type(value))):
            try:
                return kind(value)
            except (TypeError, ValueError):  # of another alternative
                continue
    if type(value) is dict:
        return _members_in(value, kinds, default)
    if type(value) in (list, tuple, set, frozenset):
        own = default[0] if isinstance(default, list | tuple) and default else None
        return type(value)(with_members(item, _of_item(kinds, index), own) for index, item in enumerate(value))
    return value


def _members_in(value: dict[Any, Any], kinds: Iterable[Any], default: Any) -> dict[Any, Any]:
    found = dict(value)
    for kind in [*kinds, type(default)]:
        if isclass(kind) and is_dataclass(kind):
            hints = annotations_of(kind)
            for one in fields(kind):
                if one.name in found:
                    own = getattr(default, one.name, one.default)
                    found[one.name] = with_members(found[one.name], hints.get(one.name), own)
        elif (get_origin(kind) or kind) in (dict, Mapping) and len(given := get_args(kind)) == 2:
            found = {with_members(key, given[0]): with_members(item, given[1]) for key, item in found.items()}
    return found


def _of_item(kinds: Iterable[Any], index: int) -> Any:
    """The annotation of an item of a list, a set, a tuple or a named tuple."""
    for kind in kinds:
        given = get_args(kind)
        if isclass(kind) and hasattr(kind, "_fields"):
            hints = _evaluated(kind.__annotations__, vars(sys.modules[kind.__module__]))
            given = tuple(hints.get(name) for name in kind._fields)
        if given and isclass(get_origin(kind) or kind):
            return given[index] if index < len(given) and Ellipsis not in given else given[0]
    return None


def _alternatives(annotation: Any) -> Iterable[Any]:
    if get_origin(annotation) in (Union, UnionType):
        for one in get_args(annotation):
            yield from _alternatives(one)
    else:
        yield annotation


def with_attributes(values: dict[Any, Any], paths: Iterable[Any]) -> dict[Any, Any]:
    """Hyper-parameters in which the values at some paths have attributes again.

    Args:
        values: The hyper-parameters.
        paths: For each value the keys that lead to it, and the names of a named tuple or `None`. Values inside come first.
    """
    made = dict(values)
    for keys, names in paths:
        made = _changed(made, list(keys), names)
    return made


def _changed(value: Any, keys: list[Any], names: Any) -> Any:
    if not keys:
        if isinstance(value, dict):
            return HyperParameters(value)
        if not isinstance(value, tuple) or not isinstance(names, list | tuple) or len(names) != len(value):
            return value
        named = NamedValues(*value)
        named._fields = tuple(names)
        return named
    if isinstance(value, dict) and keys[0] in value:
        value = type(value)({**value, keys[0]: _changed(value[keys[0]], keys[1:], names)})
    elif type(value) in (list, tuple) and isinstance(keys[0], int) and 0 <= keys[0] < len(value):
        items = list(value)
        items[keys[0]] = _changed(items[keys[0]], keys[1:], names)
        value = type(value)(items)
    return value
