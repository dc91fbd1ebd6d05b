"""The configuration of ZeRO: our arguments → DeepSpeed's, and what cannot work refused before anything is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.errors import ConfigurationError

__all__ = ["ZeROConfig"]

_PLACES = (None, "cpu", "nvme")
# Elements; DeepSpeed allocates buckets of this size whatever the model is, so a small model gets smaller ones.
_BUCKET = 500_000_000


@dataclass(frozen=True)
class ZeROConfig:
    """The options of :class:`~trainkit.strategies.ZeROStrategy`, by the same names, which say what they mean.

    Raises:
        ConfigurationError: an option that is wrong, or that does not go with the stage.
    """

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
    sub_group_size: int = 1_000_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3) or isinstance(self.stage, bool):
            raise ConfigurationError(f"stage must be 1, 2 or 3, not {self.stage!r}. Without sharding: strategy='ddp'.")
        for name in ("offload_optimizer", "offload_params"):
            if getattr(self, name) not in _PLACES:
                raise ConfigurationError(f"{name} must be None, 'cpu' or 'nvme', not {getattr(self, name)!r}.")
        self._check_offload()
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            self._check_count(name, optional=True, least=1)
        for name in ("sub_group_size", "max_live_parameters"):
            self._check_count(name, least=1)
        for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_reuse_distance"):
            self._check_count(name, least=0)

    def _check_offload(self) -> None:
        if self.stage < 3 and "nvme" in (self.offload_optimizer, self.offload_params):
            raise ConfigurationError(
                f"NVMe works with stage 3 only, and this is stage {self.stage}. Use ZeROStrategy(stage=3, ...), or "
                "offload_optimizer='cpu'."
            )
        if self.nvme_path is not None or "nvme" in (self.offload_optimizer, self.offload_params):
            raise ConfigurationError("offload to NVMe is not in this version yet. Use 'cpu', without nvme_path.")
        if self.stage < 3 and self.offload_params is not None:
            raise ConfigurationError(
                f"offload_params={self.offload_params!r}: parameters are divided, and can be offloaded, in stage 3 only; this "
                f"is stage {self.stage}. Use ZeROStrategy(stage=3, ...), or leave it out."
            )

    def _check_count(self, name: str, *, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < least:
            raise ConfigurationError(f"{name} must be a number of elements ≥ {least}, not {value!r}.")

    def for_model(self, numel: int, dtypes: Mapping[str, Any]) -> dict[str, Any]:
        """What DeepSpeed is given.

        Args:
            numel: elements of the model's parameters.
            dtypes: its sections for the precision.
        """
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
            zero["sub_group_size"] = int(self.sub_group_size)
            for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
                zero[f"stage3_{name}"] = int(getattr(self, name))
        if self.offload_optimizer is not None:
            zero["offload_optimizer"] = {"device": self.offload_optimizer, "pin_memory": self.pin_memory}
        if self.offload_params is not None:
            zero["offload_param"] = {"device": self.offload_params, "pin_memory": self.pin_memory}
        return {
            "train_micro_batch_size_per_gpu": 1,  # for DeepSpeed's own reports, which nobody sees
            "gradient_accumulation_steps": 1,  # the window is ours
            "gradient_clipping": 0.0,  # as is the value; DeepSpeed's default would be 1.0
            "steps_per_print": 2**31,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
            **dtypes,
        }

    @staticmethod
    def _bucket(given: int | None, numel: int) -> int:
        size = min(_BUCKET, numel) if given is None else int(given)
        return max(2, size + size % 2)  # DeepSpeed wants an even one
