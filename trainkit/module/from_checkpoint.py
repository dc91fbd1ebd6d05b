"""Building a module out of a checkpoint: ``TrainModule.load_from_checkpoint``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainkit.checkpoint.reader import open_checkpoint
from trainkit.console import notice
from trainkit.errors import CheckpointError, UnknownNameError, nearest
from trainkit.module.hparams import HyperParameters
from trainkit.precision import Precision
from trainkit.state.parts import Parts, model_stems, restore, shown

__all__ = ["build_from_checkpoint"]

T = TypeVar("T", bound=torch.nn.Module)


def build_from_checkpoint(
    cls: type[T],
    path: str | os.PathLike[str],
    device: torch.device | str | None,
    strict: bool,
    overrides: Mapping[str, Any],
) -> T:
    """A module of a class, made with the hyper-parameters of a checkpoint, with its weights.

    Raises:
        CheckpointError: missing, damaged, or an argument of ``__init__`` is neither in it nor given.
        StateMismatchError: the weights do not fit the module that ``__init__`` made.
        UnknownNameError: an override that ``__init__`` does not take.
    """
    checkpoint = open_checkpoint(path)
    loaded = checkpoint.read(model_stems(checkpoint.manifest.files) | {"state"})
    state = loaded.state
    if "hyper_parameters" not in state:
        raise CheckpointError(
            f"{path} was written by an own loop, not by a Trainer. Make the module yourself and load the weights: "
            "Accelerator().load_state(path)"
        )
    module = cls(**_arguments(cls, state, overrides, str(path)))
    configure: Any = getattr(module, "configure_model", None)
    if configure is not None:
        configure()
        module.__dict__["_built"] = True  # the Trainer that runs it must not build it again
    seen = shown(loaded.manifest.epoch, loaded.manifest.step, dict(loaded.tensors["model"]), state)
    hook: Any = getattr(module, "on_load_checkpoint", None)
    if hook is not None:
        hook(seen)
    restore(
        Parts([module], [], [], Precision()),
        {"model": seen["state_dict"]},
        state,
        loaded.manifest.aliases,
        wanted={"model"},
        what=str(Path(path)),
        strict=strict,
    )
    return module if device is None else module.to(device)


def _arguments(cls: type, state: Mapping[str, Any], overrides: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What ``__init__`` is called with: the saved hyper-parameters that it takes, and the overrides."""
    parameters = list(inspect.signature(cls).parameters.values())
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    saved, whole = dict(state["hyper_parameters"]), state.get("hyper_parameters_name")
    for name in overrides:
        if not takes_all and name not in names and name not in saved:
            raise UnknownNameError(f"load_from_checkpoint: {cls.__name__} has no argument {name!r}.{nearest(name, names)}")
    if whole is not None and whole in names:  # save_hyperparameters(config): one argument that holds them
        inside = {name: value for name, value in overrides.items() if name not in names}
        given = {name: value for name, value in overrides.items() if name in names}
        return {whole: HyperParameters({**saved, **inside}), **given}
    arguments = {**saved, **overrides}
    unused = [name for name in arguments if name not in names]
    if unused and not takes_all:
        notice(f"hyper-parameters that {cls.__name__} does not take are left out: {', '.join(map(str, unused))}.")
        arguments = {name: value for name, value in arguments.items() if name in names}
    arguments = {name: value for name, value in arguments.items() if isinstance(name, str)}  # no other can be an argument
    needed = [p.name for p in parameters if p.default is p.empty and p.name in names and p.name not in arguments]
    if needed:
        raise CheckpointError(
            f"{path} does not hold the arguments {', '.join(needed)} of {cls.__name__}. Give them: "
            f"{cls.__name__}.load_from_checkpoint(path, {', '.join(f'{name}=...' for name in needed)}); or call "
            "self.save_hyperparameters() in __init__ so that they are saved."
        )
    return arguments
