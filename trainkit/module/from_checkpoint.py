"""`load_from_checkpoint`: build a module or data module with the hyper-parameters of a checkpoint.

A checkpoint has plain values. Members of enumerations, values with attributes and OmegaConf's containers are created again,
as `__init__` of the class expects them. Classes and functions that it names are found in the packages of `trust=` only.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace, UnionType
from typing import IO, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import torch

from trainkit.checkpoint.pointers import resolve_pointer
from trainkit.checkpoint.reader import Checkpoint, open_checkpoint
from trainkit.checkpoint.urls import remote_sync
from trainkit.console import notice, warn
from trainkit.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, UnknownNameError, nearest
from trainkit.module.data_module import DataModule
from trainkit.module.hparams import HyperParameters
from trainkit.names import advice, refuse_unknown
from trainkit.paths import local_path
from trainkit.precision import Precision
from trainkit.registry import load
from trainkit.state.foreign_state import converted, is_foreign_file
from trainkit.state.training_objects import TrainingObjects, add_omitted, checkpoint_for_hooks, model_stems, restore

__all__ = [
    "NamedValues",
    "Trust",
    "annotations_of",
    "build_data_module",
    "build_from_checkpoint",
    "with_attributes",
    "with_members",
]


B = TypeVar("B")
D = TypeVar("D", bound=DataModule)
T = TypeVar("T", bound=torch.nn.Module)

# Needs jsonargparse, and is needed only for checkpoints of TrainkitCLI.
_FROM_CONFIG = "trainkit.cli.for_scripts.saved_arguments:module_from_config"


def build_from_checkpoint(
    cls: type[T],
    path: str | os.PathLike[str] | IO[bytes],
    map_location: Any,
    strict: bool | None,
    trust: Trust,
    overrides: Mapping[str, Any],
) -> T:
    """A module created with the hyper-parameters of a checkpoint, with its weights loaded.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or an argument of `__init__` is neither saved nor given.
        StateMismatchError: The weights do not fit the module that `__init__` built.
        UnknownNameError: `__init__` does not accept an override.
    """
    with _opened(path) as checkpoint:
        loaded = checkpoint.read(model_stems(checkpoint.manifest) | {"state"})
    state, what = loaded.state, str(path) if isinstance(path, str | os.PathLike) else "the open file"
    if "hyper_parameters" not in state:
        raise CheckpointError(
            f"{what} was saved by a training loop of your own, not by a Trainer. Build the module yourself and load the "
            "weights: Accelerator().load_state(path)"
        )
    module = _build(cls, state, "hyper_parameters", trust, overrides, what)
    if (configure := getattr(module, "configure_model", None)) is not None:
        configure()
        module.__dict__["_built"] = True  # a Trainer must not build it again
    checkpoint_dict = checkpoint_for_hooks(loaded.manifest.epoch, loaded.manifest.step, dict(loaded.tensors["model"]), state)
    if (hook := getattr(module, "on_load_checkpoint", None)) is not None:
        add_omitted(checkpoint_dict, state, getattr(module, "on_save_checkpoint", lambda checkpoint: None))
        hook(checkpoint_dict)
    restore(
        TrainingObjects([module], [], [], Precision()),
        {"model": checkpoint_dict["state_dict"]},
        state,
        loaded.manifest.aliases,
        components={"model"},
        what=what,
        strict=getattr(module, "strict_loading", True) if strict is None else strict,
    )
    device = _device_of(map_location)
    return module if device is None else module.to(device)


def build_data_module(cls: type[D], path: str | os.PathLike[str], trust: Trust, overrides: Mapping[str, Any]) -> D:
    """A data module created with the hyper-parameters of a checkpoint, with its state restored.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, holds no data module, or an argument of `__init__` is neither
            saved nor given.
        UnknownNameError: `__init__` does not accept an override.
    """
    with _opened(path) as checkpoint:
        state = checkpoint.read({"state"}).state
    if "datamodule_hyper_parameters" not in state:
        raise CheckpointError(
            f"{path} contains no DataModule: the run was not given one, or only its weights were saved. Create it yourself: "
            f"{cls.__name__}(...)"
        )
    if cls is DataModule and "datamodule_hyper_parameters_class" not in state:
        raise CheckpointError(
            f"DataModule.load_from_checkpoint({str(path)!r}): DataModule has no loaders, and only a checkpoint of TrainkitCLI "
            "names the class. Expected the class of the data module. Fix: MyData.load_from_checkpoint(path)"
        )
    module = _build(cls, state, "datamodule_hyper_parameters", trust, overrides, str(path))
    module.load_state_dict(state["datamodule"])
    return module


@contextmanager
def _opened(path: str | os.PathLike[str] | IO[bytes]) -> Iterator[Checkpoint]:
    """The checkpoint at a path, which may be that of `save_last`, or be a file, also an open one: a `.ckpt`, a state dict."""
    if not isinstance(path, str | os.PathLike):
        with TemporaryDirectory(prefix="trainkit-load-") as scratch:
            file = Path(scratch, "file.ckpt")
            with open(file, "wb") as copy:
                shutil.copyfileobj(path, copy)
            with _opened(file) as checkpoint:
                yield checkpoint
        return
    local = local_path(path, "checkpoint_path")
    remote_sync.fetch(local)
    local = resolve_pointer(local)
    if not is_foreign_file(local):
        yield open_checkpoint(local)
        return
    with (
        TemporaryDirectory(prefix="trainkit-load-") as scratch,
        converted(Path(os.path.abspath(local)), Path(scratch)) as folder,
    ):
        yield open_checkpoint(folder)


def _device_of(map_location: Any) -> Any:
    """The device that a `map_location` of `torch.load` moves a tensor to that is on the CPU, as all in a checkpoint are.

    `None`: it is not moved.
    """
    if isinstance(map_location, Mapping):
        return map_location.get("cpu")
    if callable(map_location):
        return getattr(map_location(torch.UntypedStorage(0), "cpu"), "device", None)
    return map_location


def _build(cls: type[B], state: Mapping[str, Any], key: str, trust: Trust, overrides: Mapping[str, Any], path: str) -> B:
    """A module or data module with the arguments in `state[key]`; creates the objects if they are of a configuration."""
    class_path = state.get(f"{key}_class")
    if class_path is None:
        return cls(**_arguments(cls, state, key, overrides, path))
    kind = _find_saved_class(cls, class_path, trust, path)
    arguments = _arguments(kind, state, key, overrides, path)
    saved = {name: value for name, value in arguments.items() if name not in overrides}
    passed = {name: value for name, value in arguments.items() if name in overrides}
    return cast(B, load(_FROM_CONFIG)(kind, class_path, saved, passed, trust, path))


def _find_saved_class(cls: type[B], class_path: Any, trust: Trust, path: str) -> type[B]:
    """The class that was saved: `cls`, or a subclass that is trusted."""
    if not isinstance(class_path, str):
        raise CorruptCheckpointError(f"{path}: state.json names no class, but {class_path!r:.100}")
    name = class_path.rpartition(".")[2]
    if name in (one.__name__ for one in cls.__mro__):  # The script ran as __main__, or cls is a subclass.
        return cls
    saved = trust.find(class_path)
    if isinstance(saved, type) and issubclass(saved, cls):
        return saved
    shown = name if name.isidentifier() else "MyModule"
    raise CheckpointError(
        f"{path} is of the class {class_path!r:.200}, not {cls.__name__}, and loading a checkpoint imports nothing. Expected a "
        f"call of load_from_checkpoint of that class. Fix: import it, and call {shown:.100}.load_from_checkpoint(path). If you "
        f"trust the checkpoint, name the package of the class: {cls.__name__}.load_from_checkpoint(path, trust=['mypackage.'])"
    )


def _arguments(cls: type, state: Mapping[str, Any], key: str, overrides: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The arguments for `__init__`: the hyper-parameters in `state[key]` that it accepts, and the overrides."""
    config_name: str | None = state.get(f"{key}_name")
    containers = state.get(f"{key}_omegaconf", ())  # an older checkpoint has none
    parameters = inspect.signature(cls).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    saved = _with_containers(state[key], config_name, containers)
    if f"{key}_class" not in state:  # a configuration has no values of other types
        whole = config_name if config_name in accepted else None
        saved = with_attributes(_with_members(saved, cls, accepted, whole), state.get(f"{key}_attributes", ()))
    overrides = _check_overrides(overrides, cls, {**accepted, **saved}, takes_all)
    omitted = _omitted(state, key, overrides)
    if config_name in accepted:  # save_hyperparameters(config): one argument contains all hyper-parameters
        config = {**saved, **{name: value for name, value in overrides.items() if name not in accepted}}
        others = {name: value for name, value in overrides.items() if takes_all or name in accepted}
        _warn_of_omitted(omitted, cls, path, omitted)
        return {config_name: _container(config) if config_name in containers else HyperParameters(config), **others}
    arguments = _usable({**saved, **overrides}, cls, accepted, takes_all)
    _check_complete(arguments, accepted, cls, path)
    _warn_of_omitted(omitted, cls, path, omitted if takes_all else accepted)
    return arguments


