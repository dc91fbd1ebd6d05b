"""The processes and devices of a run on XLA: one model for all devices (SPMD), or a replica of it on each.

A replica has its own process (on the CPU: thread), and averages its gradients with the others.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainkit.accelerator.prepared_models import Wrapped
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import REPLICA, place_in_slice
from trainkit.launch.joining import join
from trainkit.nested import leaves, map_tensors
from trainkit.strategies.xla.runtime import choose_runtime, import_torch_xla
from trainkit.strategies.xla.threads import ThreadWorld, replica_scheduler
from trainkit.strategy import Contents, Footprint, Held, StepMemory, in_backward

__all__ = [
    "Replicas",
    "SPMDModel",
    "batch_axes",
    "host_world",
    "launch",
    "make_mesh",
    "replica_world",
    "resolve_mode",
    "shard_footprint",
    "shard_state",
]


def resolve_mode(mode: str | None) -> str:
    """Return the mode of the argument, or else the mode that this process was started for."""
    if mode not in ("spmd", "replicas", None):
        raise ConfigurationError(f"mode must be 'spmd' or 'replicas', not {mode!r}. Use XLAStrategy(mode='spmd').")
    return mode or ("replicas" if REPLICA in os.environ else "spmd")


def replica_world(requested: RequestedDevices, xr: Any, timeout: timedelta) -> World:
    """Join the replicas of the run."""
    size, here = int(xr.world_size()), int(xr.local_device_count())
    each = requested.per_node
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
        return host_world(requested, xr, timeout)
    rank, threads = int(xr.global_ordinal()), int(xr.addressable_device_count())
    if threads == size and int(xr.process_count()) == 1:
        scheduler = replica_scheduler(size)
        if requested.as_started and rank not in scheduler.launched:
            raise ConfigurationError(
                "replicas on XLA's CPU runtime are threads that run one at a time, but trainkit cannot detect when your own "
                "training loop ends. Start it with XLAStrategy.launch(main)."
            )
        return ThreadWorld(rank, size, scheduler)
    if threads > 1:
        raise ConfigurationError(
            f"each process of this TPU has {threads} devices, as on TPU v2 and v3, but mode='replicas' needs one per process. "
            "Use mode='spmd'."
        )
    place = place_in_slice(rank, size, int(xr.local_ordinal()), here, os.environ, os.getppid())
    return _check_size(join(requested, backend="gloo", timeout=timeout, place=place), size)


def host_world(requested: RequestedDevices, xr: Any, timeout: timedelta) -> World:
    """Join the processes of an SPMD run: one on each host.

    Raises:
        ConfigurationError: A launcher started a different number of processes than the runtime has.
    """
    place = place_in_slice(int(xr.process_index()), int(xr.process_count()), 0, 1, os.environ, 0)
    hosts = RequestedDevices(requested.accelerator, nodes=requested.nodes, as_started=True)
    return _check_size(join(hosts, backend="gloo", timeout=timeout, place=place), int(xr.process_count()))


def _check_size(world: World, size: int) -> World:
    if world.size != size:
        raise ConfigurationError(
            f"there are {world.size} processes ({world.launcher}), but XLA's runtime has {size}, so each would train alone. "
            "Start the script once on each host, or let the runtime start the processes: XLAStrategy.launch(main)"
        )
    return world


class Replicas:
    """Collectives of the replicas, which are part of the graph that all of them run.

    All replicas must run the same graph. So values that differ between replicas must be inputs of the graph.

    Args:
        run: Runs the recorded operations.
    """

    def __init__(self, world: World, device: torch.device, run: Callable[[], None]) -> None:
        self.world = world
        self.device = device
        self._run = run
        self._xm: Any = importlib.import_module("torch_xla.core.xla_model")
        (self._is_main,) = self._xm.send_cpu_data_to_device([torch.tensor(world.rank == 0)], device)
        self.had_loss = False

    def sync(self) -> None:
        """Run the recorded operations, which contain collectives, on all replicas."""
        self._run()
        if isinstance(self.world, ThreadWorld):
            self.world.gather("sync")  # all replicas must have started before one waits for a result

    def average(self, parameters: Iterable[Tensor], alike: bool) -> bool:
        """Average the gradients over the replicas.

        Args:
            parameters: The same parameters on all replicas.
            alike: All replicas ran the same operations in this window, so they recorded the same graph. Otherwise the recorded
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
                    parameter.grad = parameter.grad.clone()  # A view must not stay: not all replicas would have it.
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
            value = tensor.detach().to(torch.int32) if tensor.dtype is torch.bool else tensor.detach()
            values = [torch.where(self._is_main, value, torch.zeros((), dtype=value.dtype, device=value.device))]
            self._xm.all_reduce(self._xm.REDUCE_SUM, values, pin_layout=False)
            tensor.detach().copy_(values[0])

    def gather(self, data: Any) -> Any:
        """Gather tensors from all replicas, stacked along a new first dimension."""
        tensors = [leaf for leaf in leaves(data) if isinstance(leaf, Tensor)]
        by_rank = self.world.exchange([[str(tensor.dtype), list(tensor.shape)] for tensor in tensors])
        if any(other != by_rank[0] for other in by_rank):
            raise ConfigurationError(
                f"all_gather needs tensors of the same shapes and dtypes on all replicas, but got {by_rank}. Pad them first: "
                "torch.nn.functional.pad(x, (0, n - len(x)))"
            )
        local = map_tensors(data, lambda tensor: tensor.detach().to(self.device).clone().unsqueeze(0))
        self._run()  # the graph up to here may differ between replicas
        joined = map_tensors(local, lambda tensor: self._xm.all_gather(tensor.clone(), dim=0, pin_layout=False))
        self.sync()
        return joined


