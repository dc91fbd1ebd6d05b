"""`ThroughputMonitor`: the speed of training, and the time that it waits for data."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainkit.callback import Callback
from trainkit.checks import function, real_number, whole_number
from trainkit.console import notice
from trainkit.errors import ConfigurationError
from trainkit.memory.inventory import built_placeholder
from trainkit.memory.traced_step import NoLossError, StepTraceError, step_flops
from trainkit.nested import batch_size, leaves

if TYPE_CHECKING:
    from trainkit.distributed.world import World
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["ThroughputMonitor"]


_MOST_SHAPES = 32


class _Mark(NamedTuple):
    """The totals at the end of an accumulation window."""

    time: float  # seconds, without validation
    batches: int
    samples: int
    tokens: int
    flops: float
    waited: float


class ThroughputMonitor(Callback):
    """Logs samples, tokens and batches per second, the share of time that waits for data, and the FLOPs utilization.

    It logs at log boundaries the rates over the last `window_size` optimizer steps, from the second step on:
    `throughput/samples_per_sec`, `throughput/batches_per_sec` (micro-batches) and `throughput/tokens_per_sec` of all
    processes together, `throughput/data_wait_share` (0 to 1: between the end of a batch and the start of the next, without
    validation), `throughput/tflops_per_device` and `throughput/mfu` (model FLOPs utilization, 0 to 1; Chowdhery et al.,
    PaLM, 2022).

    Times are the host's. On CUDA the host runs ahead of the device and waits for it at log boundaries only, so the rates are
    exact if `window_size` is a multiple of `log_every_n_steps`. A large `data_wait_share` on CUDA is not a problem if the
    rates are good: the device may be busy during that time.

    Args:
        batch_size_fn: Number of samples in a batch; default: the first dimension of its first tensor.
        length_fn: Number of tokens in a batch; without it tokens are not logged.
        window_size: Number of optimizer steps to average over.
        flops_per_batch: FLOPs of the forward and backward of one batch, a number or a function of the batch. Default: the
            module's attribute or property `flops_per_batch`, if it has one, read for each batch.
        available_flops: Peak FLOP/s of one device; default: from a table of known GPUs, by the precision.
        measure_flops: Count the FLOPs of a forward and backward (matrix products, convolutions and attention, with
            `torch.utils.flop_counter`) when a batch of a new shape comes, for up to 32 shapes. `training_step` and its backward
            run for it on a copy of the module, with tensors that have a shape but no values (`FakeTensor`), so nothing is
            computed. What activation checkpointing computes again does not count, as is usual for model FLOPs. If the step
            reads values of tensors or uses a kernel that torch has no formula for, a notice says so: pass `flops_per_batch`.

    Raises:
        ConfigurationError: An argument out of its range; `flops_per_batch` together with `measure_flops`.

    Example:
        ```python
        monitor = ThroughputMonitor(length_fn=lambda batch: batch["tokens"].numel(), measure_flops=True)
        trainer = Trainer(callbacks=[monitor])
        ```
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        window_size: int = 100,
        flops_per_batch: float | Callable[[Any], float] | None = None,
        available_flops: float | None = None,
        measure_flops: bool = False,
    ) -> None:
        super().__init__()
        self.window_size = whole_number(window_size, "ThroughputMonitor(window_size=)", 1)
        function(batch_size_fn, "ThroughputMonitor(batch_size_fn=)", "lambda batch: len(batch)")
        function(length_fn, "ThroughputMonitor(length_fn=)", "lambda batch: batch.numel()")
        if not callable(flops_per_batch):
            _check_positive("flops_per_batch", flops_per_batch)
        _check_positive("available_flops", available_flops)
        if measure_flops and flops_per_batch is not None:
            raise ConfigurationError(
                "ThroughputMonitor: expected flops_per_batch or measure_flops=True, got both. Fix: remove one of them"
            )
        self.batch_size_fn = batch_size_fn or batch_size
        self.length_fn = length_fn
        self.flops_per_batch = flops_per_batch
        self.available_flops = available_flops
        self.measure_flops = measure_flops
        self.flops_per_sample: float | None = None  # measured
        self._flops_per_batch = flops_per_batch  # Otherwise the module's own number is used.
        self._marks: deque[_Mark] = deque(maxlen=window_size + 1)
        self._counts = measure_flops  # FLOPs are counted until that fails.
        self._estimates = False
        self._by_shapes: dict[tuple[torch.Size, ...], int] = {}  # shapes of a batch's tensors → FLOPs
        self._unsharded: TrainModule | None = None  # a copy without values, of a module that the strategy shards
        self._peak: float | None = None
        self._sync: Callable[[], None] | None = None
        self._restart()

    def _restart(self) -> None:
        self._marks.clear()
        self._batches = self._samples = self._tokens = 0
        self._batch_samples = 0
        self._flops = self._waited = self._paused = 0.0
        self._batch_ended: float | None = None
        self._pause_began: float | None = None
        self._counts = self.measure_flops
        self._estimates = False
        self.flops_per_sample = None
        self._by_shapes.clear()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._unsharded = None
        if stage == "fit" and self.measure_flops and trainer.strategy.shards_parameters:
            self._unsharded = built_placeholder(module, trainer.precision_plugin, trainer)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._restart()
        device = trainer.strategy.device
        self._sync = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
        self._flops_per_batch = self.flops_per_batch
        if self.flops_per_batch is None and not self.measure_flops:
            if getattr(module, "flops_per_batch", None) is None:
                return
            self._flops_per_batch = lambda batch: float(module.flops_per_batch)  # type: ignore[arg-type]
        self._peak = self.available_flops or _find_peak_flops(trainer, device)
        if self._peak is None:
            notice(
                f"ThroughputMonitor: the peak FLOP/s of this device ({device.type}, {trainer.precision}) is not "
                "known, so throughput/mfu is not logged. Fix: ThroughputMonitor(available_flops=312e12)"
            )

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if self._batch_ended is not None:
            self._waited += time.monotonic() - self._batch_ended
        loader = trainer._run.train_loader
        counted = loader.samples if loader is not None and self.batch_size_fn is batch_size else None
        samples = self.batch_size_fn(batch) if counted is None else counted  # `counted` does not include padding.
        self._batches += 1
        self._batch_samples = samples
        self._samples += samples
        if self.length_fn is not None:
            self._tokens += int(self.length_fn(batch))
        flops = self._flops_per_batch
        if flops is not None:
            self._flops += flops(batch) if callable(flops) else flops
        elif self._counts and samples > 0:
            self._flops += self._count_flops(trainer, module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.accelerator.sync_gradients:
            self._end_window(trainer)
        self._batch_ended = time.monotonic()

    def _end_window(self, trainer: Trainer) -> None:
        if trainer.should_log and self._sync is not None:
            self._sync()  # reading the metrics of this step waits for the device anyway
        now = time.monotonic() - self._paused
        mark = _Mark(now, self._batches, self._samples, self._tokens, self._flops, self._waited)
        self._marks.append(mark)
        if trainer.should_log and now > self._marks[0].time:
            rates = self._rates(self._marks[0], mark, trainer.strategy.data_world)
            # batch_size=1 gives all processes the same weight.
            self.log_dict(rates, on_step=True, on_epoch=False, batch_size=1)
            if trainer.strategy.data_world.size > 1 and self.measure_flops and self.flops_per_sample is None:
                # another process may have counted FLOPs, and all must log the same names; this value has weight 0
                self.log_dict(self._flop_rates(0.0), on_step=True, on_epoch=False, batch_size=0)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._pause_began = time.monotonic()

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._pause_began is None:
            return
        pause = time.monotonic() - self._pause_began
        self._pause_began = None
        self._paused += pause
        if self._batch_ended is not None:
            self._batch_ended += pause

    def _rates(self, first: _Mark, last: _Mark, world: World) -> dict[str, float]:
        seconds = last.time - first.time
        # The logged value is the mean over processes, so multiply it by their number. For a process of several devices, a batch
        # here contains a micro-batch of each.
        rates = {
            "throughput/batches_per_sec": (last.batches - first.batches) / seconds * world.width,
            "throughput/samples_per_sec": (last.samples - first.samples) / seconds * world.size,
            "throughput/data_wait_share": (last.waited - first.waited) / seconds,
        }
        if self.length_fn is not None:
            rates["throughput/tokens_per_sec"] = (last.tokens - first.tokens) / seconds * world.size
        if self._flops_per_batch is not None or self.flops_per_sample is not None:
            rates |= self._flop_rates((last.flops - first.flops) / seconds / world.devices)
        return rates

    def _flop_rates(self, flops: float) -> dict[str, float]:
        rates = {"throughput/tflops_per_device": flops / 1e12}
        if self._peak is not None:
            rates["throughput/mfu"] = flops / self._peak
        return rates

    def _count_flops(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> float:
        """The FLOPs of a batch; 0 if they are unknown."""
        shapes = tuple(leaf.shape for leaf in leaves(batch) if isinstance(leaf, Tensor))
        known = self._by_shapes.get(shapes)
        if known is not None:
            return known
        if len(self._by_shapes) == _MOST_SHAPES:
            return self._estimate_flops(shapes)
        model = module if self._unsharded is None else self._unsharded
        try:
            flops = step_flops(model, batch, batch_idx, trainer.precision_plugin, trainer.strategy.device, trainer)
        except NoLossError:
            return 0.0
        except StepTraceError as error:
            self._counts = False
            notice(
                f"ThroughputMonitor: the FLOPs of training_step cannot be counted: {error}. So throughput/tflops_per_device "
                "and throughput/mfu are not logged. Fix: ThroughputMonitor(flops_per_batch=...)",
                everywhere=True,
            )
            return 0.0
        self._by_shapes[shapes] = flops
        if self.flops_per_sample is None:
            self.flops_per_sample = flops / self._batch_samples
        return flops

    def _estimate_flops(self, shapes: tuple[torch.Size, ...]) -> float:
        """The FLOPs of a batch of one more shape, from the mean per element of the shapes that were counted."""
        if not self._estimates:
            self._estimates = True
            notice(
                f"ThroughputMonitor: the batches have more than {_MOST_SHAPES} different shapes. The FLOPs of further shapes "
                "are estimated by their number of elements. Fix: ThroughputMonitor(flops_per_batch=lambda batch: ...)"
            )
        return sum(self._by_shapes.values()) / sum(map(_elements, self._by_shapes)) * _elements(shapes)


def _elements(shapes: tuple[torch.Size, ...]) -> int:
    return sum(shape.numel() for shape in shapes)


def _check_positive(name: str, value: Any) -> None:
    real_number(value, f"ThroughputMonitor({name}=)", above=0, example=1e12, optional=True)


def _find_peak_flops(trainer: Trainer, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    dtype = trainer.precision_plugin.autocast_dtype or trainer.precision_plugin.parameter_dtype
    return peak_flops(torch.cuda.get_device_name(device), dtype, tf32=torch.get_float32_matmul_precision() != "highest")


# ---------------------------------------------------------------------------------------------------------- peak FLOP/s


class _Peak(NamedTuple):
    """TFLOP/s of dense matrix products, from the vendor's data sheet; None: not in hardware."""

    half: float | None  # float16 with float32 accumulation, on tensor cores
    bfloat16: float | None
    tf32: float | None
    float32: float


# Words in a device's name, most specific first. Numbers with 2:4 sparsity, in data sheets since Ampere, are halved.
_PEAKS: list[tuple[tuple[str, ...], _Peak]] = [
    # NVIDIA HGX B200 data sheet, per GPU
    (("B200",), _Peak(2250.0, 2250.0, 1125.0, 75.0)),
    # NVIDIA H200 data sheet (SXM)
    (("H200",), _Peak(989.0, 989.0, 494.5, 67.0)),
    # NVIDIA H100 data sheet: NVL, PCIe, SXM
    (("H100", "NVL"), _Peak(835.0, 835.0, 417.5, 60.0)),
    (("H100", "PCIE"), _Peak(756.0, 756.0, 378.0, 51.0)),
    (("H100",), _Peak(989.0, 989.0, 494.5, 67.0)),
    # NVIDIA A100 data sheet (all forms)
    (("A100",), _Peak(312.0, 312.0, 156.0, 19.5)),
    # NVIDIA A40, A30 and A10 data sheets
    (("A40",), _Peak(149.7, 149.7, 74.8, 37.4)),
    (("A30",), _Peak(165.0, 165.0, 82.0, 10.3)),
    (("A10",), _Peak(125.0, 125.0, 62.5, 31.2)),
    # NVIDIA L40S, L40 and L4 data sheets
    (("L40S",), _Peak(362.0, 362.0, 183.0, 91.6)),
    (("L40",), _Peak(181.0, 181.0, 90.5, 90.5)),
    (("L4",), _Peak(121.0, 121.0, 60.0, 30.3)),
    # NVIDIA Ada and GA102 white papers (float32 accumulation)
    (("RTX", "4090"), _Peak(165.2, 165.2, 82.6, 82.6)),
    (("RTX", "3090"), _Peak(71.0, 71.0, 35.6, 35.6)),
    # NVIDIA V100 data sheet (SXM2, PCIe) and T4 data sheet: no bfloat16, no TF32
    (("V100", "SXM2"), _Peak(125.0, None, None, 15.7)),
    (("V100", "PCIE"), _Peak(112.0, None, None, 14.0)),
    (("T4",), _Peak(65.0, None, None, 8.1)),
    # AMD Instinct MI300X data sheet
    (("MI300X",), _Peak(1307.4, 1307.4, 653.7, 163.4)),
]

# Parts of a chip, and slower chips under the name of a faster one.
_NOT_THE_SAME = {"MIG", "LAPTOP", "MOBILE", "MAX", "D", "TI"}


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Peak FLOP/s of a device in matrix products of a dtype, or None if unknown.

    Args:
        device_name: Of `torch.cuda.get_device_name`.
        dtype: bfloat16, float16 or float32.
        tf32: Whether float32 products may use TF32.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & _NOT_THE_SAME:
        return None
    for name_words, peak in _PEAKS:
        if words.issuperset(name_words):
            teraflops = {
                torch.float16: peak.half,
                torch.bfloat16: peak.bfloat16,
                torch.float32: (peak.tf32 or peak.float32) if tf32 else peak.float32,
            }.get(dtype)
            return None if teraflops is None else teraflops * 1e12
    return None
