"""The hyper-parameters of a module or a data module, as far as a checkpoint or a logger can hold them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import nn

from trainkit.checkpoint.registered import registration_of
from trainkit.checkpoint.strict_json import MAX_DEPTH
from trainkit.checkpoint.tagged import unsavable
from trainkit.console import warn
from trainkit.omega import is_omegaconf

__all__ = ["logged", "stored"]

_LEFT_OUT = object()


def stored(owner: Any) -> dict[Any, Any]:
    """What a checkpoint holds of ``owner.hparams``; what it cannot hold is left out, which one warning says."""
    return _Kept(owner).values


def logged(owner: Any) -> dict[Any, Any]:
    """What loggers get of ``owner.hparams``: the same, and classes and functions, of which they write the names."""
    return _Kept(owner, code=True).values


class _Kept:
    """The hyper-parameters of ``owner`` without those that cannot be stored.

    Attributes:
        values: those that can.
    """

    def __init__(self, owner: Any, code: bool = False) -> None:
        self._code = code
        self._left_out: dict[str, Any] = {}  # the path to it → the key of the hyper-parameter that it is in
        kept = {}
        for key, value in owner.hparams.items():
            self._key = key
            kept[key] = self._of(value, str(key), 0)
        self.values = {key: value for key, value in kept.items() if value is not _LEFT_OUT}
        if self._left_out and not getattr(owner, "_left_out_said", False):
            object.__setattr__(owner, "_left_out_said", True)
            self._warn(type(owner).__name__)

    def _warn(self, owner: str) -> None:
        keys = [key for key in dict.fromkeys(self._left_out.values()) if isinstance(key, str) and key.isidentifier()]
        again = ", ".join(f"{key}=..." for key in keys) or "..."
        names = ", ".join(repr(key) for key in keys)
        warn(
            f"{owner}: these hyper-parameters stay in self.hparams, and checkpoints leave them out, as they hold no modules, "
            f"functions, classes or objects of other types: {', '.join(self._left_out)}. Give them again when you load one: "
            f"{owner}.load_from_checkpoint(path, {again}); or do not save them: self.save_hyperparameters(ignore=[{names}])"
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
            return {key: item for key, item in items.items() if item is not _LEFT_OUT}
        if type(value) in (list, tuple):
            listed = [self._of(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
            inside = [left for left in self._left_out if left.startswith(f"{path}[")]
            for left in inside:  # half of a list is another list, so all of it is left out
                del self._left_out[left]
            if inside:
                self._left_out[path] = self._key
            return _LEFT_OUT if any(item is _LEFT_OUT for item in listed) else type(value)(listed)
        if isinstance(value, nn.Module):
            return self._without(path)
        if isinstance(value, type | partial) or callable(value):
            # said too if only loggers are given it: a checkpoint will not have it
            self._left_out[path] = self._key
            return value if self._code and (isinstance(value, type | partial) or hasattr(value, "__qualname__")) else _LEFT_OUT
        return value if unsavable(value, path) is None else self._without(path)

    def _without(self, path: str) -> Any:
        self._left_out[path] = self._key
        return _LEFT_OUT
