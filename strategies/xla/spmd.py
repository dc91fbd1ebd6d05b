"""The mesh of devices, and parameters sharded over it by torch_xla's FSDPv2."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainkit.accelerator.wrapped import Wrapped
from trainkit.errors import ConfigurationError
from trainkit.footprint import Contents, Footprint, Held, Moment, in_backward
from trainkit.nested import leaves

__all__ = ["SPMDModel", "batch_axes", "make_mesh", "shard_state", "sharded_footprint"]

_DATA = ("data", "fsdp")  # axes over which batches are sharded


def make_mesh(wanted: Any, devices: int, fsdp: bool) -> Any:
    """Create the mesh of a run, and make it the global mesh.

    Args:
        wanted: a `Mesh`, a dict of axis name → size, or `None`.
        devices: number of devices of the run.
        fsdp: whether parameters are sharded.

    Raises:
        ConfigurationError: the mesh does not fit the devices or `fsdp`.
    """
    spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
    there = int(importlib.import_module("torch_xla.runtime").global_runtime_device_count())
    if devices != there:
        raise ConfigurationError(
            f"devices={devices} does not work with mesh or fsdp, which use all devices of the runtime. Use devices={there}."
        )
    if isinstance(wanted, spmd.Mesh):
        mesh = wanted
    else:
        sizes = {"fsdp" if fsdp else "data": devices} if wanted is None else wanted
        if not isinstance(sizes, Mapping) or not all(type(size) is int and size > 0 for size in sizes.values()):
            raise ConfigurationError(
                f"mesh must be a torch_xla.distributed.spmd.Mesh or a dict of axis sizes > 0, not {wanted!r}. For example: "
                "mesh={'data': 2, 'fsdp': 4}"
            )
        if math.prod(sizes.values()) != devices:
            raise ConfigurationError(
                f"mesh={wanted!r} has {math.prod(sizes.values())} devices, but the runtime has {devices}. Use sizes whose "
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
        module: the user's module, on the device.
        mesh: the mesh of devices.
    """

    def __init__(self, module: nn.Module, mesh: Any) -> None:
        super().__init__(module)
        self.training = module.training
        fsdp: Any = importlib.import_module("torch_xla.experimental.spmd_fully_sharded_data_parallel")
        self._spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
        self._mesh, self._marks = mesh, list[RemovableHandle]()
        called = _Called(module)
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


def sharded_footprint(whole: Footprint, contents: Contents, devices: int) -> Footprint:
    """The memory of one device if everything but buffers is sharded."""
    held = whole.moments["update"].device
    each = Held(
        parameters=contents.buffers + -(-(held.parameters - contents.buffers) // devices),
        gradients=-(-held.gradients // devices),
        optimizer=-(-held.optimizer // devices),
    )
    step = in_backward(contents, replace(each, gradients=0), shards=devices)
    return replace(whole, name=f"{whole.name}, fsdp", moments={"update": Moment(each), **step})


class _Called(nn.Module):
    """The module that FSDPv2 wraps: its forward calls a function."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)
