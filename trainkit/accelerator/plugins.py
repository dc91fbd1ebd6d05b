"""The arguments of `Accelerator` that are options of a strategy: Accelerate's plugins, and `parallelism_config`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
from trainkit.config.fsdp_plugin import FullyShardedDataParallelPlugin, ParallelismConfig
from trainkit.config.settings import Plugin, Settings
from trainkit.errors import ConfigurationError

__all__ = ["check_plugins", "given_plugin"]

_KINDS: dict[str, type] = {
    "deepspeed_plugin": DeepSpeedPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "parallelism_config": ParallelismConfig,
}


def check_plugins(given: Mapping[str, Any]) -> None:
    """Check the types of these arguments, and that they do not contradict each other.

    Raises:
        ConfigurationError: one is of another type, or two of them choose a strategy.
    """
    for name, kind in _KINDS.items():
        if given[name] is not None and not isinstance(given[name], kind):
            raise ConfigurationError(
                f"{name} must be a {kind.__name__}, not {given[name]!r}: from trainkit.utils import {kind.__name__}"
            )
    several = [name for name in ("strategy", "deepspeed_plugin", "fsdp_plugin") if given[name] is not None]
    if given["parallelism_config"] is not None and several != ["fsdp_plugin"]:
        several.append("parallelism_config")
    if len(several) > 1:
        raise ConfigurationError(f"{'= and '.join(several)}= were given. Give one of them.")


def given_plugin(given: Mapping[str, Any], settings: Settings) -> Plugin | None:
    """The options of a strategy that the arguments have; `None` without them."""
    parallelism: ParallelismConfig | None = given["parallelism_config"]
    plugin: Any = given["deepspeed_plugin"] or given["fsdp_plugin"]
    if parallelism is None or not parallelism.is_set:
        return plugin  # type: ignore[no-any-return]
    plugin = plugin or settings.plugin()
    sharded = copy.copy(plugin) if isinstance(plugin, FullyShardedDataParallelPlugin) else FullyShardedDataParallelPlugin()
    sharded.parallelism = parallelism
    return sharded
