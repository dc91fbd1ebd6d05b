"""The arguments of `Accelerator`, completed by the configuration → `Options`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.checks import whole_number
from trainkit.config.compiling import Compilation, compilation_of, refuse_compiled
from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
from trainkit.config.fsdp_plugin import FullyShardedDataParallelPlugin, ParallelismConfig
from trainkit.config.kwargs_handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    sort_handlers,
)
from trainkit.config.settings import Plugin, Settings, debugging, read_process_settings
from trainkit.distributed.requested_devices import RequestedDevices, find_device
from trainkit.errors import ConfigurationError, UnsupportedArgumentError, make_instance
from trainkit.launch.environment import DEVICE
from trainkit.launch.joining import nodes, processes
from trainkit.launch.strategy_choice import choose_strategy
from trainkit.loggers.trackers import check_trackers
from trainkit.module.activation_checkpointing import (
    CheckpointingChoice,
    checkpointing_choice,
    refuse_checkpointing,
    refuse_eager_backend,
)
from trainkit.names import advice, refuse_unknown
from trainkit.precision import MIXED, OVER_MASTERS, Precision, is_short
from trainkit.registry import accepts_keyword, find_info, load, load_strategy, make_strategy
from trainkit.strategy import Strategy

__all__ = ["Options", "check_steps", "resolve"]

_PLUGINS: dict[str, type] = {
    "deepspeed_plugin": DeepSpeedPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "parallelism_config": ParallelismConfig,
}
_GENERATORS = ("torch", "cuda", DEVICE, "generator", "python", "numpy", "hpu", "mlu", "musa", "neuron", "npu", "sdaa", "xpu")
_SHARD = "To shard parameters, use FSDP or ZeRO: Accelerator(strategy='fsdp') or 'zero3'"


@dataclass
class Options:
    """The options of an `Accelerator`.

    Attributes:
        strategy: The strategy, with its precision; this process has joined the others.
        steps: Number of micro-batches in an optimizer step.
        loaders: How loaders are sharded over the processes. It may be changed before they are prepared.
        step_scheduler_with_optimizer: A scheduler advances with each optimizer step, once for each process.
        device_placement: Models, optimizers and batches are moved to the device.
        project: The folder that the loop writes to, and how checkpoints are named.
        log_with: The trackers.
        autocast: The options of `Accelerator.autocast`.
        profile: The options of `Accelerator.profile`.
        compile: How models are compiled; `None`: they are not.
        activation_checkpointing: The modules whose activations are recomputed; `None`: none.
        plugin: The options of the strategy, from an argument or the configuration.
        debug: The calls of all processes are compared.
        watched: The process ends when another one fails.
    """

    strategy: Strategy
    steps: int = 1
    loaders: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    step_scheduler_with_optimizer: bool = True
    device_placement: bool = True
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    log_with: Sequence[Any] = ()
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    compile: Compilation | None = None
    activation_checkpointing: CheckpointingChoice | None = None
    plugin: Plugin | None = None
    debug: bool = False
    watched: bool = True


def resolve(arguments: Mapping[str, Any], unknown: Mapping[str, Any]) -> Options:
    """The options, for arguments of `Accelerator` by name."""
    # None means the default of an argument that only Accelerate has, too.
    refuse_unknown(
        "Accelerator", {n: v for n, v in unknown.items() if v is not None or advice("Accelerator", n) is None}, arguments
    )
    _refuse_unsupported(arguments)
    settings = read_process_settings()
    arguments = {**arguments, "cpu": bool(arguments["cpu"]), "plugin": _plugin(arguments, settings)}
    handlers = sort_handlers(arguments["kwargs_handlers"])
    loaders, project = _loaders(arguments), _project(arguments)
    strategy, plugin, watched = _strategy(arguments, settings, handlers)
    recomputed = _activation_checkpointing(arguments, plugin)
    backend, dynamo = arguments["dynamo_backend"], arguments["dynamo_plugin"]
    with settings.attribute_errors(*(("dynamo_backend", *settings.of_place) if backend is None and dynamo is None else ())):
        compiled = compilation_of(backend, dynamo, settings)
        if compiled is not None:
            refuse_compiled(compiled, strategy)
            refuse_eager_backend(recomputed, compiled.options.get("backend"))
    refuse_checkpointing(recomputed, strategy)
    return Options(
        strategy=strategy,
        steps=_steps(arguments, settings, plugin),
        loaders=loaders,
        step_scheduler_with_optimizer=bool(arguments["step_scheduler_with_optimizer"]),
        device_placement=bool(arguments["device_placement"]),
        project=project,
        log_with=[] if arguments["log_with"] is None else check_trackers(arguments["log_with"], project.logging_dir),
        autocast=handlers.get(AutocastKwargs),
        profile=handlers.get(ProfileKwargs),
        compile=compiled,
        activation_checkpointing=checkpointing_choice(recomputed),
        plugin=plugin,
        debug=debugging(),
        watched=watched,
    )


def _refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    if arguments["megatron_lm_plugin"] is not None:
        raise UnsupportedArgumentError(f"Accelerator(megatron_lm_plugin=...) is not supported. {_SHARD}.")
    _check_plugins(arguments)
    for name in _as_list(arguments["rng_types"]):
        if str(getattr(name, "value", name)) not in _GENERATORS:
            raise ConfigurationError(f"rng_types must be some of {', '.join(_GENERATORS)}, not {name!r}.")
    for name in ("device_placement", "cpu", "step_scheduler_with_optimizer"):
        if not isinstance(arguments[name], bool) and (name != "cpu" or arguments[name] is not None):
            raise ConfigurationError(f"Accelerator({name}=...) must be True or False, not {arguments[name]!r}.")


def _loaders(arguments: Mapping[str, Any]) -> DataLoaderConfiguration:
    """How loaders are sharded: by an object, or by arguments of the same names."""
    names = ("split_batches", "dispatch_batches", "even_batches")
    set_directly = {name: arguments[name] for name in names if arguments[name] is not None}
    configuration = arguments["dataloader_config"]
    if configuration is None:
        configuration = DataLoaderConfiguration(**set_directly)
    elif not isinstance(configuration, DataLoaderConfiguration):
        raise ConfigurationError(
            f"dataloader_config must be a DataLoaderConfiguration of trainkit.utils, not {configuration!r}."
            f"{make_instance(configuration, DataLoaderConfiguration)}"
        )
    elif set_directly:
        raise ConfigurationError(f"dataloader_config and {', '.join(set_directly)} were given. Give one of them.")
    for name in ("split_batches", "even_batches"):
        if not isinstance(getattr(configuration, name), bool):
            raise ConfigurationError(f"Accelerator({name}=...) must be True or False, not {getattr(configuration, name)!r}.")
    if configuration.dispatch_batches:
        raise UnsupportedArgumentError(
            "dispatch_batches=True is not supported: each process reads its own batches, also of an iterable dataset. Fix: "
            "remove it."
        )
    return configuration


def _steps(arguments: Mapping[str, Any], settings: Settings, plugin: Plugin | None) -> int:
    """Micro-batches in an optimizer step: from the argument, its plugin, the strategy's plugin, or the configuration."""
    steps, accumulation = arguments["gradient_accumulation_steps"], arguments["gradient_accumulation_plugin"]
    if accumulation is not None:
        if not isinstance(accumulation, GradientAccumulationPlugin):
            raise ConfigurationError(
                f"gradient_accumulation_plugin must be a GradientAccumulationPlugin, not {accumulation!r}."
                f"{make_instance(accumulation, GradientAccumulationPlugin)}"
            )
        if steps not in (None, 1):
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps!r} and a gradient_accumulation_plugin were given. Give one of them."
            )
        return accumulation.num_steps
    if steps is None:
        claimed = None if plugin is None else plugin.loop_option("gradient_accumulation_steps")
        candidates = [claimed, settings.get("gradient_accumulation_steps")]
        if arguments["plugin"] is None:  # it is from the settings, where an option takes precedence over the file
            candidates.reverse()
        return next((int(one) for one in candidates if one not in (None, "auto")), 1)
    return check_steps(steps)


