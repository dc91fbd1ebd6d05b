from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.worlds.worlds import run_world

from trainkit.callbacks import MemoryMonitor, memory_monitor
from trainkit.callbacks.memory_monitor import Gauge, Memory, ProcessMemory, StageMemory
from trainkit.errors import ConfigurationError

MB = 10**6
SLACK = 30 * MB  # tolerance for other memory of the process
resets = pytest.mark.skipif(not memory_monitor._reset_host(), reason="needs a Linux where the peak can be set back")


@contextmanager
def taken(size: int) -> Iterator[None]:
    """Use `size` more bytes inside the `with` block.

    The memory is taken from the kernel and returned to it; an allocator would reuse memory that it has kept.
    """
    with mmap.mmap(-1, size) as memory:
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1
        yield


@pytest.fixture
def collected() -> None:
    """Free the garbage of earlier tests before a stage is measured."""
    gc.collect()


def test_a_wrong_interval_is_named_with_its_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"logging_interval.*not 'steps'.*Did you mean 'step'"):
        MemoryMonitor("steps")


# -------------------------------------------------------------------------------------------------------------- measuring


class Counter:
    """Simulated memory: the test sets how much is used. The peak can be reset or not."""

    def __init__(self, resets: bool = True) -> None:
        self.used = self.peak = 10
        self.resets = resets

    def use(self, used: int) -> None:
        self.used, self.peak = used, max(self.peak, used)

    def reset(self) -> bool:
        if self.resets:
            self.peak = self.used
        return self.resets

    def gauge(self, bound: str = "") -> Gauge:
        return Gauge(lambda: (self.used, self.peak), self.reset, bound)


def test_stages_within_each_other_have_peaks_of_their_own() -> None:
    counter = Counter()
    counter.use(99)  # before the first stage
    counter.use(10)
    gauge = counter.gauge()
    gauge.begin("outer")
    counter.use(20)
    gauge.begin("inner")
    counter.use(50)
    counter.use(30)
    assert gauge.end("inner") == Memory(20, 30, 50)
    counter.use(40)
    gauge.begin("another")
    counter.use(35)
    assert gauge.end("another") == Memory(40, 35, 40)
    assert gauge.end("outer") == Memory(10, 35, 50)
    assert not gauge.open


def test_the_peak_between_two_stages_is_of_the_outer_one() -> None:
    counter = Counter()
    gauge = counter.gauge()
    gauge.begin("outer")
    counter.use(70)
    counter.use(20)
    gauge.begin("inner")
    assert gauge.end("inner") == Memory(20, 20, 20)
    assert gauge.end("outer") == Memory(10, 20, 70)


def test_a_peak_that_cannot_be_reset_is_a_bound_unless_the_stage_has_raised_it() -> None:
    counter = Counter(resets=False)
    counter.use(99)
    counter.use(10)
    gauge = counter.gauge()
    gauge.begin("low")
    counter.use(20)
    assert gauge.end("low") == Memory(10, 20, 99, "at most")
    gauge.begin("high")
    counter.use(120)
    assert gauge.end("high") == Memory(20, 120, 120)


def test_a_bound_of_the_place_stays() -> None:
    """The bound of a gauge, such as "at least", is in its results."""
    gauge = Counter().gauge("at least")
    gauge.begin("stage")
    assert gauge.end("stage").bound == "at least"


