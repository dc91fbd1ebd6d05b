"""What a `Trainer` is to be by the configuration, where its own arguments leave it open."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from trainkit.config.compiling import known_backend, refuse_compiled
from trainkit.config.inherited import Settings, inherited_settings
from trainkit.launch.resolve import read_wanted
from trainkit.launch.tpu import DEVICE
from trainkit.module.train_module import TrainModule
from trainkit.precision import MIXED, OVER_MASTERS, is_short
from trainkit.registry import load_callback, load_strategy

if TYPE_CHECKING:
    from trainkit.config.settings import Plugin

__all__ = ["attribute_errors", "compiled", "with_settings"]

_CLAIMS = ("gradient_accumulation_steps", "gradient_clipping")


def with_settings(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The arguments of a `Trainer`, completed by the settings that this process was started with.

    Args:
        given: the arguments; what is `None` or `"auto"` is open.

    Returns:
        The arguments, and what was taken from where, to be said when the processes have met; empty if nothing was.

    Raises:
        ConfigurationError: the settings ask for what cannot be had here.
    """
    settings = inherited_settings()
    plugin, mixed = settings.plugin(), settings.get("mixed_precision")
    taken = _place(settings, given) | _update(settings, plugin, given)
    by_plugin = plugin is not None and given["strategy"] == "auto" and not _elsewhere(settings, given)
    made: dict[str, Any] = {}
    if plugin is not None and by_plugin:
        short = is_short(given["precision"] or OVER_MASTERS[mixed or "no"])
        with settings.attribute_errors(*settings.of_place):
            made["strategy"] = _made(plugin, {**given, **taken}, short)
        taken |= plugin.described()
    if given["precision"] is None and mixed is not None:
        taken |= _precision(given["strategy"], (OVER_MASTERS if by_plugin else MIXED)[mixed])
    said = [f"{name}={value!r}" for name, value in taken.items()] + _compilation(settings, made)
    complete = given | {name: taken[name] for name in taken.keys() & given.keys()} | made
    if complete["accumulate_grad_batches"] is None:
        complete["accumulate_grad_batches"] = 1
    return complete, f"settings of {settings.source}: {', '.join(said)}." if said else ""


def _precision(strategy: Any, precision: str) -> dict[str, Any]:
    """The precision of the settings as an argument; a strategy object without one of its own gets it at once."""
    if isinstance(strategy, str):
        return {"precision": precision}
    if hasattr(strategy, "use_precision"):
        strategy.use_precision(precision, given=False)
    return {}


def _compilation(settings: Settings, made: dict[str, Any]) -> list[str]:
    """What the settings say of `torch.compile`, in words.

    Raises:
        ConfigurationError: the backend is unknown, or does not work with the strategy that the settings make.
    """
    backend = settings.get("dynamo_backend")
    if backend is None:
        return []
    with settings.attribute_errors("dynamo_backend", *settings.of_place):
        known_backend(backend)
        if "strategy" in made:
            refuse_compiled(backend, made["strategy"])
    return [f"steps compiled by {backend!r}"]


def attribute_errors(given: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within it an error names the settings, where they say what a `Trainer` was not told.

    Args:
        given: its arguments.
    """
    settings = inherited_settings()
    names = settings.of_place if (given["strategy"], given["accelerator"]) == ("auto", "auto") else ()
    return settings.attribute_errors(*names, *(() if given["precision"] is not None else ("mixed_precision",)))


def _place(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """What the settings say of where to run, apart from what `Settings.plugin` says."""
    taken: dict[str, Any] = {}
    accelerator, name = given["accelerator"], settings.strategy
    if accelerator == "auto" and settings.get("use_cpu"):
        taken["accelerator"] = "cpu"
    elif accelerator == "auto" and settings.get("distributed_type") == "MULTI_GPU":
        taken["accelerator"] = "gpu"
    if name is not None and given["strategy"] == "auto" and not _elsewhere(settings, given):
        taken["strategy"] = name
        if settings.devices is not None and given["devices"] == "auto":
            taken["devices"] = settings.devices
    return taken


def _elsewhere(settings: Settings, given: dict[str, Any]) -> bool:
    """Whether the arguments ask for devices that the strategy of the settings does not run on."""
    accelerator, info = given["accelerator"], settings.info
    if info is None:
        return False
    if accelerator == "tpu":
        return DEVICE not in info.devices
    if accelerator not in ("auto", "cpu") and DEVICE in info.devices:
        return True
    return info.one_device and (given["devices"] not in ("auto", 1, "1") or given["num_nodes"] not in (None, 1))


def _update(settings: Settings, plugin: Plugin | None, given: dict[str, Any]) -> dict[str, Any]:
    """What they say of an optimizer step, by themselves or in the options of the strategy."""
    told = {} if plugin is None else {name: plugin.claimed(name) for name in _CLAIMS}
    claimed = {name: value for name, value in told.items() if value is not None}
    steps, clip = settings.get(_CLAIMS[0], claimed.get(_CLAIMS[0])), claimed.get(_CLAIMS[1])
    taken: dict[str, Any] = {}
    if steps is not None and given["accumulate_grad_batches"] is None and given["global_batch_size"] is None:
        taken["accumulate_grad_batches"] = steps
    if clip and given["gradient_clip_val"] is None and not _clips(given["callbacks"]):
        taken["gradient_clip_val"] = clip
    return taken


def _clips(callbacks: Any) -> bool:
    kind = load_callback("gradient_clipping")
    return any(isinstance(callback, kind) for callback in (callbacks if isinstance(callbacks, list | tuple) else [callbacks]))


def _made(plugin: Plugin, arguments: dict[str, Any], short: bool) -> Any:
    """The plugin's strategy, without its accumulation and clipping: the Trainer's count."""
    device = read_wanted(arguments["accelerator"], arguments["devices"], arguments["num_nodes"]).accelerator
    config = {name: value for name, value in plugin.config_for(short).items() if name not in _CLAIMS}
    return load_strategy(plugin.strategy)(config=config, device=device)


def compiled(module: Any) -> Any:
    """The module out of `torch.compile`, if the settings ask for that and the user has not done it."""
    settings = inherited_settings()
    if settings.get("dynamo_backend") is None or not isinstance(module, TrainModule):
        return module
    return torch.compile(module, **settings.compiling)
