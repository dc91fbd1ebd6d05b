"""Whether a machine has a TPU, found out without loading what runs on it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from trainkit.console import notice

__all__ = ["tpu_is_chosen", "tpu_is_here"]

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
    """Whether a run that leaves the choice open runs on a TPU: there is one, and what runs on it is installed."""
    chosen = env.get("PJRT_DEVICE", "").upper()
    if chosen:
        return chosen == "TPU"
    if not tpu_is_here():
        return False
    if importlib.util.find_spec("torch_xla") is None:
        notice("this machine has a TPU, which is not used: torch_xla is not installed. pip install 'trainkit-torch[xla]'")
        return False
    return True