class _Replica:
    """The function that `torch_xla.launch` calls in each replica: runs the user's function as one of the replicas."""

    def __init__(self, function: Callable[..., Any], devices: int | None) -> None:
        self._function = function
        self._devices = devices

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
        scheduler, rank = replica_scheduler(size), int(xr.global_ordinal())
        scheduler.launched.add(rank)
        scheduler.join(rank)
        error: BaseException | None = None
        try:
            return self._function(index, *args)
        except BaseException as caught:
            error = caught
            raise
        finally:
            scheduler.leave(rank, error)


def launch(function: Callable[..., Any], args: tuple[Any, ...], devices: int | None, options: Mapping[str, Any]) -> None:
    """See `trainkit.strategies.XLAStrategy.launch`."""
    choose_runtime(RequestedDevices("auto", devices))
    if os.environ["PJRT_DEVICE"] == "CPU":
        os.environ["PJRT_CPU_ASYNC_CLIENT"] = "0"  # read when the runtime starts
    os.environ[REPLICA] = "1"  # Threads and processes both read it.
    try:
        import_torch_xla().launch(_Replica(function, devices), args=args, **options)
    finally:
        os.environ.pop(REPLICA, None)


# ----------------------------------------------------------------------------------------------------------------- SPMD


_DATA = ("data", "fsdp")  # axes over which batches are sharded


def make_mesh(mesh: Any, devices: int, fsdp: bool) -> Any:
    """Create the mesh of a run, and make it the global mesh.

    Args:
        mesh: A `Mesh`, a dict of axis name → size, or `None`.
        devices: Number of devices of the run.
        fsdp: Whether parameters are sharded.
    """
    spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
    there = int(importlib.import_module("torch_xla.runtime").global_runtime_device_count())
    if devices != there:
        raise ConfigurationError(
            f"devices={devices} does not work with mesh or fsdp, which use all devices of the runtime. Use devices={there}."
        )
    if not isinstance(mesh, spmd.Mesh):
        sizes = {"fsdp" if fsdp else "data": devices} if mesh is None else mesh
        if not isinstance(sizes, Mapping) or not all(type(size) is int and size > 0 for size in sizes.values()):
            raise ConfigurationError(
                f"mesh must be a torch_xla.distributed.spmd.Mesh or a dict of axis sizes > 0, not {mesh!r}. For example: "
                "mesh={'data': 2, 'fsdp': 4}"
            )
        if math.prod(sizes.values()) != devices:
            raise ConfigurationError(
                f"mesh={mesh!r} has {math.prod(sizes.values())} devices, but the runtime has {devices}. Use sizes whose "
                f"product is {devices}: mesh={{'data': {devices}}}"
            )
        mesh = spmd.Mesh(np.arange(devices), tuple(sizes.values()), tuple(sizes))
    names = tuple(mesh.axis_names or ())
    if fsdp and "fsdp" not in names:
        raise ConfigurationError(
            f"fsdp=True needs an axis 'fsdp' in the mesh, which has {', '.join(names) or 'no names'}. Name an axis 'fsdp': "
            f"mesh={{'fsdp': {devices}}}"
        )
    if not set(names) & set(_DATA):
        raise ConfigurationError(
            f"the mesh has the axes {names!r}, but batches are sharded over axes named 'data' or 'fsdp'. Name an axis 'data': "
            "torch_xla.distributed.spmd.Mesh(ids, (4,), ('data',))"
        )
    spmd.set_global_mesh(mesh)
    return mesh


