"""The configuration of ZeRO: checks the options before the run starts, and converts them to a DeepSpeed configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any

import torch

from trainkit.checks import Check, argument, check_arguments, is_whole, optional, whole_number
from trainkit.errors import ConfigurationError, nearest
from trainkit.precision import Precision

__all__ = ["CHECKPOINTING", "COMMUNICATION", "NO_VALUES", "RUN_IS_OVER", "ZeROConfig"]

NO_VALUES = (
    "gradients cannot be clipped by value under ZeRO, because no process has the full gradients. Clip by norm: "
    "Trainer(gradient_clip_val=1.0, gradient_clip_algorithm='norm')"
)
RUN_IS_OVER = (
    "the run is over, and ZeRO has freed the optimizer state. Save a checkpoint during the run, in on_train_end or with "
    "ModelCheckpoint, which also saves at the end, or save only the weights: trainer.save_checkpoint(path, weights_only=True)"
)

# DeepSpeed allocates buckets of this size even for a small model, so for_model() reduces it to the model's size.
_BUCKET_ELEMENTS = 500_000_000
COMMUNICATION: dict[str | None, str] = {None: "", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Values of `communication_dtype` → names of torch dtypes."""

CHECKPOINTING = {
    "partition_activations": "partition_activations",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
"""Keys of DeepSpeed's "activation_checkpointing" section → arguments of its `checkpointing.configure`."""

_BLOCK_BYTES = 4096
_USED_BY = {  # stage or kind of offload → options that have an effect only there
    "stage 3": (
        "sub_group_size",
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "hpz_partition_size",
        "quantized_weights",
        "quantized_nontrainable_weights",
        "quantized_gradients",
        "zero3_save_16bit_model",
    ),
    "stages 1 and 2": ("allgather_bucket_size", "round_robin_gradients"),
    "offload": ("pin_memory",),
    "NVMe": ("aio_block_size", "aio_queue_depth", "aio_threads", "aio_single_submit", "aio_overlap_events"),
    "offload_params='nvme'": ("max_params_in_cpu", "param_buffer_count"),
    "offload_optimizer='nvme'": ("optimizer_buffer_count",),
}


def _stage(value: Any, name: str) -> Any:
    if is_whole(value) and value in (1, 2, 3):
        return value
    raise ConfigurationError(f"{name} must be 1, 2 or 3, not {value!r}. Without sharding, use strategy='ddp'.")


def _place(value: Any, name: str) -> Any:
    if value in (None, "cpu", "nvme"):
        return value
    raise ConfigurationError(f"{name} must be None, 'cpu' or 'nvme', not {value!r}.")


def _flag(value: Any, name: str) -> Any:
    if isinstance(value, bool):  # DeepSpeed's extensions refuse 1 for True.
        return value
    raise ConfigurationError(f"{name} must be True or False, not {value!r}.")


def _count(least: int) -> Check:
    def check(value: Any, name: str) -> int:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value  # 5e8
        return whole_number(whole, name, least, expected=f"a whole number ≥ {least}")

    return check


def _dtype(value: Any, name: str) -> Any:
    if value in COMMUNICATION:
        return value
    raise ConfigurationError(f"{name} must be None, 'fp32', 'bf16' or 'fp16', not {value!r}.")


def _blocks(value: Any, name: str) -> Any:
    if _count(1)(value, name) % _BLOCK_BYTES == 0:
        return value
    raise ConfigurationError(
        f"{name} must be a multiple of {_BLOCK_BYTES} bytes, the block size of direct I/O, not {value}. Use {name}=1048576."
    )


def _checkpointing(section: Any, name: str) -> Any:
    for key in section or {}:
        if key not in CHECKPOINTING:
            raise ConfigurationError(
                f"{name} has no key {key!r}. Use one of {', '.join(CHECKPOINTING)}.{nearest(key, CHECKPOINTING)}"
            )
    needed = ("partition_activations", "number_checkpoints")
    if section and section.get("contiguous_memory_optimization") and not all(section.get(key) for key in needed):
        raise ConfigurationError(
            f"{name}: contiguous_memory_optimization needs two more keys. Add "
            "'partition_activations': True and 'number_checkpoints': the number of checkpointed layers."
        )
    return section


@dataclass(frozen=True)
class ZeROConfig:
    """The arguments of `ZeROStrategy`, each stated once: its type, its default, its check, and here its text.

    An object of it has the options: the arguments without `config` and those of the process group.

    Args:
        stage: 1, 2 or 3. Default: 2.
        config: A DeepSpeed configuration, as the path of a JSON file or as a dict, instead of `stage` and the options.
            `"auto"` uses the value of the `Trainer`; a value that differs from the `Trainer`'s is an error.
        process_group_backend: As in `DDPStrategy`.
        timeout: As in `DDPStrategy`.
        device: As in `DDPStrategy`.
        precision: As in `Strategy`.
        offload_optimizer: Where to keep the optimizer state and the float32 master weights: `"cpu"`, where the optimizer
            step then also runs, or `"nvme"` (stage 3 only). Default: the device.
        offload_params: Where to keep parameters that are not in use: `"cpu"` or `"nvme"` (stage 3). Default: the device.
        nvme_path: Folder on a fast local disk for `"nvme"`. Each process writes to its own folder and removes it at
            the end. The next run removes the files of killed processes. Tensors smaller than 1 MiB stay in memory.
        pin_memory: Keep offloaded tensors in page-locked host memory, which makes copies to and from a GPU faster. Default:
            `True`.
        reduce_bucket_size: Number of elements to reduce at a time. Default: 5e8, or the size of the model if that is
            smaller.
        allgather_bucket_size: Number of elements to gather at a time (stages 1 and 2). Same default.
        overlap_comm: Reduce gradients during the backward pass, on a GPU. Default: `True` in stage 3 only.
        contiguous_gradients: Copy gradients into one buffer as they are computed. Default: `True`.
        round_robin_gradients: Assign parameters to the processes in round-robin order (stages 1 and 2). Default: `False`.
        sub_group_size: Number of elements to update at a time (stage 3). With the optimizer on NVMe, each buffer holds that
            number of elements in memory. Default: 1e9; with the optimizer on NVMe 1e8.
        prefetch_bucket_size: Number of elements to gather ahead of their use (stage 3). Default: 5e7.
        param_persistence_threshold: Parameters with at most this number of elements are not sharded (stage 3). Default:
            1e5.
        max_live_parameters: Maximum number of gathered elements on a process at a time (stage 3). Default: 1e9.
        max_reuse_distance: Keep a gathered parameter if it is used again within this number of elements (stage 3). Default:
            1e9; 0 for parameters on NVMe.
        max_params_in_cpu: Number of parameter elements to keep in host memory when parameters are on NVMe. Default: 0.
        param_buffer_count: Number of parameters to read ahead from NVMe. Default: 5.
        optimizer_buffer_count: Number of page-locked buffers of `sub_group_size` elements. Default, and minimum: one for
            the master weights, one for the gradients, and one for each tensor of optimizer state per parameter (AdamW: 4 in
            all).
        aio_block_size: Size of a disk request in bytes. Default: 1 MiB.
        aio_queue_depth: Maximum number of disk requests in flight. Default: 8.
        aio_threads: Number of threads for a read or write. Default: 1.
        aio_single_submit: Submit disk requests one by one. Default: `False`.
        aio_overlap_events: Submit disk requests while others are in flight. Default: `True`.
        hpz_partition_size: Size of a group of processes, for example those of one node, that keeps a secondary copy of all
            parameters, so that they are gathered within the group (stage 3; ZeRO++, Wang et al., ICLR 2024). Default: 1.
        quantized_weights: Gather parameters in 8 bits (stage 3 on GPUs; ZeRO++). Default: `False`.
        quantized_nontrainable_weights: The same for frozen parameters, which are also stored in 8 bits. Default: `False`.
        quantized_gradients: Reduce gradients in 8 and 4 bits (stage 3 on GPUs; ZeRO++). Default: `False`.
        communication_dtype: Dtype in which gradients are reduced: `"fp32"`, `"bf16"` or `"fp16"`. Default: the dtype of
            the parameters; float32 under `*-mixed`.
        activation_checkpointing: Options for a model that calls `deepspeed.checkpointing.checkpoint`, with the keys of a
            DeepSpeed configuration: `partition_activations`, `cpu_checkpointing`, `contiguous_memory_optimization`,
            `number_checkpoints`, `synchronize_checkpoint_boundary` and `profile`.
        zero3_save_16bit_model: Let `save_model` write the 16-bit parameters instead of the float32 master weights (stage
            3). Default: `False`.
    """

    stage: int = argument(None, _stage)
    _: KW_ONLY
    config: str | os.PathLike[str] | Mapping[str, Any] | None = argument(None, kept=False)
    process_group_backend: str | None = argument(None, kept=False)
    timeout: timedelta | float = argument(timedelta(minutes=30), kept=False)
    device: str | torch.device = argument("auto", kept=False)
    precision: Precision | str | int | None = argument(None, kept=False)
    offload_optimizer: str | None = argument(None, _place)
    offload_params: str | None = argument(None, _place)
    nvme_path: str | os.PathLike[str] | None = argument(None)
    pin_memory: bool = argument(True, _flag)
    reduce_bucket_size: int | None = argument(None, optional(_count(1)))
    allgather_bucket_size: int | None = argument(None, optional(_count(1)))
    overlap_comm: bool | None = argument(None, optional(_flag))
    contiguous_gradients: bool = argument(True, _flag)
    round_robin_gradients: bool = argument(False, _flag)
    sub_group_size: int | None = argument(None, optional(_count(1)))
    prefetch_bucket_size: int = argument(50_000_000, _count(0))
    param_persistence_threshold: int = argument(100_000, _count(0))
    max_live_parameters: int = argument(1_000_000_000, _count(1))
    max_reuse_distance: int | None = argument(None, optional(_count(0)))
    max_params_in_cpu: int = argument(0, _count(0))
    param_buffer_count: int = argument(5, _count(1))
    optimizer_buffer_count: int | None = argument(None, optional(_count(1)))
    aio_block_size: int = argument(1_048_576, _blocks)
    aio_queue_depth: int = argument(8, _count(1))
    aio_threads: int = argument(1, _count(1))
    aio_single_submit: bool = argument(False, _flag)
    aio_overlap_events: bool = argument(True, _flag)
    hpz_partition_size: int = argument(1, _count(1))
    quantized_weights: bool = argument(False, _flag)
    quantized_nontrainable_weights: bool = argument(False, _flag)
    quantized_gradients: bool = argument(False, _flag)
    communication_dtype: str | None = argument(None, _dtype)
    activation_checkpointing: Mapping[str, Any] | None = argument(None, _checkpointing)
    zero3_save_16bit_model: bool = argument(False, _flag)

    def __post_init__(self) -> None:
        if self.stage is None:
            object.__setattr__(self, "stage", 2)
        check_arguments(ZeROConfig, vars(self))
        self._check_offload()
        self._check_used()

    def _check_used(self) -> None:
        """Refuse options that would have no effect."""
        for name, where in _find_unused(vars(self)).items():
            if getattr(self, name) != getattr(ZeROConfig, name):
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} has an effect only with {where}, but this is ZeROStrategy("
                    f"stage={self.stage}, offload_optimizer={self.offload_optimizer!r}, "
                    f"offload_params={self.offload_params!r}). Remove {name}."
                )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> tuple[ZeROConfig, list[str]]:
        """Returns the configuration, and the names of skipped options: a file may have options for several stages."""
        unused = [name for name in _find_unused(options) if name in options]
        return cls(**{name: value for name, value in options.items() if name not in unused}), unused

    @property
    def uses_nvme(self) -> bool:
        """Whether anything is offloaded to a disk."""
        return "nvme" in (self.offload_optimizer, self.offload_params)

    def _check_offload(self) -> None:
        if self.stage < 3 and self.uses_nvme:
            raise ConfigurationError(
                f"offload to NVMe needs stage 3, but this is stage {self.stage}. Use ZeROStrategy(stage=3, ...), or "
                "offload_optimizer='cpu'."
            )
        if self.uses_nvme and self.nvme_path is None:
            raise ConfigurationError(
                "offload to NVMe needs a folder on a fast local disk. Pass it: ZeROStrategy(stage=3, "
                "offload_optimizer='nvme', nvme_path='/path/to/folder')"
            )
        if self.nvme_path is not None and not self.uses_nvme:
            raise ConfigurationError(
                f"nvme_path={str(self.nvme_path)!r} is given, but nothing is offloaded to NVMe. Add "
                "offload_optimizer='nvme' or offload_params='nvme', or remove nvme_path."
            )
        if self.stage < 3 and self.offload_params is not None:
            raise ConfigurationError(
                f"offload_params={self.offload_params!r} needs stage 3, which shards the parameters, but this is stage "
                f"{self.stage}. Use ZeROStrategy(stage=3, ...), or remove offload_params."
            )

    def for_model(
        self,
        sizes: Sequence[int],
        dtypes: Mapping[str, Any],
        folder: str | os.PathLike[str] | None = None,
        optimizer_slots: int = 2,
    ) -> dict[str, Any]:
        """Returns the DeepSpeed configuration for a model.

        Args:
            sizes: Number of elements of each parameter of the model.
            dtypes: Sections of the DeepSpeed configuration for the precision.
            folder: Folder for offload to NVMe.
            optimizer_slots: Number of tensors of optimizer state per parameter.
        """
        numel = sum(sizes)
        zero: dict[str, Any] = {
            "stage": self.stage,
            "contiguous_gradients": self.contiguous_gradients,
            "round_robin_gradients": self.round_robin_gradients,
            "reduce_bucket_size": self._bucket(self.reduce_bucket_size, numel),
            "allgather_bucket_size": self._bucket(self.allgather_bucket_size, numel),
        }
        if self.overlap_comm is not None:
            zero["overlap_comm"] = self.overlap_comm
        if self.stage == 3:
            zero["sub_group_size"] = self.elements_at_a_time
            for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters"):
                zero[f"stage3_{name}"] = int(getattr(self, name))
            zero["zero_hpz_partition_size"] = int(self.hpz_partition_size)
            for name in ("quantized_weights", "quantized_nontrainable_weights", "quantized_gradients"):
                zero[f"zero_{name}"] = getattr(self, name)
            zero["stage3_max_reuse_distance"] = int(self._reuse)
        if self.offload_optimizer is not None:
            zero["offload_optimizer"] = {"device": self.offload_optimizer, "pin_memory": self.pin_memory}
        if self.offload_optimizer == "nvme":
            # optimizer state, plus master weights and gradients
            zero["offload_optimizer"] |= {
                "nvme_path": str(folder),
                "buffer_count": int(self.optimizer_buffer_count or optimizer_slots + 2),
            }
        if self.offload_params is not None:
            zero["offload_param"] = {"device": self.offload_params, "pin_memory": self.pin_memory}
        if self.offload_params == "nvme":
            zero["offload_param"] |= {
                "nvme_path": str(folder),
                "buffer_count": int(self.param_buffer_count),
                "max_in_cpu": int(self.max_params_in_cpu),
            }
        return {
            "train_micro_batch_size_per_gpu": 1,  # DeepSpeed requires it, for its reports only
            "gradient_accumulation_steps": 1,  # trainkit counts the micro-batches of an accumulation window
            "gradient_clipping": 0.0,  # trainkit sets the clipping norm; DeepSpeed's default is 1.0
            "steps_per_print": 2**31,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
            **({} if self.communication_dtype is None else {"communication_data_type": self.communication_dtype}),
            "aio": {
                "block_size": int(self.aio_block_size),
                "queue_depth": int(self.aio_queue_depth),
                "intra_op_parallelism": int(self.aio_threads),
                "single_submit": self.aio_single_submit,
                "overlap_events": self.aio_overlap_events,
            },
            **dtypes,
        }

    def needs_on_nvme(self, sizes: Sequence[int], processes: int, optimizer_slots: int) -> tuple[int, int]:
        """Returns, for an optimizer on NVMe, the bytes on disk and the bytes of page-locked memory of one process.

        Args:
            sizes: Number of elements of each parameter of the optimizer.
            processes: Number of processes that the parameters are sharded across.
            optimizer_slots: Number of tensors of optimizer state per parameter.
        """
        least = optimizer_slots + 2  # master weights and gradients
        buffers = self.optimizer_buffer_count or least
        if buffers < least:
            raise ConfigurationError(
                f"optimizer_buffer_count={buffers} is too small: this optimizer has {optimizer_slots} tensors of state per "
                f"parameter and needs {least} buffers, with master weights and gradients. Remove optimizer_buffer_count, or "
                f"set it to {least}."
            )
        parts = [-(-size // processes) for size in sizes]
        at_a_time = min(sum(parts), self.elements_at_a_time + max(parts, default=0))
        return 4 * (optimizer_slots + 1) * sum(parts), 4 * buffers * at_a_time

    @property
    def elements_at_a_time(self) -> int:
        """`sub_group_size`; its default is smaller for an optimizer on NVMe, so that less is in memory at a time."""
        return int(self.sub_group_size or (100_000_000 if self.offload_optimizer == "nvme" else 1_000_000_000))

    @property
    def _reuse(self) -> int:
        """`max_reuse_distance`; parameters on NVMe are not kept in memory by default."""
        if self.max_reuse_distance is not None:
            return self.max_reuse_distance
        return 0 if self.offload_params == "nvme" else 1_000_000_000

    @staticmethod
    def _bucket(size: int | None, numel: int) -> int:
        size = min(_BUCKET_ELEMENTS, numel) if size is None else int(size)
        return max(2, size + size % 2)  # DeepSpeed requires an even size


def _find_unused(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options that have no effect with these `options`, each with where it has one."""
    stage, places = options.get("stage"), (options.get("offload_optimizer"), options.get("offload_params"))
    active = {
        "stage 3": stage == 3,
        "stages 1 and 2": stage != 3,
        "offload": any(places),
        "NVMe": "nvme" in places,
        "offload_params='nvme'": places[1] == "nvme",
        "offload_optimizer='nvme'": places[0] == "nvme",
    }
    return {name: where for where, names in _USED_BY.items() if not active[where] for name in names}
