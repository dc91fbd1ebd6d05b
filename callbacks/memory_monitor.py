"""`MemoryMonitor`: the memory of device and host at the start and end of each stage, and its peak."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainkit.callback import Callback
from trainkit.checks import choice
from trainkit.console import notice

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["Memory", "MemoryMonitor", "ProcessMemory", "StageMemory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Memory:
    """Bytes in use at the `start` and at the `end` of a stage, and their `peak` in between.

    `bound` is `""` if the peak is exact, `"at most"` if it is an upper bound, `"at least"` if it is a lower bound.
    """

    start: int
    end: int
    peak: int
    bound: str = ""


@dataclass(frozen=True)
class ProcessMemory:
    """One process in one stage: the rank of its node, its resident memory, and what torch has allocated on its device.

    A memory is None if it is not measured.
    """

    node: int
    host: Memory | None
    device: Memory | None


@dataclass(frozen=True)
class StageMemory:
    """One run of a stage. Each number of `device`, `host` and `together` is the maximum over devices, processes or nodes.

    Attributes:
        stage: `"setup"`, `"sanity_check"`, `"train"`, `"train_epoch"`, `"validate"`, `"test"`, `"predict"`.
        epoch: `trainer.current_epoch` at its end.
        step: `trainer.global_step` at its end.
        processes: Each process, by rank.
    """

    stage: str
    epoch: int
    step: int
    processes: tuple[ProcessMemory, ...]

    @property
    def device(self) -> Memory | None:
        """Of one device."""
        return _combine((process.device for process in self.processes), max)

    @property
    def host(self) -> Memory | None:
        """Of one process."""
        return _combine((process.host for process in self.processes), max)

    @property
    def together(self) -> Memory | None:
        """Of all processes of one node; the sum of their peaks is an upper bound, as they may not be simultaneous."""
        nodes = {process.node for process in self.processes}
        by_node = ([process.host for process in self.processes if process.node == node] for node in nodes)
        return _combine((_combine(memories, sum) for memories in by_node), max)


def _combine(memories: Iterable[Memory | None], operation: Callable[[Iterable[int]], int]) -> Memory | None:
    """The sum or the maximum of each number; None if there are none."""
    known = [memory for memory in memories if memory is not None]
    if not known:
        return None
    start, end, peak = map(operation, zip(*((memory.start, memory.end, memory.peak) for memory in known), strict=True))
    bound = "at most" if operation is sum and len(known) > 1 else next((memory.bound for memory in known if memory.bound), "")
    return Memory(start, end, peak, bound)


@dataclass
class _OpenStage:
    start: int
    peak: int
    counter_peak: int  # The counter's peak when the stage began.


class Gauge:
    """Measures the memory of host or device in stages, which may be nested.

    Args:
        read: Returns the bytes in use, and the peak since the last reset.
        reset: Resets the peak; returns `False` if that did not work.
        bound: See `Memory`.
    """

    def __init__(self, read: Callable[[], tuple[int, int]], reset: Callable[[], object], bound: str = "") -> None:
        self.open: dict[str, _OpenStage] = {}
        self._read = read
        self._reset = reset
        self._bound = bound
        self._resets = True

    def begin(self, stage: str) -> None:
        """Begin a stage."""
        self._record_peak()
        used, peak = self._read()
        self.open[stage] = _OpenStage(used, used, peak)

    def end(self, stage: str) -> Memory:
        """End a stage."""
        used, done = self._record_peak(), self.open.pop(stage)
        bound = self._bound if self._resets or done.peak > done.counter_peak else "at most"
        return Memory(done.start, used, done.peak, bound)

    def _record_peak(self) -> int:
        """Record the peak for all open stages, and reset it; returns the bytes in use."""
        used, peak = self._read()
        for stage in self.open.values():
            stage.peak = max(stage.peak, peak)
        self._resets = self._resets and self._reset() is not False
        return used


def host_gauge() -> Gauge | None:
    """For the resident memory of this process; None if it cannot be measured."""
    return None if _host_memory() is None else Gauge(lambda: _host_memory() or (0, 0), _reset_host)


def _host_memory() -> tuple[int, int] | None:
    try:
        sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB$", _STATUS.read_text("ascii", "replace"), re.MULTILINE))
    except OSError:
        return None
    return (int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024) if len(sizes) == 2 else None


def _reset_host() -> bool:
    with suppress(OSError):  # raised in a sandbox, or by a kernel without it
        return bool(_CLEAR.write_text("5", "ascii"))  # resets VmHWM to VmRSS, see proc(5)
    return False


def device_gauge(device: torch.device) -> Gauge | None:
    """For the memory that torch has allocated on a device; None if torch does not count it."""
    if device.type == "cuda":
        torch.cuda.init()  # before that there are no peaks to reset
        reset = partial(torch.cuda.reset_peak_memory_stats, device)
        return Gauge(lambda: (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)), reset)
    if device.type == "mps":
        return Gauge(lambda: (torch.mps.current_allocated_memory(),) * 2, lambda: True, "at least")
    return None


class MemoryMonitor(Callback):
    """Measures the memory of host and device at the start and end of each stage, and its peak in between.

    Stages are the set-up of a run (`configure_model`, the strategy's work, loading a checkpoint), the sanity check,
    training, each validation, test and predict. At the end of each the main process prints a line, and `stages` and
    `history` contain the memory of all processes, in bytes. After an error each process prints that of its open stage.

    Device memory is that of the tensors that torch has allocated (`torch.cuda.max_memory_allocated`); the driver shows more,
    because it includes torch's cache and libraries. On MPS torch has no peak, and the largest value seen is a lower bound.

    Host memory is the resident memory of the process, on Linux only: `VmRSS` and `VmHWM` of `/proc/self/status`. Shared
    memory, such as that of libraries, counts in each process; DataLoader workers are not counted.

    Each stage resets the peaks of torch and of the kernel when it starts and ends, which other readers of
    `torch.cuda.max_memory_allocated` or `ru_maxrss` notice. If the kernel does not allow it, the peak since the start of
    the process is an upper bound, unless the stage has raised it.

    Args:
        logging_interval: `"epoch"`: each training epoch is also a stage, `"train_epoch"`, and logged; `"step"`: log
            at log boundaries; None: log nothing. The metrics are `memory/host`, `memory/host_peak`, `memory/device`,
            `memory/device_peak`, in MB (10^6 bytes), of the process with the most; peaks are since the last boundary.
        verbose: Print the lines.

    Attributes:
        stages: The latest run of each stage.
        history: All runs of stages, in the order of their ends.

    Raises:
        ConfigurationError: An unknown interval.

    Example:
        ```python
        monitor = MemoryMonitor()
        Trainer(callbacks=[monitor]).fit(module)
        print(monitor.stages["train"].host.peak / 1e9, "GB")
        ```
    """

    def __init__(self, logging_interval: str | None = None, verbose: bool = True) -> None:
        super().__init__()
        choice(logging_interval, "MemoryMonitor(logging_interval=)", ("step", "epoch"), optional=True)
        self.logging_interval = logging_interval
        self.verbose = verbose
        self.stages: dict[str, StageMemory] = {}
        self.history: list[StageMemory] = []
        self._gauges: dict[str, Gauge] = {}  # "host" or "device" → its gauge.
        self._reported: set[str] = set()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        device = trainer.strategy.device
        gauges = {"host": host_gauge(), "device": device_gauge(device)}
        self._gauges = {name: gauge for name, gauge in gauges.items() if gauge is not None}
        if "host" not in self._gauges:
            self._notice_once("host memory is measured on Linux only.")
        if "device" not in self._gauges:
            why = "there is no device memory" if device.type == "cpu" else "torch does not count the memory of the device"
            self._notice_once(f"on {device.type} {why}{': it measures only host memory' * ('host' in self._gauges)}.")
        self._begin("setup")

    def _notice_once(self, text: str) -> None:
        if self.verbose and text not in self._reported:
            notice(f"MemoryMonitor: {text}")
            self._reported.add(text)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._end("setup", trainer)

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("sanity_check")

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end("sanity_check", trainer)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("train")

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.logging_interval is not None:
            self._begin("train_epoch" if self.logging_interval == "epoch" else "step")

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.logging_interval == "step" and trainer.should_log and trainer.accelerator.sync_gradients:
            # Each process logs its own, without waiting for others.
            self._log(self._measure("step", 0), on_step=True, on_epoch=False)
            self._begin("step")

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.logging_interval == "epoch":
            self._end("train_epoch", trainer)
            self._log(self.stages["train_epoch"], on_step=False, on_epoch=True)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end("train", trainer)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.stage != "fit":
            self._end("setup", trainer)
        self._begin(_evaluation(trainer))

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self._end(_evaluation(trainer), trainer)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        stages = [stage for gauge in self._gauges.values() for stage in gauge.open if stage != "step"]
        if stages and self.verbose and isinstance(exception, Exception):
            # The innermost stage, of this process: the others may be in a collective.
            mine = StageMemory(stages[-1], trainer.current_epoch, trainer.global_step, (self._measure(stages[-1], 0),))
            notice(f"{_line(mine)}, until {type(exception).__name__}", everywhere=True)

    def _begin(self, stage: str) -> None:
        for gauge in self._gauges.values():
            gauge.begin(stage)

    def _end(self, stage: str, trainer: Trainer) -> None:
        """End a stage. Collective."""
        mine = self._measure(stage, trainer.strategy.world.node)
        rows = trainer.strategy.world.exchange([mine.node, *(m and list(astuple(m)) for m in (mine.host, mine.device))])
        processes = tuple(ProcessMemory(node, *(None if m is None else Memory(*m) for m in two)) for node, *two in rows)
        done = StageMemory(stage, trainer.current_epoch, trainer.global_step, processes)
        self.stages[stage] = done
        self.history.append(done)
        if self.verbose and (done.host or done.device):
            notice(_line(done))

    def _measure(self, stage: str, node: int) -> ProcessMemory:
        ends = {name: gauge.end(stage) for name, gauge in self._gauges.items()}
        return ProcessMemory(node, ends.get("host"), ends.get("device"))

    def _log(self, use: ProcessMemory | StageMemory, **options: bool) -> None:
        for name, memory in (("host", use.host), ("device", use.device)):
            if memory is not None:
                values = {f"memory/{name}": memory.end / 1e6, f"memory/{name}_peak": memory.peak / 1e6}
                self.log_dict(values, reduce_fx="max", **options)


def _evaluation(trainer: Trainer) -> str:
    return "validate" if trainer.stage in (None, "fit") else trainer.stage


def _line(use: StageMemory) -> str:
    distributed = len(use.processes) > 1
    count = max(Counter(process.node for process in use.processes).values())
    together = use.together if distributed else None
    named = {f"host{' (one process)' * distributed}": use.host, f"{count} processes of a node": together, "device": use.device}
    parts = [f"{name} {_text(memory)}" for name, memory in named.items() if memory is not None]
    return f"memory in {use.stage}{f' {use.epoch}' * (use.stage == 'train_epoch')}: {'; '.join(parts)}"


def _text(memory: Memory) -> str:
    peak = f"{memory.bound} {memory.peak / 1e6:,.0f} MB".strip()
    return f"{memory.start / 1e6:,.0f} → {memory.end / 1e6:,.0f} MB, peak {peak}"
