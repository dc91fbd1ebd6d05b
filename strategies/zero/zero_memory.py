"""What ZeRO holds where: bytes on the device, on the host and on NVMe, as measured, which is more than the paper counts.

Beside masters, state, gradients and parameters DeepSpeed 0.19 has, for ``b`` bytes an element:

- stages 1 and 2: a bucket, which is there while gradients are reduced, and over several processes the part of it that one
  process gets, flat; before the update the averaged gradients, which are flattened (a copy) and cast to float32 (another one
  in bfloat16); with the optimizer on the host room for the largest parameter on both sides, and there a copy of this
  process's parameters on their way back;
- stage 3: a bucket for the whole run, a copy of it while it is reduced, the parameters that are gathered, and float32
  gradients of a sub-group beside those in ``b``.

``benchmarks/plan.py`` and ``tests/strategies/zero/test_zero_memory.py`` hold this against real runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from trainkit.footprint import Contents, Footprint, Held, Moment, Weight
from trainkit.strategies.zero.deepspeed_config import ZeROConfig
from trainkit.strategies.zero.optimizer_adapter import refuse_optimizer

if TYPE_CHECKING:
    from trainkit.strategies.zero.zero_strategy import ZeROStrategy

__all__ = ["ZeROMemory", "footprint"]

_MASTER = 4  # bytes of a float32 element, which masters, gradients of the update and state are in
_ON_DISK = 1 << 20  # bytes; smaller tensors stay in memory


def footprint(strategy: ZeROStrategy, contents: Contents, processes: int) -> Footprint:
    """See :meth:`trainkit.Strategy.footprint`."""
    return ZeROMemory(strategy.config).footprint(contents, processes)


class ZeROMemory:
    """The memory of ZeRO under a configuration; DeepSpeed is not needed to know it.

    Args:
        config: the configuration; or nothing, and its options.
        **options: those of :class:`~trainkit.strategies.zero.deepspeed_config.ZeROConfig`.
    """

    supported_precisions: ClassVar[tuple[str, ...]] = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")

    def __init__(self, config: ZeROConfig | None = None, **options: Any) -> None:
        self.config = ZeROConfig(**options) if config is None else config

    def footprint(self, contents: Contents, processes: int) -> Footprint:
        """See :meth:`trainkit.Strategy.footprint`.

        Raises:
            OptimizerError: an optimizer that ZeRO would change.
        """
        for optimizer in contents.optimizers:
            refuse_optimizer(optimizer)
        shares = _Shares.of(self.config, contents, processes)
        moments = self._stage_3(shares) if self.config.stage == 3 else self._stages_1_and_2(shares)
        slots = contents.flat_slots
        trained = sum(weight.numel for weight in contents.trained)
        return Footprint(
            self.name,
            moments,
            checkpoint=_MASTER * (1 + slots) * trained + contents.stored_bare,
            disk=self._disk(shares),
            divides_layers=self.config.stage == 3,
        )

    @property
    def name(self) -> str:
        """Stage, and what is offloaded where."""
        places = {"optimizer": self.config.offload_optimizer, "parameters": self.config.offload_params}
        if set(places.values()) == {"cpu"}:
            return f"zero{self.config.stage}, both on cpu"
        if set(places.values()) == {"nvme"}:
            return f"zero{self.config.stage}, both on nvme"
        return ", ".join([f"zero{self.config.stage}", *(f"{what} on {place}" for what, place in places.items() if place)])

    def _stages_1_and_2(self, s: _Shares) -> dict[str, Moment]:
        config, b = self.config, s.itemsize
        kept = {"masters": _MASTER * s.part, "optimizer": _MASTER * s.slots * s.part}
        parameters = s.frozen + b * s.part * s.processes + s.buffers
        bucket = s.buckets(self._bucket(s)) * (2 if config.overlap_comm else 1)
        # stage 1 reduces when the window is complete: until then each process has whole gradients
        before = b * s.trained if config.stage == 1 else b * s.part
        flat = b * min(self._bucket(s), s.trained) // s.processes if config.stage == 2 and s.processes > 1 else 0
        if config.offload_optimizer is None:
            return {
                "reduce": Moment(Held(parameters, before, buffers=bucket + flat, **kept)),
                "flatten": Moment(Held(parameters, 2 * _MASTER * s.part, **kept)),
                "update": Moment(Held(parameters, _MASTER * s.part, **kept)),
            }
        largest = b * s.largest
        waiting = b * s.part if s.window > 1 and config.stage == 2 else 0
        there = Held(gradients=_MASTER * s.part + waiting, buffers=b * s.part + largest, **kept)
        update = {"update": Moment(Held(parameters, buffers=largest), there)}
        if config.stage == 1:  # whole gradients go into the bucket one by one; on one process nothing else is made of it
            alone = s.processes == 1
            fill = Moment(Held(parameters, before, buffers=largest + bucket), there, reserved=alone)
            reduce = {"reduce": Moment(Held(parameters, before, buffers=2 * largest), there)} if alone else {}
            return {"fill": fill, **reduce, **update}
        # each gradient goes to the host when its bucket has been reduced
        return {"reduce": Moment(Held(parameters, 2 * largest, buffers=largest + bucket + flat), there), **update}

    def _stage_3(self, s: _Shares) -> dict[str, Moment]:
        config, b = self.config, s.itemsize
        gradients, kept = b * s.part, {"masters": _MASTER * s.part, "optimizer": _MASTER * s.slots * s.part}
        parameters = s.persistent + s.buffers + (0 if config.offload_params else b * s.whole_part)
        bucket = s.travelling * self._bucket(s)
        # gathered for a forward; copied to be reduced
        gathered = round(s.on_the_way * min(1.0, self._gathered(s) / max(s.whole, 1)))
        copied = round(s.reduced * min(1.0, self._bucket(s) / max(s.trained, 1)))
        if config.offload_optimizer is not None:
            there = self._stage_3_host(s)
            return {
                "reduce": Moment(Held(parameters + gathered, buffers=bucket + copied), there),
                "update": Moment(Held(parameters, buffers=bucket), there),
            }
        there = Held(self._offloaded_parameters(s), buffers=self._written_back(s))
        at_a_time = min(s.part, config.elements_at_a_time + s.largest_part)
        update = gradients + _MASTER * at_a_time
        flat = b * at_a_time if b < _MASTER else 0  # what is cast to float32
        return {
            "reduce": Moment(Held(parameters + gathered, gradients, buffers=bucket + copied, **kept), there),
            "flatten": Moment(Held(parameters, update + flat, buffers=bucket, **kept), there),
            "update": Moment(Held(parameters, update, buffers=bucket, **kept), there),
        }

    def _stage_3_host(self, s: _Shares) -> Held:
        """What is on the host where the optimizer is there, or on NVMe."""
        parameters, gradients = self._offloaded_parameters(s), s.itemsize * s.part
        if self.config.offload_optimizer == "nvme":
            _, pinned = self.config.needs_on_nvme(s.sizes, s.processes, s.slots)
            return Held(parameters, gradients, buffers=pinned + self._written_back(s))
        master = _MASTER * s.part
        return Held(parameters, gradients + master, s.slots * master, master, self._written_back(s))

    def _offloaded_parameters(self, s: _Shares) -> int:
        """Bytes of parameters on the host; on NVMe those that are being read are there, and small ones."""
        places = {None: 0, "cpu": s.whole_part, "nvme": s.reading}
        return s.itemsize * places[self.config.offload_params]

    def _written_back(self, s: _Shares) -> int:
        """Bytes of the buffer through which a sub-group's parameters go to NVMe, which is as large as if they were whole."""
        if self.config.offload_params != "nvme":
            return 0
        return s.itemsize * min(s.trained, s.processes * (self.config.elements_at_a_time + s.largest_part))

    def _bucket(self, s: _Shares) -> int:
        """Elements, as ``ZeROConfig.for_model`` gives them to DeepSpeed."""
        zero = self.config.for_model([s.numel], {}, "", s.slots)["zero_optimization"]
        return int(zero["reduce_bucket_size"])

    def _gathered(self, s: _Shares) -> int:
        """Elements of parameters that are whole at a time."""
        config = self.config
        if config.max_reuse_distance == 0 or (config.max_reuse_distance is None and config.offload_params == "nvme"):
            return int(config.prefetch_bucket_size) + s.largest_whole
        return int(config.max_live_parameters)

    def _disk(self, s: _Shares) -> int:
        config, total = self.config, 0
        if config.offload_optimizer == "nvme":
            total += config.needs_on_nvme(s.sizes, s.processes, s.slots)[0]
        if config.offload_params == "nvme":
            total += s.itemsize * s.large_part
        return total


