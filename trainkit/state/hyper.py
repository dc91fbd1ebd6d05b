"""The hyper-parameters of a module or a data module that a checkpoint or a logger can store."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

from trainkit.console import warn
from trainkit.tagged_json.codec import MAX_DEPTH, is_omegaconf, plain_container, registration_of, unsavable

__all__ = ["logged", "stored", "stored_attributes", "stored_omegaconf"]

_OMITTED = object()


def stored(owner: Any) -> dict[Any, Any]:
    """The values of `owner.hparams` that a checkpoint stores; a warning names the others."""
    return _Kept(owner).values


def logged(owner: Any) -> dict[Any, Any]:
    """The values of `owner.hparams` for loggers: those of `stored`, and classes and functions, logged by name."""
    return _Kept(owner, code=True).values


def stored_omegaconf(owner: Any) -> list[Any]:
    """The names of the hyper-parameters that are OmegaConf containers, which checkpoints store as dicts and lists.

    If one container holds all hyper-parameters: the name of the argument that it was.
    """
    if is_omegaconf(owner.hparams):
        return [owner._hparams_name]
    return [name for name, value in owner.hparams.items() if is_omegaconf(value)]


def stored_attributes(owner: Any) -> list[Any]:
    """Where in the hyper-parameters a checkpoint stores a value with attributes as a dict or a tuple.

    Returns:
        For each, those inside others first: the keys that lead to it, and the names of the items of a tuple, else `None`.
    """
    return _Kept(owner).attributes


class _Kept:
    """The hyper-parameters of `owner` without those that cannot be stored.

    Attributes:
        values: The hyper-parameters that can be stored, by name.
        attributes: Where values with attributes are.
    """

    def __init__(self, owner: Any, code: bool = False) -> None:
        self._code = code
        self.attributes: list[Any] = []
        self._keys: list[Any] = []  # that lead to the value
        self._omitted: dict[str, Any] = {}  # the path to it → the key of the hyper-parameter that it is in
        kept = {}
        for key, value in plain_container(owner.hparams).items():
            self._key = key
            kept[key] = self._at(key, value, str(key), 0)
        self.values = {key: value for key, value in kept.items() if value is not _OMITTED}
        if self._omitted and not getattr(owner, "_omitted_warned", False):
            object.__setattr__(owner, "_omitted_warned", True)
            self._warn(owner)

    def _warn(self, owner: Any) -> None:
        name = type(owner).__name__
        keys = [key for key in dict.fromkeys(self._omitted.values()) if isinstance(key, str) and key.isidentifier()]
        fixes = []
        if keys and hasattr(owner, "load_from_checkpoint"):
            again = ", ".join(f"{key}=..." for key in keys)
            fixes.append(f"Pass them again when you load a checkpoint: {name}.load_from_checkpoint(path, {again})")
        if keys:
            fixes.append(f"To not save them: self.save_hyperparameters(ignore={keys})")
        warn(
            f"{name}: checkpoints cannot store these hyper-parameters, and loggers record at most their names: "
            f"{', '.join(self._omitted)}. Expected plain values, got modules, functions, classes or other objects. They stay "
            "in self.hparams. " + ". ".join(fixes)
        )

    def _at(self, key: Any, value: Any, path: str, depth: int) -> Any:
        """The part of the value of a key that can be stored, or `_OMITTED`."""
        self._keys.append(key)
        kept = self._storable(value, path, depth)
        if kept is not _OMITTED and _has_attributes(value):
            self.attributes.append([list(self._keys), list(getattr(value, "_fields", ())) or None])
        self._keys.pop()
        return kept

    def _storable(self, value: Any, path: str, depth: int) -> Any:
        """The part of a value that can be stored, or `_OMITTED`."""
        if depth >= MAX_DEPTH:  # it contains itself
            return self._omit(path)
        if is_omegaconf(value) or registration_of(type(value)) is not None:
            return value if unsavable(value, path) is None else self._omit(path)
        if isinstance(value, Enum):
            return self._storable(value.value, path, depth + 1)
        if (items := _items_of(value)) is not None:
            return self._storable_items(items, path, depth)
        if type(value) in (list, tuple) or _is_named_tuple(value):
            return self._storable_list(value, path, depth)
        if callable(value):  # a module, function or class: a checkpoint cannot store it
            self._omitted[path] = self._key
            return value if self._code and _has_name(value) else _OMITTED
        return value if unsavable(value, path) is None else self._omit(path)

    def _storable_items(self, items: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        kept = {key: self._at(key, item, f"{path}.{key}", depth + 1) for key, item in items.items()}
        return {key: item for key, item in kept.items() if item is not _OMITTED}

    def _storable_list(self, value: Any, path: str, depth: int) -> Any:
        """A list or tuple is stored completely or not at all: without some items, the positions of the others would change."""
        items = [self._at(index, item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if inside := [omitted for omitted in self._omitted if omitted.startswith(f"{path}[")]:
            for omitted in inside:
                del self._omitted[omitted]
            self._omitted[path] = self._key
        return _OMITTED if any(item is _OMITTED for item in items) else (list if type(value) is list else tuple)(items)

    def _omit(self, path: str) -> Any:
        self._omitted[path] = self._key
        return _OMITTED


def _has_name(value: Any) -> bool:
    """Whether a logger can record code by its name."""
    return isinstance(value, type | partial) or hasattr(value, "__qualname__")


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _has_attributes(value: Any) -> bool:
    """Whether the items of a value that is stored as a dict or a tuple are attributes too."""
    if is_omegaconf(value) or registration_of(type(value)) is not None:
        return False
    items = _items_of(value)
    return _is_named_tuple(value) or (items is not None and (items is not value or hasattr(type(value), "__getattr__")))


def _items_of(value: Any) -> Mapping[Any, Any] | None:
    """The items of a mapping, the attributes of a `Namespace` or the fields of a dataclass; `None` for other values."""
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if is_dataclass(value) and not callable(value):  # classes and modules are callable
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value if isinstance(value, Mapping) else None
