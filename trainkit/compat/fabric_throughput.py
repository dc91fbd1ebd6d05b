"""`Throughput` and `ThroughputMonitor` of `lightning.fabric.utilities.throughput`: rates of a loop that counts by itself."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from trainkit.callbacks.throughput_monitor import peak_flops
from trainkit.checks import whole_number
from trainkit.errors import ConfigurationError

if TYPE_CHECKING:
    from trainkit.compat.fabric_names import Fabric

__all__ = ["Throughput", "ThroughputMonitor"]

_TOTALS = ("time", "batches", "samples", "lengths")


class Throughput:
    """Rates over the last calls of `update`, under Lightning's names, such as `device/samples_per_sec`.

    Args:
        available_flops: Peak FLOP/s of one device, for `device/mfu`.
        world_size: Number of devices. With several, there are also rates of all of them, without `device/`.
        window_size: Number of calls; there are rates once there were as many.
        separator: Between `device` and the name.

    Raises:
        ConfigurationError: `window_size` is less than 2, or `world_size` less than 1.
    """

    def __init__(
        self, available_flops: float | None = None, world_size: int = 1, window_size: int = 100, separator: str = "/"
    ) -> None:
        self.available_flops = available_flops
        self.world_size = whole_number(world_size, "Throughput(world_size=)", 1)
        self.separator = separator
        window = whole_number(window_size, "Throughput(window_size=)", 2)
        self._totals: deque[dict[str, float]] = deque(maxlen=window)
        self._flops: deque[float] = deque(maxlen=window)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: float | None = None
    ) -> None:
        """Note the totals of this device so far.

        Args:
            time: Seconds.
            batches: Number of micro-batches.
            samples: Number of samples.
            lengths: Number of tokens; in each call or in none.
            flops: FLOPs since the last call; not a total.

        Raises:
            ConfigurationError: A total has not grown, or there are fewer samples than batches, or fewer tokens than samples.
        """
        totals = {"time": time, "batches": batches, "samples": samples} | ({} if lengths is None else {"lengths": lengths})
        last = self._totals[-1] if self._totals else None
        if last is not None and (last.keys() != totals.keys() or any(totals[name] <= last[name] for name in totals)):
            raise ConfigurationError(
                f"Throughput.update: expected totals that grow with each call, of the same names, got {totals} after {last}."
            )
        if not batches <= samples <= (samples if lengths is None else lengths):
            raise ConfigurationError(
                f"Throughput.update: expected batches <= samples <= lengths, as totals of a run, got {totals}."
            )
        self._totals.append(totals)
        if flops is not None:
            self._flops.append(flops)

    def compute(self) -> dict[str, float]:
        """The newest totals, and the rates per second."""
        values = dict(self._totals[-1])
        full = len(self._totals) == self._totals.maxlen
        first, last = self._totals[0], self._totals[-1]
        seconds = last["time"] - first["time"]
        rates = {}
        if full:
            names = {"batches": "batches", "samples": "samples", "items": "lengths"}
            rates = {name: (last[of] - first[of]) / seconds for name, of in names.items() if of in last}
        if full and len(self._flops) == self._flops.maxlen:  # The first one was spent before the window.
            rates["flops"] = (sum(self._flops) - self._flops[0]) / seconds
        for name, rate in rates.items():
            values[f"device{self.separator}{name}_per_sec"] = rate
            if self.world_size > 1:
                values[f"{name}_per_sec"] = rate * self.world_size
        if "flops" in rates and self.available_flops:
            values[f"device{self.separator}mfu"] = rates["flops"] / self.available_flops
        return values

    def reset(self) -> None:
        """Forget all calls."""
        self._totals.clear()
        self._flops.clear()


class FabricThroughputMonitor(Throughput):
    """`Throughput` of a `Fabric`, on its main process: on others the methods do nothing and return an empty dict.

    Args:
        fabric: The `Fabric`.
        options: Those of `Throughput`; `available_flops` is that of known GPUs, and `world_size` that of the `Fabric`.
    """

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        super().__init__(**{"available_flops": _peak(fabric), "world_size": fabric.world_size} | options)
        self._fabric = fabric
        self.step = -1

    def update(self, **totals: Any) -> None:
        """See `Throughput.update`."""
        if self._fabric.is_global_zero:
            super().update(**totals)

    def compute(self) -> dict[str, float]:
        """See `Throughput.compute`."""
        return super().compute() if self._fabric.is_global_zero else {}

    def compute_and_log(self, step: int | None = None) -> dict[str, float]:
        """`compute`, and log the values.

        Args:
            step: The step; default: the number of calls before this one.
        """
        self.step = self.step + 1 if step is None else step
        values = self.compute()
        self._fabric.log_dict(values, self.step)
        return values


ThroughputMonitor = FabricThroughputMonitor  # Lightning has two classes of this name; the other one is a callback.


def _peak(fabric: Fabric) -> float | None:
    device, precision = fabric.device, fabric.strategy.precision
    if device.type != "cuda":
        return None
    dtype = precision.autocast_dtype or precision.parameter_dtype
    return peak_flops(torch.cuda.get_device_name(device), dtype, tf32=torch.get_float32_matmul_precision() != "highest")
