"""What an ``Accelerator`` works with, as Accelerate's scripts ask for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from trainkit.accelerator.options import Options, mixed_name
from trainkit.errors import ConfigurationError
from trainkit.strategy import Strategy
from trainkit.utils.configurations import ProjectConfiguration
from trainkit.utils.deepspeed_plugin import DeepSpeedPlugin
from trainkit.utils.distributed_type import DistributedType

__all__ = ["AcceleratorState", "FactVerbs"]


@dataclass(frozen=True)
class AcceleratorState:
    """``accelerator.state``.

    Attributes:
        distributed_type: what distributes the run.
        num_processes: as of the accelerator; the others likewise.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        deepspeed_plugin: with ``zero_stage`` and ``deepspeed_config``.
    """

    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    mixed_precision: str
    _plugin: DeepSpeedPlugin | None = None

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin:
        """ZeRO's options.

        Raises:
            ConfigurationError: it is not ZeRO that runs.
        """
        if self._plugin is None:
            raise ConfigurationError(
                f"state.deepspeed_plugin: distributed_type is {self.distributed_type}. Ask for it first: "
                "if accelerator.distributed_type == DistributedType.DEEPSPEED"
            )
        return self._plugin

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def use_distributed(self) -> bool:
        """Whether micro-batches are worked on side by side."""
        return self.num_processes > 1


class FactVerbs:
    """The properties of :class:`trainkit.Accelerator` that say what it works with."""

    strategy: Strategy
    options: Options
    project: ProjectConfiguration

    @property
    def state(self) -> AcceleratorState:
        """What there is, in one object."""
        me: Any = self
        return AcceleratorState(
            me.distributed_type,
            me.num_processes,
            me.process_index,
            me.local_process_index,
            me.device,
            self.mixed_precision,
            self._plugin(),
        )

    def _plugin(self) -> DeepSpeedPlugin | None:
        """Of ZeRO, whoever has asked for it."""
        if self.options.plugin is not None or not self.strategy.sharded_state:
            return self.options.plugin
        config: Any = self.strategy
        return DeepSpeedPlugin(zero_stage=config.stage)

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``; ``strategy.precision`` knows more."""
        return mixed_name(self.strategy.precision)

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the project."""
        return self.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the trackers that write files."""
        return self.project.logging_dir