def check_steps(steps: Any) -> int:
    """Refuse a number of micro-batches in an optimizer step that is not an integer ≥ 1."""
    return whole_number(steps, "gradient_accumulation_steps", 1)


def _project(arguments: Mapping[str, Any]) -> ProjectConfiguration:
    configuration, folder = arguments["project_config"], arguments["project_dir"]
    if configuration is None:
        return ProjectConfiguration(project_dir=folder)
    if not isinstance(configuration, ProjectConfiguration):
        raise ConfigurationError(
            f"project_config must be a ProjectConfiguration of trainkit.utils, not {configuration!r}."
            f"{make_instance(configuration, ProjectConfiguration)}"
        )
    if folder is not None:
        if configuration.project_dir not in (None, folder):
            raise ConfigurationError(
                f"project_dir={folder!r}, but project_config has {configuration.project_dir!r}. Give one of them."
            )
        configuration.set_directories(folder)
    return configuration


def _activation_checkpointing(arguments: Mapping[str, Any], plugin: Plugin | None) -> Any:
    """The argument, else the option of the plugin; `None`: not set."""
    chosen = arguments.get("activation_checkpointing")
    return plugin.loop_option("activation_checkpointing") if chosen is None and plugin is not None else chosen


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


# ------------------------------------------------------------------------------------------------ strategy and precision


