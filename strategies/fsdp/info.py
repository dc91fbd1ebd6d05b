"""What the registry knows about `FSDPStrategy` without importing it."""

from __future__ import annotations

from trainkit.registry import StrategyInfo

__all__ = ["INFO"]

INFO = StrategyInfo(
    path="trainkit.strategies.fsdp.fsdp_strategy:FSDPStrategy",
    names={"fsdp": {}},
    aliases={"fsdp2": ("fsdp", {}), "fsdp_cpu_offload": ("fsdp", {"offload_params": "cpu"})},
    devices=("cpu", "cuda"),
    distributed_type="FSDP",
    file_types={"FSDP": "fsdp"},
    sections=("fsdp_config", "parallelism_config"),
    plugin="trainkit.config.fsdp_plugin:fsdp_plugin_of_keys",
)
