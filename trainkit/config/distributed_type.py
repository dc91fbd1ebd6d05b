"""`DistributedType`: what distributes a run, by Accelerate's names."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

__all__ = ["DistributedType", "distributed_type"]


class DistributedType(str, enum.Enum):
    """How a run is distributed: `accelerator.distributed_type == DistributedType.MULTI_GPU`. Members are also strings.

    `NO` is one process, `MULTI_CPU` and `MULTI_GPU` are DDP, `DEEPSPEED` is ZeRO, `FSDP` is PyTorch's FSDP2, and
    `TPU` is another name for `XLA`. No run has one of the others, which exist so that scripts can compare with them.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # noqa: PIE796 - an alias

    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_NPU = "MULTI_NPU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_XPU = "MULTI_XPU"

    def __str__(self) -> str:
        return str(self.value)


def distributed_type(strategy: Strategy) -> DistributedType:
    """The type of a strategy that has joined its processes."""
    if strategy.info.distributed_type is not None:
        return DistributedType(strategy.info.distributed_type)
    if strategy.world_size == 1:
        return DistributedType.NO
    return DistributedType.MULTI_CPU if strategy.device.type == "cpu" else DistributedType.MULTI_GPU
