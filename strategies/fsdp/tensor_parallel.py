"""Tensor parallelism: `TrainModule.parallelize` shards the layers over the ranks of a group, and can be undone.

`ReplicatedGradients` finds parameters that a plan has forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainkit.console import join_names
from trainkit.errors import MissingMethodError, ModuleError
from trainkit.module.train_module import TrainModule
from trainkit.strategies._collectives import broadcast
from trainkit.strategies.fsdp.sharded_model import ShardedModel
from trainkit.strategies.fsdp.units import Slot, slots

__all__ = ["Replaced", "ReplicatedGradients", "find_tied_slots", "parallelize"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MARK = "_distribute_module_applied"  # A module with this attribute cannot get a plan again.
_LAST_CHECKED_WINDOW = 64  # the first, second, fourth, ... accumulation window are checked
_TOLERANCE = 0.02  # relative; parts of a gradient differ by about its size, and gradients of equal inputs only by rounding


def find_tied_slots(module: nn.Module) -> list[list[Slot]]:
    """The places of each parameter that has several."""
    places: dict[int, list[Slot]] = {}
    for owner, name in slots(module):
        places.setdefault(id(owner._parameters[name]), []).append((owner, name))
    return [each for each in places.values() if len(each) > 1]


def parallelize(module: nn.Module, mesh: DeviceMesh, device: torch.device) -> Callable[[], None]:
    """Call `module.parallelize(mesh)` with rank 0's values; returns a function that removes what torch's plans add to modules.

    Args:
        module: The user's; tied parameters are tied afterwards too.
        mesh: The device mesh, with a dimension `"tensor"`.
        device: The device of this process, to which the module is moved.

    Raises:
        ModuleError: It shards nothing, or tied parameters differently.
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
    ties = find_tied_slots(module)
    before = [(part, name, set(getattr(part, name))) for part in module.modules() for name in _HOOKS]

    def remove_hooks() -> None:
        for part, name, known in before:
            table = getattr(part, name)
            for key in [key for key in table if key not in known]:
                del table[key]
        for part in module.modules():
            vars(part).pop(_MARK, None)

    try:
        module.parallelize(mesh)  # type: ignore[operator]
        _check_plan(module, ties)
    except BaseException:
        remove_hooks()
        raise
    return remove_hooks


def _check_plan(module: nn.Module, ties: list[list[Slot]]) -> None:
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ModuleError(
            f"{type(module).__name__}.parallelize has sharded no parameter. Expected a plan whose names match submodules: "
            "parallelize_module(self.model, mesh['tensor'], {'layers.*.linear1': ColwiseParallel(), …})"
        )
    for places in ties:
        _tie(places)


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
        module: The user's, before anything is sharded.
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


class ReplicatedGradients:
    """Checks that ranks of a tensor-parallel group have equal gradients for parameters that no plan shards.

    They differ if such a parameter is used with a part of the activations, as a norm over the heads of one rank: each rank
    then has a part of its gradient, and torch adds up only those of parameters in a plan.

    Args:
        mesh: The device mesh, with a dimension `"tensor"`.
    """

    def __init__(self, models: Sequence[ShardedModel], mesh: DeviceMesh, device: torch.device) -> None:
        self._models = models
        self._device = device
        self._group = mesh["tensor"].get_group()
        self._windows = 0

    def check(self) -> None:
        """Check at the end of an accumulation window, before gradients of whole parameters are averaged. Collective."""
        self._windows += 1
        if self._windows > _LAST_CHECKED_WINDOW or self._windows & (self._windows - 1):
            return
        named = list(self._outside_of_plans())  # several models may have parameters of one name
        if not named:
            return
        differences = torch.stack([self._difference(parameter) for _, parameter in named])
        dist.all_reduce(differences, op=dist.ReduceOp.MAX)
        wrong = [name for (name, _), difference in zip(named, differences.tolist(), strict=True) if difference > _TOLERANCE]
        if wrong:
            shown = join_names(wrong)
            raise ModuleError(
                f"{shown}: the ranks of a tensor-parallel group have different gradients, because each uses another part of "
                "the activations, or other random numbers in dropout. Expected a plan for each parameter that sees parts of "
                "them, such as parallelize_module(self.model, mesh['tensor'], {'layers.*.norm': SequenceParallel()}), and the "
                "same seed on these ranks."
            )

    def _outside_of_plans(self) -> Iterator[tuple[str, Tensor]]:
        for model in self._models:
            model.reshard()
            for name, parameter in model.module.named_parameters():
                names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
                if parameter.requires_grad and "tensor" not in (names or ()):
                    yield name, parameter

    @torch.no_grad()
    def _difference(self, parameter: Tensor) -> Tensor:
        """The difference between this rank's gradient and that of the first rank of its group, relative to the larger one."""
        gradient: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        local = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).to(self._device, torch.float32)
        first = local.clone()
        dist.broadcast(first, group=self._group, group_src=0)
        size = torch.maximum(local.norm(), first.norm())
        return torch.where(size > 0.0, (local - first).norm() / size, size)
