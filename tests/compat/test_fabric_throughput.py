"""`Throughput` and `ThroughputMonitor`, with the names and numbers of Lightning 2.6.6."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainkit.compat.fabric_loggers import CSVLogger
from trainkit.compat.fabric_throughput import Throughput, ThroughputMonitor
from trainkit.errors import ConfigurationError
from trainkit.fabric import Fabric
from trainkit.utilities import measure_flops


def test_rates_of_the_window() -> None:
    """The values are what Lightning computes from the same calls."""
    throughput = Throughput(available_flops=50, world_size=2, window_size=3)
    for number in range(1, 5):
        totals = {"batches": number, "samples": 4 * number, "lengths": 40 * number}
        throughput.update(time=2.0 * number, flops=10 * number, **totals)
        if number == 2:
            assert throughput.compute() == {"time": 4.0, "batches": 2, "samples": 8, "lengths": 80}
    assert throughput.compute() == {
        "time": 8.0,
        "batches": 4,
        "samples": 16,
        "lengths": 160,
        "device/batches_per_sec": 0.5,
        "batches_per_sec": 1.0,
        "device/samples_per_sec": 2.0,
        "samples_per_sec": 4.0,
        "device/items_per_sec": 20.0,
        "items_per_sec": 40.0,
        "device/flops_per_sec": 17.5,
        "flops_per_sec": 35.0,
        "device/mfu": 0.35,
    }
    throughput.reset()
    throughput.update(time=1.0, batches=1, samples=1)
    assert throughput.compute() == {"time": 1.0, "batches": 1, "samples": 1}


def test_totals_that_do_not_grow() -> None:
    throughput = Throughput()
    throughput.update(time=1.0, batches=2, samples=2)
    for wrong in ({"batches": 2, "samples": 4}, {"batches": 3, "samples": 4, "lengths": 5}):
        with pytest.raises(ConfigurationError, match="expected totals that grow with each call, of the same names"):
            throughput.update(time=2.0, **wrong)
    with pytest.raises(ConfigurationError, match="expected batches <= samples <= lengths"):
        throughput.update(time=2.0, batches=4, samples=3)
    with pytest.raises(ConfigurationError, match=r"window_size"):
        Throughput(window_size=1)


def test_a_monitor_logs_with_its_fabric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", loggers=CSVLogger(tmp_path))
    model, x = torch.nn.Linear(4, 2), torch.ones(3, 4)
    monitor = ThroughputMonitor(fabric, window_size=2)
    flops = measure_flops(model, lambda: model(x), torch.sum)
    for number in (1, 2):
        monitor.update(time=float(number), batches=number, samples=3 * number, flops=flops)
        values = monitor.compute_and_log()
    fabric.logger.finalize("success")
    assert values["device/samples_per_sec"] == 3.0
    assert values["device/flops_per_sec"] == float(flops)
    assert monitor.step == 1
    assert "device/samples_per_sec" in next(tmp_path.rglob("metrics.csv")).read_text("utf-8")
