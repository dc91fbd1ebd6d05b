"""The memory of ZeRO: bytes on the device, on the host and on NVMe. The formulas are measured; the paper counts less.

In addition to master weights, optimizer state, gradients and parameters, DeepSpeed 0.19 allocates (`b` bytes per element):

- stages 1 and 2: a bucket while gradients are reduced, and with several processes also this process's flat shard of it. Before
  the optimizer step, a flat copy of the averaged gradients and, in bfloat16, another copy in float32. With the optimizer on the
  host, buffers for the largest parameter on the device and on the host, and on the host also a copy of this process's
  parameters before they are copied to the device;
- stage 3: a bucket during the whole run, a copy of it while it is reduced, the gathered parameters, and float32 gradients of
  one sub-group in addition to the gradients in `b` bytes per element.

`benchmarks/plan.py` and `tests/strategies/zero/test_zero_memory.py` compare these numbers with real runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from trainkit.strategies._whole_steps import largest_gathered
from trainkit.strategies.zero.deepspeed_config import ZeROConfig
from trainkit.strategies.zero.optimizer_adapter import of_deepspeed, refuse_optimizer
from trainkit.strategy import Contents, Footprint, Held, StepMemory, Weight, in_backward

if TYPE_CHECKING:
    from trainkit.strategies.zero.zero_strategy import ZeROStrategy

__all__ = ["ZeROMemory", "footprint"]

_MASTER_BYTES = 4  # Master weights, their gradients and optimizer state are float32.
_ON_DISK_BYTES = 1 << 20  # smaller tensors stay in memory


def footprint(strategy: ZeROStrategy, contents: Contents, processes: int) -> Footprint:
    """See `trainkit.Strategy.footprint`."""
    return ZeROMemory(strategy.config).footprint(contents, processes)


class ZeROMemory:
    """The memory of ZeRO with a configuration. Does not need DeepSpeed.

    Args:
        config: The configuration; `None`: created from `options`.
        **options: Options of `ZeROConfig`.
    """

    supported_precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")

    def __init__(self, config: ZeROConfig | None = None, **options: Any) -> None:
        self.config = ZeROConfig(**options) if config is None else config

    def footprint(self, contents: Contents, processes: int) -> Footprint:
        """See `trainkit.Strategy.footprint`.

        Raises:
            OptimizerError: ZeRO does not support an optimizer.
        """
        for optimizer in contents.optimizers:
            refuse_optimizer(optimizer)
        sizes = _Sizes.of(self.config, contents, processes)
        moments = self._stage_3(sizes) if self.config.stage == 3 else self._stages_1_and_2(sizes)
        moments |= self._backward(contents, sizes, moments)
        slots = contents.flat_slots
        if gathered := self._count_whole(contents):
            device = moments["update"].device
            moments["update"] = replace(moments["update"], device=replace(device, buffers=device.buffers + gathered))
        trained = sum(weight.numel for weight in contents.trained)
        return Footprint(
            self.name,
            moments,
            checkpoint=_MASTER_BYTES * (1 + slots) * trained + contents.stored_bare,
            disk=self._disk(sizes),
            shards_layers=self.config.stage == 3,
        )

    @property
    def name(self) -> str:
        """The stage, and the offload of optimizer and parameters."""
        places = {"optimizer": self.config.offload_optimizer, "parameters": self.config.offload_params}
        if set(places.values()) == {"cpu"}:
            return f"zero{self.config.stage}, both on cpu"
        if set(places.values()) == {"nvme"}:
            return f"zero{self.config.stage}, both on nvme"
        return ", ".join([f"zero{self.config.stage}", *(f"{what} on {place}" for what, place in places.items() if place)])

    def _count_whole(self, contents: Contents) -> int:
        """Bytes of the largest parameter that is stepped whole, with its gradient and its state, all in float32."""
        slots, optimizers = contents.flat_slots, tuple(one for one in contents.optimizers if not of_deepspeed(one))
        weights = tuple(replace(w, itemsize=_MASTER_BYTES, state=_MASTER_BYTES * slots * w.numel) for w in contents.weights)
        return largest_gathered(replace(contents, weights=weights, optimizers=optimizers))

    def _stages_1_and_2(self, s: _Sizes) -> dict[str, StepMemory]:
        config, b = self.config, s.itemsize
        kept = {"masters": _MASTER_BYTES * s.shard, "optimizer": _MASTER_BYTES * s.slots * s.shard}
        parameters = s.frozen + b * s.shard * s.processes + s.buffers
        bucket = s.buckets(self._bucket(s)) * (2 if config.overlap_comm else 1)
        # stage 1 reduces at the end of an accumulation window; until then each process has full gradients
        before = b * s.trained if config.stage == 1 else b * s.shard
        flat = b * min(self._bucket(s), s.trained) // s.processes if config.stage == 2 and s.processes > 1 else 0
        if config.offload_optimizer is None:
            return {
                "reduce": StepMemory(Held(parameters, before, buffers=bucket + flat, **kept)),
                "flatten": StepMemory(Held(parameters, 2 * _MASTER_BYTES * s.shard, **kept)),
                "update": StepMemory(Held(parameters, _MASTER_BYTES * s.shard, **kept)),
            }
        largest = b * s.largest
        waiting = b * s.shard if s.window > 1 and config.stage == 2 else 0
        there = Held(gradients=_MASTER_BYTES * s.shard + waiting, buffers=b * s.shard + largest, **kept)
        update = {"update": StepMemory(Held(parameters, buffers=largest), there)}
        if config.stage == 1:  # full gradients are copied to the bucket one by one; one process makes no other tensor from it
            single = s.processes == 1
            fill = StepMemory(Held(parameters, before, buffers=largest + bucket), there, reserved=single)
            reduce = {"reduce": StepMemory(Held(parameters, before, buffers=2 * largest), there)} if single else {}
            return {"fill": fill, **reduce, **update}
        # each gradient is copied to the host once its bucket is reduced
        return {"reduce": StepMemory(Held(parameters, 2 * largest, buffers=largest + bucket + flat), there), **update}

    def _stage_3(self, s: _Sizes) -> dict[str, StepMemory]:
        config, b = self.config, s.itemsize
        gradients, kept = b * s.shard, {"masters": _MASTER_BYTES * s.shard, "optimizer": _MASTER_BYTES * s.slots * s.shard}
        parameters = s.persistent + s.buffers + (0 if config.offload_params else b * s.full_shard)
        bucket = s.bucket_itemsize * self._bucket(s)
        # parameters that are gathered for the forward; copy of the bucket that is reduced
        gathered = round(s.parameter_bytes * min(1.0, self._count_gathered(s) / max(s.full, 1)))
        copied = round(s.gradient_bytes * min(1.0, self._bucket(s) / max(s.trained, 1)))
        if config.offload_optimizer is not None:
            there = self._stage_3_host(s)
            return {
                "reduce": StepMemory(Held(parameters + gathered, buffers=bucket + copied), there),
                "update": StepMemory(Held(parameters, buffers=bucket), there),
            }
        there = Held(self._count_offloaded(s), buffers=self._count_write_buffer(s))
        at_a_time = min(s.shard, config.elements_at_a_time + s.largest_shard)
        update = gradients + _MASTER_BYTES * at_a_time
        flat = b * at_a_time if b < _MASTER_BYTES else 0  # the elements that are cast to float32
        return {
            "reduce": StepMemory(Held(parameters + gathered, gradients, buffers=bucket + copied, **kept), there),
            "flatten": StepMemory(Held(parameters, update + flat, buffers=bucket, **kept), there),
            "update": StepMemory(Held(parameters, update, buffers=bucket, **kept), there),
        }

    def _backward(self, contents: Contents, s: _Sizes, moments: dict[str, StepMemory]) -> dict[str, StepMemory]:
        """The peaks of the forward and backward, with activations."""
        config = self.config
        reduce = moments["reduce" if "reduce" in moments else "fill"]
        # stage 1 shards no gradients; an optimizer on the host takes them from the device as soon as they are reduced
        shards = 1 if config.stage == 1 else s.processes if config.offload_optimizer is None else max(s.trained, 1)
        if config.stage == 3:
            held = replace(reduce.device, gradients=0, buffers=s.bucket_itemsize * self._bucket(s))
            return in_backward(contents, held, reduce.host, shards=shards)
        bucket = s.buckets(self._bucket(s)) * (2 if config.overlap_comm else 1)
        held = replace(reduce.device, gradients=0, buffers=0)
        peaks = in_backward(contents, held, reduce.host, shards=shards, waiting=bucket)
        # a backward begins with an empty bucket, in which the gradients wait
        for moment in in_backward(contents, replace(held, buffers=bucket), reduce.host, shards=shards).values():
            peaks["bucket"] = replace(moment, reserved=True)
        return peaks

    def _stage_3_host(self, s: _Sizes) -> Held:
        """Returns the host memory with the optimizer on the host or on NVMe."""
        parameters, gradients = self._count_offloaded(s), s.itemsize * s.shard
        if self.config.offload_optimizer == "nvme":
            _, pinned = self.config.needs_on_nvme(s.sizes, s.processes, s.slots)
            return Held(parameters, gradients, buffers=pinned + self._count_write_buffer(s))
        master = _MASTER_BYTES * s.shard
        return Held(parameters, gradients + master, s.slots * master, master, self._count_write_buffer(s))

    def _count_offloaded(self, s: _Sizes) -> int:
        """Bytes of parameters on the host; for parameters on NVMe, those that are being read, and small ones."""
        places = {None: 0, "cpu": s.full_shard, "nvme": s.reading}
        return s.itemsize * places[self.config.offload_params]

    def _count_write_buffer(self, s: _Sizes) -> int:
        """Bytes of the buffer for writing a sub-group's parameters to NVMe; it has the size of the full parameters."""
        if self.config.offload_params != "nvme":
            return 0
        return s.itemsize * min(s.trained, s.processes * (self.config.elements_at_a_time + s.largest_shard))

    def _bucket(self, s: _Sizes) -> int:
        """Number of elements of a bucket, as in `ZeROConfig.for_model`."""
        zero = self.config.for_model([s.numel], {}, "", s.slots)["zero_optimization"]
        return int(zero["reduce_bucket_size"])

    def _count_gathered(self, s: _Sizes) -> int:
        """Maximum number of gathered elements at a time."""
        config = self.config
        if config.max_reuse_distance == 0 or (config.max_reuse_distance is None and config.offload_params == "nvme"):
            return int(config.prefetch_bucket_size) + s.largest_full
        return int(config.max_live_parameters)

    def _disk(self, s: _Sizes) -> int:
        config, total = self.config, 0
        if config.offload_optimizer == "nvme":
            total += config.needs_on_nvme(s.sizes, s.processes, s.slots)[0]
        if config.offload_params == "nvme":
            total += s.itemsize * s.large_shard
        return total


