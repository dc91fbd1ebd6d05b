"""The hyper-parameters of a module or a data module, as far as a checkpoint or a logger can hold them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import nn

from trainkit.console import warn
from trainkit.tagged_json.encode import unsavable
from trainkit.tagged_json.omegaconf import is_omegaconf
from trainkit.tagged_json.registered import registration_of
from trainkit.tagged_json.strict_json import MAX_DEPTH

__all__ = ["logged", "stored"]

_OMITTED = object()


def stored(owner: Any) -> dict[Any, Any]:
    """What a checkpoint stores of ``owner.hparams``; one warning names what it cannot store."""
    return _Kept(owner).values


def logged(owner: Any) -> dict[Any, Any]:
    """What loggers get of ``owner.hparams``: the same, and classes and functions, whose names they write."""
    return _Kept(owner, code=True).values


class _Kept:
    """The hyper-parameters of ``owner`` without those that cannot be stored.

    Attributes:
        values: those that can.
    """

    def __init__(self, owner: Any, code: bool = False) -> None:
        self._code = code
        self._omitted: dict[str, Any] = {}  # the path to it → the key of the hyper-parameter that it is in
        kept = {}
        for key, value in owner.hparams.items():
            self._key = key
            kept[key] = self._of(value, str(key), 0)
        self.values = {key: value for key, value in kept.items() if value is not _OMITTED}
        if self._omitted and not getattr(owner, "_omitted_said", False):
            object.__setattr__(owner, "_omitted_said", True)
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
            f"{name}: checkpoints do not store these hyper-parameters, and loggers at most their names: "
            f"{', '.join(self._omitted)}. Expected values, got modules, functions, classes or other objects; self.hparams "
            "keeps them. " + ". ".join(fixes)
        )

    def _of(self, value: Any, path: str, depth: int) -> Any:
        if depth >= MAX_DEPTH:  # it contains itself
            return self._without(path)
        if is_omegaconf(value) or registration_of(type(value)) is not None:
            return value if unsavable(value, path) is None else self._without(path)
        if isinstance(value, Namespace):
            value = vars(value)
        elif is_dataclass(value) and not isinstance(value, type | nn.Module) and not callable(value):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping):
            items = {key: self._of(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
            return {key: item for key, item in items.items() if item is not _OMITTED}
        if type(value) in (list, tuple):
            listed = [self._of(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
            inside = [one for one in self._omitted if one.startswith(f"{path}[")]
            for omitted in inside:  # half of a list is another list, so none of it is stored
                del self._omitted[omitted]
            if inside:
                self._omitted[path] = self._key
            return _OMITTED if any(item is _OMITTED for item in listed) else type(value)(listed)
        if isinstance(value, nn.Module):
            return self._without(path)
        if isinstance(value, type | partial) or callable(value):
            # in the warning even if only loggers get it: a checkpoint will not have it
            self._omitted[path] = self._key
            return value if self._code and (isinstance(value, type | partial) or hasattr(value, "__qualname__")) else _OMITTED
        return value if unsavable(value, path) is None else self._without(path)

    def _without(self, path: str) -> Any:
        self._omitted[path] = self._key
        return _OMITTED