@dataclass(frozen=True)
class _Shares:
    """The numbers that the formulas are made of: elements, but for the last ones, which are bytes.

    ``part`` is this process's of what is trained; ``whole_part`` of all parameters; ``large_part`` of those that go to a disk.
    ``travelling`` is the bytes of an element in each dtype that is sent.
    """

    processes: int
    itemsize: int
    slots: int
    window: int
    sizes: tuple[int, ...]
    numel: int
    whole: int
    trained: int
    part: int
    whole_part: int
    large_part: int
    largest: int
    largest_part: int
    largest_whole: int
    reading: int
    travelling: int
    frozen: int
    persistent: int
    buffers: int
    on_the_way: int
    reduced: int

    @classmethod
    def of(cls, config: ZeROConfig, contents: Contents, processes: int) -> _Shares:
        """The numbers for the contents of a run, sharded over ``processes``."""
        trained, weights = contents.trained, contents.weights
        counted = trained or weights
        itemsize = max((weight.itemsize for weight in counted), default=4)
        sizes, all_sizes = ([weight.numel for weight in some] for some in (trained, weights))
        own, shares = ([-(-size // processes) for size in some] for some in (sizes, all_sizes))
        large = [share for share in shares if share * itemsize >= _ON_DISK]
        small = [size for size in all_sizes if size <= config.param_persistence_threshold]
        total = sum(sizes)
        return cls(
            processes=processes,
            itemsize=itemsize,
            slots=contents.flat_slots,
            window=contents.window,
            sizes=tuple(sizes),
            numel=total,
            whole=sum(all_sizes),
            trained=total,
            part=sum(own) if config.stage == 3 else -(-total // (2 * processes)) * 2,
            whole_part=sum(shares),
            large_part=sum(large),
            largest=max(sizes, default=0),
            largest_part=max(own, default=0),
            largest_whole=max(all_sizes, default=0),
            frozen=_nbytes(weights) - _nbytes(trained),
            persistent=itemsize * sum(small) if processes > 1 else 0,
            buffers=contents.buffers,
            travelling=sum({weight.itemsize for weight in counted}),
            on_the_way=_nbytes(weights),
            reduced=_nbytes(trained),
            reading=sum(sorted(large)[-config.param_buffer_count :]) + sum(shares) - sum(large),
        )

    def buckets(self, elements: int) -> int:
        """Bytes of a bucket of that number of elements."""
        return self.itemsize * elements


def _nbytes(weights: Sequence[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)