def _with_containers(saved: dict[Any, Any], whole: str | None, names: Container[Any]) -> dict[Any, Any]:
    """Hyper-parameters with containers of OmegaConf; `whole`: the argument that contains all of them."""
    if whole in names:
        return {name: _literal(value) for name, value in saved.items()}
    return {name: _container(_literal(value)) if name in names else value for name, value in saved.items()}


def _with_members(
    saved: dict[Any, Any], cls: type, accepted: Mapping[str, inspect.Parameter], whole: str | None
) -> dict[Any, Any]:
    """Hyper-parameters with members of enumerations; `whole`: the argument that contains all of them."""
    hints = annotations_of(cls)
    defaults = {name: parameter.default for name, parameter in accepted.items()}
    if whole is not None:
        members: dict[Any, Any] = with_members(saved, hints.get(whole), defaults[whole])
        return members
    return {name: with_members(value, hints.get(name), defaults.get(name)) for name, value in saved.items()}


def _literal(value: Any) -> Any:
    """Dicts and lists for OmegaConf, in which `${resolver:...}` is text: a resolver is a function of the program's."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, str) and ":" in value:
        return re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", value)
    return value


def _container(value: Any) -> Any:
    """Dicts and lists as the OmegaConf container that was saved, or as they are if omegaconf is not installed."""
    if not isinstance(value, dict | list):  # text would be read as YAML
        return value
    try:
        return load("omegaconf:OmegaConf").create(value, flags={"allow_objects": True})
    except ModuleNotFoundError:
        return HyperParameters(value) if isinstance(value, dict) else value


def _check_overrides(overrides: Mapping[str, Any], cls: type, known: Mapping[Any, Any], takes_all: bool) -> dict[str, Any]:
    """The overrides without Lightning's arguments of `load_from_checkpoint`, which are refused unless they are the default."""
    unknown = {name: value for name, value in overrides.items() if name not in known}
    foreign = {name: value for name, value in unknown.items() if advice("load_from_checkpoint", name) is not None}
    for name in () if takes_all else [name for name in unknown if name not in foreign]:
        near = nearest(name, [one for one in known if isinstance(one, str)])
        raise UnknownNameError(f"load_from_checkpoint: {cls.__name__} has no argument {name!r}.{near}")
    refuse_unknown("load_from_checkpoint", foreign, ())
    return {name: value for name, value in overrides.items() if name not in foreign}


