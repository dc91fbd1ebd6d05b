"""`trainkit.launch.environment`: whether there is a TPU, and the rank of this process in a slice."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigurationError
from trainkit.launch import environment
from trainkit.launch.environment import place_in_slice, tpu_is_chosen, tpu_is_here


def bus(folder: Path, *devices: tuple[str, str]) -> Path:
    """Create the files with which Linux describes these PCI devices."""
    for number, (vendor, device) in enumerate(devices):
        place = folder / f"0000:00:0{number}.0"
        place.mkdir()
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "device").write_text(f"{device}\n")
    (folder / "unreadable").mkdir()
    return folder


def test_a_tpu_is_found_on_the_bus(tmp_path: Path) -> None:
    for name, devices, found in [
        ("none", [], False),
        ("a network card of Google's", [("0x1ae0", "0x0042")], False),
        ("a chip's number of another maker", [("0x8086", "0x0063")], False),
        ("v5e", [("0x8086", "0x1237"), ("0x1ae0", "0x0063")], True),
        ("v4", [("0x1ae0", "0x005e")], True),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        assert tpu_is_here(bus(folder, *devices)) is found, name
    assert not tpu_is_here(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "env, here, installed, chosen",
    [
        ({"PJRT_DEVICE": "TPU"}, False, True, True),
        ({"PJRT_DEVICE": "CPU"}, True, True, False),
        ({"PJRT_DEVICE": "CPU", environment.REPLICA: "1"}, False, True, True),
        ({}, True, True, True),
        ({}, True, False, False),
        ({}, False, True, False),
    ],
)
def test_a_tpu_is_used_where_it_can_be(
    env: dict[str, str], here: bool, installed: bool, chosen: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO", "trainkit")
    monkeypatch.setattr(environment, "tpu_is_here", lambda: here)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert tpu_is_chosen(env) is chosen
    fix = "To use it: pip install 'trainkit-torch[xla]'"
    said = [f"this host has a TPU, but torch_xla is not installed; not using the TPU. {fix}"]
    assert caplog.messages == (said if here and not installed else [])


def test_one_process_needs_no_place() -> None:
    """A single process has no rank in a slice."""
    assert place_in_slice(0, 1, 0, 1, {}, 77) is None
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert place_in_slice(0, 1, 0, 1, torchrun, 77) is None


def test_the_address_of_processes_on_one_host() -> None:
    """Processes on one host agree on a port. Another run on the same host has another port."""
    first, second = (place_in_slice(rank, 4, rank, 4, {}, 77) for rank in (0, 3))
    other = place_in_slice(0, 4, 0, 4, {}, 78)
    assert first is not None
    assert second is not None
    assert other is not None
    assert (first.rank, first.size, first.local_rank, first.local_size, first.node, first.nodes) == (0, 4, 0, 4, 0, 1)
    assert (second.rank, second.local_rank, second.node) == (3, 3, 0)
    assert (
        (first.master_addr, first.master_port) == (second.master_addr, second.master_port) == ("127.0.0.1", first.master_port)
    )
    assert other.master_port != first.master_port


def test_the_address_of_several_hosts() -> None:
    env = {"TPU_WORKER_HOSTNAMES": "10.0.0.5, 10.0.0.6,10.0.0.7", "TPU_WORKER_ID": "2"}
    places = [place_in_slice(rank, 3, 0, 1, env, parent) for rank, parent in enumerate((11, 12, 13))]
    found = [(p.rank, p.size, p.node, p.nodes, p.master_addr) for p in places if p is not None]
    assert found == [(rank, 3, rank, 3, "10.0.0.5") for rank in range(3)]
    assert len({p.master_port for p in places if p is not None}) == 1
    given = place_in_slice(1, 2, 0, 1, {"MASTER_ADDR": "host0", "MASTER_PORT": "4711"}, 1)
    assert given is not None
    assert (given.master_addr, given.master_port) == ("host0", 4711)


def test_replicas_on_several_hosts() -> None:
    env = {"TPU_WORKER_HOSTNAMES": "a,b"}
    place = place_in_slice(5, 8, 1, 4, env, 1)
    assert place is not None
    assert (place.local_rank, place.local_size, place.node, place.nodes, place.master_addr) == (1, 4, 1, 2, "a")


def test_an_unknown_address_is_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match="2 processes on 2 hosts, but the address of the first host is unknown.*MASTER_ADDR=host0"
    ):
        place_in_slice(0, 2, 0, 1, {}, 1)


def test_processes_outside_of_the_runtime_are_refused() -> None:
    """If a launcher has started several processes and XLA's runtime has one, each would train alone: an error."""
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigurationError, match="has started 2 processes .*XLA's runtime has 1: each would train alone"):
        place_in_slice(0, 1, 0, 1, torchrun, 1)
    fitting = place_in_slice(1, 2, 0, 1, torchrun, 1)
    assert fitting is not None
    assert fitting.rank == 1