@resets
@pytest.mark.usefixtures("collected")
def test_the_host_is_measured() -> None:
    """The peak includes 150 MB that were used and freed in the stage, but not 300 MB that were freed before it."""
    with taken(300 * MB):
        pass
    gauge = memory_monitor.host_gauge()
    assert gauge is not None
    gauge.begin("stage")
    with taken(50 * MB):
        with taken(150 * MB):
            pass
        memory = gauge.end("stage")
    assert memory.bound == ""
    assert abs(memory.end - memory.start - 50 * MB) < SLACK
    assert abs(memory.peak - memory.start - 200 * MB) < SLACK
    gauge.begin("quiet")
    assert gauge.end("quiet").peak - memory.end < SLACK


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_is_measured() -> None:
    """Sizes are in bytes; they are multiples of 512, to which the caching allocator of PyTorch rounds."""
    gauge = memory_monitor.device_gauge(torch.device("cuda", 0))
    assert gauge is not None
    gauge.begin("stage")
    kept = torch.empty(512 * 100, dtype=torch.uint8, device="cuda:0")
    gone = torch.empty(512 * 300, dtype=torch.uint8, device="cuda:0")
    del gone
    memory = gauge.end("stage")
    assert memory == Memory(memory.start, memory.start + kept.nbytes, memory.start + 512 * 400)
    gauge.begin("quiet")
    assert gauge.end("quiet") == Memory(memory.end, memory.end, memory.end)


@pytest.mark.parametrize("text", [None, "", "VmRSS:\t 12 kB\n", "VmRSS:\t twelve kB\nVmHWM:\t 13 kB\n"])
def test_where_the_host_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None) -> None:
    status = tmp_path / "status"
    if text is not None:
        status.write_text(text)
    monkeypatch.setattr(memory_monitor, "_STATUS", status)
    assert memory_monitor.host_gauge() is None


def test_what_the_kernel_says_is_in_units_of_1024_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    13 kB\nVmRSS:\t    12 kB\nRssAnon:\t 7 kB\n")
    monkeypatch.setattr(memory_monitor, "_STATUS", status)
    monkeypatch.setattr(memory_monitor, "_CLEAR", tmp_path)  # a folder cannot be written to, so the peak cannot be reset
    gauge = memory_monitor.host_gauge()
    assert gauge is not None
    gauge.begin("stage")
    assert gauge.end("stage") == Memory(12 * 1024, 12 * 1024, 13 * 1024, "at most")


# --------------------------------------------------------------------------------------------- the values that are reported


def process(node: int, host: int, device: int | None = None) -> ProcessMemory:
    """A process with this many MB at the start, twice as many at the end, and three times as many at the peak."""
    memories = [None if size is None else Memory(size * MB, 2 * size * MB, 3 * size * MB) for size in (host, device)]
    return ProcessMemory(node, *memories)


def test_the_largest_process_the_largest_machine_and_the_largest_device() -> None:
    """`host` is of the process with the most host memory, `device` of the fullest device, `together` of the fullest node."""
    use = StageMemory("train", 0, 5, (process(0, 10, 7), process(0, 40, 5), process(1, 30, 6), process(1, 25, 1)))
    assert use.host == Memory(40 * MB, 80 * MB, 120 * MB)
    assert use.device == Memory(7 * MB, 14 * MB, 21 * MB)
    assert use.together == Memory(55 * MB, 110 * MB, 165 * MB, "at most")
    alone = StageMemory("train", 0, 5, (process(0, 10),))
    assert alone.together == alone.host == Memory(10 * MB, 20 * MB, 30 * MB)
    assert alone.device is None


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter]:
    """Simulated memory that the callback measures instead of this process and its device."""
    counters = {"host": Counter(), "device": Counter()}
    monkeypatch.setattr(memory_monitor, "host_gauge", lambda: counters["host"].gauge())
    monkeypatch.setattr(memory_monitor, "device_gauge", lambda device: counters["device"].gauge())
    return counters


@pytest.fixture
def start(trainer, module, counters) -> Any:
    def started(**arguments: Any) -> MemoryMonitor:
        callback = MemoryMonitor(**arguments)
        callback._module = module
        callback.setup(trainer, module, "fit")
        callback.on_fit_start(trainer, module)
        callback.on_train_start(trainer, module)
        return callback

    return started


def use(counters: dict[str, Counter], host: int, device: int) -> None:
    counters["host"].use(host * MB)
    counters["device"].use(device * MB)


