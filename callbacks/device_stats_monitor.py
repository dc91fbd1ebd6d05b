"""`DeviceStatsMonitor`: logs the statistics of the device and of the CPU at log boundaries."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from trainkit.callback import Callback
from trainkit.console import notice
from trainkit.errors import ConfigurationError, MissingPackageError

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.trainer import Trainer

__all__ = ["DeviceStatsMonitor"]


class DeviceStatsMonitor(Callback):
    """Logs the statistics of the device, and of the CPU, at the start and at the end of batches.

    Names are `DeviceStatsMonitor.on_train_batch_start/<statistic>` and the same with `on_train_batch_end`,
    `on_validation_batch_start`, `on_validation_batch_end`, `on_test_batch_start` and `on_test_batch_end`. In training it logs
    at log boundaries, at the start of the accumulation window and at its end; in an evaluation, every `log_every_n_steps`
    batches. With several processes, each value is the largest of all of them.

    * CUDA: all numbers of `torch.cuda.memory_stats`, such as `allocated_bytes.all.peak`, in bytes, and `num_alloc_retries`.
    * MPS: `allocated_bytes.all.current`, in bytes.
    * CPU, or with `cpu_stats=True`: `cpu_percent`, `cpu_vm_percent` and `cpu_swap_percent` of psutil: the load of all cores,
      and the memory and the swap in use, of the whole node, in percent.

    Nothing waits for the device. For the memory of each stage and its peak, see `MemoryMonitor`.

    Args:
        cpu_stats: Log the statistics of the CPU; `None`: if the run is on the CPU.

    Raises:
        ConfigurationError: `cpu_stats` is not `True`, `False` or `None`; when a fit begins, the Trainer has no logger.
        MissingPackageError: When a run begins: psutil is not installed, and the statistics of the CPU are to be logged.

    Example:
        ```python
        trainer = Trainer(callbacks=[DeviceStatsMonitor(cpu_stats=True)], log_every_n_steps=100)
        ```
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        super().__init__()
        if cpu_stats not in (True, False, None):
            raise ConfigurationError(
                f"DeviceStatsMonitor(cpu_stats=...) must be True, False or None, not {cpu_stats!r}. For example: "
                "DeviceStatsMonitor(cpu_stats=True)"
            )
        self.cpu_stats = cpu_stats
        self._device = torch.device("cpu")
        self._reads_cpu = False

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and not trainer.loggers and not trainer.fast_dev_run:  # fast_dev_run disables the loggers
            raise ConfigurationError(
                "DeviceStatsMonitor needs a logger, but the Trainer has none. Fix: Trainer(logger=True), or remove "
                "DeviceStatsMonitor"
            )
        self._device = trainer.strategy.device
        self._reads_cpu = self._device.type == "cpu" if self.cpu_stats is None else self.cpu_stats
        if self._reads_cpu:
            if find_spec("psutil") is None:
                raise MissingPackageError(
                    "DeviceStatsMonitor logs the statistics of the CPU with the package 'psutil', which is not installed. "
                    "Install it with: pip install psutil   (or do not log them: DeviceStatsMonitor(cpu_stats=False))"
                )
            _cpu_stats()  # the first cpu_percent is 0: it counts from the call before
        if not self._reads_cpu and self._device.type not in ("cuda", "mps"):
            notice(f"DeviceStatsMonitor logs nothing: there are no statistics of {self._device.type}.")

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if trainer.should_log and batch_idx % trainer.accumulate_grad_batches == 0:
            self._log("on_train_batch_start")

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.should_log and trainer.accelerator.sync_gradients:
            self._log("on_train_batch_end")

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log_evaluation(trainer, "on_validation_batch_start", batch_idx)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log_evaluation(trainer, "on_validation_batch_end", batch_idx)

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log_evaluation(trainer, "on_test_batch_start", batch_idx)

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log_evaluation(trainer, "on_test_batch_end", batch_idx)

    def _log_evaluation(self, trainer: Trainer, hook: str, batch_idx: int) -> None:
        every = trainer.log_every_n_steps
        if every and batch_idx % every == 0 and not trainer.sanity_checking:
            self._log(hook)

    def _log(self, hook: str) -> None:
        stats = self._stats()
        if stats:
            values = {f"{type(self).__qualname__}.{hook}/{name}": float(value) for name, value in stats.items()}
            self.log_dict(values, on_step=True, on_epoch=False, reduce_fx="max")

    def _stats(self) -> dict[str, float]:
        stats: dict[str, float] = {}
        if self._device.type == "cuda":
            stats |= torch.cuda.memory_stats(self._device)
        elif self._device.type == "mps":
            stats["allocated_bytes.all.current"] = torch.mps.current_allocated_memory()
        return stats | _cpu_stats() if self._reads_cpu else stats


def _cpu_stats() -> dict[str, float]:
    """The load of the node, in percent; waits for nothing."""
    import psutil

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
