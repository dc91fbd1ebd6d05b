"""What an ``Accelerator`` works with, as Accelerate's scripts ask for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from trainkit.accelerator.options import Options, mixed_name
from trainkit.config.configurations import ProjectConfiguration
from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
from trainkit.config.distributed_type import DistributedType
from trainkit.console import notice
from trainkit.errors import nearest
from trainkit.strategy import Strategy
from trainkit.unsupported import advice

__all__ = ["AcceleratorState", "FactVerbs"]


@dataclass(frozen=True)
class AcceleratorState:
    """``accelerator.state``.

    Attributes:
        distributed_type: what distributes the run.
        num_processes: as of the accelerator; the others likewise.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        deepspeed_plugin: with ``zero_stage`` and ``deepspeed_config``; ``None`` where it is not ZeRO that runs.
    """

    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    mixed_precision: str
    deepspeed_plugin: DeepSpeedPlugin | None = None

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
    _even: bool

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
        """The plugin as it was given, else the one that the strategy describes itself by."""
        plugin: Any = self.strategy.plugin if self.options.plugin is None else self.options.plugin
        return plugin  # type: ignore[no-any-return]

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``; ``strategy.precision`` knows more."""
        return mixed_name(self.strategy.precision)

    @property
    def native_amp(self) -> bool:
        """Whether forwards run under autocast. Setting it has no effect: the precision is an argument of the accelerator."""
        return self.strategy.precision.autocast_dtype is not None

    @native_amp.setter
    def native_amp(self, native: bool) -> None:
        if bool(native) is not self.native_amp:
            notice(
                f"accelerator.native_amp = {native} has no effect: the precision is {self.strategy.precision.name}. To choose "
                f"another: Accelerator(mixed_precision={'bf16' if native else 'no'!r})"
            )

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the project."""
        return self.project.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the trackers that write files."""
        return self.project.logging_dir

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """ZeRO's options; ``None`` where it is not ZeRO that runs."""
        return self._plugin()

    @property
    def even_batches(self) -> bool:
        """Whether all processes are given as many batches, of loaders that are prepared from here on."""
        return self._even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._even = even

    def __getattr__(self, name: str) -> Any:
        fix = advice("accelerator", name)
        text = f" Use {fix}." if fix else nearest(name, [one for one in dir(type(self)) if not one.startswith("_")])
        # Python would add another "Did you mean", if it knew the object
        raise AttributeError(f"an Accelerator has no {name!r}.{text}", name=name, obj=None)