def test_lines_and_figures_of_a_fit(trainer, module, counters, start, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    callback = start()
    use(counters, 20, 2000)
    trainer.global_step = 4
    callback.on_validation_start(trainer, module)
    use(counters, 30, 1000)
    use(counters, 25, 500)
    callback.on_validation_end(trainer, module)
    callback.on_train_end(trainer, module)
    assert caplog.messages == [
        "memory in setup: host 0 → 0 MB, peak 0 MB; device 0 → 0 MB, peak 0 MB",
        "memory in validate: host 20 → 25 MB, peak 30 MB; device 2,000 → 500 MB, peak 2,000 MB",
        "memory in train: host 0 → 25 MB, peak 30 MB; device 0 → 500 MB, peak 2,000 MB",
    ]
    assert [(use.stage, use.step) for use in callback.history] == [("setup", 0), ("validate", 4), ("train", 4)]
    assert callback.stages["train"].device == Memory(10, 500 * MB, 2000 * MB)
    assert not module.logged


def test_silence(trainer, module, start, caplog) -> None:
    """`verbose=False` prints nothing, but measures."""
    caplog.set_level("INFO", "trainkit")
    callback = start(verbose=False)
    callback.on_train_end(trainer, module)
    callback.on_exception(trainer, module, RuntimeError())
    assert not caplog.messages
    assert "train" in callback.stages


def test_epochs_are_stages_and_are_logged_if_asked_for(trainer, module, counters, start) -> None:
    callback = start(logging_interval="epoch")
    for host in (30, 20):
        callback.on_train_epoch_start(trainer, module)
        use(counters, host, 5)
        use(counters, 10, 5)
        callback.on_train_batch_end(trainer, module, None, None, 0)
        assert not module.logged
        callback.on_train_epoch_end(trainer, module)
        assert module.logged == {"memory/host": 10, "memory/host_peak": host, "memory/device": 5, "memory/device_peak": 5}
        assert module.options == {"reduce_fx": "max", "on_step": False, "on_epoch": True}
        module.logged.clear()
    assert [use.stage for use in callback.history] == ["setup", "train_epoch", "train_epoch"]


def test_log_boundaries(trainer, module, counters, start) -> None:
    callback = start(logging_interval="step")
    callback.on_train_epoch_start(trainer, module)
    for should_log, full in ((False, True), (True, False)):
        trainer.should_log, trainer.accelerator.sync_gradients = should_log, full
        use(counters, 30, 5)
        use(counters, 10, 5)
        callback.on_train_batch_end(trainer, module, None, None, 0)
        assert not module.logged
    trainer.accelerator.sync_gradients = True
    callback.on_train_batch_end(trainer, module, None, None, 2)
    assert module.logged == {"memory/host": 10, "memory/host_peak": 30, "memory/device": 5, "memory/device_peak": 5}
    assert module.options == {"reduce_fx": "max", "on_step": True, "on_epoch": False}
    callback.on_train_batch_end(trainer, module, None, None, 3)
    assert module.logged["memory/host_peak"] == 10  # the peak since the last log boundary
    callback.on_train_epoch_end(trainer, module)
    callback.on_train_end(trainer, module)
    assert callback.stages["train"].host == Memory(10, 10 * MB, 30 * MB)
    assert [use.stage for use in callback.history] == ["setup", "train"]


def test_an_error_shows_what_there_was_until_then(trainer, module, counters, start, caplog) -> None:
    callback = start()
    callback.on_validation_start(trainer, module)
    use(counters, 30, 5)
    caplog.clear()
    caplog.set_level("INFO", "trainkit")
    callback.on_exception(trainer, module, KeyboardInterrupt())
    assert not caplog.messages
    callback.on_exception(trainer, module, torch.OutOfMemoryError("no"))
    assert caplog.messages == [
        "memory in validate: host 0 → 30 MB, peak 30 MB; device 0 → 5 MB, peak 5 MB, until OutOfMemoryError"
    ]


def test_an_error_before_anything_was_measured(trainer, module, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    MemoryMonitor().on_exception(trainer, module, RuntimeError())
    assert not caplog.messages


def test_what_is_not_measured_is_said_once(trainer, module, monkeypatch, caplog) -> None:
    caplog.set_level("INFO", "trainkit")
    monkeypatch.setattr(memory_monitor, "host_gauge", lambda: None)
    callback = MemoryMonitor()
    for _ in range(2):
        callback.setup(trainer, module, "fit")
        callback.on_fit_start(trainer, module)
    assert len(caplog.messages) == 2
    assert "host memory is measured on Linux only" in caplog.messages[0]
    assert "on cpu there is no device memory." in caplog.messages[1]
    assert callback.stages["setup"].host is callback.stages["setup"].device is None


# ---------------------------------------------------------------------------------------------------------------- real runs


class Hungry(TinyModule):
    """Uses some MB for a moment in each step of a stage; rank 1 uses twice as much as rank 0."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def take(self, stage: str) -> None:
        size = self.sizes.get(stage, 0) * (self.global_rank + 1)
        if size:
            with taken(size * MB):
                pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.take("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.take("validate")
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.take("test")

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.take("predict")


def grown(use: StageMemory) -> int:
    """The number of MB by which the peak of the stage was above its start."""
    assert use.host is not None
    return round((use.host.peak - use.host.start) / MB)


@resets
@pytest.mark.usefixtures("collected")
def test_each_stage_of_real_runs(make_trainer) -> None:
    callback = MemoryMonitor("epoch")
    trainer = make_trainer(callback, max_epochs=2, num_sanity_val_steps=1)
    module = Hungry(train=100, validate=200, test=300)
    trainer.fit(module, tiny_loader(), tiny_loader())
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module, tiny_loader())
    fit = ["setup", "sanity_check", *["validate", "train_epoch"] * 2, "train"]
    assert [use.stage for use in callback.history] == [*fit, "setup", "validate", "setup", "test", "setup", "predict"]
    for stage, size in [("train_epoch", 200), ("train", 200), ("validate", 200), ("test", 300), ("predict", 0), ("setup", 0)]:
        assert abs(grown(callback.stages[stage]) - size) < SLACK / MB, stage
    logged = trainer.loggers[0].of("memory/host_peak")
    assert len(logged) == 2
    assert logged[trainer._run.fitted.trainer.global_step] > 200


@resets
@pytest.mark.usefixtures("collected")
def test_the_peak_between_log_boundaries(make_trainer) -> None:
    trainer = make_trainer(MemoryMonitor("step"), log_every_n_steps=2)
    trainer.fit(Hungry(train=100), tiny_loader())
    used, peaks = (trainer.loggers[0].of(f"memory/{name}") for name in ("host", "host_peak"))
    assert peaks.keys() == used.keys()
    assert len(peaks) >= 2
    assert all(abs(peaks[step] - used[step] - 100) < SLACK / MB for step in peaks)


def on_two(interval: str) -> Any:
    from helpers.runs.trainers import Memory as Remembering
    from helpers.runs.trainers import make_trainer

    logger, callback = Remembering(), MemoryMonitor(interval)
    trainer = make_trainer(callback, strategy="ddp", logger=logger, log_every_n_steps=1)
    trainer.fit(Hungry(train=100), tiny_loader(20))  # five batches: rank 1 has no third batch
    return callback.history, logger.of("memory/host_peak")


@resets
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_several_processes(interval: str) -> None:
    (first, logged), (second, _) = run_world(2, on_two, interval)
    assert first == second
    train = first[-1]
    peaks = [memory.host.peak - memory.host.start for memory in train.processes]
    assert [abs(peak - size * MB) < SLACK for peak, size in zip(peaks, (100, 200), strict=True)] == [True, True]
    hosts = [memory.host for memory in train.processes]
    assert train.host.peak == max(host.peak for host in hosts)
    assert train.together == Memory(
        sum(h.start for h in hosts), sum(h.end for h in hosts), sum(h.peak for h in hosts), "at most"
    )
    assert max(logged.values()) == train.host.peak / MB
