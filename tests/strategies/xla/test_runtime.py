"""Choosing the XLA runtime and its number of devices. These tests do not need torch_xla."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainkit import Trainer
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError, MissingPackageError
from trainkit.launch.strategy_choice import join_strategy
from trainkit.registry import load_strategy, make_strategy
from trainkit.strategies import XLAStrategy
from trainkit.strategies.xla import runtime as _xla_runtime
from trainkit.strategies.xla.runtime import choose_runtime, count_devices, require


@pytest.fixture(autouse=True)
def no_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_xla_runtime, "tpu_is_here", lambda: False)


@pytest.mark.parametrize(
    "wanted, env, chosen",
    [
        (RequestedDevices("cpu"), {}, {"PJRT_DEVICE": "CPU"}),
        (RequestedDevices("cpu", 4), {}, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}),
        (RequestedDevices("auto", 4), {"PJRT_DEVICE": "cpu"}, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}),
        (RequestedDevices("cpu", 4), {"CPU_NUM_DEVICES": "2"}, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}),
        (RequestedDevices("cpu", -1), {}, {"PJRT_DEVICE": "CPU"}),
        (RequestedDevices("xla", 4), {"PJRT_DEVICE": "TPU"}, {"PJRT_DEVICE": "TPU"}),
    ],
)
def test_the_requested_runtime(wanted: RequestedDevices, env: dict[str, str], chosen: dict[str, str]) -> None:
    choose_runtime(wanted, env)
    assert env == chosen


def test_an_existing_tpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_xla_runtime, "tpu_is_here", lambda: True)
    env: dict[str, str] = {}
    choose_runtime(RequestedDevices("auto", 4), env)
    assert env == {"PJRT_DEVICE": "TPU"}


@pytest.mark.parametrize(
    "wanted, env, message",
    [
        (
            RequestedDevices("auto"),
            {},
            "needs a TPU, but this host has none. To test on XLA's CPU runtime, use accelerator='cpu', or export PJRT",
        ),
        (RequestedDevices("xla"), {}, "this host has none"),
        (RequestedDevices("cpu"), {"PJRT_DEVICE": "TPU"}, "accelerator='cpu' contradicts PJRT_DEVICE=TPU"),
        (
            RequestedDevices("cpu", 2, (0, 1)),
            {},
            r"devices=\[0, 1\] does not work with XLA, .*export TPU_VISIBLE_CHIPS=0,2",
        ),
    ],
)
def test_impossible_runtimes(wanted: RequestedDevices, env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose_runtime(wanted, env)


def test_a_notice_if_a_cpu_replaces_a_tpu(caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    choose_runtime(RequestedDevices("xla"), {"PJRT_DEVICE": "CPU"})
    assert caplog.messages == [
        "accelerator='tpu', but PJRT_DEVICE=CPU in the environment: the run uses XLA's CPU runtime instead of a TPU."
    ]


def runtime(here: int, hosts: int = 1, kind: str = "TPU") -> Any:
    return SimpleNamespace(
        addressable_runtime_device_count=lambda: here,
        global_runtime_device_count=lambda: here * hosts,
        process_count=lambda: hosts,
        device_type=lambda: kind,
    )


@pytest.mark.parametrize(
    "wanted, there, count",
    [
        (RequestedDevices(), runtime(4), 4),
        (RequestedDevices("xla", -1), runtime(4), 4),
        (RequestedDevices("xla", 4), runtime(4), 4),
        (RequestedDevices("xla", 1), runtime(4), 1),
        (RequestedDevices(), runtime(1), 1),
        (RequestedDevices("xla", 4, None, 2), runtime(4, 2), 8),
        (RequestedDevices("xla", 4), runtime(4, 2), 8),
    ],
)
def test_the_number_of_devices_of_the_runtime(wanted: RequestedDevices, there: Any, count: int) -> None:
    assert count_devices(wanted, there) == count


@pytest.mark.parametrize(
    "wanted, there, message",
    [
        (RequestedDevices("xla", 8), runtime(4), "devices=8, but XLA's runtime has 4 on this host.*TPU_VISIBLE_CHIPS"),
        (RequestedDevices("xla", 2), runtime(4, kind="CPU"), "devices=2, but XLA's runtime has 4.*CPU_NUM_DEVICES"),
        (RequestedDevices("xla", 1), runtime(4, 2), "devices=1, but XLA's runtime has 4"),
        (RequestedDevices("xla", 4, None, 2), runtime(4), "num_nodes=2, but XLA's runtime has 1. .*use num_nodes=1"),
        (RequestedDevices("xla", None, None, 1), runtime(4, 2), "num_nodes=1, but XLA's runtime has 2"),
    ],
)
def test_other_numbers_of_devices_are_refused(wanted: RequestedDevices, there: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        count_devices(wanted, there)


# ------------------------------------------------------------------------------------------------------- the package


def versions(monkeypatch: pytest.MonkeyPatch, xla: str | None) -> None:
    def version(name: str) -> str:
        if name == "torch_xla" and xla is not None:
            return xla
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_without_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, None)
    here = torch.__version__.replace("+", ".")
    message = rf"torch_xla, which is not installed\..*this one has torch {here}\): pip install 'trainkit-torch\[xla\]'"
    with pytest.raises(MissingPackageError, match=message):
        require()
    with pytest.raises(MissingPackageError, match=message):
        Trainer(strategy="xla", accelerator="cpu", logger=False)


def test_an_incompatible_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, "1.13.2")
    with pytest.raises(MissingPackageError, match=r"torch_xla 1\.13\.2 needs torch 1\.13, but torch [23]\."):
        require()
    versions(monkeypatch, ".".join(torch.__version__.split(".")[:2]) + ".5")
    require()


# -------------------------------------------------------------------------------------------------------- its names


def test_names() -> None:
    assert load_strategy("xla") is XLAStrategy
    assert make_strategy("xla_fsdp").fsdp  # type: ignore[attr-defined]
    assert not make_strategy("xla").fsdp  # type: ignore[attr-defined]
    assert (make_strategy("xla").name, make_strategy("xla").lazy_tensors) == ("xla", True)


@pytest.mark.parametrize(
    "name, fix", [("tpu_spawn", "strategy='xla'"), ("single_xla", "devices=1"), ("xla_debug", "Recompile")]
)
def test_unsupported_names_of_lightning(name: str, fix: str) -> None:
    with pytest.raises(ConfigurationError, match=fix):
        load_strategy(name)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "smpd"}, "mode must be 'spmd' or 'replicas', not 'smpd'"),
        ({"mode": "replicas", "fsdp": True}, "do not work with mode=.replicas., .* Use mode='spmd'"),
        ({"mode": "replicas", "pad_last_batch": True}, "do not work with mode=.replicas., .* Use mode='spmd'"),
        ({"device": "cuda"}, "does not run on 'cuda'. Use device='xla'"),
        ({"timeout": 0}, "timeout must be a timedelta or a number of seconds"),
        ({"precision": "16-mixed"}, "does not work with XLAStrategy, which supports 32-true"),
    ],
)
def test_contradictory_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        XLAStrategy(**options)


def test_the_mode_depends_on_how_the_process_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert XLAStrategy().mode == "spmd"
    monkeypatch.setenv("TRAINKIT_XLA_REPLICA", "1")
    assert (XLAStrategy().mode, XLAStrategy(mode="spmd").mode) == ("replicas", "spmd")


def test_it_is_chosen_only_for_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[RequestedDevices] = []
    monkeypatch.setattr(XLAStrategy, "join", lambda self, wanted: joined.append(wanted))
    assert join_strategy("auto", RequestedDevices("xla", 4), False).name == "xla"
    assert join_strategy("auto", RequestedDevices("cpu"), False).name == "single"
    monkeypatch.setattr("trainkit.launch.strategy_choice.tpu_is_chosen", lambda: True)
    assert join_strategy("auto", RequestedDevices(), False).name == "xla"
    assert join_strategy("auto", RequestedDevices("cpu"), False).name == "single"
    assert joined == [RequestedDevices("xla", 4), RequestedDevices()]
    with pytest.raises(ConfigurationError, match="accelerator='tpu' works with strategy='xla', not with 'ddp'"):
        join_strategy("ddp", RequestedDevices("xla"), False)
    with pytest.raises(ConfigurationError, match="name different devices"):
        join_strategy(XLAStrategy(), RequestedDevices("cuda"), False)


def test_the_memory_of_a_device() -> None:
    from helpers.runs.planned import Planned
    from helpers.runs.trainers import make_trainer

    contents = make_trainer()._memory_estimator().contents(Planned())
    whole, part = XLAStrategy().footprint(contents, 4), XLAStrategy(fsdp=True).footprint(contents, 4)
    assert (whole.name, part.name) == ("xla", "xla, fsdp")
    assert part.device.total == pytest.approx(whole.device.total / 4, rel=0.001)
    assert part.checkpoint == whole.checkpoint
