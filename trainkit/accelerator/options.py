"""The arguments of `Accelerator`, completed by the configuration → `Options`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.accelerator.plugins import check_plugins, given_plugin
from trainkit.accelerator.tracker_verbs import check_trackers
from trainkit.checks import whole_number
from trainkit.config.compiling import Compilation, compilation_of, refuse_compiled
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
    sorted_handlers,
)
from trainkit.config.settings import Plugin, Settings, debugging, inherited_settings
from trainkit.distributed.requested_devices import RequestedDevices, find_device
from trainkit.errors import ConfigurationError, UnsupportedArgumentError
from trainkit.launch.environment import DEVICE
from trainkit.launch.joining import nodes, processes
from trainkit.launch.strategy_choice import choose_strategy
from trainkit.module.activation_checkpointing import (
    CheckpointingChoice,
    checkpointing_choice,
    refuse_checkpointing,
    refuse_eager_backend,
)
from trainkit.names import refuse_unknown
from trainkit.precision import MIXED, OVER_MASTERS, Precision, is_short
from trainkit.registry import accepts_keyword, find_info, load, load_strategy, make_strategy
from trainkit.strategy import Strategy

__all__ = ["Options", "check_steps", "mixed_name", "resolve"]

_GENERATORS = ("torch", "cuda", DEVICE, "generator")
_SHARD = "To shard parameters, use FSDP or ZeRO: Accelerator(strategy='fsdp') or 'zero3'"


@dataclass
class Options:
    """The options of an `Accelerator`.

    Attributes:
        strategy: as one of the processes, with its precision.
        steps: micro-batches in an optimizer step.
        split_batches: a loader's `batch_size` is that of all processes together.
        even_batches: all processes get the same number of batches.
        resume_loaders: `load_state` continues loaders where they were, by default.
        step_scheduler_with_optimizer: a scheduler advances with each optimizer step, once for each process.
        device_placement: models, optimizers and batches are put on the device.
        project: where the loop writes.
        log_with: trackers, as they were given.
        autocast: of `trainkit.Accelerator.autocast`.
        profile: of `trainkit.Accelerator.profile`.
        compile: how models are compiled; `None`: they are not compiled.
        activation_checkpointing: whose activations are recomputed; `None`: nothing's.
        plugin: the options of the strategy, as the argument for a plugin or the configuration gives them.
        debug: the calls of all processes are compared.
        watched: the process ends when another one fails.
    """

    strategy: Strategy
    steps: int = 1
    split_batches: bool = False
    even_batches: bool = True
    resume_loaders: bool = False
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


def resolve(given: Mapping[str, Any], unknown: Mapping[str, Any]) -> Options:
    """The options, for arguments of `Accelerator` by name.

    Raises:
        ConfigurationError: an argument that is wrong, unknown, not supported or contradicts another.
    """
    refuse_unknown("Accelerator", unknown, given)
    _refuse_unsupported(given)
    settings = inherited_settings()
    given = {**given, "plugin": given_plugin(given, settings)}
    handlers = sorted_handlers(given["kwargs_handlers"])
    loaders, project = _loaders(given), _project(given)
    strategy, plugin, watched = _strategy(given, settings, handlers)
    recomputed = _activation_checkpointing(given, plugin)
    backend, dynamo = given["dynamo_backend"], given["dynamo_plugin"]
    with settings.attribute_errors(*(("dynamo_backend", *settings.of_place) if backend is None and dynamo is None else ())):
        compiled = compilation_of(backend, dynamo, settings)
        if compiled is not None:
            refuse_compiled(compiled, strategy)
            refuse_eager_backend(recomputed, compiled.options.get("backend"))
    refuse_checkpointing(recomputed, strategy)
    return Options(
        strategy=strategy,
        steps=_steps(given, settings, plugin),
        split_batches=loaders.split_batches,
        even_batches=loaders.even_batches,
        resume_loaders=bool(loaders.use_stateful_dataloader),
        step_scheduler_with_optimizer=bool(given["step_scheduler_with_optimizer"]),
        device_placement=bool(given["device_placement"]),
        project=project,
        log_with=[] if given["log_with"] is None else check_trackers(given["log_with"], project.logging_dir),
        autocast=handlers.get(AutocastKwargs),
        profile=handlers.get(ProfileKwargs),
        compile=compiled,
        activation_checkpointing=checkpointing_choice(recomputed),
        plugin=plugin,
        debug=debugging(),
        watched=watched,
    )


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    if given["megatron_lm_plugin"] is not None:
        raise UnsupportedArgumentError(f"Accelerator(megatron_lm_plugin=...) is not supported. {_SHARD}.")
    check_plugins(given)
    for name in _listed(given["rng_types"]):
        if str(getattr(name, "value", name)) not in _GENERATORS:
            raise ConfigurationError(f"rng_types must be some of {', '.join(_GENERATORS)}, not {name!r}.")
    for name in ("device_placement", "cpu", "step_scheduler_with_optimizer"):
        if not isinstance(given[name], bool):
            raise ConfigurationError(f"Accelerator({name}=...) must be True or False, not {given[name]!r}.")


def _loaders(given: Mapping[str, Any]) -> DataLoaderConfiguration:
    """How loaders are sharded: by an object, or by arguments of the same names."""
    names = ("split_batches", "dispatch_batches", "even_batches")
    arguments = {name: given[name] for name in names if given[name] is not None}
    configuration = given["dataloader_config"]
    if configuration is None:
        configuration = DataLoaderConfiguration(**arguments)
    elif not isinstance(configuration, DataLoaderConfiguration):
        raise ConfigurationError(
            f"dataloader_config must be a DataLoaderConfiguration of trainkit.utils, not {configuration!r}."
        )
    elif arguments:
        raise ConfigurationError(f"dataloader_config and {', '.join(arguments)} were given. Give one of them.")
    for name in ("split_batches", "even_batches"):
        if not isinstance(getattr(configuration, name), bool):
            raise ConfigurationError(f"Accelerator({name}=...) must be True or False, not {getattr(configuration, name)!r}.")
    if configuration.dispatch_batches:
        raise UnsupportedArgumentError(
            "dispatch_batches=True is not supported: each process reads its own batches, also of an iterable dataset. Fix: "
            "remove it."
        )
    return configuration


def _steps(given: Mapping[str, Any], settings: Settings, plugin: Plugin | None) -> int:
    """Micro-batches in an optimizer step: from the argument, its plugin, the strategy's plugin, or the configuration."""
    steps, accumulation = given["gradient_accumulation_steps"], given["gradient_accumulation_plugin"]
    if accumulation is not None:
        if not isinstance(accumulation, GradientAccumulationPlugin):
            raise ConfigurationError(
                f"gradient_accumulation_plugin must be a GradientAccumulationPlugin, not {accumulation!r}."
            )
        if steps not in (None, 1):
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps!r} and a gradient_accumulation_plugin were given. Give one of them."
            )
        return accumulation.num_steps
    if steps is None:
        claimed = None if plugin is None else plugin.claimed("gradient_accumulation_steps")
        candidates = [claimed, settings.get("gradient_accumulation_steps")]
        if given["plugin"] is None:  # it is from the settings, where an option takes precedence over the file
            candidates.reverse()
        return next((int(one) for one in candidates if one not in (None, "auto")), 1)
    return check_steps(steps)