def batch_axes(mesh: Any) -> tuple[str, ...]:
    """The axes over which batches are sharded."""
    return tuple(name for name in mesh.axis_names if name in _DATA)


class SPMDModel(Wrapped):
    """A module whose parameters are sharded over the axis "fsdp".

    Args:
        module: The user's module, on the device.
    """

    def __init__(self, module: nn.Module, mesh: Any) -> None:
        super().__init__(module)
        self.training = module.training
        fsdp: Any = importlib.import_module("torch_xla.experimental.spmd_fully_sharded_data_parallel")
        self._spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
        self._mesh = mesh
        self._marks = list[RemovableHandle]()
        called = _FunctionModule(module)
        # set in __dict__, so that it is not registered as a submodule
        self.__dict__["_fsdp"] = fsdp.SpmdFullyShardedDataParallel(called, mesh=mesh, shard_output=self._shard_outputs)
        called._backward_hooks.clear()  # FSDPv2's hook warns, because batches need no gradients

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, *args, **kwargs)

    def shard_children_outputs(self) -> None:
        """Shard the outputs of the module's children too, for a training step that calls them and returns only a loss.

        These marks make the compiler gather parameters instead of activations. Your own training loop, which calls such a child
        as its model, then has the same graph.
        """
        children = [child for child in self.module.children() if any(True for _ in child.parameters())]
        if not self._marks:
            self._marks += [child.register_forward_hook(self._mark) for child in children]

    def _mark(self, child: nn.Module, args: Any, outputs: Any) -> None:
        self._shard_outputs(outputs, self._mesh)

    def close(self) -> None:
        """Remove the hooks from the module's children."""
        for mark in self._marks:
            mark.remove()
        self._marks.clear()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that uses the parameters inside FSDPv2's forward."""
        return self.__dict__["_fsdp"](function, args, kwargs)

    def _shard_outputs(self, outputs: Any, mesh: Any) -> None:
        """Shard outputs along their first dimension, like the batch. Scalars are not sharded."""
        samples = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.ndim and leaf.device.type == "xla"]
        axes = batch_axes(mesh)
        for leaf in samples:
            self._spmd.mark_sharding(leaf, mesh, (axes, *[None] * (leaf.ndim - 1)))


def shard_state(optimizers: Iterable[Optimizer]) -> None:
    """Shard loaded optimizer state, which is whole on each device, in the same way as its parameters."""
    xlac: Any = importlib.import_module("torch_xla")._XLAC
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(state, dict) or not xlac._get_xla_sharding_spec(parameter):
                continue
            sharding = xlac._get_xla_op_sharding(parameter)
            for value in state.values():
                if isinstance(value, Tensor) and value.device.type == "xla" and value.shape == parameter.shape:
                    xlac._xla_mark_sharding(value, sharding)


def shard_footprint(whole: Footprint, contents: Contents, devices: int) -> Footprint:
    """The memory of one device if everything but buffers is sharded."""
    held = whole.moments["update"].device
    each = Held(
        parameters=contents.buffers + -(-(held.parameters - contents.buffers) // devices),
        gradients=-(-held.gradients // devices),
        optimizer=-(-held.optimizer // devices),
    )
    step = in_backward(contents, replace(each, gradients=0), shards=devices)
    return replace(whole, name=f"{whole.name}, fsdp", moments={"update": StepMemory(each), **step})


class _FunctionModule(nn.Module):
    """The module that FSDPv2 wraps: its forward calls a function."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)
