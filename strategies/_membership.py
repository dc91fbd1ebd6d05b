"""How strategies with several processes join the process group."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from math import inf
from typing import Any

import torch

from trainkit.checks import is_number
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch.joining import device_of, join

__all__ = ["Membership", "duration"]


class Membership:
    """Joins a process to the process group of a run.

    Args:
        name: class name of the strategy, for messages.
        device: `device` argument of the strategy.
        backend: backend of the process group. Default: nccl for CUDA, gloo for the CPU.
        timeout: timeout of collectives: a timedelta, or a number of seconds.

    Raises:
        ConfigurationError: the timeout is not a positive duration.
    """

    def __init__(self, name: str, device: str | torch.device, backend: str | None, timeout: Any) -> None:
        self._name, self.backend, self.timeout = name, backend, duration(timeout)
        self._one_device = str(device) != "auto" and torch.device(device).index is not None

    def join(self, wanted: RequestedDevices, device: torch.device) -> tuple[World, torch.device]:
        """Join the process group; returns the ranks of the run and the device of this process.

        Args:
            wanted: the devices that the user asked for.
            device: the device that the strategy resolved its argument to.

        Raises:
            ConfigurationError: the `device` argument names one device for several processes, or
                `trainkit.launch.joining.join` raises it.
        """
        if wanted.accelerator == "auto":
            wanted = replace(wanted, accelerator=device.type)
        world = join(wanted, backend=self.backend, timeout=self.timeout)
        if not self._one_device:
            return world, device_of(wanted, world)
        if world.size > 1:
            raise ConfigurationError(
                f"{self._name}(device={str(device)!r}) names one device for {world.size} processes, but each process needs its "
                f"own. Use device={device.type!r}, and select devices with Trainer(devices=[0, 2])."
            )
        return world, device


def duration(timeout: Any) -> timedelta:
    """Return a timeout, given as a timedelta or a number of seconds, as a timedelta.

    Raises:
        ConfigurationError: it is not a positive duration.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not is_number(seconds) or not 0 < seconds < inf:
        raise ConfigurationError(
            f"timeout must be a timedelta or a number of seconds > 0, not {timeout!r}. For example: timeout=1800"
        )
    return timedelta(seconds=seconds)