def _usable(arguments: Mapping[Any, Any], cls: type, accepted: Container[Any], takes_all: bool) -> dict[str, Any]:
    """The arguments that `__init__` accepts; a notice names the others. No argument has a name that is not a string."""
    unused = [] if takes_all else [name for name in arguments if name not in accepted]
    if unused:
        notice(f"ignoring hyper-parameters that {cls.__name__} does not accept: {', '.join(map(str, unused))}.")
    return {name: value for name, value in arguments.items() if isinstance(name, str) and name not in unused}


def _omitted(state: Mapping[str, Any], key: str, overrides: Container[str]) -> list[str]:
    """The hyper-parameters that could not be stored, or that `omit_from_checkpoint` named, and that are not passed."""
    named = [name.removeprefix(f"{key}.") for name in state.get("omitted", ()) if name.startswith(f"{key}.")]
    return [name for name in [*state.get(f"{key}_omitted", ()), *named] if name not in overrides]


def _warn_of_omitted(omitted: Iterable[str], cls: type, path: str, accepted: Container[str]) -> None:
    if names := [name for name in omitted if name in accepted]:
        warn(
            f"{path} lacks hyper-parameters of {cls.__name__}, completely or in part, because modules, functions, classes and "
            f"other objects cannot be stored: {', '.join(names)}. __init__ uses its defaults for them. Pass what the run had: "
            f"{cls.__name__}.load_from_checkpoint(path, {', '.join(f'{name}=...' for name in names)})"
        )


