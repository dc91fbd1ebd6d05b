"""Short names → classes, imported when used, `StrategyInfo`, the declaration of a strategy, and adapters of foreign objects.

The package of a strategy has its declaration, `INFO`, in its `__init__.py`, which imports neither the class nor its backend.
The core reads these declarations and never names a backend, so that a new strategy needs no change here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, make_instance, nearest

__all__ = [
    "ADAPTERS",
    "CALLBACKS",
    "SINGLE",
    "StrategyInfo",
    "accepts_keyword",
    "adapt",
    "automatic_info",
    "automatic_strategy",
    "find_info",
    "find_info_by_section",
    "find_info_by_type",
    "load",
    "load_callback",
    "load_footprints",
    "load_strategy",
    "make_strategy",
    "normalize_name",
    "register_strategy",
    "strategies",
    "strategy_infos",
]


@dataclass(frozen=True)
class StrategyInfo:
    """What trainkit knows of a strategy before it imports it. A path is text, `"module:attribute"`.

    Attributes:
        path: Path of the class.
        names: Short name → options.
        aliases: Lightning's other names → (short name, further options).
        refused: Lightning's names that are not supported → what to use instead. Also refuses names that continue one of
            them after an underscore.
        command_line: Name → path of a function that gets the arguments of the script and returns options, or `None`.
        devices: Types of torch devices that the strategy supports.
        auto: Type of devices → the short name for `strategy="auto"` with several devices.
        one_device: It uses one device in one process, and has no options about processes.
        one_process: One process uses all devices of a node.
        splits_micro_batches: A rank may run its micro-batch in parts while other ranks run theirs whole: `auto_micro_batch`.
        process_group: It has the option `process_group_backend`.
        handlers: Class names of Accelerate's `kwargs_handlers` whose `strategy_options()` its constructor accepts.
        distributed_type: Accelerate's `DistributedType`; `None`: by device and number of processes.
        file_types: Value of `distributed_type` in Accelerate's configuration files → short name.
        file_aliases: Other spellings of these values, in lower case → the value.
        sections: Its sections in these files, such as `"deepspeed_config"`.
        plugin: Path of a function that converts the keys of its sections to a `trainkit.config.settings.Plugin`. It is
            called as `plugin(**keys)`, or `plugin(file, **keys)` with a configuration file of the backend's own.
        footprints: What `Trainer.plan` compares, the fastest first: (path, options) of callables. Their results have
            `footprint` and `supported_precisions`.
        packages: Packages of the backend: `trainkit env` shows their versions, and tracebacks skip their frames.
        variables: Prefixes of environment variables of the backend, which `trainkit env` shows.
        parameter_marks: Attributes of parameters that the backend manages.
        shape_attribute: Attribute of a sharded parameter with the shape of the whole parameter.
        swapped_devices: Types of devices for which a module is moved by swapping the tensors of its parameters.
        adam_classes: Class name of an optimizer of the backend with the state of `torch.optim.Adam` → the attribute for
            decoupled weight decay, as in `AdamW`.
        host_optimizers: Class names of optimizers of the backend that step on the CPU only.
    """

    path: str
    names: Mapping[str, Mapping[str, Any]]
    aliases: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    command_line: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda", "mps")
    auto: Mapping[str, str] = field(default_factory=dict)
    one_device: bool = False
    one_process: bool = False
    splits_micro_batches: bool = False
    process_group: bool = True
    handlers: tuple[str, ...] = ()
    distributed_type: str | None = None
    file_types: Mapping[str, str] = field(default_factory=dict)
    file_aliases: Mapping[str, str] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    plugin: str | None = None
    footprints: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    packages: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    parameter_marks: tuple[str, ...] = ()
    shape_attribute: str | None = None
    swapped_devices: tuple[str, ...] = ()
    adam_classes: Mapping[str, str] = field(default_factory=dict)
    host_optimizers: tuple[str, ...] = ()


SINGLE = StrategyInfo(
    path="trainkit.strategy:Strategy",
    names={"single": {}},
    aliases={"auto": ("single", {}), "single_device": ("single", {})},
    one_device=True,
    splits_micro_batches=True,
    process_group=False,
    file_types={"NO": "single"},
    footprints=(("trainkit.strategy:Strategy", {"device": "cpu"}),),
)
"""The base class, `trainkit.Strategy`: one device."""

CALLBACKS: dict[str, str] = {
    "checkpoint": "trainkit.callbacks.checkpoint:Checkpoint",
    "early_stopping": "trainkit.callbacks.early_stopping:EarlyStopping",
    "gradient_accumulation_scheduler": "trainkit.callbacks.gradient_accumulation_scheduler:GradientAccumulationScheduler",
    "gradient_clipping": "trainkit.callbacks.gradient_clipping:GradientClipping",
    "learning_rate_monitor": "trainkit.callbacks.learning_rate_monitor:LearningRateMonitor",
    "model_checkpoint": "trainkit.callbacks.model_checkpoint:ModelCheckpoint",
    "model_summary": "trainkit.callbacks.model_summary:ModelSummary",
    "nonfinite_guard": "trainkit.callbacks.nonfinite_guard:NonFiniteGuard",
    "progress_bar": "trainkit.callbacks.progress.tqdm_progress:TQDMProgressBar",
    "recompile_monitor": "trainkit.callbacks.recompile_monitor:RecompileMonitor",
    "rich_model_summary": "trainkit.callbacks.rich_model_summary:RichModelSummary",
    "timer": "trainkit.callbacks.timer:Timer",
}

_LIGHTNING = {
    "callbacks.callback.Callback": "trainkit.compat.lightning_objects:adapt_callback",
    "core.datamodule.LightningDataModule": "trainkit.compat.lightning_objects:refuse_datamodule",
    "core.module.LightningModule": "trainkit.compat.lightning_objects:refuse_module",
    "loggers.logger.Logger": "trainkit.compat.lightning_objects:adapt_logger",
    "profilers.profiler.Profiler": "trainkit.compat.lightning_objects:refuse_other",
    "strategies.strategy.Strategy": "trainkit.compat.lightning_objects:refuse_other",
}

ADAPTERS: dict[str, str] = {
    f"{package}.{path}": function
    for package in ("lightning.pytorch", "pytorch_lightning")
    for path, function in _LIGHTNING.items()
} | {
    f"{package}.loggers.logger.Logger": "trainkit.compat.lightning_objects:adapt_logger"
    for package in ("lightning.fabric", "lightning_fabric")
}
"""Path of a class of another framework → path of a function, which gets an object of that class, and the class."""

# Prefixes of the names of Lightning's strategies that trainkit does not have.
_UNSUPPORTED = ("hpu", "horovod", "bagua", "colossalai")

_registered: list[StrategyInfo] = []


def register_strategy(info: StrategyInfo) -> None:
    """Register a strategy under its short names, for `Trainer(strategy="mine")`.

    The strategies of `trainkit.strategies` are already registered.

    Args:
        info: The facts about the strategy.

    Raises:
        ConfigurationError: A strategy with one of its names exists.

    Example:
        ```python
        register_strategy(StrategyInfo(path="my_package.strategy:MyStrategy", names={"mine": {}}))
        trainer = Trainer(strategy="mine")
        ```
    """
    taken = {name.lower() for one in strategy_infos() for name in (*one.names, *one.aliases)}
    twice = sorted(name for name in (*info.names, *info.aliases) if name.lower() in taken)
    if twice:
        raise ConfigurationError(
            f"register_strategy: the name {twice[0]!r} is taken, and names of strategies must be unique. Choose another: "
            f"StrategyInfo(names={{'my_{twice[0]}': {{}}}}, ...)"
        )
    _registered.append(info)


def strategy_infos() -> tuple[StrategyInfo, ...]:
    """All declarations: one device, then `trainkit.strategies`, then the registered ones."""
    return (*_load_built_in(), *_registered)


@cache
def _load_built_in() -> tuple[StrategyInfo, ...]:
    packages: Iterable[str] = load("trainkit.strategies:PACKAGES")
    return (SINGLE, *(load(f"trainkit.strategies.{package}:INFO") for package in packages))


def strategies() -> dict[str, str]:
    """Return the short names of all strategies → paths of their classes, sorted."""
    return dict(sorted((name, info.path) for info in strategy_infos() for name in info.names))


def normalize_name(name: str) -> str:
    """A name of a strategy as its declaration spells it: the case does not count. An unknown name is in lower case."""
    known = (one for info in strategy_infos() for one in (*info.names, *info.aliases))
    return next((one for one in known if one.lower() == name.lower()), name.lower())


def find_info(name: str) -> StrategyInfo | None:
    """The declaration of the strategy with this name, or with this name in Lightning; `None` if the name is unknown."""
    return next((info for info in strategy_infos() if name in info.names or name in info.aliases), None)


def find_info_by_type(distributed_type: str | None) -> StrategyInfo | None:
    """The declaration of the strategy of a `distributed_type` in a configuration file, if there is one."""
    return next((info for info in strategy_infos() if distributed_type in info.file_types), None)


def find_info_by_section(section: str) -> StrategyInfo:
    """The declaration of the strategy with this section in configuration files."""
    return next(info for info in strategy_infos() if section in info.sections)


def automatic_info(device: str) -> StrategyInfo:
    """The declaration of the strategy that `strategy="auto"` means on a type of devices, such as `"cuda"`."""
    return next((info for info in strategy_infos() if device in info.auto), SINGLE)


def automatic_strategy(device: str) -> str:
    """The short name of the strategy that `strategy="auto"` means on several devices of a type."""
    return automatic_info(device).auto.get(device, "single")


def load_callback(name: str) -> Any:
    """Import the callback class with a short name; an `UnknownNameError` if there is none."""
    if name not in CALLBACKS:
        raise UnknownNameError(f"unknown callback {name!r}; known: {', '.join(CALLBACKS)}.{nearest(name, list(CALLBACKS))}")
    return load(CALLBACKS[name])


def load_footprints() -> list[Any]:
    """The strategies that a memory estimate compares, the fastest first."""
    return [load(path)(**options) for info in strategy_infos() for path, options in info.footprints]


def load_strategy(name: str) -> Any:
    """Import the strategy class with a short name.

    Raises:
        ConfigurationError: Not a string.
        UnsupportedArgumentError: A strategy of Lightning's that is not supported; the message says what to use.
        UnknownNameError: An unknown name.
    """
    known = strategies()
    if not isinstance(name, str):
        raise ConfigurationError(
            f"strategy must be a name ({', '.join(map(repr, ('auto', *known)))}) or a Strategy object, not {name!r}."
        )
    if name in known:
        return load(known[name])
    for refused, advice in ((refused, advice) for info in strategy_infos() for refused, advice in info.refused.items()):
        if name == refused or name.startswith(f"{refused}_"):
            raise UnsupportedArgumentError(f"strategy={name!r}: {advice}.")
    if name.lower().startswith(_UNSUPPORTED):
        raise UnsupportedArgumentError(
            f"strategy={name!r} is not supported: use strategy='auto', or one of {', '.join(map(repr, known))}."
        )
    names = sorted({*known, *(alias for info in strategy_infos() for alias in info.aliases)})
    raise UnknownNameError(f"unknown strategy {name!r}; known: {', '.join(names)}.{nearest(name, names)}")


def make_strategy(strategy: Any, **options: Any) -> Any:
    """The strategy with a name, including `"auto"`, or the object itself.

    Args:
        strategy: A name, or a `trainkit.Strategy` object.
        **options: Arguments of the class, for a name.

    Raises:
        ConfigurationError: Another object, a name that `load_strategy` refuses, or an option that the class does not have.
    """
    if isinstance(strategy, str):
        info = find_info(strategy)
        if info is None:
            return load_strategy(strategy)(**options)  # This raises an error.
        name, defaults = info.aliases.get(strategy, (strategy, {}))
        if strategy in info.command_line and (parsed := load(info.command_line[strategy])(sys.argv[1:])) is not None:
            return load(info.path)(**{**parsed, **options})
        return _create(strategy, load(info.path), {**info.names[name], **defaults, **options})
    strategy = adapt(strategy)  # Lightning's have an optimizer_step too.
    if isinstance(strategy, type) or not hasattr(strategy, "optimizer_step"):
        fix = make_instance(strategy) or " Use strategy='auto'."
        raise ConfigurationError(f"strategy must be a name or a Strategy object, not {strategy!r}.{fix}")
    return strategy


def adapt(value: Any) -> Any:
    """What trainkit uses in place of an object of another framework: an adapter that calls it; other objects as they are.

    It imports no framework: the class of an object is in `sys.modules`.

    Args:
        value: An object that is not an instance of the class of trainkit that was expected.

    Raises:
        TrainkitError: The object cannot work here. The message says what to use instead.
    """
    for path, function in ADAPTERS.items():
        module, _, name = path.rpartition(".")
        kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
        if isinstance(kind, type) and isinstance(value, kind):
            return load(function)(value, kind)
    return value


def accepts_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether a function, or the constructor of a class, accepts a keyword argument."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or (p.name == name and p.kind is not p.POSITIONAL_ONLY) for p in parameters)


def _create(name: str, kind: type, options: Mapping[str, Any]) -> Any:
    for option, value in options.items():
        if not accepts_keyword(kind, option):
            raise ConfigurationError(
                f"strategy={name!r} passes {option}={value!r} to {kind.__name__}, which has no such argument. Expected a "
                "constructor that accepts device= and each option that StrategyInfo names. Fix: "
                f"def __init__(self, *, {option}={value!r}, **options)"
            )
    return kind(**options)


def load(path: str) -> Any:
    """Import the object with a path `"module:attribute"`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
