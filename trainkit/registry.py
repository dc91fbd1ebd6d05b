"""Short names → import paths, loaded on use.

The core knows strategies and callbacks only by the names in these tables, so that nothing is imported that a run does not
use and the core never depends on the two folders.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError, nearest
from trainkit.launch.arguments import deepspeed_config

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

__all__ = [
    "CALLBACKS",
    "FOOTPRINTS",
    "STRATEGIES",
    "load_callback",
    "load_footprints",
    "load_strategy",
    "make_strategy",
]

STRATEGIES: dict[str, str] = {
    "ddp": "trainkit.strategies.ddp.ddp_strategy:DDPStrategy",
    "single": "trainkit.strategy:Strategy",
    "xla": "trainkit.strategies.xla.xla_strategy:XLAStrategy",
    "zero1": "trainkit.strategies.zero.zero_strategy:ZeROStrategy",
    "zero2": "trainkit.strategies.zero.zero_strategy:ZeROStrategy",
    "zero3": "trainkit.strategies.zero.zero_strategy:ZeROStrategy",
    "zero3_offload": "trainkit.strategies.zero.zero_strategy:ZeROStrategy",
}

# What a plan of memory compares, the cheapest in time first: paths, and options. Each has footprint, supported_precisions.
_ZERO = "trainkit.strategies.zero.memory_plan:ZeROMemory"
FOOTPRINTS: list[tuple[str, dict[str, Any]]] = [
    (STRATEGIES["single"], {"device": "cpu"}),
    (STRATEGIES["ddp"], {"device": "cpu"}),
    *((_ZERO, {"stage": stage}) for stage in (1, 2, 3)),
    *((_ZERO, {"stage": stage, "offload_optimizer": "cpu"}) for stage in (1, 2, 3)),
    (_ZERO, {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}),
    (_ZERO, {"stage": 3, "offload_optimizer": "nvme", "nvme_path": "."}),
    (_ZERO, {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": "."}),
]

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

# The options that a name stands for.
_OPTIONS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
}

# Other names of a strategy, Lightning's among them, with the options that they stand for besides.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto": ("single", {}),
    "ddp_find_unused_parameters_false": ("ddp", {}),
    "ddp_find_unused_parameters_true": ("ddp", {"find_unused_parameters": True}),
    "deepspeed": ("zero2", {}),
    "deepspeed_stage_1": ("zero1", {}),
    "deepspeed_stage_1_offload": ("zero1", {"offload_optimizer": "cpu"}),
    "deepspeed_stage_2": ("zero2", {}),
    "deepspeed_stage_2_offload": ("zero2", {"offload_optimizer": "cpu"}),
    "deepspeed_stage_3": ("zero3", {}),
    "deepspeed_stage_3_offload": ("zero3_offload", {}),
    "xla_fsdp": ("xla", {"fsdp": True}),
}

# What Lightning calls by these names, and what to use here.
_STARTED = "processes are not started by the strategy. Write strategy='ddp': a script is started once for each device"
_NOT_OURS: dict[str, str] = {
    "ddp_fork": _STARTED,
    "ddp_notebook": "processes are not started by the strategy. Put the training into a function, leave strategy out, and "
    "start it from the notebook with: notebook_launcher(function, num_processes=2)",
    "ddp_spawn": _STARTED,
    "dp": "DataParallel is not offered, it is slower than DDP. Use strategy='ddp', with the same devices",
    "deepspeed_stage_3_offload_nvme": "name the folder on the NVMe disk: ZeROStrategy(stage=3, offload_optimizer='nvme', "
    "offload_params='nvme', nvme_path='/local_nvme')",
    "fsdp": "parameters are sharded by ZeRO. Use strategy='zero3'",
    "single_xla": "write strategy='xla', devices=1",
    "tpu_spawn": "write strategy='xla', with the same devices",
    "xla_debug": "write strategy='xla'; what is compiled is told by the callback RecompileMonitor",
    "single_device": "write strategy='auto' and choose the device with accelerator='cpu', 'gpu' or 'mps'",
}
_NOT_YET = ("hpu", "horovod", "bagua", "colossalai")


def load_callback(name: str) -> Any:
    """The callback class of a short name, imported now.

    Raises:
        UnknownNameError: no callback has that name.
    """
    return _load(_path(name, CALLBACKS, "callback"))


def load_footprints() -> list[Any]:
    """What a plan of memory compares, of :data:`FOOTPRINTS`."""
    return [_load(path)(**options) for path, options in FOOTPRINTS]


def load_strategy(name: str) -> Any:
    """The strategy class of a short name, imported now.

    Raises:
        UnsupportedArgumentError: a strategy of Lightning's that is not offered; the message names what to use.
        UnknownNameError: nobody knows the name.
    """
    if not isinstance(name, str):
        raise ConfigurationError(
            f"strategy must be a name ({', '.join(map(repr, ('auto', *STRATEGIES)))}) or a Strategy object, not {name!r}."
        )
    if name not in STRATEGIES:
        kind = next((key for key in _NOT_OURS if name == key or name.startswith(f"{key}_")), None)
        if kind is not None:
            raise UnsupportedArgumentError(f"strategy={name!r}: {_NOT_OURS[kind]}.")
        if name.lower().startswith(_NOT_YET):
            raise UnsupportedArgumentError(
                f"strategy={name!r} is not in this version: it has one device (strategy='auto'), DDP ('ddp'), ZeRO "
                "('zero1', 'zero2', 'zero3') and XLA ('xla')."
            )
    return _load(_path(name, STRATEGIES, "strategy"))


def make_strategy(strategy: str | Strategy, **options: Any) -> Strategy:
    """The strategy of a name, ``"auto"`` among them, or the object itself.

    Args:
        strategy: a name, or a ``Strategy`` object; with "deepspeed" the command line's ``--deepspeed_config FILE`` counts.
        **options: arguments of the class, where a name was given.

    Raises:
        ConfigurationError: neither of the two, or a name as of :func:`load_strategy`.
    """
    if isinstance(strategy, str):
        name, own = _VARIANTS.get(strategy, (strategy, {}))
        if strategy == "deepspeed" and (file := deepspeed_config(sys.argv[1:])) is not None:
            return load_strategy(name)(config=file, **options)  # type: ignore[no-any-return]
        made: Strategy = load_strategy(name)(**{**_OPTIONS.get(name, {}), **own, **options})
        return made
    if isinstance(strategy, type) or not hasattr(strategy, "optimizer_step"):
        raise ConfigurationError(f"strategy must be a name or a Strategy object, not {strategy!r}. Use strategy='auto'.")
    return strategy


def _path(name: str, table: dict[str, str], kind: str) -> str:
    if name not in table:
        known = sorted({*_VARIANTS, *table}) if kind == "strategy" else list(table)
        raise UnknownNameError(f"unknown {kind} {name!r}; known: {', '.join(known)}.{nearest(name, known)}")
    return table[name]


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
