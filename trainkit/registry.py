"""Short names → classes, imported on use, and what the core knows of each strategy: :class:`StrategyInfo`.

A strategy's package declares its ``StrategyInfo`` in a module ``info`` of its own, which imports nothing of the backend. The
core reads these declarations and never names a backend, so a new strategy needs no change here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest

__all__ = [
    "CALLBACKS",
    "SINGLE",
    "StrategyInfo",
    "automatic_info",
    "automatic_strategy",
    "find_info",
    "find_info_by_type",
    "load",
    "load_callback",
    "load_footprints",
    "load_strategy",
    "make_strategy",
    "register_strategy",
    "strategies",
    "strategy_infos",
]


@dataclass(frozen=True)
class StrategyInfo:
    """What the core knows of a strategy without importing it. Paths are written ``"module:attribute"``.

    Attributes:
        path: path of the class.
        names: short names, each with the options that it stands for.
        aliases: Lightning's other names, each with the short name and the further options that it stands for.
        refused: Lightning's names that are not supported, each with what to use instead. A name that continues one of them
            after an underscore is refused the same way.
        command_line: names whose options may come from the command line of the script, each with the path of a function that
            gets its arguments and returns options, or ``None`` if they say nothing.
        devices: types of torch devices that the strategy runs on.
        auto: for which types of devices ``strategy="auto"`` chooses it, each with the short name; not for one device only.
        one_device: it runs on one device in one process, and takes no options about processes.
        one_process: one process drives all devices of a node.
        process_group: the backend of torch's process group can be chosen, by the option ``process_group_backend``.
        handlers: class names of Accelerate's ``kwargs_handlers`` whose ``strategy_options()`` its constructor takes.
        distributed_type: Accelerate's ``DistributedType`` that it reports; ``None``: by device and number of processes.
        file_types: values of ``distributed_type`` in Accelerate's configuration files that mean it, each with the short name.
        file_aliases: other spellings of these values, in lower case, each with the value.
        plugin: path of the function that reads their section for it, as ``(file, **options)``, into a
            :class:`trainkit.config.settings.Plugin`; ``None``: they have no section for it.
        footprints: what ``trainer.plan`` compares, the fastest first: paths, each with the options to call it with. The
            result has ``footprint`` and ``supported_precisions``.
        packages: the backend's packages: ``trainkit env`` shows their versions, and their frames are not the user's.
        variables: prefixes of environment variables that configure the backend, which ``trainkit env`` shows.
        parameter_marks: attributes that the backend gives to parameters which it manages.
        shape_attribute: attribute of a sharded parameter that holds the shape of the whole one.
        swapped_devices: types of devices whose tensors cannot be put into a parameter, so that a module is moved to and from
            them by swapping the tensors of its parameters.
        adam_classes: class names of the backend's optimizers whose state is that of ``torch.optim.Adam``, each with the
            attribute that says whether weight decay is decoupled, as in ``AdamW``.
        host_optimizers: class names of the backend's optimizers that step on the CPU only.
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
    process_group: bool = True
    handlers: tuple[str, ...] = ()
    distributed_type: str | None = None
    file_types: Mapping[str, str] = field(default_factory=dict)
    file_aliases: Mapping[str, str] = field(default_factory=dict)
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
    aliases={"auto": ("single", {})},
    refused={"single_device": "write strategy='auto' and choose the device with accelerator='cpu', 'gpu' or 'mps'"},
    one_device=True,
    process_group=False,
    file_types={"NO": "single"},
    footprints=(("trainkit.strategy:Strategy", {"device": "cpu"}),),
)
"""The base class, :class:`trainkit.Strategy`: one device."""

CALLBACKS: dict[str, str] = {
    "early_stopping": "trainkit.callbacks.early_stopping:EarlyStopping",
    "gradient_clipping": "trainkit.callbacks.gradient_clipping:GradientClipping",
    "learning_rate_monitor": "trainkit.callbacks.learning_rate_monitor:LearningRateMonitor",
    "model_checkpoint": "trainkit.callbacks.model_checkpoint:ModelCheckpoint",
    "model_summary": "trainkit.callbacks.model_summary:ModelSummary",
    "progress_bar": "trainkit.callbacks.progress_bar:TQDMProgressBar",
    "recompile_monitor": "trainkit.callbacks.recompile_monitor:RecompileMonitor",
    "timer": "trainkit.callbacks.timer:Timer",
}

# Lightning's strategies for which there is nothing here, by the beginning of their names.
_NOT_YET = ("hpu", "horovod", "bagua", "colossalai")

_registered: list[StrategyInfo] = []


