"""What an ``Accelerator`` works with, as Accelerate's scripts ask for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from trainkit.accelerator.options import Options, mixed_name
from trainkit.console import notice
from trainkit.errors import nearest
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
        fix = INSTEAD.get(name)
        text = f" Use {fix}." if fix else nearest(name, [one for one in dir(type(self)) if not one.startswith("_")])
        # Python would add another "Did you mean", if it knew the object
        raise AttributeError(f"an Accelerator has no {name!r}.{text}", name=name, obj=None)


_ONLY_ZERO = "ZeRO-3: Accelerator(strategy='zero3'); parameters are divided in no other way, and sequences are not"
_NO_FP8 = "mixed_precision='bf16': FP8 is not offered"
_OPTIONS = "accelerator.options, which has what the accelerator was made with"
_YOURS = "the object that you have given in kwargs_handlers"

# What Accelerate's has and ours has not, with what to use.
INSTEAD = {
    "ao_recipe_handler": _NO_FP8,
    "autocast_handler": _YOURS,
    "context_parallel_rank": _ONLY_ZERO,
    "data_parallel_rank": "accelerator.process_index",
    "data_parallel_shard_rank": "accelerator.process_index",
    "dataloader_config": "accelerator.even_batches, accelerator.split_batches, or the object that you have given",
    "ddp_handler": _YOURS,
    "deepspeed_ulysses_dl_adapter": _ONLY_ZERO,
    "delayed_fp8_autocast": _NO_FP8,
    "device_placement": _OPTIONS,
    "dispatch_batches": "nothing: each process reads what it works on, which is dispatch_batches=False",
    "flag_tensor": "accelerator.check_trigger()",
    "fp8_backend": _NO_FP8,
    "fp8_enabled": _NO_FP8,
    "fp8_recipe_handler": _NO_FP8,
    "fsdp_plugin": "ZeRO-3: Accelerator(strategy='zero3')",
    "gradient_state": "accelerator.sync_gradients",
    "has_fp8_handler": _NO_FP8,
    "has_lomo_optimizer": "an optimizer of torch's",
    "init_handler": _YOURS,
    "is_composable_parallelism_enabled": "accelerator.distributed_type",
    "is_fsdp2": "accelerator.distributed_type, which never is FSDP",
    "log_with": "accelerator.trackers",
    "lomo_backward": "accelerator.backward(loss) and an optimizer of torch's",
    "maybe_context_parallel": _ONLY_ZERO,
    "msamp_recipe_handler": _NO_FP8,
    "multi_device": "accelerator.num_processes > 1",
    "non_blocking": "nothing: copies out of pinned memory never wait",
    "parallelism_config": _ONLY_ZERO,
    "pipeline_parallel_rank": _ONLY_ZERO,
    "profile_handler": _YOURS,
    "register_load_state_pre_hook": "accelerator.register_for_checkpointing(object), or load_state(folder, restore={'model'})",
    "register_save_state_pre_hook": "accelerator.register_for_checkpointing(object), or save_model(model, folder)",
    "rng_types": "nothing: all generators are seeded, for each micro-batch by a key, on all processes",
    "scaler": "accelerator.strategy.precision.scaler",
    "scaler_handler": _YOURS,
    "should_save_model": "nothing: save_state always writes the model",
    "step_scheduler_with_optimizer": _OPTIONS,
    "te_recipe_handler": _NO_FP8,
    "tensor_parallel_rank": _ONLY_ZERO,
    "torch_device_mesh": _ONLY_ZERO,
    "torch_tp_plugin": "ZeRO-3: Accelerator(strategy='zero3')",
    "trigger_sync_in_backward": "accelerator.accumulate(model), where the last micro-batch of a window lets gradients travel",
    "use_seedable_sampler": "nothing: the order of an epoch always is a function of the seed and its number",
    "use_stateful_dataloader": "load_state(folder, resume_loaders=True), which continues each prepared loader where it was",
    "verify_device_map": "nothing: a model is on one device in each process, or divided by ZeRO-3",
}
