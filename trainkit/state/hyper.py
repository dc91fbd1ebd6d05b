"""The hyper-parameters of a module or a data module that a checkpoint or a logger can store."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from trainkit.console import warn
from trainkit.tagged_json.encode import unsavable
from trainkit.tagged_json.omegaconf import is_omegaconf, without_omegaconf
from trainkit.tagged_json.registered import registration_of
from trainkit.tagged_json.strict_json import MAX_DEPTH

__all__ = ["logged", "stored", "stored_omegaconf"]

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


class _Kept:
    """The hyper-parameters of `owner` without those that cannot be stored.

    Attributes:
        values: The hyper-parameters that can be stored, by name.
    """

    def __init__(self, owner: Any, code: bool = False) -> None:
        self._code = code
        self._omitted: dict[str, Any] = {}  # the path to it → the key of the hyper-parameter that it is in
        kept = {}
        for key, value in without_omegaconf(owner.hparams).items():
            self._key = key
            kept[key] = self._storable(value, str(key), 0)
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

    def _storable(self, value: Any, path: str, depth: int) -> Any:
        """The part of a value that can be stored, or `_OMITTED`."""
        if depth >= MAX_DEPTH:  # it contains itself
            return self._omit(path)
        if is_omegaconf(value) or registration_of(type(value)) is not None:
            return value if unsavable(value, path) is None else self._omit(path)
        if (items := _items_of(value)) is not None:
            kept = {key: self._storable(item, f"{path}.{key}", depth + 1) for key, item in items.items()}
            return {key: item for key, item in kept.items() if item is not _OMITTED}
        if type(value) in (list, tuple):
            return self._storable_list(value, path, depth)
        if callable(value):  # a module, function or class: a checkpoint cannot store it
            self._omitted[path] = self._key
            return value if self._code and (isinstance(value, type | partial) or hasattr(value, "__qualname__")) else _OMITTED
        return value if unsavable(value, path) is None else self._omit(path)

    def _storable_list(self, value: Any, path: str, depth: int) -> Any:
        """A list or tuple is stored completely or not at all: without some items, the positions of the others would change."""
        items = [self._storable(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if inside := [omitted for omitted in self._omitted if omitted.startswith(f"{path}[")]:
            for omitted in inside:
                del self._omitted[omitted]
            self._omitted[path] = self._key
        return _OMITTED if any(item is _OMITTED for item in items) else type(value)(items)

    def _omit(self, path: str) -> Any:
        self._omitted[path] = self._key
        return _OMITTED


def _items_of(value: Any) -> Mapping[Any, Any] | None:
    """The items of a mapping, the attributes of a `Namespace` or the fields of a dataclass; `None` for other values."""
    if isinstance(value, Namespace):
        return vars(value)
    if is_dataclass(value) and not callable(value):  # classes and modules are callable
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value if isinstance(value, Mapping) else None
