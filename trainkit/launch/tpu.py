"""Whether a machine has a TPU, found out without loading what runs on it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trainkit.console import notice
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import read_place
from trainkit.launch.place import Place, port_number, stable_port

__all__ = ["DEVICE", "REPLICA", "place_in_slice", "runtime_is_loaded", "tpu_is_chosen", "tpu_is_here"]

# The type of a TPU among torch's devices.
DEVICE = "xla"

# Set while XLA's runtime starts replicas, and in them.
REPLICA = "TRAINKIT_XLA_REPLICA"

# Google's number among the makers of PCI devices, and those of its TPU chips, as torch_xla/_internal/tpu.py has them.
_VENDOR = "0x1ae0"
_CHIPS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")


def tpu_is_here(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether the machine has a TPU."""
    for device in devices.glob("*"):
        try:
            vendor, chip = (device / "vendor").read_text().strip(), (device / "device").read_text().strip()
        except OSError:
            continue
        if vendor == _VENDOR and chip in _CHIPS:
            return True
    return False


def tpu_is_chosen(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a run that leaves the choice open runs on a TPU: there is one, and what runs on it is installed.

    A replica that XLA's runtime has started runs on that runtime, whichever it is.
    """
    if REPLICA in env:
        return True
    chosen = env.get("PJRT_DEVICE", "").upper()
    if chosen:
        return chosen == "TPU"
    if not tpu_is_here():
        return False
    if importlib.util.find_spec("torch_xla") is None:
        notice("this machine has a TPU, which is not used: torch_xla is not installed. pip install 'trainkit-torch[xla]'")
        return False
    return True


def runtime_is_loaded() -> bool:
    """Whether this process has loaded XLA's runtime, in which threads may be what processes are elsewhere."""
    return "torch_xla" in sys.modules


def place_in_slice(rank: int, size: int, local_rank: int, local_size: int, env: Mapping[str, str], parent: int) -> Place | None:
    """Which process of a run on a TPU slice this one is; ``None`` if it is the only one.

    Args:
        rank: as the runtime counts the processes.
        size: likewise.
        local_rank: among those of its host.
        local_size: the processes of a host.
        env: the environment variables; those of Cloud TPU name the hosts.
        parent: the process that has started those of this host, which tells two runs on it apart.

    Raises:
        ConfigurationError: a launcher has started other processes than the runtime knows of; it is not known where they meet.
    """
    started = read_place(env)
    if started is not None and started.size not in (1, size):
        raise ConfigurationError(
            f"{started.launcher} has started {started.size} processes ({started.reason}), but XLA's runtime knows of {size}: "
            "each would train by itself. Start the script once on each host; with mode='spmd' it drives all devices of the "
            "host, with mode='replicas' it starts its processes by XLAStrategy.launch(main)."
        )
    if size == 1:
        return None
    hosts = [name.strip() for name in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    nodes = size // local_size
    address = env.get("MASTER_ADDR", "").strip() or ("127.0.0.1" if nodes == 1 else hosts[0] if hosts else "")
    if not address:
        raise ConfigurationError(
            f"XLA's runtime knows of {size} processes on {nodes} hosts, but not how the first host is called. Set it on all of "
            "them: export MASTER_ADDR=host0"
        )
    job = str(parent) if nodes == 1 else ",".join(hosts) or address
    port = port_number(env, "MASTER_PORT") or stable_port("xla", job)
    node = rank // local_size
    return Place(rank, size, local_rank, local_size, node, nodes, address, port, "XLA's runtime", f"which knows of {size}")