def _check_plugins(arguments: Mapping[str, Any]) -> None:
    """Check the types of the arguments for plugins, and that only one of them chooses a strategy."""
    for name, kind in _PLUGINS.items():
        if arguments[name] is not None and not isinstance(arguments[name], kind):
            raise ConfigurationError(
                f"{name} must be a {kind.__name__}, not {arguments[name]!r}: from trainkit.utils import {kind.__name__}"
                f"{make_instance(arguments[name], kind)}"
            )
    conflicting = [name for name in ("strategy", "deepspeed_plugin", "fsdp_plugin") if arguments[name] is not None]
    if arguments["parallelism_config"] is not None and conflicting != ["fsdp_plugin"]:
        conflicting.append("parallelism_config")
    if len(conflicting) > 1:
        raise ConfigurationError(f"{'= and '.join(conflicting)}= were given. Give one of them.")


def _plugin(arguments: Mapping[str, Any], settings: Settings) -> Plugin | None:
    """The options of a strategy that the arguments have; `None` without them."""
    parallelism: ParallelismConfig | None = arguments["parallelism_config"]
    plugin: Any = arguments["deepspeed_plugin"] or arguments["fsdp_plugin"]
    if parallelism is None or not parallelism.is_set:
        return plugin  # type: ignore[no-any-return]
    plugin = plugin or settings.plugin()
    sharded = copy.copy(plugin) if isinstance(plugin, FullyShardedDataParallelPlugin) else FullyShardedDataParallelPlugin()
    sharded.parallelism = parallelism
    return sharded


def _strategy(
    arguments: Mapping[str, Any], settings: Settings, handlers: Mapping[Any, Any]
) -> tuple[Strategy, Plugin | None, bool]:
    """The strategy as one of the processes, the plugin that it was created from, and whether a watchdog watches it."""
    strategy = arguments["strategy"]
    devices = RequestedDevices(_kind(arguments, settings), as_started=True)
    place, dtype = _from_settings(arguments, settings)
    _precision(arguments, settings, handlers, masters=False)  # raises for wrong arguments
    with settings.attribute_errors(*place):
        created, plugin = _create(arguments, settings, handlers, devices)
    precision = _precision(arguments, settings, handlers, masters=created.owns_masters, sharded=created.shards_parameters)
    watched = isinstance(strategy, str | None) or not created.joined
    with settings.attribute_errors(*dtype, *place):
        if place and devices.accelerator == "cuda":
            find_device("cuda")
        if precision is not None:
            created.check_precision(precision)  # before it joins, which starts collectives
    if not created.joined:
        created.join(devices)
    if precision is not None:
        with settings.attribute_errors(*dtype, *place):
            created.use_precision(precision)
    return created, plugin, watched


def _from_settings(arguments: Mapping[str, Any], settings: Settings) -> tuple[Sequence[str], Sequence[str]]:
    """The settings that the arguments do not override: where to run, and in which precision. Errors name them."""
    place = settings.of_place if arguments["strategy"] is None and arguments["plugin"] is None else ()
    dtype = ("mixed_precision",) if arguments["precision"] is None and arguments["mixed_precision"] is None else ()
    return place, dtype


def _create(
    arguments: Mapping[str, Any], settings: Settings, handlers: Mapping[Any, Any], devices: RequestedDevices
) -> tuple[Strategy, Plugin | None]:
    """The strategy, and the plugin that it was created from."""
    strategy, plugin = arguments["strategy"], arguments["plugin"]
    if strategy is None and plugin is None:
        plugin = settings.plugin()
    if plugin is not None:
        precision = _precision(arguments, settings, handlers, masters=True)
        short = precision is not None and is_short(precision)
        passed = arguments["plugin"] is not None
        without = () if passed else ("gradient_accumulation_steps",)  # arguments take precedence over a file
        options = plugin.options_for(short, processes(devices), nodes(devices), without)
        created = load_strategy(plugin.strategy)(device=devices.accelerator, **options, **_process_group_options(handlers))
        created.configured_by(plugin.source or (type(plugin).__name__ if passed else settings.source))
    elif strategy is None or isinstance(strategy, str):
        name = choose_strategy(strategy or settings.strategy or "auto", devices)
        created = make_strategy(name, **_options_of(name, devices, handlers))
    else:
        created = make_strategy(strategy)
        _refuse_handlers(handlers)
    return created, plugin


