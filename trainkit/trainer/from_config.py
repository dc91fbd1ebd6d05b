"""What the configuration sets for a `Trainer`, where its arguments do not."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from trainkit.config.settings import Settings, inherited_settings
from trainkit.launch.environment import DEVICE
from trainkit.launch.joining import nodes, processes
from trainkit.launch.strategy_choice import read_devices
from trainkit.precision import MIXED, OVER_MASTERS, is_short
from trainkit.registry import load_callback, load_strategy

if TYPE_CHECKING:
    from trainkit.config.settings import Plugin

__all__ = ["attribute_errors", "with_settings"]

_CLAIMS = ("gradient_accumulation_steps", "gradient_clipping")


def with_settings(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The arguments of a `Trainer`, completed by the settings that this process was started with.

    Args:
        given: the arguments; the settings replace those that are `None` or `"auto"`.

    Returns:
        The arguments, and a notice of what the settings have set, to be printed when the processes are connected; empty if
        they have set nothing.

    Raises:
        ConfigurationError: the settings ask for something that is not available here.
    """
    settings = inherited_settings()
    plugin, mixed = settings.plugin(), settings.get("mixed_precision")
    taken = _place(settings, given) | _optimizer_step(settings, plugin, given)
    created: dict[str, Any] = {}
    masters = False
    if plugin is not None and given["strategy"] == "auto" and not _elsewhere(settings, given):
        created, chosen = _by_plugin(settings, plugin, {**given, **taken})
        taken |= chosen
        masters = created["strategy"].owns_masters
    if given["precision"] is None and mixed is not None:
        taken |= _precision(given["strategy"], OVER_MASTERS.get(mixed, MIXED[mixed]) if masters else MIXED[mixed])
    notes = [f"{name}={value!r}" for name, value in taken.items()] + _compilation(settings, given)
    complete = given | {name: taken[name] for name in taken.keys() & given.keys()} | created
    if complete["accumulate_grad_batches"] is None:
        complete["accumulate_grad_batches"] = 1
    return complete, f"settings of {settings.source}: {', '.join(notes)}." if notes else ""


def _precision(strategy: Any, precision: str) -> dict[str, Any]:
    """The precision of the settings as an argument; a strategy object without a precision gets it immediately."""
    if isinstance(strategy, str):
        return {"precision": precision}
    if hasattr(strategy, "use_precision"):
        strategy.use_precision(precision, given=False)
    return {}


def _compilation(settings: Settings, given: dict[str, Any]) -> list[str]:
    """What the settings compile, in words; `compiled_steps.requested_compilation` reads them."""
    backend = settings.get("dynamo_backend")
    return [] if backend is None or given["compile"] is not None else [f"compiled by {backend!r}"]


def attribute_errors(given: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within it an error names the settings, if they set what the arguments of a `Trainer` do not.

    Args:
        given: the arguments.
    """
    settings = inherited_settings()
    names = settings.of_place if (given["strategy"], given["accelerator"]) == ("auto", "auto") else ()
    return settings.attribute_errors(*names, *(() if given["precision"] is not None else ("mixed_precision",)))


def _place(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """What the settings say about where to run, in addition to `Settings.plugin`."""
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


def _optimizer_step(settings: Settings, plugin: Plugin | None, given: dict[str, Any]) -> dict[str, Any]:
    """What the settings say about an optimizer step, by themselves or in the options of the strategy."""
    of_plugin = {} if plugin is None else {name: plugin.claimed(name) for name in _CLAIMS}
    claimed = {name: value for name, value in of_plugin.items() if value is not None}
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


def _by_plugin(settings: Settings, plugin: Plugin, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plugin's strategy as an argument, and what else it sets.

    The strategy does not get accumulation, clipping and activation checkpointing, which are arguments of the Trainer.
    """
    short = is_short(arguments["precision"] or OVER_MASTERS[settings.get("mixed_precision") or "no"])
    with settings.attribute_errors(*settings.of_place):
        wanted = read_devices(arguments["accelerator"], arguments["devices"], arguments["num_nodes"])
        options = plugin.options_for(short, processes(wanted), nodes(wanted), _CLAIMS)
        strategy = load_strategy(plugin.strategy)(device=wanted.accelerator, **options)
    chosen = plugin.described()
    if arguments.get("activation_checkpointing") is None and plugin.claimed("activation_checkpointing"):
        chosen["activation_checkpointing"] = True
    return {"strategy": strategy}, chosen
