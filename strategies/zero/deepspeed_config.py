"""The configuration of ZeRO: checks the options before the run starts, and converts them to a DeepSpeed configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.checks import is_whole, whole_number
from trainkit.errors import ConfigurationError, nearest

__all__ = ["CHECKPOINTING", "COMMUNICATION", "NO_VALUES", "RUN_IS_OVER", "ZeROConfig"]

NO_VALUES = (
    "gradients cannot be clipped by value under ZeRO, because no process has the full gradients. Clip by norm: "
    "Trainer(gradient_clip_val=1.0, gradient_clip_algorithm='norm')"
)
RUN_IS_OVER = (
    "the run is over, and ZeRO has freed the optimizer state. Save a checkpoint during the run, in on_train_end or with "
    "ModelCheckpoint, which also saves at the end, or save only the weights: trainer.save_checkpoint(path, weights_only=True)"
)

_PLACES = (None, "cpu", "nvme")
# DeepSpeed allocates buckets of this size even for a small model, so for_model() reduces it to the model's size.
_BUCKET_ELEMENTS = 500_000_000
_COUNTS = {  # option → minimum
    "reduce_bucket_size": 1,
    "allgather_bucket_size": 1,
    "sub_group_size": 1,
    "max_live_parameters": 1,
    "prefetch_bucket_size": 0,
    "param_persistence_threshold": 0,
    "max_reuse_distance": 0,
    "max_params_in_cpu": 0,
    "param_buffer_count": 1,
    "optimizer_buffer_count": 1,
    "aio_block_size": 1,
    "aio_queue_depth": 1,
    "aio_threads": 1,
    "hpz_partition_size": 1,
}
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


@dataclass(frozen=True)
class ZeROConfig:
    """The options of `ZeROStrategy`; `ZeROOptions` documents them."""

    stage: int = 2
    offload_optimizer: str | None = None
    offload_params: str | None = None
    nvme_path: str | os.PathLike[str] | None = None
    pin_memory: bool = True
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    round_robin_gradients: bool = False
    sub_group_size: int | None = None
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int | None = None
    max_params_in_cpu: int = 0
    param_buffer_count: int = 5
    optimizer_buffer_count: int | None = None
    aio_block_size: int = 1_048_576
    aio_queue_depth: int = 8
    aio_threads: int = 1
    aio_single_submit: bool = False
    aio_overlap_events: bool = True
    hpz_partition_size: int = 1
    quantized_weights: bool = False
    quantized_nontrainable_weights: bool = False
    quantized_gradients: bool = False
    communication_dtype: str | None = None
    activation_checkpointing: Mapping[str, Any] | None = None
    zero3_save_16bit_model: bool = False

    def __post_init__(self) -> None:
        if not is_whole(self.stage) or self.stage not in (1, 2, 3):
            raise ConfigurationError(f"stage must be 1, 2 or 3, not {self.stage!r}. Without sharding, use strategy='ddp'.")
        for name in ("offload_optimizer", "offload_params"):
            if getattr(self, name) not in _PLACES:
                raise ConfigurationError(f"{name} must be None, 'cpu' or 'nvme', not {getattr(self, name)!r}.")
        self._check_offload()
        for name, least in _COUNTS.items():
            self._check_count(name, least)
        for name, annotation in type(self).__annotations__.items():
            value = getattr(self, name)
            if annotation.startswith("bool") and not (isinstance(value, bool) or (value is None and "None" in annotation)):
                raise ConfigurationError(f"{name} must be True or False, not {value!r}.")
        if self.communication_dtype not in COMMUNICATION:
            raise ConfigurationError(
                f"communication_dtype must be None, 'fp32', 'bf16' or 'fp16', not {self.communication_dtype!r}."
            )
        self._check_activation_checkpointing(self.activation_checkpointing or {})
        self._check_used()
        if self.aio_block_size % _BLOCK_BYTES:
            raise ConfigurationError(
                f"aio_block_size must be a multiple of {_BLOCK_BYTES} bytes, the block size of direct I/O, not "
                f"{self.aio_block_size}. Use aio_block_size=1048576."
            )

    def _check_activation_checkpointing(self, section: Mapping[str, Any]) -> None:
        for name in section:
            if name not in CHECKPOINTING:
                raise ConfigurationError(
                    f"activation_checkpointing has no key {name!r}. Use one of {', '.join(CHECKPOINTING)}."
                    f"{nearest(name, CHECKPOINTING)}"
                )
        needed = ("partition_activations", "number_checkpoints")
        if section.get("contiguous_memory_optimization") and not all(section.get(name) for name in needed):
            raise ConfigurationError(
                "activation_checkpointing: contiguous_memory_optimization needs two more keys. Add "
                "'partition_activations': True and 'number_checkpoints': the number of checkpointed layers."
            )

    def _check_used(self) -> None:
        """Refuse options that would have no effect."""
        for name, where in _unused(vars(self)).items():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} has an effect only with {where}, but this is ZeROStrategy("
                    f"stage={self.stage}, offload_optimizer={self.offload_optimizer!r}, "
                    f"offload_params={self.offload_params!r}). Remove {name}."
                )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> tuple[ZeROConfig, list[str]]:
        """Returns the configuration, and the names of skipped options: a file may have options for several stages."""
        unused = [name for name in _unused(options) if name in options]
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

    def _check_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        whole = int(value) if isinstance(value, float) and value.is_integer() else value  # 5e8
        whole_number(whole, name, least, expected=f"a whole number ≥ {least}")

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


def _unused(options: Mapping[str, Any]) -> dict[str, str]:
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