def register_strategy(info: StrategyInfo) -> None:
    """Make a strategy known by its short names: ``Trainer(strategy="mine")``.

    The strategies of ``trainkit.strategies`` need no call: that package lists them.

    Raises:
        ConfigurationError: one of its names is taken.
    """
    taken = {name for one in strategy_infos() for name in (*one.names, *one.aliases)}
    twice = sorted(taken.intersection((*info.names, *info.aliases)))
    if twice:
        raise ConfigurationError(
            f"register_strategy: the name {twice[0]!r} is taken, and names of strategies must be unique. Choose another: "
            f"StrategyInfo(names={{'my_{twice[0]}': {{}}}}, ...)"
        )
    _registered.append(info)


def strategy_infos() -> tuple[StrategyInfo, ...]:
    """What all strategies declare: one device, then those of ``trainkit.strategies``, then the registered ones."""
    return (*_built_in(), *_registered)


@cache
def _built_in() -> tuple[StrategyInfo, ...]:
    packages: Iterable[str] = load("trainkit.strategies:PACKAGES")
    return (SINGLE, *(load(f"trainkit.strategies.{package}.info:INFO") for package in packages))


def strategies() -> dict[str, str]:
    """Short names of all strategies → paths of their classes, in alphabetical order."""
    return dict(sorted((name, info.path) for info in strategy_infos() for name in info.names))


def find_info(name: str) -> StrategyInfo | None:
    """The declaration of the strategy with a short name or one of Lightning's; ``None`` if no strategy has that name."""
    return next((info for info in strategy_infos() if name in info.names or name in info.aliases), None)


def find_info_by_type(distributed_type: str | None) -> StrategyInfo | None:
    """The declaration of the strategy that a ``distributed_type`` in a configuration file means, if it means one."""
    return next((info for info in strategy_infos() if distributed_type in info.file_types), None)


def automatic_info(device: str) -> StrategyInfo:
    """The declaration of the strategy that ``strategy="auto"`` means on devices of a type.

    Args:
        device: a type of torch's devices, such as ``"cuda"``.
    """
    return next((info for info in strategy_infos() if device in info.auto), SINGLE)


def automatic_strategy(device: str) -> str:
    """The short name of the strategy that ``strategy="auto"`` means on several devices of a type."""
    return automatic_info(device).auto.get(device, "single")


def load_callback(name: str) -> Any:
    """The callback class of a short name, imported now.

    Raises:
        UnknownNameError: no callback has that name.
    """
    if name not in CALLBACKS:
        raise UnknownNameError(f"unknown callback {name!r}; known: {', '.join(CALLBACKS)}.{nearest(name, list(CALLBACKS))}")
    return load(CALLBACKS[name])


def load_footprints() -> list[Any]:
    """What a memory plan compares, the fastest strategies first."""
    return [load(path)(**options) for info in strategy_infos() for path, options in info.footprints]


def load_strategy(name: str) -> Any:
    """The strategy class of a short name, imported now.

    Raises:
        ConfigurationError: no string.
        UnsupportedArgumentError: a strategy of Lightning's that is not supported; the message says what to use.
        UnknownNameError: no strategy has that name.
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
    if name.lower().startswith(_NOT_YET):
        raise UnsupportedArgumentError(
            f"strategy={name!r} is not in this version: use strategy='auto', or one of {', '.join(map(repr, known))}."
        )
    names = sorted({*known, *(alias for info in strategy_infos() for alias in info.aliases)})
    raise UnknownNameError(f"unknown strategy {name!r}; known: {', '.join(names)}.{nearest(name, names)}")


def make_strategy(strategy: Any, **options: Any) -> Any:
    """The strategy of a name, ``"auto"`` among them, or the object itself.

    Args:
        strategy: a name, or a :class:`trainkit.Strategy` object.
        **options: arguments of the class, where a name was given.

    Raises:
        ConfigurationError: neither of the two, or a name that :func:`load_strategy` refuses.
    """
    if isinstance(strategy, str):
        info = find_info(strategy)
        if info is None:
            return load_strategy(strategy)(**options)  # which raises
        name, own = info.aliases.get(strategy, (strategy, {}))
        if strategy in info.command_line and (told := load(info.command_line[strategy])(sys.argv[1:])) is not None:
            return load(info.path)(**{**told, **options})
        return load(info.path)(**{**info.names[name], **own, **options})
    if isinstance(strategy, type) or not hasattr(strategy, "optimizer_step"):
        raise ConfigurationError(f"strategy must be a name or a Strategy object, not {strategy!r}. Use strategy='auto'.")
    return strategy


def load(path: str) -> Any:
    """Import what a path names: ``"module:attribute"``."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
