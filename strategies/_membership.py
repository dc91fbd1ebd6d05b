"""Becoming one of several processes, as all strategies that need them do it."""

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
    """How a strategy joins the others.

    Args:
        name: of the strategy's class, for messages.
        device: its argument.
        backend: of the process group; default: nccl for CUDA, gloo for the CPU.
        timeout: how long a process waits for the others in a collective: a timedelta, or seconds.

    Raises:
        ConfigurationError: the timeout is no time.
    """

    def __init__(self, name: str, device: str | torch.device, backend: str | None, timeout: Any) -> None:
        self._name, self.backend, self.timeout = name, backend, duration(timeout)
        self._one_device = str(device) != "auto" and torch.device(device).index is not None

    def join(self, wanted: RequestedDevices, device: torch.device) -> tuple[World, torch.device]:
        """The processes, and the device of this one.

        Args:
            wanted: what the user asked for.
            device: what the strategy has resolved its argument to.

        Raises:
            ConfigurationError: one device was named for several processes; or as of :func:`trainkit.launch.joining.join`.
        """
        if wanted.accelerator == "auto":
            wanted = replace(wanted, accelerator=device.type)
        world = join(wanted, backend=self.backend, timeout=self.timeout)
        if not self._one_device:
            return world, device_of(wanted, world)
        if world.size > 1:
            raise ConfigurationError(
                f"{self._name}(device={str(device)!r}) names one device for {world.size} processes. Use device="
                f"{device.type!r}, and choose among several with Trainer(devices=[0, 2])."
            )
        return world, device


def duration(timeout: Any) -> timedelta:
    """A timeout as users give it: a timedelta, or seconds.

    Raises:
        ConfigurationError: it is no time.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not is_number(seconds) or not 0 < seconds < inf:
        raise ConfigurationError(f"timeout must be a timedelta or seconds, more than 0, not {timeout!r}.")
    return timedelta(seconds=seconds)
