"""Build a module or data module from a checkpoint: their `load_from_checkpoint`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from trainkit.checkpoint.folder import pointed_to
from trainkit.checkpoint.reader import Checkpoint, open_checkpoint
from trainkit.checkpoint.staging import staging
from trainkit.console import notice
from trainkit.errors import CheckpointError, CorruptCheckpointError, UnknownNameError, nearest
from trainkit.module.data_module import DataModule
from trainkit.module.hparams import HyperParameters
from trainkit.module.restored_values import annotations_of, with_attributes, with_members
from trainkit.module.trusted import Trust
from trainkit.names import advice, refuse_unknown
from trainkit.paths import local_path
from trainkit.precision import Precision
from trainkit.registry import load
from trainkit.state.parts import Parts, model_stems, restore, shown

__all__ = ["build_data_module", "build_from_checkpoint"]

B = TypeVar("B")
D = TypeVar("D", bound=DataModule)
T = TypeVar("T", bound=torch.nn.Module)

# Needs jsonargparse, and is needed only for checkpoints of TrainkitCLI.
_FROM_CONFIG = "trainkit.cli.for_scripts.saved_arguments:module_from_config"


def build_from_checkpoint(
    cls: type[T],
    path: str | os.PathLike[str],
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
    checkpoint = _opened(path)
    loaded = checkpoint.read(model_stems(checkpoint.manifest.files) | {"state"})
    state = loaded.state
    if "hyper_parameters" not in state:
        raise CheckpointError(
            f"{path} was saved by a training loop of your own, not by a Trainer. Build the module yourself and load the "
            "weights: Accelerator().load_state(path)"
        )
    module = _built(cls, state, "hyper_parameters", trust, overrides, str(path))
    if (configure := getattr(module, "configure_model", None)) is not None:
        configure()
        module.__dict__["_built"] = True  # a Trainer must not build it again
    seen = shown(loaded.manifest.epoch, loaded.manifest.step, dict(loaded.tensors["model"]), state)
    if (hook := getattr(module, "on_load_checkpoint", None)) is not None:
        hook(seen)
    restore(
        Parts([module], [], [], Precision()),
        {"model": seen["state_dict"]},
        state,
        loaded.manifest.aliases,
        wanted={"model"},
        what=str(Path(path)),
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
    state = _opened(path).read({"state"}).state
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
    module = _built(cls, state, "datamodule_hyper_parameters", trust, overrides, str(path))
    module.load_state_dict(state["datamodule"])
    return module


def _opened(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at a path, which may be that of `save_last`, or end with Lightning's `.ckpt`."""
    folder = local_path(path, "checkpoint_path")
    staging.fetch(folder)
    return open_checkpoint(pointed_to(folder))


def _device_of(map_location: Any) -> Any:
    """The device that a `map_location` of `torch.load` moves a tensor to that is on the CPU, as all in a checkpoint are.

    `None`: it is not moved.
    """
    if isinstance(map_location, Mapping):
        return map_location.get("cpu")
    if callable(map_location):
        return getattr(map_location(torch.UntypedStorage(0), "cpu"), "device", None)
    return map_location


def _built(cls: type[B], state: Mapping[str, Any], key: str, trust: Trust, overrides: Mapping[str, Any], path: str) -> B:
    """A module or data module with the arguments in `state[key]`; creates the objects if they are of a configuration."""
    class_path = state.get(f"{key}_class")
    if class_path is None:
        return cls(**_arguments(cls, state, key, overrides, path))
    kind = _saved_class(cls, class_path, trust, path)
    arguments = _arguments(kind, state, key, overrides, path)
    saved = {name: value for name, value in arguments.items() if name not in overrides}
    given = {name: value for name, value in arguments.items() if name in overrides}
    return cast(B, load(_FROM_CONFIG)(kind, class_path, saved, given, trust, path))


def _saved_class(cls: type[B], class_path: Any, trust: Trust, path: str) -> type[B]:
    """The class that was saved: `cls`, or a subclass that is trusted."""
    if not isinstance(class_path, str):
        raise CorruptCheckpointError(f"{path}: state.json names no class, but {class_path!r:.100}")
    name = class_path.rpartition(".")[2]
    if name in (one.__name__ for one in cls.__mro__):  # of a script that ran as __main__, or cls is a subclass of it
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
    overrides = _accepted(overrides, cls, {**accepted, **saved}, takes_all)
    if config_name in accepted:  # save_hyperparameters(config): one argument contains all hyper-parameters
        config = {**saved, **{name: value for name, value in overrides.items() if name not in accepted}}
        given = {name: value for name, value in overrides.items() if takes_all or name in accepted}
        return {config_name: _container(config) if config_name in containers else HyperParameters(config), **given}
    arguments = _usable({**saved, **overrides}, cls, accepted, takes_all)
    _check_complete(arguments, accepted, cls, path)
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
        found: dict[Any, Any] = with_members(saved, hints.get(whole), defaults[whole])
        return found
    return {name: with_members(value, hints.get(name), defaults.get(name)) for name, value in saved.items()}


def _literal(value: Any) -> Any:
    """Dicts and lists for OmegaConf, in which `${resolver:...}` is text: a resolver is a function of the program's."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, str) and ":" in value:
        return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", value)
    return value


def _container(value: Any) -> Any:
    """Dicts and lists as the OmegaConf container that was saved, or as they are if omegaconf is not installed."""
    if not isinstance(value, dict | list):  # text would be read as YAML
        return value
    try:
        return load("omegaconf:OmegaConf").create(value, flags={"allow_objects": True})
    except ModuleNotFoundError:
        return HyperParameters(value) if isinstance(value, dict) else value


def _accepted(overrides: Mapping[str, Any], cls: type, known: Mapping[Any, Any], takes_all: bool) -> dict[str, Any]:
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


def _check_complete(arguments: Container[str], accepted: Mapping[str, inspect.Parameter], cls: type, path: str) -> None:
    missing = [name for name, parameter in accepted.items() if parameter.default is parameter.empty and name not in arguments]
    if missing:
        raise CheckpointError(
            f"{path} does not contain the arguments {', '.join(missing)} of {cls.__name__}. Pass them: "
            f"{cls.__name__}.load_from_checkpoint(path, {', '.join(f'{name}=...' for name in missing)}); or call "
            "self.save_hyperparameters() in __init__ so that they are saved."
        )
