"""Hyper-parameters: the arguments that `save_hyperparameters` collects, and what a checkpoint or a logger stores of them."""

from __future__ import annotations

import copy
import inspect
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from trainkit.console import warn
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.tagged_json.codec import MAX_DEPTH, is_omegaconf, plain_container, registration_of, unsavable

__all__ = [
    "AttributeDict",
    "HyperParameters",
    "HyperparametersMixin",
    "StorableHyperParameters",
    "omegaconf_names",
    "use_configured_values",
]


# A deeper structure contains itself.
_MAX_COPY_DEPTH = 32


class _Configuration(NamedTuple):
    """What an object is created from: its class, the path of the class, and the arguments as in a configuration file."""

    kind: type
    class_path: str
    values: Mapping[str, Any]


_configuration: ContextVar[_Configuration | None] = ContextVar("configuration", default=None)


@contextmanager
def use_configured_values(kind: type, class_path: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Within it, `save_hyperparameters` of an object of a class saves these values instead of the arguments of `__init__`.

    An argument that is an object, which a checkpoint cannot store, is a class path and its arguments in a configuration.

    Args:
        kind: The class.
        class_path: From which module it is imported.
        values: The arguments of `__init__`, plain values.
    """
    token = _configuration.set(_Configuration(kind, class_path, values))
    try:
        yield
    finally:
        _configuration.reset(token)


class HyperParameters(dict[str, Any]):
    """A dict whose entries are also attributes: `hparams.lr` is `hparams["lr"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            names = sorted(map(str, self))
            raise AttributeError(f"no hyper-parameter {name!r}; known: {names}.{nearest(name, names)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


AttributeDict = HyperParameters  # Lightning's name


class HyperparametersMixin:
    """`save_hyperparameters` and `hparams`: a base of `TrainModule`, `DataModule`, and other classes that want them."""

    _hparams: HyperParameters | None = None
    _hparams_initial: HyperParameters | None = None
    _hparams_name: str | None = None  # the argument that contains all of them
    _hparams_class: str | None = None  # the class path, if they are values of a configuration
    _log_hyperparams: bool = True

    @property
    def hparams(self) -> HyperParameters:
        """The hyper-parameters; empty before `save_hyperparameters`. A `DictConfig` that holds all of them stays one."""
        if self._hparams is None:
            object.__setattr__(self, "_hparams", HyperParameters())
        assert self._hparams is not None
        return self._hparams

    @property
    def hparams_initial(self) -> Any:
        """The hyper-parameters at the time of `save_hyperparameters`; modules and functions are not copied."""
        return _copy_containers(HyperParameters() if self._hparams_initial is None else self._hparams_initial)

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of `__init__` as `self.hparams`, which are logged and stored in checkpoints.

        Call it in `__init__`. `self.hparams` contains all arguments, including modules and functions. Checkpoints and
        loggers omit those that they cannot store, and a warning names them when a run starts: pass them to
        `load_from_checkpoint` again. To store your own type, call `trainkit.checkpoint.register`.

        Args:
            *args: Names of arguments to save (default: all), or one dict, Namespace, dataclass or `DictConfig` with all
                hyper-parameters. If the module is a dataclass, fields with `init=False` are not hyper-parameters.
            ignore: Names to omit, including those that a base class saved.
            frame: The frame of `__init__`, if the call is not made directly from it.
            logger: Log them when a run starts.

        Raises:
            UnknownNameError: A name is not an argument of `__init__`.
            ConfigurationError: An argument is neither a name nor contains hyper-parameters.
        """
        caller = frame or sys._getframe(1)
        if len(args) == 1 and not isinstance(args[0], str):
            collected = _as_mapping(args[0])
            object.__setattr__(self, "_hparams_name", _name_of(args[0], caller))
        else:
            configuration = _configuration.get()
            if configuration is not None and type(self) is configuration.kind:
                collected = _copy_containers(dict(configuration.values))
                object.__setattr__(self, "_hparams_class", configuration.class_path)
            else:
                collected = _arguments(self, caller)
            collected = {name: _argument(name, collected) for name in args} if args else collected
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        if len(args) == 1 and is_omegaconf(args[0]) and not ignored and (not self.hparams or self.hparams is args[0]):
            object.__setattr__(self, "_hparams", args[0])  # functions of OmegaConf accept no copy in a dict
        else:
            self._add_hparams(collected, ignored)
        object.__setattr__(self, "_hparams_initial", _copy_containers(self.hparams))
        object.__setattr__(self, "_log_hyperparams", logger)

    def _add_hparams(self, collected: Mapping[str, Any], ignored: Iterable[str]) -> None:
        if is_omegaconf(self.hparams):
            object.__setattr__(self, "_hparams", HyperParameters(_as_mapping(self.hparams)))
        self.hparams.update(collected)
        for name in ignored:
            self.hparams.pop(name, None)


def _arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of `owner`: those of `__init__` in `frame`, or the fields of a dataclass."""
    if is_dataclass(owner):
        return {field.name: getattr(owner, field.name) for field in fields(owner) if field.init and hasattr(owner, field.name)}
    if frame is None or frame.f_code.co_name != "__init__":
        raise ConfigurationError(
            "save_hyperparameters() saves the arguments of the __init__ that calls it. Call it there, or pass them: "
            "self.save_hyperparameters({'lr': lr})"
        )
    return _init_arguments(owner, frame)


def _init_arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of the `__init__` that runs in `frame` and of those of subclasses that called it."""
    collected: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        code, values = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if not names or values.get(names[0]) is not owner:
            break
        collected.update({name: values[name] for name in names[1:] if name in values})
        if code.co_flags & inspect.CO_VARKEYWORDS:
            position = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
            collected.update(values.get(code.co_varnames[position], {}))
        frame = frame.f_back
    collected.pop("__class__", None)
    return collected


def _name_of(value: Any, frame: FrameType | None) -> str | None:
    """The argument of `__init__` that is this object; `None` if it is another object."""
    if frame is None or frame.f_code.co_name != "__init__":
        return None
    code = frame.f_code
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return next((name for name in names if frame.f_locals.get(name) is value), None)


def _as_mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Namespace):
        return dict(vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        try:
            return dict(value)
        except Exception:
            if not is_omegaconf(value):
                raise
            return dict(plain_container(value))  # Some values are missing or have unresolved interpolations.
    raise _not_arguments(value)


def _copy_containers(value: Any, depth: int = 0) -> Any:
    """A value with copied containers, so that later changes do not affect it; other objects are shared."""
    if depth > _MAX_COPY_DEPTH:
        return value
    if isinstance(value, dict):
        entries = copy.copy(value)  # The copy has the same class.
        for key, item in value.items():
            entries[key] = _copy_containers(item, depth + 1)
        return entries
    if type(value) in (list, tuple):
        return type(value)(_copy_containers(item, depth + 1) for item in value)
    if isinstance(value, set) or is_omegaconf(value):
        return copy.deepcopy(value)
    if isinstance(value, Namespace) or (is_dataclass(value) and not isinstance(value, nn.Module | type)):
        duplicate: Any = copy.copy(value)
        if hasattr(duplicate, "__dict__"):
            vars(duplicate).update({name: _copy_containers(item, depth + 1) for name, item in vars(value).items()})
        return duplicate
    return value


def _not_arguments(value: Any) -> ConfigurationError:
    return ConfigurationError(
        f"save_hyperparameters accepts names of arguments, or one dict, Namespace or dataclass, not {value!r}. "
        "For example: self.save_hyperparameters('lr', 'width')"
    )


def _argument(name: Any, collected: dict[str, Any]) -> Any:
    if not isinstance(name, str):
        raise _not_arguments(name)
    if name not in collected:
        raise UnknownNameError(
            f"save_hyperparameters({name!r}): __init__ has no such argument; it has {sorted(collected)}."
            f"{nearest(str(name), collected)}"
        )
    return collected[name]


_OMITTED = object()


def omegaconf_names(owner: Any) -> list[Any]:
    """The names of the hyper-parameters that are OmegaConf containers, which checkpoints store as dicts and lists.

    If one container holds all hyper-parameters: the name of the argument that it was.
    """
    if is_omegaconf(owner.hparams):
        return [owner._hparams_name]
    return [name for name, value in owner.hparams.items() if is_omegaconf(value)]


class StorableHyperParameters:
    """The hyper-parameters of `owner` that a checkpoint can store. A warning names the others, once for each owner.

    Args:
        owner: A module or a data module.
        code: Include classes and functions, which loggers record by name.

    Attributes:
        values: The hyper-parameters that can be stored, by name.
        attributes: Where a value with attributes is stored as a dict or a tuple: the keys that lead to it, and the names of
            the items of a tuple, else `None`. Values inside others come first.
        omitted: The names of those that cannot be stored, or not with all that is in them.
    """

    def __init__(self, owner: Any, code: bool = False) -> None:
        self._code = code
        self.attributes: list[Any] = []
        # The keys that lead to the present value.
        self._keys: list[Any] = []
        # The path to each value that cannot be stored, and the key of the hyper-parameter that it is in.
        self._omitted: dict[str, Any] = {}
        self.values: dict[Any, Any] = {}
        for key, value in plain_container(owner.hparams).items():
            storable = self._at(key, value, str(key), 0)
            if storable is not _OMITTED:
                self.values[key] = storable
        self.omitted = [name for name in dict.fromkeys(self._omitted.values()) if isinstance(name, str)]
        if self._omitted and not getattr(owner, "_omitted_warned", False):
            object.__setattr__(owner, "_omitted_warned", True)
            self._warn(owner)

    def _warn(self, owner: Any) -> None:
        name = type(owner).__name__
        keys = [key for key in self.omitted if key.isidentifier()]
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
        storable = self._storable(value, path, depth)
        if storable is not _OMITTED and _has_attributes(value):
            self.attributes.append([list(self._keys), list(getattr(value, "_fields", ())) or None])
        self._keys.pop()
        return storable

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
            self._omit(path)
            return value if self._code and _has_name(value) else _OMITTED
        return value if unsavable(value, path) is None else self._omit(path)

    def _storable_items(self, items: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        storable = {key: self._at(key, item, f"{path}.{key}", depth + 1) for key, item in items.items()}
        return {key: item for key, item in storable.items() if item is not _OMITTED}

    def _storable_list(self, value: Any, path: str, depth: int) -> Any:
        """A list or tuple is stored completely or not at all: without some items, the positions of the others would change."""
        items = [self._at(index, item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        if inside := [omitted for omitted in self._omitted if omitted.startswith(f"{path}[")]:
            for omitted in inside:
                del self._omitted[omitted]
            self._omit(path)
        return _OMITTED if any(item is _OMITTED for item in items) else (list if type(value) is list else tuple)(items)

    def _omit(self, path: str) -> Any:
        self._omitted[path] = self._keys[0]
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