def _kind(arguments: Mapping[str, Any], settings: Settings) -> str:
    """The kind of device."""
    if arguments["cpu"] or settings.get("use_cpu"):
        return "cpu"
    return "cuda" if arguments["strategy"] is None and settings.get("distributed_type") == "MULTI_GPU" else "auto"


def _process_group_options(handlers: Mapping[Any, Any]) -> dict[str, Any]:
    handler = handlers.get(InitProcessGroupKwargs)
    return {} if handler is None else handler.strategy_options()


def _options_of(name: str, devices: RequestedDevices, handlers: Mapping[Any, Any]) -> dict[str, Any]:
    """The options of a strategy of that name. Handlers for another strategy have no effect: one script runs under several."""
    options: dict[str, Any] = {"device": devices.accelerator}
    info, connected = find_info(name), handlers.get(InitProcessGroupKwargs)
    if info is None or info.one_device:
        return options
    if not info.process_group and connected is not None and connected.backend is not None:
        raise UnsupportedArgumentError(
            f"InitProcessGroupKwargs(backend={connected.backend!r}) is not supported on XLA, whose runtime connects the "
            "processes. Fix: remove backend."
        )
    common = _process_group_options(handlers)
    _check_accepted(name, load(info.path), common)
    options |= common
    for kind, handler in handlers.items():
        if kind.__name__ in info.handlers:
            options |= handler.strategy_options()
    return options


def _check_accepted(name: str, kind: type, options: Mapping[str, Any]) -> None:
    """Check that a strategy has the options of `InitProcessGroupKwargs`."""
    for option, value in options.items():
        if not accepts_keyword(kind, option):
            argument = "backend" if option == "process_group_backend" else option
            raise ConfigurationError(
                f"InitProcessGroupKwargs({argument}={value!r}): strategy={name!r} has no option {option!r}. Expected a "
                f"strategy whose constructor has it, such as 'ddp'. Fix: remove {argument}=; or, if {kind.__name__} is yours, "
                f"add the option: def __init__(self, *, {option}=None, device='auto', precision=None)"
            )


def _refuse_handlers(handlers: Mapping[Any, Any]) -> None:
    """Refuse options for a strategy that the user has created."""
    for kind in (DistributedDataParallelKwargs, InitProcessGroupKwargs):
        if kind in handlers:
            raise ConfigurationError(
                f"kwargs_handlers has {kind.__name__}, but strategy= is an object, which takes these options itself. Pass them "
                "to it."
            )


def _precision(
    arguments: Mapping[str, Any], settings: Settings, handlers: Mapping[Any, Any], masters: bool, sharded: bool = False
) -> Precision | str | int | None:
    """The precision; `None`: the strategy's."""
    precision, mixed = arguments["precision"], arguments["mixed_precision"]
    if precision is not None and mixed is not None:
        raise ConfigurationError("precision= and mixed_precision= were given. Give one of them.")
    scaler = handlers.get(GradScalerKwargs)
    if precision is None:
        mixed = getattr(mixed, "value", mixed)
        name = _check_mixed_precision(mixed) if mixed is not None else settings.get("mixed_precision")
        if name is None:
            if scaler is None:
                return None
            name = "no"
        # under DeepSpeed, Accelerate's names mean what they mean there: parameters in 16 bits with float32 masters
        precision = OVER_MASTERS.get(str(name), MIXED[str(name)]) if masters else MIXED[str(name)]
    chosen: Precision | str | int = precision
    if AORecipeKwargs in handlers and chosen == MIXED["fp8"]:
        recipe: AORecipeKwargs = handlers[AORecipeKwargs]
        return recipe.precision(sharded)
    if scaler is None:
        return chosen
    if isinstance(chosen, Precision):
        raise ConfigurationError("kwargs_handlers has GradScalerKwargs, but precision= is an object. Pass the options to it.")
    return Precision(chosen, **scaler.to_kwargs())


def _check_mixed_precision(name: Any) -> str:
    if name not in MIXED:
        raise ConfigurationError(f"mixed_precision must be one of {', '.join(map(repr, MIXED))}, not {name!r}.")
    return str(name)
