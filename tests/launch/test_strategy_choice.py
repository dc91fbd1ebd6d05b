"""The values of `accelerator`, `devices` and `num_nodes`, and the strategy that they resolve to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError, UnknownNameError, UnsupportedArgumentError
from trainkit.launch.joining import processes
from trainkit.launch.strategy_choice import join_strategy, read_devices
from trainkit.strategy import Strategy


@pytest.mark.parametrize(
    "devices, per_node, indices",
    [
        ("auto", None, None),
        (None, None, None),
        (1, 1, None),
        ("1", 1, None),
        (2, 2, None),
        ("2", 2, None),
        (-1, -1, None),
        ("-1", -1, None),
        ([0], 1, (0,)),
        ("0,", 1, (0,)),
        ([0, 1], 2, (0, 1)),
        ("0, 1", 2, (0, 1)),
        ((2, 3), 2, (2, 3)),
    ],
)
def test_devices(devices: Any, per_node: int | None, indices: tuple[int, ...] | None) -> None:
    assert read_devices("cpu", devices, None) == RequestedDevices("cpu", per_node, indices, None)


@pytest.mark.parametrize("devices", [0, "0", [], [-1], ["0"], [True], True, 1.5, "one", ",", -2, {0: 1}])
def test_wrong_devices(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"devices must be 'auto', a number, or a list of GPUs such as \[0, 1\], not"):
        read_devices("cpu", devices, None)


def test_a_gpu_that_is_named_twice() -> None:
    with pytest.raises(ConfigurationError, match=r"names a GPU twice.*devices=\[1\]"):
        read_devices("cuda", [1, 1], None)


@pytest.mark.parametrize("nodes", [0, -1, True, 1.0, "2"])
def test_wrong_num_nodes(nodes: Any) -> None:
    with pytest.raises(ConfigurationError, match="num_nodes must be an integer ≥ 1, not"):
        read_devices("cpu", 1, nodes)


def test_accelerators() -> None:
    assert [read_devices(name, "auto", 2).accelerator for name in ("auto", "cpu", "mps")] == ["auto", "cpu", "mps"]
    assert read_devices("gpu", "auto", None) == read_devices("cuda", "auto", None)
    with pytest.raises(UnknownNameError, match="unknown accelerator 'cpus'.*Did you mean 'cpu'"):
        read_devices("cpus", 1, None)
    with pytest.raises(UnknownNameError, match="'xla': XLA is a strategy.* Use accelerator='tpu', or strategy='xla'"):
        read_devices("xla", 1, None)
    assert read_devices("tpu", 4, None) == RequestedDevices("xla", 4)
    with pytest.raises(UnsupportedArgumentError, match="'hpu' is not supported"):
        read_devices("hpu", 1, None)


def test_one_mps_device() -> None:
    with pytest.raises(ConfigurationError, match="there is one MPS device. Use devices=1"):
        read_devices("mps", 2, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_does_not_exist() -> None:
    with pytest.raises(ConfigurationError, match="GPU 3 does not exist"):
        join_strategy("auto", RequestedDevices("auto", 1, (3,)), False)
    with pytest.raises(ConfigurationError, match="Use accelerator='cpu'"):
        join_strategy("auto", RequestedDevices("cuda"), False)


@pytest.mark.parametrize("name", ["auto", "single", "ddp"])
def test_one_process(name: str) -> None:
    made = join_strategy(name, RequestedDevices("cpu", 1), False)
    assert made.joined
    assert (made.name, made.world.size, str(made.device)) == ("ddp" if name == "ddp" else "single", 1, "cpu")


def test_two_different_devices() -> None:
    with pytest.raises(ConfigurationError, match="name different devices. Pass only one"):
        join_strategy(Strategy("cpu"), RequestedDevices("cuda"), False)


@pytest.mark.parametrize("wanted", [RequestedDevices("cpu", 2), RequestedDevices("cpu", None, None, 2)])
def test_several_processes_on_one_device(wanted: RequestedDevices) -> None:
    with pytest.raises(ConfigurationError, match="runs on one device.*Use strategy='ddp', or devices=1"):
        join_strategy("single", wanted, False)


@pytest.mark.world_size(2)
def test_auto_is_ddp_on_several_processes() -> None:
    made = join_strategy("auto", RequestedDevices("cpu"), False)
    assert (made.name, made.world.size) == ("ddp", 2)
    assert join_strategy("ddp", RequestedDevices("cpu"), False).world is made.world


def test_an_own_loop_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With your own training loop, the existing processes are used: a script on a node with 4 GPUs stays one process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [processes(RequestedDevices("cuda")), processes(RequestedDevices("cuda", as_started=True))] == [4, 1]
