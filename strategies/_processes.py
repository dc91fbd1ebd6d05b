"""`ProcessStrategy`: what strategies have in common that use one process for each device."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from math import inf
from typing import Any

import torch
from torch import Tensor

from trainkit.checks import is_number
from trainkit.distributed.collective_checks import CollectiveChecks
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.errors import ConfigurationError
from trainkit.launch.joining import device_of, join
from trainkit.precision import Precision
from trainkit.strategies._collectives import Buffers, all_gather_nested, mean
from trainkit.strategy import Strategy

__all__ = ["ProcessStrategy", "duration"]


class ProcessStrategy(Strategy):
    """Joins the process group of a run, and communicates over it.

    Args:
        process_group_backend: Backend of the process group. Default: nccl for CUDA, gloo for the CPU.
        timeout: Timeout of collectives: a timedelta, or a number of seconds.
        device: As in `Strategy`.
        precision: As in `Strategy`.
    """

    def __init__(
        self,
        process_group_backend: str | None,
        timeout: timedelta | float,
        device: str | torch.device,
        precision: Precision | str | int | None,
    ) -> None:
        super().__init__(device, precision)
        self.process_group_backend = process_group_backend
        self.timeout = duration(timeout)
        self._one_device = str(device) != "auto" and torch.device(device).index is not None
        self._buffers = Buffers()

    def join(self, wanted: RequestedDevices) -> None:
        """See `trainkit.Strategy.join`."""
        if wanted.accelerator == "auto":
            wanted = replace(wanted, accelerator=self.device.type)
        world = join(wanted, backend=self.process_group_backend, timeout=self.timeout)
        if self._one_device and world.size > 1:
            raise ConfigurationError(
                f"{type(self).__name__}(device={str(self.device)!r}) names one device for {world.size} processes, but each "
                f"process needs its own. Use device={self.device.type!r}, and select devices with Trainer(devices=[0, 2])."
            )
        self.device = self.device if self._one_device else device_of(wanted, world)
        self.world = world
        self.joined = True

    def mean(self, value: Tensor) -> Tensor:
        if self.world.size == 1:
            return value
        with self.world.collectives:
            return mean(value)

    def sync_buffers(self) -> None:
        self._buffers.sync()

    def all_gather(self, data: Any, sync_grads: bool = False, alike: bool = False) -> Any:
        """See `trainkit.Strategy.all_gather`.

        Raises:
            ConfigurationError: The ranks pass different containers, shapes or dtypes, or not all ranks call it.
        """
        return data if self.world.size == 1 else all_gather_nested(data, self.world, self.device, sync_grads, alike)

    def barrier_for(self, verb: str) -> None:
        """See `trainkit.Strategy.barrier_for`.

        Raises:
            CollectiveError: Another rank is in a different verb, or has exited; the message names the lines of code.
        """
        CollectiveChecks.of(self.world).wait(verb)


def duration(timeout: Any) -> timedelta:
    """Return a timeout, a timedelta or a number of seconds, as a timedelta."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not is_number(seconds) or not 0 < seconds < inf:
        raise ConfigurationError(
            f"timeout must be a timedelta or a number of seconds > 0, not {timeout!r}. For example: timeout=1800"
        )
    return timedelta(seconds=seconds)
