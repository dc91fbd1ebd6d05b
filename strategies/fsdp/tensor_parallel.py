"""Tensor parallelism: `TrainModule.parallelize` shards the layers over the ranks of a group, and can be undone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainkit.errors import MissingMethodError, ModuleError
from trainkit.module.train_module import TrainModule
from trainkit.strategies._reduction import broadcast
from trainkit.strategies.fsdp.units import Slot, slots

__all__ = ["Replaced", "parallelize", "tied_slots"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MARK = "_distribute_module_applied"  # with it, torch refuses to apply a plan again


def tied_slots(module: nn.Module) -> list[list[Slot]]:
    """The places of each parameter that has several."""
    places: dict[int, list[Slot]] = {}
    for owner, name in slots(module):
        places.setdefault(id(owner._parameters[name]), []).append((owner, name))
    return [each for each in places.values() if len(each) > 1]


def parallelize(module: nn.Module, mesh: DeviceMesh, device: torch.device) -> Callable[[], None]:
    """Call `module.parallelize(mesh)` with rank 0's values; returns a function that removes what torch's plans add to modules.

    Args:
        module: the user's; tied parameters are tied afterwards too.
        mesh: the device mesh, with a dimension `"tensor"`.
        device: the device of this process, to which the module is moved.

    Raises:
        MissingMethodError: the module has no such method.
        ModuleError: it shards nothing, or tied parameters differently.
    """
    if not callable(getattr(module, "parallelize", None)) or _is_empty(module):
        raise MissingMethodError(
            f"FSDPStrategy(tensor_parallel={mesh['tensor'].size()}) needs {type(module).__name__}.parallelize, which says how "
            "to shard its layers. Define: def parallelize(self, mesh): parallelize_module(self.layers, mesh['tensor'], plan)"
        )
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)
    broadcast([parameter.data for parameter in module.parameters() if not parameter.is_meta])
    ties = tied_slots(module)
    before = [(part, name, set(getattr(part, name))) for part in module.modules() for name in _HOOKS]
    module.parallelize(mesh)  # type: ignore[operator]
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ModuleError(
            f"{type(module).__name__}.parallelize has sharded no parameter. Expected a plan whose names match submodules: "
            "parallelize_module(self.model, mesh['tensor'], {'layers.*.linear1': ColwiseParallel(), …})"
        )
    for places in ties:
        _tie(places)

    def remove_hooks() -> None:
        for part, name, known in before:
            table = getattr(part, name)
            for key in [key for key in table if key not in known]:
                del table[key]
        for part in module.modules():
            vars(part).pop(_MARK, None)

    return remove_hooks


def _is_empty(module: nn.Module) -> bool:
    """Whether it has the method of `TrainModule`, which does nothing."""
    method = getattr(type(module), "parallelize", None)
    return method is not None and method is TrainModule.parallelize


def _tie(places: list[Slot]) -> None:
    """Tie parameters again, which torch's plans have replaced each by itself."""
    first, *others = (owner._parameters[name] for owner, name in places)
    for other in others:
        if _layout(other) != _layout(first):
            raise ModuleError(
                f"parallelize shards tied parameters differently: {places[0][1]} of {type(places[0][0]).__name__} as "
                f"{_layout(first)}, and {places[-1][1]} of {type(places[-1][0]).__name__} as {_layout(other)}. Use plans that "
                "shard them the same way, such as RowwiseParallel for the embedding and ColwiseParallel for the head."
            )
    for owner, name in places:
        owner._parameters[name] = first


def _layout(parameter: Any) -> Any:
    return parameter.placements if isinstance(parameter, DTensor) else None


class Replaced:
    """The parameters that have taken the places of those of before, for optimizers that were made before.

    Args:
        module: the user's, before anything is sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before: dict[int, tuple[weakref.ref[Tensor], Slot]] = {}
        for owner, name in slots(module):
            parameter = owner._parameters[name]
            if parameter is not None:
                self._before[id(parameter)] = weakref.ref(parameter), (owner, name)

    def current(self, parameter: Tensor) -> Tensor:
        """What is now in the place of a parameter; itself, if it was in none."""
        reference, slot = self._before.get(id(parameter), (None, None))
        if reference is None or slot is None or reference() is not parameter:
            return parameter
        owner, name = slot
        now = owner._parameters[name]
        assert now is not None
        return now