def _check_complete(arguments: Container[str], accepted: Mapping[str, inspect.Parameter], cls: type, path: str) -> None:
    missing = [name for name, parameter in accepted.items() if parameter.default is parameter.empty and name not in arguments]
    if missing:
        raise CheckpointError(
            f"{path} does not contain the arguments {', '.join(missing)} of {cls.__name__}. Pass them: "
            f"{cls.__name__}.load_from_checkpoint(path, {', '.join(f'{name}=...' for name in missing)}); or call "
            "self.save_hyperparameters() in __init__ so that they are saved."
        )


_annotations: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


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
    annotations: dict[str, Any] = {}
    for one in reversed(kind.__mro__):
        if (init := vars(one).get("__init__")) is not None and hasattr(init, "__annotations__"):
            if init not in _annotations:
                _annotations[init] = _evaluate(init.__annotations__, getattr(init, "__globals__", {}))
            annotations.update(_annotations[init])
    return annotations


def _evaluate(annotations: Mapping[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    evaluated = {}
    for name, annotation in annotations.items():
        try:
            evaluated.update(get_type_hints(SimpleNamespace(__annotations__={name: annotation}), names))
        except Exception:  # a name that only type checkers know
            continue
    return evaluated


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
            except (TypeError, ValueError):  # The value may be meant for another alternative.
                continue
    if type(value) is dict:
        return _members_in(value, kinds, default)
    if type(value) in (list, tuple, set, frozenset):
        of_items = default[0] if isinstance(default, list | tuple) and default else None
        return type(value)(with_members(item, _item_annotation(kinds, index), of_items) for index, item in enumerate(value))
    return value


def _members_in(value: dict[Any, Any], kinds: Iterable[Any], default: Any) -> dict[Any, Any]:
    restored = dict(value)
    for kind in [*kinds, type(default)]:
        if isclass(kind) and is_dataclass(kind):
            hints = annotations_of(kind)
            for one in fields(kind):
                if one.name in restored:
                    field_default = getattr(default, one.name, one.default)
                    restored[one.name] = with_members(restored[one.name], hints.get(one.name), field_default)
        elif (get_origin(kind) or kind) in (dict, Mapping) and len(get_args(kind)) == 2:
            for_keys, for_values = get_args(kind)
            restored = {with_members(key, for_keys): with_members(item, for_values) for key, item in restored.items()}
    return restored


def _item_annotation(kinds: Iterable[Any], index: int) -> Any:
    """The annotation of an item of a list, a set, a tuple or a named tuple."""
    for kind in kinds:
        annotations = get_args(kind)
        if isclass(kind) and hasattr(kind, "_fields"):
            hints = _evaluate(kind.__annotations__, vars(sys.modules[kind.__module__]))
            annotations = tuple(hints.get(name) for name in kind._fields)
        if annotations and isclass(get_origin(kind) or kind):
            return annotations[index] if index < len(annotations) and Ellipsis not in annotations else annotations[0]
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
    restored = dict(values)
    for keys, names in paths:
        restored = _replace_at(restored, list(keys), names)
    return restored


def _replace_at(value: Any, keys: list[Any], names: Any) -> Any:
    if not keys:
        if isinstance(value, dict):
            return HyperParameters(value)
        if not isinstance(value, tuple) or not isinstance(names, list | tuple) or len(names) != len(value):
            return value
        named = NamedValues(*value)
        named._fields = tuple(names)
        return named
    if isinstance(value, dict) and keys[0] in value:
        value = type(value)({**value, keys[0]: _replace_at(value[keys[0]], keys[1:], names)})
    elif type(value) in (list, tuple) and isinstance(keys[0], int) and 0 <= keys[0] < len(value):
        items = list(value)
        items[keys[0]] = _replace_at(items[keys[0]], keys[1:], names)
        value = type(value)(items)
    return value


class Trust:
    """Finds the classes and functions that a checkpoint names, in the packages that the user has named.

    Without packages it finds nothing, and imports nothing.

    Args:
        prefixes: What a path must begin with, each with a dot at its end: `"mypackage."`.
        where: The argument that they are of, for messages.

    Raises:
        ConfigurationError: It is no list of such prefixes.
    """

    def __init__(self, prefixes: Iterable[str] = (), where: str = "load_from_checkpoint(trust=...)") -> None:
        prefixes = prefixes if isinstance(prefixes, str) else list(prefixes)
        if isinstance(prefixes, str) or not all(map(_is_prefix, prefixes)):
            raise ConfigurationError(
                f"{where}: expected prefixes of import paths, each with a dot at its end, got {prefixes!r}. "
                "Fix: trust=['mypackage.']; on the command line: --trust mypackage."
            )
        self._prefixes = tuple(prefixes)

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def find(self, path: object) -> Any:
        """The class or function with an import path, or `None` if the path or what it leads to is not trusted.

        The path and the module that defines the object begin with the same prefix, and the object has its name there. So
        `mypackage.utils.os.system` is not found: `os` is an attribute of `mypackage.utils` and no module of the package.

        Raises:
            CheckpointError: A module of a trusted package cannot be imported.
        """
        prefixes = [prefix for prefix in self._prefixes if isinstance(path, str) and path.startswith(prefix)]
        if not isinstance(path, str) or not prefixes:
            return None
        names = path.split(".")
        if not all(map(str.isidentifier, names)):
            return None
        try:
            module, rest = _module(names)
        except ImportError as error:
            raise CheckpointError(
                f"the checkpoint names {path:.200}, which trust= covers, and its module cannot be imported: {error}. Expected "
                "an installed package. Fix: install it, or pass the argument to load_from_checkpoint"
            ) from error
        target = _attribute(module, rest)
        home = getattr(target, "__module__", None)
        if not (inspect.isclass(target) or inspect.isroutine(target)) or not isinstance(home, str):
            return None
        defined = _attribute(sys.modules.get(home), target.__qualname__.split("."))
        return target if defined is target and any(f"{home}.".startswith(prefix) for prefix in prefixes) else None


def _is_prefix(value: object) -> bool:
    return isinstance(value, str) and value[-1:] == "." and all(map(str.isidentifier, value[:-1].split(".")))


def _module(names: list[str]) -> tuple[ModuleType, list[str]]:
    """The module that a path begins with, and the names of the attributes that follow: at least the last name."""
    module, count = import_module(names[0]), 1
    while count < len(names) - 1 and hasattr(module, "__path__") and not inspect.isclass(vars(module).get(names[count])):
        name = ".".join(names[: count + 1])
        if find_spec(name) is None:
            break
        module, count = import_module(name), count + 1
    return module, names[count:]


def _attribute(owner: Any, names: list[str]) -> Any:
    """An attribute of a module, or of a class in it, of a class in that, and so on; `None` if it does not exist."""
    for name in names:
        if not isinstance(owner, ModuleType | type) or (owner := getattr(owner, name, None)) is None:
            return None
        if isinstance(owner, ModuleType):
            return None
    return owner
