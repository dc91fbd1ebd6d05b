from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit.callbacks import LambdaCallback, ThroughputMonitor, throughput_monitor
from trainkit.callbacks.throughput_monitor import peak_flops
from trainkit.console import TrainkitWarning
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.precision import Precision


@pytest.fixture(autouse=True)
def _stopped_clock(clock, monkeypatch) -> None:
    monkeypatch.setattr(throughput_monitor, "time", clock)


@pytest.fixture
def start(trainer, module) -> Any:
    def started(**arguments: Any) -> ThroughputMonitor:
        callback = ThroughputMonitor(**arguments)
        callback._module = module
        callback.on_train_start(trainer, module)
        return callback

    return started


def batch_of(samples: int, length: int = 4) -> list[torch.Tensor]:
    return [torch.zeros(samples, length)]


def step(
    callback: ThroughputMonitor, trainer: Any, module: Any, clock: Any, samples: list[int], wait: float = 1.0
) -> dict[str, float]:
    """One optimizer step. Each micro-batch waits for data and then takes three seconds. Returns the logged values."""
    module.logged.clear()
    for number, size in enumerate(samples, start=1):
        clock.now += wait
        callback.on_train_batch_start(trainer, module, batch_of(size), 0)
        clock.now += 3.0
        callback.on_after_backward(trainer, module)
        trainer.accelerator.sync_gradients = number == len(samples)
        callback.on_train_batch_end(trainer, module, None, batch_of(size), 0)
    return dict(module.logged)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"window_size": 0}, ["window_size", "≥ 1"]),
        ({"batch_size_fn": 32}, ["batch_size_fn", "a function or None", "lambda batch"]),
        ({"length_fn": "len"}, ["length_fn", "'len'"]),
        ({"flops_per_batch": 0}, ["flops_per_batch", "> 0"]),
        ({"available_flops": -1.0}, ["available_flops", "> 0"]),
        ({"available_flops": "312e12"}, ["available_flops", "'312e12'"]),
        ({"flops_per_batch": 1.0, "measure_flops": True}, ["remove one of them"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_fix(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ThroughputMonitor(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_flops_of_the_module(trainer, module, clock, start) -> None:
    """Lightning's way to tell them. They may change; an argument of the callback has precedence."""
    module.flops_per_batch = 4e12
    callback = start(available_flops=20e12)
    step(callback, trainer, module, clock, [8])
    assert step(callback, trainer, module, clock, [8])["throughput/tflops_per_device"] == pytest.approx(1.0)
    module.flops_per_batch = 12e12
    assert step(callback, trainer, module, clock, [8])["throughput/tflops_per_device"] == pytest.approx(2.0)
    callback = start(flops_per_batch=8e12)
    step(callback, trainer, module, clock, [8])
    assert step(callback, trainer, module, clock, [8])["throughput/tflops_per_device"] == pytest.approx(2.0)


def test_rates_of_a_window(trainer, module, clock, start) -> None:
    callback = start(window_size=2)
    assert step(callback, trainer, module, clock, [8]) == {}  # the first step includes warm-up
    # Each step: 1 s of waiting for data, 3 s of work.
    assert step(callback, trainer, module, clock, [8]) == {
        "throughput/batches_per_sec": 0.25,
        "throughput/samples_per_sec": 2.0,
        "throughput/data_wait_share": 0.25,
    }
    step(callback, trainer, module, clock, [8])
    logged = step(callback, trainer, module, clock, [16], wait=5.0)  # the last two steps, 12 s
    assert logged == {
        "throughput/batches_per_sec": 2 / 12,
        "throughput/samples_per_sec": 24 / 12,
        "throughput/data_wait_share": 6 / 12,
    }
    assert module.options == {"on_step": True, "on_epoch": False, "batch_size": 1}


def test_batches_are_micro_batches(trainer, module, clock, start) -> None:
    callback = start()
    step(callback, trainer, module, clock, [4, 4])
    logged = step(callback, trainer, module, clock, [4, 2])
    assert logged["throughput/batches_per_sec"] == 2 / 8
    assert logged["throughput/samples_per_sec"] == 6 / 8


def test_tokens_and_the_users_own_counts(trainer, module, clock, start) -> None:
    callback = start(batch_size_fn=lambda batch: 10, length_fn=lambda batch: batch[0].numel())
    step(callback, trainer, module, clock, [8])
    logged = step(callback, trainer, module, clock, [8])
    assert logged["throughput/samples_per_sec"] == 10 / 4
    assert logged["throughput/tokens_per_sec"] == 32 / 4


def test_rates_are_of_all_processes_together(trainer, module, clock, start) -> None:
    trainer.strategy.data_world = World(size=4)
    callback = start(length_fn=lambda batch: 8)
    step(callback, trainer, module, clock, [8])
    logged = step(callback, trainer, module, clock, [8])
    assert logged["throughput/batches_per_sec"] == 4 * 0.25
    assert logged["throughput/samples_per_sec"] == 4 * 2.0
    assert logged["throughput/tokens_per_sec"] == 4 * 2.0
    assert logged["throughput/data_wait_share"] == 0.25


def test_a_batch_of_several_devices_is_counted_as_it_is(trainer, module, clock, start) -> None:
    """The batch contains the samples of all devices of the process, and one micro-batch for each device."""
    trainer.strategy.data_world = World(devices=4)
    callback = start(flops_per_batch=8e12, length_fn=lambda batch: 8)
    step(callback, trainer, module, clock, [8])
    logged = step(callback, trainer, module, clock, [8])
    assert logged["throughput/batches_per_sec"] == 4 * 0.25
    assert logged["throughput/samples_per_sec"] == 2.0
    assert logged["throughput/tokens_per_sec"] == 2.0
    assert logged["throughput/tflops_per_device"] == 0.5


def test_time_in_validation_counts_for_nothing(trainer, module, clock, start) -> None:
    callback = start()
    step(callback, trainer, module, clock, [8])
    callback.on_validation_start(trainer, module)
    clock.now += 1000.0
    callback.on_validation_end(trainer, module)
    logged = step(callback, trainer, module, clock, [8])
    assert logged["throughput/samples_per_sec"] == 2.0
    assert logged["throughput/data_wait_share"] == 0.25


def test_logs_at_log_boundaries_only(trainer, module, clock, start) -> None:
    callback = start()
    trainer.should_log = False
    for _ in range(3):
        assert step(callback, trainer, module, clock, [8]) == {}
    trainer.should_log = True
    assert step(callback, trainer, module, clock, [8])["throughput/samples_per_sec"] == 2.0


def test_a_second_fit_starts_again(trainer, module, clock, start) -> None:
    callback = start()
    step(callback, trainer, module, clock, [8])
    clock.now += 1000.0
    callback.on_train_start(trainer, module)
    assert step(callback, trainer, module, clock, [8]) == {}
    assert step(callback, trainer, module, clock, [8])["throughput/data_wait_share"] == 0.25


@pytest.mark.parametrize("flops", [8e12, lambda batch: 1e12 * len(batch[0])])
def test_utilization(trainer, module, clock, start, flops: Any) -> None:
    trainer.strategy.data_world = World(size=2)  # values per device are not multiplied by this
    callback = start(flops_per_batch=flops, available_flops=20e12)
    step(callback, trainer, module, clock, [8])
    logged = step(callback, trainer, module, clock, [8])
    assert logged["throughput/tflops_per_device"] == 2.0
    assert logged["throughput/mfu"] == 0.1


def test_without_a_known_peak_there_is_one_notice_and_no_utilization(trainer, module, clock, start, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    callback = start(flops_per_batch=8e12)
    step(callback, trainer, module, clock, [8])
    logged = step(callback, trainer, module, clock, [8])
    assert logged["throughput/tflops_per_device"] == 2.0
    assert "throughput/mfu" not in logged
    assert len(caplog.messages) == 1
    assert "(cpu, 32-true)" in caplog.messages[0]
    assert "ThroughputMonitor(available_flops=312e12)" in caplog.messages[0]
    start()  # no notice if FLOPs are not requested
    assert len(caplog.messages) == 1


class Measured(TinyModule):
    """A linear layer whose FLOPs are known: forward and the weight's gradient, 2·4 each for a sample."""

    def __init__(self, step: Callable[[Measured, Any, int], Any] | None = None) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if self.step is None else self.step(self, batch, batch_idx)


def measure(make_trainer: Any, module: TinyModule, loader: Any = None, **options: Any) -> ThroughputMonitor:
    monitor = ThroughputMonitor(measure_flops=True, available_flops=1e3)
    make_trainer(monitor, **options).fit(module, tiny_loader() if loader is None else loader)
    return monitor


def batches(*sizes: int) -> list[Any]:
    return [(torch.ones(size, 4), torch.ones(size, 1)) for size in sizes]


def test_flops_of_manual_optimization(make_trainer) -> None:
    def manual(module: Measured, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        optimizer.step()

    module = Measured(manual)
    module.automatic_optimization = False
    assert measure(make_trainer, module).flops_per_sample == 16


@pytest.mark.parametrize(
    "changed", [{"activation_checkpointing": "Linear"}, {"compile": {"modules": "Linear", "backend": "aot_eager"}}]
)
def test_flops_of_layers_that_are_recomputed_or_compiled(make_trainer, changed: dict[str, Any]) -> None:
    try:
        assert measure(make_trainer, Measured(), **changed).flops_per_sample == 16
    finally:
        torch.compiler.reset()


def test_each_shape_is_counted_once(make_trainer, monkeypatch) -> None:
    counted = []
    original = throughput_monitor.step_flops
    monkeypatch.setattr(throughput_monitor, "step_flops", lambda *args: counted.append(args[2]) or original(*args))
    monitor = measure(make_trainer, Measured(), batches(2, 2, 3, 2, 3))
    assert counted == [0, 2]
    assert monitor._flops == (2 + 2 + 3 + 2 + 3) * 16


@pytest.mark.slow
def test_many_shapes_are_estimated(make_trainer, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    monitor = measure(make_trainer, Measured(), batches(*range(1, 36)))
    assert monitor._flops == 16 * sum(range(1, 36))  # here the FLOPs are proportional to the elements
    assert len(monitor._by_shapes) == 32
    assert sum("estimated by their number of elements" in message for message in caplog.messages) == 1


def test_a_batch_without_loss_is_not_what_is_counted(make_trainer) -> None:
    module = Measured(lambda module, batch, index: module.loss(batch) if index else None)
    with pytest.warns(TrainkitWarning, match="training_step returned None for the first batch"):
        monitor = measure(make_trainer, module, batches(2, 2))
    assert monitor._flops == 2 * 16


def test_a_batch_without_samples_is_not_what_is_counted(make_trainer) -> None:
    monitor = ThroughputMonitor(measure_flops=True, available_flops=1.0, batch_size_fn=lambda batch: len(batch[0]) - 2)
    make_trainer(monitor).fit(Measured(), batches(2, 3))
    assert monitor._flops == 3 * 16


def test_counting_leaves_the_module_and_the_random_numbers_alone(make_trainer) -> None:
    """What the counted step stores in the module, in its lists and in the metrics is not there for the run."""

    def storing(module: Measured, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = module.loss(batch) * torch.rand(()) * random.random()
        module.seen.append(loss.detach())
        module.log("loss", loss, on_epoch=True)
        return loss

    def run(*callbacks: Any) -> tuple[list[torch.Tensor], Any]:
        module = Measured(storing)
        trainer = make_trainer(*callbacks)
        trainer.fit(module, tiny_loader())
        return module.seen, trainer.callback_metrics["loss_epoch"]

    torch.manual_seed(0)
    plain, plain_mean = run()
    torch.manual_seed(0)
    seen, mean = run(ThroughputMonitor(measure_flops=True, available_flops=1.0))
    assert len(seen) == len(plain)
    assert torch.equal(torch.stack(seen), torch.stack(plain))
    assert mean == plain_mean


@torch.library.custom_op("trainkit_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An operation that torch has no formula for."""
    return 2 * x


twice.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    "step, reason",
    [
        (
            lambda module, batch, batch_idx: module.loss(batch) / module.loss(batch).item(),
            "in test_throughput_monitor.py, line",
        ),
        (
            lambda module, batch, batch_idx: module.loss(batch) + twice(batch[0]).sum(),
            "no formula for the FLOPs of trainkit_tests",
        ),
    ],
)
def test_what_cannot_be_counted(make_trainer, clock, caplog, step: Any, reason: str) -> None:
    caplog.set_level("INFO", "trainkit")
    tick = LambdaCallback(on_train_batch_start=lambda *args: setattr(clock, "now", clock.now + 1))
    trainer = make_trainer(tick, monitor := ThroughputMonitor(measure_flops=True, available_flops=1.0))
    trainer.fit(Measured(step), tiny_loader())
    (said,) = [message for message in caplog.messages if "cannot be counted" in message]
    assert reason in said
    assert "ThroughputMonitor(flops_per_batch=...)" in said
    assert monitor.flops_per_sample is None
    names = {name for _, metrics in trainer.logger.rows for name in metrics}
    assert "throughput/samples_per_sec" in names
    assert not names & {"throughput/mfu", "throughput/tflops_per_device"}


@pytest.mark.parametrize(
    "name, dtype, tf32, teraflops",
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, False, 989.0),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756.0),
        ("NVIDIA H100 NVL", torch.float16, False, 835.0),
        ("NVIDIA H200", torch.float32, False, 67.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156.0),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5),
        ("NVIDIA A100-SXM4-80GB", torch.float64, False, None),
        ("NVIDIA A10", torch.bfloat16, False, 125.0),
        ("NVIDIA A10G", torch.bfloat16, False, None),
        ("NVIDIA L40S", torch.bfloat16, False, 362.0),
        ("NVIDIA L4", torch.bfloat16, False, 121.0),
        ("Tesla V100-SXM2-16GB", torch.float16, False, 125.0),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, False, None),
        ("Tesla V100-SXM2-16GB", torch.float32, True, 15.7),
        ("Tesla T4", torch.float32, False, 8.1),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, False, 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, False, None),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, False, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, False, None),
        ("AMD Instinct MI300X", torch.bfloat16, False, 1307.4),
        ("Some GPU", torch.bfloat16, False, None),
    ],
)
def test_known_peaks(name: str, dtype: torch.dtype, tf32: bool, teraflops: float | None) -> None:
    expected = None if teraflops is None else teraflops * 1e12
    assert peak_flops(name, dtype, tf32) == expected


@pytest.mark.parametrize("precision, teraflops", [("bf16-mixed", 989.0), ("16-true", 989.0), ("32-true", 67.0)])
def test_the_peak_is_that_of_the_runs_precision(trainer, monkeypatch, precision: str, teraflops: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    trainer.precision_plugin = Precision(precision)
    assert throughput_monitor._find_peak_flops(trainer, torch.device("cuda", 0)) == teraflops * 1e12


def test_waits_for_the_device_at_log_boundaries_only(trainer, module, clock, start) -> None:
    callback = start()
    waits: list[float] = []
    callback._sync = lambda: waits.append(clock.now)
    for should_log in (False, False, True, False):
        trainer.should_log = should_log
        step(callback, trainer, module, clock, [8])
    assert waits == [1012.0]


class TimedSteps(TinyModule):
    """Each training step moves the clock by three seconds."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.now += 3
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx) -> None:
        self.clock.now += 1000


class Slow(torch.utils.data.Dataset):
    """Sixteen samples; reading one moves the clock by a quarter of a second."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.clock.now += 0.25
        return torch.ones(4), torch.ones(1)


def test_a_fit(make_trainer, clock) -> None:
    monitor = ThroughputMonitor(length_fn=lambda batch: batch[0].numel(), measure_flops=True, available_flops=1e3)
    trainer = make_trainer(monitor, max_epochs=2, log_every_n_steps=2)
    loader = torch.utils.data.DataLoader(Slow(clock), batch_size=4)
    trainer.fit(TimedSteps(clock), loader, torch.utils.data.DataLoader(Slow(clock), batch_size=16))
    # Four samples in four seconds, of which fetching them took one; validation between the epochs does not count.
    for step in (2, 4, 6, 8):
        row = {name: value for at, metrics in trainer.logger.rows if at == step for name, value in metrics.items()}
        assert {name: value for name, value in row.items() if name.startswith("throughput/")} == {
            "throughput/batches_per_sec": 0.25,
            "throughput/samples_per_sec": 1.0,
            "throughput/tokens_per_sec": 4.0,
            "throughput/data_wait_share": 0.25,
            "throughput/tflops_per_device": 16e-12,  # forward and the weight's gradient, 2·4 each
            "throughput/mfu": 0.016,
        }


def test_counting_flops_does_not_change_training(make_trainer) -> None:
    weights = []
    for callbacks in ([], [ThroughputMonitor(measure_flops=True, available_flops=1e3)]):
        torch.manual_seed(0)
        module = TinyModule()
        make_trainer(*callbacks, accumulate_grad_batches=2).fit(module, tiny_loader())
        weights.append(module.layer.weight.detach())
    assert torch.equal(*weights)
