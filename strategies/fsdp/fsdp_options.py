"""The options of `FSDPStrategy`: checked, and as the arguments of torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from trainkit.errors import ConfigurationError
from trainkit.module.blocks import Choice
from trainkit.precision import Precision, is_short
from trainkit.strategies.fsdp.units import Wrap

__all__ = ["FSDPOptions"]


@dataclass(frozen=True)
class FSDPOptions:
    """The arguments of `FSDPStrategy`, which explains them.

    Raises:
        ConfigurationError: One is wrong.
    """

    wrap: Wrap = None
    reshard_after_forward: bool | int | None = None
    mixed_precision: MixedPrecisionPolicy | None = None
    offload_params: Literal["cpu"] | None = None
    replicas: int = 1
    tensor_parallel: int = 1
    ignored_modules: Choice | Sequence[Choice] | None = None
    accumulate: Literal["once", "reshard"] = "once"
    forward_methods: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, known in (("offload_params", (None, "cpu")), ("accumulate", ("once", "reshard"))):
            value = getattr(self, name)
            if value not in known:
                raise ConfigurationError(
                    f"{name}={value!r}: expected {' or '.join(map(repr, known))}. For example: "
                    f"FSDPStrategy({name}={known[-1]!r})"
                )
        for name in ("replicas", "tensor_parallel"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name}={value!r}: expected a whole number ≥ 1. For example: FSDPStrategy({name}=2)")
        if isinstance(self.forward_methods, str) or not all(isinstance(name, str) for name in self.forward_methods):
            raise ConfigurationError(
                f"forward_methods={self.forward_methods!r}: expected a list of names of methods. For example: "
                "FSDPStrategy(forward_methods=['encode'])"
            )
        if self.mixed_precision is not None and not isinstance(self.mixed_precision, MixedPrecisionPolicy):
            raise ConfigurationError(
                f"mixed_precision={self.mixed_precision!r}: expected torch.distributed.fsdp.MixedPrecisionPolicy. To compute "
                "in bfloat16: Trainer(precision='bf16-mixed' or 'bf16-true'), without mixed_precision"
            )

    def changed(self) -> dict[str, Any]:
        """The options that do not have their default."""
        return {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}

    def needed_alone(self, precision: Precision) -> bool:
        """Whether a single process needs `fully_shard` too: for master weights, or to offload parameters."""
        return self.offload_params is not None or self.mixed_precision is not None or is_short(precision)

    def convert(self, module: nn.Module, precision: Precision, whole: Collection[nn.Parameter]) -> None:
        """Convert a module to the dtypes of the precision; shards of 16-bit parameters are float32 master weights.

        Args:
            module: The module.
            precision: The precision.
            whole: The parameters that are not sharded. They are not gathered in 16 bits, so they are 16 bits themselves.
        """
        if self.mixed_precision is not None or not is_short(precision):
            precision.convert_module(module)
            precision.note_other_dtypes(module)
            return
        for tensor in (*module.parameters(), *module.buffers()):
            sharded = isinstance(tensor, nn.Parameter) and (tensor not in whole or not tensor.ndim)
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if sharded else precision.parameter_dtype)

    def convert_back(self, module: nn.Module, precision: Precision) -> None:
        """After a run, convert float32 master weights to the dtype of the precision, as other strategies leave them."""
        if self.mixed_precision is None and is_short(precision):
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(precision.parameter_dtype)

    def arguments(self, precision: Precision, device: torch.device) -> dict[str, Any]:
        """Arguments of `fully_shard` for each unit."""
        policy = self.mixed_precision
        if policy is None and is_short(precision):  # the precision converts the inputs
            policy = MixedPrecisionPolicy(precision.parameter_dtype, torch.float32, cast_forward_inputs=False)
        return {
            "mp_policy": policy or MixedPrecisionPolicy(),
            "offload_policy": OffloadPolicy()
            if self.offload_params is None
            else CPUOffloadPolicy(pin_memory=device.type == "cuda"),
            "reshard_after_forward": self.reshard_after_forward,
        }
