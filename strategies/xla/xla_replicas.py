"""Replicas: a copy of the model on each device, each in its own process (on the CPU: thread), with averaged gradients."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch.joining import join
from trainkit.launch.tpu import REPLICA, place_in_slice
from trainkit.nested import leaves, map_tensors
from trainkit.strategies.xla.runtime import choose_runtime, imported
from trainkit.strategies.xla.threads import ThreadWorld, replica_turns

__all__ = ["Replicas", "host_world", "launch", "replica_world", "resolve_mode"]


def resolve_mode(mode: str | None) -> str:
    """Return the mode of the argument, or else the mode that this process was started for.

    Raises:
        ConfigurationError: the mode is unknown.
    """
    if mode not in ("spmd", "replicas", None):
        raise ConfigurationError(f"mode must be 'spmd' or 'replicas', not {mode!r}. Use XLAStrategy(mode='spmd').")
    return mode or ("replicas" if REPLICA in os.environ else "spmd")


def replica_world(wanted: RequestedDevices, xr: Any, timeout: timedelta) -> World:
    """Join the replicas of the run.

    Raises:
        ConfigurationError: the number of replicas is not the one that the user asked for, or they cannot run here.
    """
    size, here = int(xr.world_size()), int(xr.local_device_count())
    each = wanted.per_node
    if size == 1 and (each or 1) > 1:
        raise ConfigurationError(
            f"devices={each} and mode='replicas', but XLA's runtime has one replica. Start the replicas: "
            "XLAStrategy.launch(main), where main creates the Trainer and calls fit."
        )
    if each is not None and each > 0 and each != here:
        raise ConfigurationError(
            f"devices={each}, but there are {here} replicas on this host. Use devices={here}, or remove devices."
        )
    if size == 1:
        return host_world(wanted, xr, timeout)
    rank, threads = int(xr.global_ordinal()), int(xr.addressable_device_count())
    if threads == size and int(xr.process_count()) == 1:
        turns = replica_turns(size)
        if wanted.as_started and rank not in turns.launched:
            raise ConfigurationError(
                "replicas on XLA's CPU runtime are threads that run one at a time, but the end of your own training loop is "
                "not known. Start it with XLAStrategy.launch(main)."
            )
        return ThreadWorld(rank, size, turns)
    if threads > 1:
        raise ConfigurationError(
            f"each process of this TPU has {threads} devices, as on TPU v2 and v3, but mode='replicas' needs one per process. "
            "Use mode='spmd'."
        )
    place = place_in_slice(rank, size, int(xr.local_ordinal()), here, os.environ, os.getppid())
    return _checked(join(wanted, backend="gloo", timeout=timeout, place=place), size)


def host_world(wanted: RequestedDevices, xr: Any, timeout: timedelta) -> World:
    """Join the processes of an SPMD run: one on each host.

    Raises:
        ConfigurationError: a launcher has started another number of processes than the runtime knows of.
    """
    place = place_in_slice(int(xr.process_index()), int(xr.process_count()), 0, 1, os.environ, 0)
    hosts = RequestedDevices(wanted.accelerator, nodes=wanted.nodes, as_started=True)
    return _checked(join(hosts, backend="gloo", timeout=timeout, place=place), int(xr.process_count()))


def _checked(world: World, size: int) -> World:
    if world.size != size:
        raise ConfigurationError(
            f"there are {world.size} processes ({world.launcher}), but XLA's runtime has {size}: each would train alone. "
            "Start the script once on each host, or let the runtime start the processes: XLAStrategy.launch(main)"
        )
    return world


class Replicas:
    """Collectives of the replicas, which are part of the graph that all of them run.

    All replicas must run the same graph. So values that differ between replicas must be inputs of the graph.

    Args:
        world: the replicas.
        device: the device of this replica.
        run: runs the recorded operations.
    """

    def __init__(self, world: World, device: torch.device, run: Callable[[], None]) -> None:
        self.world, self.device, self._run = world, device, run
        self._xm: Any = importlib.import_module("torch_xla.core.xla_model")
        (self._is_main,) = self._xm.send_cpu_data_to_device([torch.tensor(world.rank == 0)], device)
        self.had_loss = False

    def sync(self) -> None:
        """Run the recorded operations, which contain collectives, on all replicas."""
        self._run()
        if isinstance(self.world, ThreadWorld):
            self.world.gather("sync")  # all must have started before one waits for a result

    def average(self, parameters: Iterable[Tensor], alike: bool) -> bool:
        """Average the gradients over the replicas.

        Args:
            parameters: the same parameters on all replicas.
            alike: all replicas ran the same operations in this window, so they recorded the same graph. Otherwise the recorded
                graph runs first, and the gradients are inputs of the graph that averages them.

        Returns:
            Whether any replica had a loss in the window.
        """
        listed, had_loss = list(parameters), True
        if not alike:
            had = self.world.exchange([self.had_loss, *[p.grad is not None for p in listed]])
            had_loss = any(one[0] for one in had)
            for parameter, *there in zip(listed, *(one[1:] for one in had), strict=True):
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()  # not a view, which not all replicas would have
                elif any(there):
                    zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
                    (parameter.grad,) = self._xm.send_cpu_data_to_device([zeros], self.device)
            self._run()
        self.had_loss = False
        gradients = [parameter.grad for parameter in listed if parameter.grad is not None]
        if gradients:
            self._xm.all_reduce(self._xm.REDUCE_SUM, gradients, scale=1.0 / self.world.size, pin_layout=False)
        return had_loss

    @torch.no_grad()
    def from_main(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors from the main process."""
        for tensor in tensors:
            own = tensor.detach().to(torch.int32) if tensor.dtype is torch.bool else tensor.detach()
            values = [torch.where(self._is_main, own, torch.zeros((), dtype=own.dtype, device=own.device))]
            self._xm.all_reduce(self._xm.REDUCE_SUM, values, pin_layout=False)
            tensor.detach().copy_(values[0])

    def gathered(self, data: Any) -> Any:
        """Gather tensors from all replicas, stacked along a new first dimension.

        Raises:
            ConfigurationError: the replicas pass different shapes or dtypes.
        """
        tensors = [leaf for leaf in leaves(data) if isinstance(leaf, Tensor)]
        said = self.world.exchange([[str(tensor.dtype), list(tensor.shape)] for tensor in tensors])
        if any(other != said[0] for other in said):
            raise ConfigurationError(
                f"all_gather needs tensors of the same shapes and dtypes on all replicas, but got {said}. Pad them first: "
                "torch.nn.functional.pad(x, (0, n - len(x)))"
            )
        own = map_tensors(data, lambda tensor: tensor.detach().to(self.device).clone().unsqueeze(0))
        self._run()  # the graph up to here may differ between replicas
        found = map_tensors(own, lambda tensor: self._xm.all_gather(tensor.clone(), dim=0, pin_layout=False))
        self.sync()
        return found


