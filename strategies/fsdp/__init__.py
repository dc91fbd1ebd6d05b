"""`FSDPStrategy`: parameters, gradients and optimizer state sharded with torch's `fully_shard`.

`INFO` declares it to the registry. Importing this package imports neither the class nor its backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily
from trainkit.registry import StrategyInfo

if TYPE_CHECKING:
    from trainkit.strategies.fsdp.fsdp_strategy import FSDPStrategy

__all__ = ["INFO", "FSDPStrategy"]

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

__getattr__, __dir__ = lazily(globals(), {"FSDPStrategy": "fsdp_strategy"})
