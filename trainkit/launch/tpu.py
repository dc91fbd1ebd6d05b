"""Whether this host has a TPU, without loading torch_xla; and the ranks of a process on a TPU slice."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trainkit.console import notice
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import read_place
from trainkit.launch.rank_info import RankInfo, port_number, stable_port

__all__ = ["DEVICE", "REPLICA", "place_in_slice", "runtime_is_loaded", "tpu_is_chosen", "tpu_is_here"]

# The type of a TPU among torch's devices.
DEVICE = "xla"

# Set while XLA's runtime starts replicas, and in them.
REPLICA = "TRAINKIT_XLA_REPLICA"

# The PCI ids of Google and of its TPU chips, as in torch_xla/_internal/tpu.py.
_VENDOR = "0x1ae0"
_CHIPS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")


def tpu_is_here(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether this host has a TPU."""
    for device in devices.glob("*"):
        try:
            vendor, chip = (device / "vendor").read_text().strip(), (device / "device").read_text().strip()
        except OSError:
            continue
        if vendor == _VENDOR and chip in _CHIPS:
            return True
    return False


def tpu_is_chosen(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a run with automatic choice of the device uses a TPU: there is one, and torch_xla is installed.

    A replica that XLA's runtime has started uses that runtime, on any device.
    """
    if REPLICA in env:
        return True
    chosen = env.get("PJRT_DEVICE", "").upper()
    if chosen:
        return chosen == "TPU"
    if not tpu_is_here():
        return False
    if importlib.util.find_spec("torch_xla") is None:
        notice(
            "this host has a TPU, but torch_xla is not installed; not using the TPU. To use it: pip install "
            "'trainkit-torch[xla]'"
        )
        return False
    return True


def runtime_is_loaded() -> bool:
    """Whether this process has loaded XLA's runtime, whose replicas may be threads instead of processes."""
    return "torch_xla" in sys.modules


def place_in_slice(
    rank: int, size: int, local_rank: int, local_size: int, env: Mapping[str, str], parent: int
) -> RankInfo | None:
    """The ranks of this process on a TPU slice; `None` if it is the only one.

    Args:
        rank: rank of the process in XLA's runtime.
        size: number of processes in XLA's runtime.
        local_rank: rank among the processes of its host.
        local_size: number of processes of a host.
        env: the environment variables; those of Cloud TPU name the hosts.
        parent: id of the process that started those of this host, so that two runs on it use different ports.

    Raises:
        ConfigurationError: a launcher has started a different number of processes, or the first host's address is not set.
    """
    started = read_place(env)
    if started is not None and started.size not in (1, size):
        raise ConfigurationError(
            f"{started.launcher} has started {started.size} processes ({started.reason}), but XLA's runtime has {size}: "
            "each would train alone. Start the script once on each host; with mode='spmd' it uses all devices of the host, "
            "with mode='replicas' it starts its processes: XLAStrategy.launch(main)"
        )
    if size == 1:
        return None
    hosts = [name.strip() for name in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    nodes = size // local_size
    address = env.get("MASTER_ADDR", "").strip() or ("127.0.0.1" if nodes == 1 else hosts[0] if hosts else "")
    if not address:
        raise ConfigurationError(
            f"XLA's runtime has {size} processes on {nodes} hosts, but the address of the first host is unknown. Set it on all "
            "hosts: export MASTER_ADDR=host0"
        )
    job = str(parent) if nodes == 1 else ",".join(hosts) or address
    port = port_number(env, "MASTER_PORT") or stable_port("xla", job)
    node = rank // local_size
    return RankInfo(rank, size, local_rank, local_size, node, nodes, address, port, "XLA's runtime", f"it reports {size}")
