"""`MemoryMonitor`: the memory of device and host at the start and end of each stage, and its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.callbacks._memory import Gauge, Memory, device_gauge, host_gauge
from trainkit.checks import choice
from trainkit.console import notice

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["Memory", "MemoryMonitor", "ProcessMemory", "StageMemory"]

_EPOCH = "train_epoch"


@dataclass(frozen=True)
class ProcessMemory:
    """One process in one stage.

    Attributes:
        node: The rank of its node.
        host: Its resident memory; None if not measured.
        device: The memory that torch has allocated on its device; None if there is none, or if not measured.
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
        return _combined((process.device for process in self.processes), max)

    @property
    def host(self) -> Memory | None:
        """Of one process."""
        return _combined((process.host for process in self.processes), max)

    @property
    def together(self) -> Memory | None:
        """Of all processes of one node; the sum of their peaks is an upper bound, as they may not be simultaneous."""
        nodes: dict[int, list[Memory | None]] = {}
        for process in self.processes:
            nodes.setdefault(process.node, []).append(process.host)
        return _combined((_combined(memories, sum) for memories in nodes.values()), max)


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
        self._host: Gauge | None = None
        self._device: Gauge | None = None
        self._reported: set[str] = set()

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        device = trainer.strategy.device
        self._host, self._device = host_gauge(), device_gauge(device)
        if self._host is None:
            self._notice_once("host memory is measured on Linux only.")
        if self._device is None:
            why = "there is no device memory" if device.type == "cpu" else "torch does not count the memory of the device"
            self._notice_once(f"on {device.type} {why}{': it measures only host memory' * (self._host is not None)}.")
        self._begin("setup")

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._end("setup", trainer)

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("sanity_check")

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end("sanity_check", trainer)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("train")

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.logging_interval == "epoch":
            self._begin(_EPOCH)
        elif self.logging_interval == "step":
            self._begin("step")

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.logging_interval == "step" and trainer.should_log and trainer.accelerator.sync_gradients:
            for name, gauge in self._gauges():  # each process logs its own, without waiting for others
                self._log(name, gauge.end("step"), on_step=True, on_epoch=False)
            self._begin("step")

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.logging_interval == "epoch":
            self._end(_EPOCH, trainer)
            for name in ("host", "device"):
                memory = getattr(self.stages[_EPOCH], name)
                if memory is not None:
                    self._log(name, memory, on_step=False, on_epoch=True)

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
        if not self.verbose or not isinstance(exception, Exception):
            return
        stages = [stage for _, gauge in self._gauges() for stage in gauge.open if stage != "step"]
        if stages:  # the innermost one, of this process: the others may be in a collective
            mine = StageMemory(stages[-1], trainer.current_epoch, trainer.global_step, (self._measured(stages[-1], 0),))
            notice(f"{_line(mine)}, until {type(exception).__name__}", everywhere=True)

    def _gauges(self) -> list[tuple[str, Gauge]]:
        return [(name, gauge) for name, gauge in (("host", self._host), ("device", self._device)) if gauge is not None]

    def _begin(self, stage: str) -> None:
        for _, gauge in self._gauges():
            gauge.begin(stage)

    def _end(self, stage: str, trainer: Trainer) -> None:
        """End a stage. Collective."""
        mine = self._measured(stage, trainer.strategy.world.node)
        rows = trainer.strategy.world.exchange([mine.node, *(m and list(astuple(m)) for m in (mine.host, mine.device))])
        processes = tuple(ProcessMemory(node, *(None if m is None else Memory(*m) for m in two)) for node, *two in rows)
        done = StageMemory(stage, trainer.current_epoch, trainer.global_step, processes)
        self.stages[stage] = done
        self.history.append(done)
        if self.verbose and (done.host or done.device):
            notice(_line(done))

    def _measured(self, stage: str, node: int) -> ProcessMemory:
        host, device = (None if gauge is None else gauge.end(stage) for gauge in (self._host, self._device))
        return ProcessMemory(node, host, device)

    def _log(self, name: str, memory: Memory, **options: bool) -> None:
        values = {f"memory/{name}": memory.end / 1e6, f"memory/{name}_peak": memory.peak / 1e6}
        self.log_dict(values, reduce_fx="max", **options)

    def _notice_once(self, text: str) -> None:
        if self.verbose and text not in self._reported:
            notice(f"MemoryMonitor: {text}")
            self._reported.add(text)


def _evaluation(trainer: Trainer) -> str:
    return "validate" if trainer.stage in (None, "fit") else trainer.stage


def _combined(memories: Iterable[Memory | None], combine: Callable[[Iterable[int]], int]) -> Memory | None:
    """The sum or the maximum of each number; None if there are none."""
    known = [memory for memory in memories if memory is not None]
    if not known:
        return None
    start, end, peak = map(combine, zip(*((memory.start, memory.end, memory.peak) for memory in known), strict=True))
    bound = "at most" if combine is sum and len(known) > 1 else next((memory.bound for memory in known if memory.bound), "")
    return Memory(start, end, peak, bound)


def _line(use: StageMemory) -> str:
    name = f"train_epoch {use.epoch}" if use.stage == _EPOCH else use.stage
    parts = []
    if use.host is not None:
        several = len(use.processes) > 1
        parts.append(f"host{' (one process)' * several} {_text(use.host)}")
        if several and use.together is not None:
            count = max(Counter(process.node for process in use.processes).values())
            parts.append(f"{count} processes of a node {_text(use.together)}")
    if use.device is not None:
        parts.append(f"device {_text(use.device)}")
    return f"memory in {name}: {'; '.join(parts)}"


def _text(memory: Memory) -> str:
    """`120 → 130 MB, peak 150 MB`."""
    bound = f"{memory.bound} " * bool(memory.bound)
    return f"{memory.start / 1e6:,.0f} → {memory.end / 1e6:,.0f} MB, peak {bound}{memory.peak / 1e6:,.0f} MB"
