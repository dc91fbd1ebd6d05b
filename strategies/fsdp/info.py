"""What the registry knows about `FSDPStrategy` without importing it.

A file of its own because the registry reads it without importing the strategy and its backend.
"""

from __future__ import annotations

from trainkit.registry import StrategyInfo

__all__ = ["INFO"]

_PATH = "trainkit.strategies.fsdp.fsdp_strategy:FSDPStrategy"

INFO = StrategyInfo(
    path=_PATH,
    names={"fsdp": {}},
    aliases={"fsdp2": ("fsdp", {}), "fsdp_cpu_offload": ("fsdp", {"offload_params": "cpu"})},
    devices=("cpu", "cuda"),
    distributed_type="FSDP",
    file_types={"FSDP": "fsdp"},
    sections=("fsdp_config", "parallelism_config"),
    plugin="trainkit.config.fsdp_plugin:fsdp_plugin_of_keys",
    footprints=((_PATH, {"device": "cpu"}),),
)
