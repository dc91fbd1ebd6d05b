"""`DeviceStatsMonitor`: which statistics it logs, and when."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.worlds.worlds import run_world

from trainkit.callbacks import DeviceStatsMonitor, device_stats_monitor
from trainkit.errors import ConfigurationError, MissingPackageError


@pytest.fixture(autouse=True)
def psutil(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces psutil, whether it is installed or not."""
    percent = SimpleNamespace(percent=25.0)
    package = SimpleNamespace(cpu_percent=lambda: 50.0, virtual_memory=lambda: percent, swap_memory=lambda: percent)
    monkeypatch.setitem(sys.modules, "psutil", package)
    monkeypatch.setattr(device_stats_monitor, "find_spec", lambda name: package)
    return package


def names(hook: str) -> list[str]:
    return [f"DeviceStatsMonitor.{hook}/cpu_{name}" for name in ("percent", "vm_percent", "swap_percent")]


def test_statistics_of_a_fit_at_log_boundaries(make_trainer: Any) -> None:
    trainer = make_trainer(DeviceStatsMonitor(), log_every_n_steps=2, accumulate_grad_batches=2)
    trainer.fit(TinyModule(), tiny_loader(32), tiny_loader(8))
    logger = trainer.loggers[0]
    for name in names("on_train_batch_start") + names("on_train_batch_end"):
        assert logger.of(name) == dict.fromkeys([2, 4], 50.0 if name.endswith("/cpu_percent") else 25.0)
    assert set(logger.of(names("on_validation_batch_end")[0]).values()) == {50.0}
    assert len(logger.of(names("on_validation_batch_start")[0])) == 1  # two batches


def test_statistics_of_a_test(make_trainer: Any) -> None:
    trainer = make_trainer(DeviceStatsMonitor(), log_every_n_steps=2)
    trainer.test(TinyModule(), tiny_loader(16), verbose=False)
    for hook in ("on_test_batch_start", "on_test_batch_end"):
        assert len(trainer.loggers[0].of(names(hook)[0])) == 2


def test_the_sanity_check_is_not_logged(make_trainer: Any) -> None:
    trainer = make_trainer(DeviceStatsMonitor(), num_sanity_val_steps=1, limit_train_batches=1, max_steps=1)
    trainer.fit(TinyModule(), tiny_loader(8), tiny_loader(4))
    assert len(trainer.loggers[0].of(names("on_validation_batch_start")[0])) == 1


@pytest.mark.parametrize("cpu_stats, kind, read", [(None, "cpu", 3), (False, "cpu", 0), (True, "meta", 3), (None, "meta", 0)])
def test_when_the_cpu_is_read(trainer: Any, module: Any, caplog: Any, cpu_stats: bool | None, kind: str, read: int) -> None:
    caplog.set_level("INFO", "trainkit")
    callback = DeviceStatsMonitor(cpu_stats=cpu_stats)
    callback._module = module
    trainer.strategy.device = torch.device(kind)
    callback.setup(trainer, module, "fit")
    callback.on_train_batch_start(trainer, module, None, 0)
    assert len(module.logged) == read
    assert ("logs nothing" in caplog.text) == (read == 0)


def test_the_memory_of_a_gpu(trainer: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are torch's. A GPU and MPS are replaced."""
    callback = DeviceStatsMonitor()
    callback._module = module
    trainer.strategy.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.peak": 7, "num_ooms": 0})
    callback.setup(trainer, module, "fit")
    callback.on_train_batch_end(trainer, module, None, None, 0)
    prefix = "DeviceStatsMonitor.on_train_batch_end"
    assert module.logged == {f"{prefix}/allocated_bytes.all.peak": 7.0, f"{prefix}/num_ooms": 0.0}
    assert module.options["reduce_fx"] == "max"
    trainer.strategy.device = torch.device("mps")
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 5)
    module.logged.clear()
    callback.setup(trainer, module, "fit")
    callback.on_train_batch_end(trainer, module, None, None, 0)
    assert module.logged == {f"{prefix}/allocated_bytes.all.current": 5.0}


def test_wrong_arguments_and_what_is_missing(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="cpu_stats=True"):
        DeviceStatsMonitor(cpu_stats="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="logger=True"):
        make_trainer(DeviceStatsMonitor(), logger=False).fit(TinyModule(), tiny_loader())
    make_trainer(DeviceStatsMonitor(), fast_dev_run=True).fit(TinyModule(), tiny_loader())
    monkeypatch.setattr(device_stats_monitor, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="pip install psutil"):
        make_trainer(DeviceStatsMonitor()).fit(TinyModule(), tiny_loader())
    make_trainer(DeviceStatsMonitor(cpu_stats=False)).fit(TinyModule(), tiny_loader())


@pytest.mark.skipif(importlib.util.find_spec("psutil") is None, reason="needs psutil")
def test_psutil_has_these_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "psutil")
    assert all(0 <= value <= 100 for value in device_stats_monitor._cpu_stats().values())


def logged() -> Any:
    from helpers.runs.trainers import Memory, make_trainer

    logger, rank = Memory(), int(__import__("os").environ["RANK"])
    percent = SimpleNamespace(percent=float(rank))
    package = SimpleNamespace(cpu_percent=lambda: float(rank), virtual_memory=lambda: percent, swap_memory=lambda: percent)
    sys.modules["psutil"] = package  # type: ignore[assignment]
    device_stats_monitor.find_spec = lambda name: package  # type: ignore[assignment]
    trainer = make_trainer(DeviceStatsMonitor(), logger=logger, log_every_n_steps=1, strategy="ddp")
    trainer.fit(TinyModule(), tiny_loader(20), tiny_loader(12))  # an odd number of batches
    return logger.of(names("on_train_batch_end")[0]), len(logger.of(names("on_validation_batch_end")[0]))


def test_the_largest_value_of_all_processes() -> None:
    main, _ = run_world(2, logged)
    assert main[0] == {1: 1.0, 2: 1.0, 3: 0.0}  # the second process has no batch in the last step
    assert main[1]
