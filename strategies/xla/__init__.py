"""`XLAStrategy`: TPUs and other XLA devices, through torch_xla.

`INFO` declares it to the registry. Importing this package imports neither the class nor its backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.names import lazily
from trainkit.registry import StrategyInfo

if TYPE_CHECKING:
    from trainkit.strategies.xla.xla_strategy import XLAStrategy

__all__ = ["INFO", "XLAStrategy"]

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

__getattr__, __dir__ = lazily(globals(), {"XLAStrategy": "xla_strategy"})