class _Replica:
    """The function that `torch_xla.launch` calls in each replica: runs the user's function as one of the replicas."""

    def __init__(self, function: Callable[..., Any], devices: int | None) -> None:
        self._function, self._devices = function, devices

    def __call__(self, index: int, *args: Any) -> Any:
        xr: Any = importlib.import_module("torch_xla.runtime")
        size = int(xr.world_size())
        here = int(xr.local_device_count())
        if self._devices not in (None, here):
            raise ConfigurationError(
                f"XLAStrategy.launch(devices={self._devices}): XLA's runtime has {here} devices on this host. Use "
                f"devices={here}, or select devices in the environment: CPU_NUM_DEVICES, TPU_VISIBLE_CHIPS"
            )
        if size == 1 or int(xr.addressable_device_count()) != size or int(xr.process_count()) != 1:
            return self._function(index, *args)
        turns, rank = replica_turns(size), int(xr.global_ordinal())
        turns.launched.add(rank)
        turns.enter(rank)
        error: BaseException | None = None
        try:
            return self._function(index, *args)
        except BaseException as caught:
            error = caught
            raise
        finally:
            turns.leave(rank, error)


def launch(function: Callable[..., Any], args: tuple[Any, ...], devices: int | None, options: Mapping[str, Any]) -> None:
    """See `trainkit.strategies.XLAStrategy.launch`."""
    choose_runtime(RequestedDevices("auto", devices))
    if os.environ["PJRT_DEVICE"] == "CPU":
        os.environ["PJRT_CPU_ASYNC_CLIENT"] = "0"  # read when the runtime starts
    os.environ[REPLICA] = "1"  # for both threads and processes
    try:
        imported().launch(_Replica(function, devices), args=args, **options)
    finally:
        os.environ.pop(REPLICA, None)
