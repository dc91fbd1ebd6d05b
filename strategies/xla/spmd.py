"""The mesh of devices, and parameters divided over it by torch_xla's FSDPv2."""

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
from trainkit.footprint import Contents, Footprint, Held, Moment
from trainkit.nested import leaves

__all__ = ["SPMDModel", "divide_state", "divided", "make_mesh", "share_of"]

_DATA = ("data", "fsdp")  # axes over which batches are divided


def make_mesh(wanted: Any, devices: int, fsdp: bool) -> Any:
    """The mesh of a run.

    Args:
        wanted: a ``Mesh``, sizes by axis, or ``None``.
        devices: of the runtime.
        fsdp: parameters are divided.

    Raises:
        ConfigurationError: it does not go together with the devices, or with ``fsdp``.
    """
    spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
    there = int(importlib.import_module("torch_xla.runtime").global_runtime_device_count())
    if devices != there:
        raise ConfigurationError(
            f"devices={devices} goes without mesh and fsdp, which are for all {there} devices of the runtime. Leave it out."
        )
    if isinstance(wanted, spmd.Mesh):
        mesh = wanted
    else:
        sizes = {"fsdp" if fsdp else "data": devices} if wanted is None else wanted
        if not isinstance(sizes, Mapping) or not all(type(size) is int and size > 0 for size in sizes.values()):
            raise ConfigurationError(
                "mesh must be a torch_xla.distributed.spmd.Mesh, or sizes by axis such as {'data': 2, 'fsdp': 4}, not "
                f"{wanted!r}."
            )
        if math.prod(sizes.values()) != devices:
            raise ConfigurationError(
                f"mesh={wanted!r} is of {math.prod(sizes.values())} devices, and the runtime has {devices}."
            )
        mesh = spmd.Mesh(np.arange(devices), tuple(sizes.values()), tuple(sizes))
    names = tuple(mesh.axis_names or ())
    if fsdp and "fsdp" not in names:
        raise ConfigurationError(f"fsdp=True needs an axis 'fsdp' in the mesh, which has {', '.join(names) or 'no names'}.")
    if not set(names) & set(_DATA):
        raise ConfigurationError(
            f"the axes of the mesh are called {names!r}, and batches are divided over 'data' and 'fsdp'. Name one so: "
            "torch_xla.distributed.spmd.Mesh(ids, (4,), ('data',))"
        )
    spmd.set_global_mesh(mesh)
    return mesh


def share_of(mesh: Any) -> tuple[str, ...]:
    """The axes over which batches are divided."""
    return tuple(name for name in mesh.axis_names if name in _DATA)


class SPMDModel(Wrapped):
    """A module whose parameters are divided over the axis "fsdp".

    Args:
        module: the user's, on the device.
        mesh: of the devices.
    """

    def __init__(self, module: nn.Module, mesh: Any) -> None:
        super().__init__(module)
        self.training = module.training
        fsdp: Any = importlib.import_module("torch_xla.experimental.spmd_fully_sharded_data_parallel")
        self._spmd: Any = importlib.import_module("torch_xla.distributed.spmd")
        self._mesh, self._marks = mesh, list[RemovableHandle]()
        called = _Called(module)
        # not assigned plainly: it would be a part of this module
        self.__dict__["_fsdp"] = fsdp.SpmdFullyShardedDataParallel(called, mesh=mesh, shard_output=self._divide_outputs)
        called._backward_hooks.clear()  # FSDPv2's comes before there are gradients, as batches need none, and warns of that

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, *args, **kwargs)

    def mark_parts(self) -> None:
        """Divide what the parts of the module return, too: where a step of the module calls them, and it returns but a loss.

        It is there that the compiler is told to gather parameters and not activations; and a loop of one's own, which calls
        such a part as its model, is the same graph.
        """
        parts = [part for part in self.module.children() if any(True for _ in part.parameters())]
        if not self._marks:
            self._marks += [part.register_forward_hook(self._mark) for part in parts]

    def _mark(self, part: nn.Module, args: Any, outputs: Any) -> None:
        self._divide_outputs(outputs, self._mesh)

    def close(self) -> None:
        """Leave the module's parts as they were."""
        for mark in self._marks:
            mark.remove()
        self._marks.clear()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that uses the parameters, within FSDPv2's forward."""
        return self.__dict__["_fsdp"](function, args, kwargs)

    def _divide_outputs(self, outputs: Any, mesh: Any) -> None:
        """By samples, as the batch; what is one number is not divided."""
        samples = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.ndim and leaf.device.type == "xla"]
        axes = share_of(mesh)
        for leaf in samples:
            self._spmd.mark_sharding(leaf, mesh, (axes, *[None] * (leaf.ndim - 1)))


def divide_state(optimizers: Iterable[Optimizer]) -> None:
    """Divide the state of parameters as the parameters are: what has been loaded is whole on each device."""
    room: Any = importlib.import_module("torch_xla")._XLAC
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(state, dict) or not room._get_xla_sharding_spec(parameter):
                continue
            sharding = room._get_xla_op_sharding(parameter)
            for value in state.values():
                if isinstance(value, Tensor) and value.device.type == "xla" and value.shape == parameter.shape:
                    room._xla_mark_sharding(value, sharding)


def divided(whole: Footprint, contents: Contents, devices: int) -> Footprint:
    """What one device holds where all but buffers is divided."""
    held = whole.moments["update"].device
    each = Held(
        parameters=contents.buffers + -(-(held.parameters - contents.buffers) // devices),
        gradients=-(-held.gradients // devices),
        optimizer=-(-held.optimizer // devices),
    )
    return replace(whole, name=f"{whole.name}, fsdp", moments={"update": Moment(each)})


class _Called(nn.Module):
    """What FSDPv2 calls: it calls what it is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)