@dataclass(frozen=True)
class _Sizes:
    """The inputs of the formulas: numbers of elements, unless they are described as bytes.

    Attributes:
        processes: Number of processes.
        itemsize: Largest size of an element in bytes.
        slots: Number of tensors of optimizer state per parameter.
        window: Number of micro-batches in an accumulation window.
        sizes: Elements of each trainable parameter.
        numel: Elements of all trainable parameters.
        full: Elements of all parameters.
        trained: Same as `numel`.
        shard: This process's shard of the trainable parameters.
        full_shard: This process's shard of all parameters.
        large_shard: This process's shard of the parameters that are large enough for NVMe.
        largest: The largest trainable parameter.
        largest_shard: This process's shard of it.
        largest_full: The largest parameter, trainable or frozen.
        reading: Parameters in the read buffers for NVMe, and those that are too small for NVMe.
        bucket_itemsize: Bytes of an element, summed over the dtypes of the gradients: each dtype has a bucket.
        frozen: Bytes of the frozen parameters.
        persistent: Bytes of the parameters that are not sharded.
        buffers: Bytes of the module's buffers.
        parameter_bytes: Bytes of all parameters.
        gradient_bytes: Bytes of all gradients.
    """

    processes: int
    itemsize: int
    slots: int
    window: int
    sizes: tuple[int, ...]
    numel: int
    full: int
    trained: int
    shard: int
    full_shard: int
    large_shard: int
    largest: int
    largest_shard: int
    largest_full: int
    reading: int
    bucket_itemsize: int
    frozen: int
    persistent: int
    buffers: int
    parameter_bytes: int
    gradient_bytes: int

    @classmethod
    def of(cls, config: ZeROConfig, contents: Contents, processes: int) -> _Sizes:
        """The numbers for the contents of a run, sharded over `processes`."""
        trained, weights = contents.trained, contents.weights
        counted = trained or weights
        itemsize = max((weight.itemsize for weight in counted), default=4)
        sizes, all_sizes = ([weight.numel for weight in some] for some in (trained, weights))
        shards, shares = ([-(-size // processes) for size in some] for some in (sizes, all_sizes))
        large = [share for share in shares if share * itemsize >= _ON_DISK_BYTES]
        small = [size for size in all_sizes if size <= config.param_persistence_threshold]
        total = sum(sizes)
        return cls(
            processes=processes,
            itemsize=itemsize,
            slots=contents.flat_slots,
            window=contents.window,
            sizes=tuple(sizes),
            numel=total,
            full=sum(all_sizes),
            trained=total,
            shard=sum(shards) if config.stage == 3 else -(-total // (2 * processes)) * 2,
            full_shard=sum(shares),
            large_shard=sum(large),
            largest=max(sizes, default=0),
            largest_shard=max(shards, default=0),
            largest_full=max(all_sizes, default=0),
            frozen=_nbytes(weights) - _nbytes(trained),
            persistent=itemsize * sum(small) if processes > 1 else 0,
            buffers=contents.buffers,
            bucket_itemsize=sum({weight.itemsize for weight in counted}),
            parameter_bytes=_nbytes(weights),
            gradient_bytes=_nbytes(trained),
            reading=sum(sorted(large)[-config.param_buffer_count :]) + sum(shares) - sum(large),
        )

    def buckets(self, elements: int) -> int:
        """Bytes of a bucket of that number of elements."""
        return self.itemsize * elements


def _nbytes(weights: Sequence[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)
