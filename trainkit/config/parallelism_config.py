"""`ParallelismConfig`: how the processes are divided, under Accelerate's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit.checks import whole_number
from trainkit.errors import ConfigurationError, UnsupportedArgumentError

__all__ = ["ParallelismConfig"]


@dataclass
class ParallelismConfig:
    """How many replicas FSDP trains, over how many processes each is sharded, and the size of tensor parallelism.

    For `Accelerator(parallelism_config=)`. The product of the sizes is the number of processes.

    Args:
        dp_replicate_size: Number of replicas of the model (HSDP). Default: 1.
        dp_shard_size: Number of processes over which a replica is sharded. Default: all that the other sizes leave.
        tp_size: Number of processes that compute a layer together (tensor parallelism). Default: 1.
        cp_size: Only 1: context parallelism is not implemented.
        cp_backend: No effect: there is no context parallelism.
        sp_size: Only 1: sequences are not sharded.
        sp_backend: No effect: there is no sequence parallelism.
        tp_handler: No effect: it has no options.
        cp_handler: No effect: as `cp_backend`.
        sp_handler: No effect: as `sp_backend`.

    Raises:
        ConfigurationError: A size is not an integer ≥ 1.
        UnsupportedArgumentError: Context or sequence parallelism, or replicas that are not sharded.

    Example:
        ```python
        accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=4))
        ```
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            if getattr(self, name) is not None:
                setattr(self, name, whole_number(getattr(self, name), f"ParallelismConfig({name}=)", 1))
        if (self.cp_size or 1) > 1:
            raise UnsupportedArgumentError(
                f"ParallelismConfig(cp_size={self.cp_size}) is not implemented: context parallelism of torch has no rule "
                "for the attention kernels of the CPU, only for those of a GPU. Remove cp_size; for long sequences use "
                "activation checkpointing."
            )
        if (self.sp_size or 1) > 1:
            raise UnsupportedArgumentError(
                f"ParallelismConfig(sp_size={self.sp_size}) is not implemented: sequences are not sharded. Remove sp_size; "
                "for long sequences use activation checkpointing."
            )
        if (self.dp_replicate_size or 1) > 1 and self.dp_shard_size == 1:
            raise UnsupportedArgumentError(
                f"ParallelismConfig(dp_replicate_size={self.dp_replicate_size}, dp_shard_size=1): without shards it is DDP. "
                "Use Accelerator(strategy='ddp') without a parallelism_config; or shard each replica: dp_shard_size=2"
            )

    @property
    def is_set(self) -> bool:
        """Whether a size is larger than 1."""
        return any(size not in (None, 1) for size in (self.dp_replicate_size, self.dp_shard_size, self.tp_size))

    def options_for(self, processes: int) -> dict[str, Any]:
        """Return the options of `FSDPStrategy` for a run with a number of processes.

        Raises:
            ConfigurationError: The product of the sizes is another number.
        """
        replicas, parallel = self.dp_replicate_size or 1, self.tp_size or 1
        if self.dp_shard_size is None:
            whole = processes % (replicas * parallel) == 0
        else:
            whole = self.dp_shard_size * replicas * parallel == processes
        if not whole:
            sizes = (("dp_replicate_size", replicas), ("dp_shard_size", self.dp_shard_size), ("tp_size", parallel))
            written = " × ".join(f"{name}={size}" for name, size in sizes if size is not None)
            raise ConfigurationError(
                f"ParallelismConfig: {written} does not fit the number of processes, {processes}. Change a size; or start the "
                f"script with trainkit launch --nproc-per-node {replicas * parallel * (self.dp_shard_size or 1)}"
            )
        found = {"replicas": replicas, "tensor_parallel": parallel}
        return {name: size for name, size in found.items() if size > 1}