def check_steps(steps: Any) -> int:
    """Micro-batches in an optimizer step.

    Raises:
        ConfigurationError: not an integer ≥ 1.
    """
    return whole_number(steps, "gradient_accumulation_steps", 1)


def _project(given: Mapping[str, Any]) -> ProjectConfiguration:
    configuration, folder = given["project_config"], given["project_dir"]
    if configuration is None:
        return ProjectConfiguration(project_dir=folder)
    if not isinstance(configuration, ProjectConfiguration):
        raise ConfigurationError(f"project_config must be a ProjectConfiguration of trainkit.utils, not {configuration!r}.")
    if folder is not None:
        if configuration.project_dir not in (None, folder):
            raise ConfigurationError(
                f"project_dir={folder!r}, but project_config has {configuration.project_dir!r}. Give one of them."
            )
        configuration.set_directories(folder)
    return configuration


def _activation_checkpointing(given: Mapping[str, Any], plugin: Plugin | None) -> Any:
    """The argument, else the option of the plugin; `None`: not set."""
    chosen = given.get("activation_checkpointing")
    return plugin.claimed("activation_checkpointing") if chosen is None and plugin is not None else chosen


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


# ------------------------------------------------------------------------------------------------ strategy and precision


def _strategy(
    given: Mapping[str, Any], settings: Settings, handlers: Mapping[Any, Any]
) -> tuple[Strategy, Plugin | None, bool]:
    """The strategy as one of the processes, the plugin that it was created from, and whether a watchdog watches it."""
    strategy = given["strategy"]
    wanted = RequestedDevices(_kind(given, settings), as_started=True)
    place, dtype = _from_settings(given, settings)
    _precision(given, settings, handlers, masters=False)  # raises for wrong arguments
    with settings.attribute_errors(*place):
        created, plugin = _create(given, settings, handlers, wanted)
    precision = _precision(given, settings, handlers, masters=created.owns_masters, sharded=created.shards_parameters)
    watched = isinstance(strategy, str | None) or not created.joined
    with settings.attribute_errors(*dtype, *place):
        if place and wanted.accelerator == "cuda":
            find_device("cuda")
        if precision is not None:
            created.check_precision(precision)  # before it joins, which starts collectives
    if not created.joined:
        created.join(wanted)
    if precision is not None:
        with settings.attribute_errors(*dtype, *place):
            created.use_precision(precision)
    return created, plugin, watched


