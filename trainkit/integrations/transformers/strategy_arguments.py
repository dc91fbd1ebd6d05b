"""The strategy that `TrainingArguments` ask for: ZeRO, FSDP, or DDP with options.

A file of its own because no other file of this room names a strategy.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from transformers import TrainingArguments

from trainkit.config.fsdp_plugin import FullyShardedDataParallelPlugin
from trainkit.config.fsdp_plugin import ParallelismConfig as Parallelism
from trainkit.errors import ConfigurationError
from trainkit.integrations.transformers.refusals import Refusals
from trainkit.strategies import DDPStrategy, FSDPStrategy, ZeROStrategy

__all__ = ["strategy_of"]

# TrainingArguments → DDPStrategy
_DDP = {
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_static_graph": "static_graph",
}


def strategy_of(args: TrainingArguments, refusals: Refusals) -> Any:
    """The strategy: ZeRO, FSDP, DDP with options, or what the launcher asks for."""
    if args.deepspeed:
        return ZeROStrategy(config=args.deepspeed)
    if args.fsdp:
        return _fsdp(args, refusals)
    if args.parallelism_config is not None:
        refusals.add("parallelism_config", args.parallelism_config, "it needs fsdp. Set fsdp=True")
    options = {ours: getattr(args, name) for name, ours in _DDP.items() if getattr(args, name) is not None}
    return DDPStrategy(**options) if options else "auto"


def _fsdp(args: TrainingArguments, refusals: Refusals) -> Any:
    if args.fsdp_plugin_args is None:
        refusals.add("fsdp_config", {"xla": True}, "on a TPU: Trainer(strategy='xla')")
        return "auto"
    try:
        plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
        if args.parallelism_config is not None:
            names = [field.name for field in dataclasses.fields(Parallelism) if not field.name.endswith("handler")]
            sizes = {name: getattr(args.parallelism_config, name, None) for name in names}
            plugin.parallelism = Parallelism(**sizes)
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        return FSDPStrategy(**plugin.options_for(short=False, processes=args.world_size, nodes=nodes, without=()))
    except ConfigurationError as error:
        refusals.add("fsdp_config", args.fsdp_config, str(error))
        return "auto"
