"""What the registry knows about `XLAStrategy` without importing it.

A file of its own because the registry reads it without importing the strategy and its backend.
"""

from __future__ import annotations

from trainkit.registry import StrategyInfo

__all__ = ["INFO"]

INFO = StrategyInfo(
    path="trainkit.strategies.xla.xla_strategy:XLAStrategy",
    names={"xla": {}},
    aliases={"xla_fsdp": ("xla", {"fsdp": True})},
    refused={
        "single_xla": "write strategy='xla', devices=1",
        "tpu_spawn": "write strategy='xla' with the same devices",
        "xla_debug": "write strategy='xla', and use the callback RecompileMonitor to see what is compiled",
    },
    devices=("xla", "cpu"),  # the CPU, with XLA's CPU runtime
    auto={"xla": "xla"},
    one_process=True,
    process_group=False,
    distributed_type="XLA",
    file_types={"XLA": "xla"},
    file_aliases={"tpu": "XLA"},
    packages=("torch_xla",),
    variables=("PJRT_", "TPU_", "XLA_"),
    swapped_devices=("xla",),
)