def _from_settings(given: Mapping[str, Any], settings: Settings) -> tuple[Sequence[str], Sequence[str]]:
    """The settings that the arguments do not override: where to run, and in which precision. Errors name them."""
    place = settings.of_place if given["strategy"] is None and given["plugin"] is None else ()
    dtype = ("mixed_precision",) if given["precision"] is None and given["mixed_precision"] is None else ()
    return place, dtype


def _create(
    given: Mapping[str, Any], settings: Settings, handlers: Mapping[Any, Any], wanted: RequestedDevices
) -> tuple[Strategy, Plugin | None]:
    """The strategy, and the plugin that it was created from."""
    strategy, plugin = given["strategy"], given["plugin"]
    if strategy is None and plugin is None:
        plugin = settings.plugin()
    if plugin is not None:
        precision = _precision(given, settings, handlers, masters=True)
        short = precision is not None and is_short(precision)
        passed = given["plugin"] is not None
        without = () if passed else ("gradient_accumulation_steps",)  # arguments take precedence over a file
        options = plugin.options_for(short, processes(wanted), nodes(wanted), without)
        created = load_strategy(plugin.strategy)(device=wanted.accelerator, **options, **_common(handlers))
        created.configured_by(plugin.source or (type(plugin).__name__ if passed else settings.source))
    elif strategy is None or isinstance(strategy, str):
        name = choose_strategy(strategy or settings.strategy or "auto", wanted)
        created = make_strategy(name, **_named(name, wanted, handlers))
    else:
        created = make_strategy(strategy)
        refuse_handlers(handlers)
    return created, plugin


def _kind(given: Mapping[str, Any], settings: Settings) -> str:
    """The kind of device."""
    if given["cpu"] or settings.get("use_cpu"):
        return "cpu"
    return "cuda" if given["strategy"] is None and settings.get("distributed_type") == "MULTI_GPU" else "auto"


def _common(handlers: Mapping[Any, Any]) -> dict[str, Any]:
    found = handlers.get(InitProcessGroupKwargs)
    return {} if found is None else found.strategy_options()


def _named(name: str, wanted: RequestedDevices, handlers: Mapping[Any, Any]) -> dict[str, Any]:
    """The options of a strategy of that name. Handlers for another strategy have no effect: one script runs under several."""
    options: dict[str, Any] = {"device": wanted.accelerator}
    info, connected = find_info(name), handlers.get(InitProcessGroupKwargs)
    if info is None or info.one_device:
        return options
    if not info.process_group and connected is not None and connected.backend is not None:
        raise UnsupportedArgumentError(
            f"InitProcessGroupKwargs(backend={connected.backend!r}) is not supported on XLA, whose runtime connects the "
            "processes. Fix: remove backend."
        )
    common = _common(handlers)
    _check_accepted(name, load(info.path), common)
    options |= common
    for kind, handler in handlers.items():
        if kind.__name__ in info.handlers:
            options |= handler.strategy_options()
    return options


def _check_accepted(name: str, kind: type, options: Mapping[str, Any]) -> None:
    """Check that a strategy has the options of `InitProcessGroupKwargs`.

    Raises:
        ConfigurationError: it does not have one of them.
    """
    for option, value in options.items():
        if not accepts_keyword(kind, option):
            argument = "backend" if option == "process_group_backend" else option
            raise ConfigurationError(
                f"InitProcessGroupKwargs({argument}={value!r}): strategy={name!r} has no option {option!r}. Expected a "
                f"strategy whose constructor has it, such as 'ddp'. Fix: remove {argument}=; or, if {kind.__name__} is yours, "
                f"add the option: def __init__(self, *, {option}=None, device='auto', precision=None)"
            )


def refuse_handlers(handlers: Mapping[Any, Any]) -> None:
    """Refuse options for a strategy that the user has created.

    Raises:
        ConfigurationError: there are some.
    """
    for kind in (DistributedDataParallelKwargs, InitProcessGroupKwargs):
        if kind in handlers:
            raise ConfigurationError(
                f"kwargs_handlers has {kind.__name__}, but strategy= is an object, which takes these options itself. Pass them "
                "to it."
            )


def _precision(
    given: Mapping[str, Any], settings: Settings, handlers: Mapping[Any, Any], masters: bool, sharded: bool = False
) -> Precision | str | int | None:
    """The precision; `None`: the strategy's."""
    precision, mixed = given["precision"], given["mixed_precision"]
    if precision is not None and mixed is not None:
        raise ConfigurationError("precision= and mixed_precision= were given. Give one of them.")
    scaler = handlers.get(GradScalerKwargs)
    if precision is None:
        mixed = getattr(mixed, "value", mixed)
        name = _mixed(mixed) if mixed is not None else settings.get("mixed_precision")
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


def _mixed(name: Any) -> str:
    if name not in MIXED:
        raise ConfigurationError(f"mixed_precision must be one of {', '.join(map(repr, MIXED))}, not {name!r}.")
    return str(name)


def mixed_name(precision: Precision) -> str:
    """Accelerate's name of a precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`."""
    return next((name for table in (MIXED, OVER_MASTERS) for name in table if table[name] == precision.name), "no")
