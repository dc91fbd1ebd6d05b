"""What scripts for Accelerate ask an `Accelerator`: its state, its precision, and names that only Accelerate has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from trainkit.accelerator.options import mixed_name
from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
from trainkit.config.fsdp_plugin import FullyShardedDataParallelPlugin
from trainkit.config.kwargs_handlers import DistributedType, distributed_type
from trainkit.config.settings import Plugin
from trainkit.console import notice
from trainkit.errors import nearest
from trainkit.names import advice
from trainkit.strategy import Strategy

__all__ = ["AcceleratorState", "no_attribute", "plugin_of", "refuse_precision", "state_of"]

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class AcceleratorState:
    """The device, the processes and the precision of a run: `accelerator.state`.

    Attributes:
        distributed_type: How the run is distributed.
        num_processes: As `Accelerator.num_processes`.
        process_index: The rank of this process.
        local_process_index: The rank of this process on its node.
        device: The device of this process.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`.
        deepspeed_plugin: The options of ZeRO, with `zero_stage` and `deepspeed_config`; `None` without ZeRO.
        fsdp_plugin: The options of FSDP; `None` without FSDP.
    """

    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    mixed_precision: str
    deepspeed_plugin: DeepSpeedPlugin | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process, rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_process_index == 0

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes, or a process drives several devices."""
        return self.num_processes > 1


def state_of(strategy: Strategy, plugin: Plugin | None) -> AcceleratorState:
    """`accelerator.state`.

    Args:
        strategy: That of the run.
        plugin: The plugin that `Accelerator` was given.
    """
    return AcceleratorState(
        distributed_type(strategy),
        strategy.world_size,
        strategy.rank,
        strategy.local_rank,
        strategy.device,
        mixed_name(strategy.precision),
        plugin_of(strategy, plugin, DeepSpeedPlugin),
        plugin_of(strategy, plugin, FullyShardedDataParallelPlugin),
    )


def plugin_of(strategy: Strategy, plugin: Plugin | None, kind: type[_Kind]) -> _Kind | None:
    """The plugin that was given, else the one that the strategy describes itself by; `None` if it is of another kind."""
    found = strategy.plugin if plugin is None else plugin
    return found if isinstance(found, kind) else None


def refuse_precision(strategy: Strategy, native: bool) -> None:
    """Print that setting `accelerator.native_amp` has no effect, if it would change the precision."""
    if bool(native) is not (strategy.precision.autocast_dtype is not None):
        notice(
            f"accelerator.native_amp = {native} has no effect: the precision is {strategy.precision.name}. To choose "
            f"another: Accelerator(mixed_precision={'bf16' if native else 'no'!r})"
        )


def no_attribute(kind: type, name: str) -> AttributeError:
    """The error for an attribute that an `Accelerator` does not have, with what to use instead.

    Args:
        kind: The class of the accelerator.
        name: The attribute.
    """
    fix = advice("accelerator", name)
    text = f" Use {fix}." if fix else nearest(name, [one for one in dir(kind) if not one.startswith("_")])
    # With obj=accelerator Python would add another "Did you mean".
    return AttributeError(f"an Accelerator has no {name!r}.{text}", name=name, obj=None)
