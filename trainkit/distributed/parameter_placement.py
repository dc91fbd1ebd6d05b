"""Where the parameters of a module are: on which devices, and which part of a sharded one this process has."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.console import notice
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, ModuleError
from trainkit.registry import strategy_infos

__all__ = [
    "Range",
    "check_placement",
    "is_dtensor",
    "layer_devices",
    "move_module",
    "move_rest",
    "move_state",
    "own_range",
    "part_at",
    "refuse_sharded",
    "whole_shape",
]

_OFFLOADED = ("cpu", "disk")  # Accelerate keeps the weights of layers there for which no GPU has room.

Range = tuple[tuple[int, int], ...]
"""Start and end of a part in each dimension."""


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter, of which this process may have only a shard."""
    for info in strategy_infos():
        if info.shape_attribute is not None and hasattr(parameter, info.shape_attribute):
            return torch.Size(getattr(parameter, info.shape_attribute))
    return parameter.shape


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a module whose parameters are still sharded over processes by an earlier run.

    Raises:
        ConfigurationError: parameters are sharded, as DeepSpeed leaves them, or FSDP after a run that has failed.
    """
    attributes = [info.shape_attribute for info in strategy_infos() if info.shape_attribute is not None]
    sharded = sum(any(hasattr(parameter, name) for name in attributes) for parameter in module.parameters())
    if sharded:
        raise ConfigurationError(
            f"{sharded} parameters are sharded by ZeRO-3: configure_model created them in an earlier run on several processes, "
            f"or under deepspeed.zero.Init. Expected whole parameters. Continue with strategy='zero3', or start from a "
            f"checkpoint: {type(module).__name__}.load_from_checkpoint(path)"
        )
    sharded = sum(map(is_dtensor, module.parameters()))
    if sharded:
        raise ConfigurationError(
            f"{sharded} parameters are sharded (DTensor): an earlier run on several processes has failed and left them so, or "
            f"the script has sharded them. Expected whole parameters. Create the module again, or start from a checkpoint: "
            f"{type(module).__name__}.load_from_checkpoint(path)"
        )


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module. Its parameters stay the same objects, so that ties and existing optimizers remain valid.

    Raises:
        ModuleError: it cannot be moved to or from XLA, because something else refers to a parameter.
    """
    types = {device.type, *(parameter.device.type for parameter in module.parameters())}
    if any(kind in types for info in strategy_infos() for kind in info.swapped_devices):
        with _swapping(module):
            module.to(device)
    else:
        module.to(device)


def layer_devices(module: nn.Module) -> tuple[torch.device, ...]:
    """The devices on which the user has placed the layers of a module, that of the first parameter first.

    Returns:
        At least two devices; or `()` for a module that may be moved as a whole. The CPU does not count: modules are created
        there.
    """
    tensors = chain(module.parameters(), module.buffers())
    devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta"))
    return tuple(devices) if len(devices) > 1 else ()


class Placing(Protocol):
    """What `check_placement` must know about a strategy."""

    keeps_placement: ClassVar[bool]
    shards_parameters: ClassVar[bool]
    world: World
    device: torch.device


def check_placement(module: nn.Module, strategy: Placing) -> tuple[torch.device, ...]:
    """Return what `layer_devices` returns for a module that the strategy can train where it is.

    Raises:
        ConfigurationError: It cannot be trained like this.
    """
    name = type(module).__name__
    _refuse_offloaded(module)
    devices = layer_devices(module)
    if not devices:
        return ()
    there = " and ".join(map(str, devices))
    if strategy.world.size > 1 or not strategy.keeps_placement:
        processes = f"there are {strategy.world.size} processes, and each has one device"
        shard = "" if strategy.shards_parameters else ", and shard it: strategy='fsdp' or 'zero3'"
        why_one = processes if strategy.world.size > 1 else f"{type(strategy).__name__} needs a module on one device"
        raise ConfigurationError(
            f"{name} has layers on {there}, but {why_one}. Expected: one process and no strategy, Trainer(devices=1) or "
            f"Accelerator(). To train on several processes, create the module without .to(device) and device_map{shard}"
        )
    if strategy.device != devices[0]:
        raise ConfigurationError(
            f"{name} has layers on {there}, but batches are moved to {strategy.device}, the device of this process. Expected: "
            f"the device of the first parameter, {devices[0]}. Use Trainer(accelerator='gpu', devices=[{devices[0].index}]) or "
            f"Accelerator(strategy=Strategy({str(devices[0])!r}))"
        )
    return devices


def _refuse_offloaded(module: nn.Module) -> None:
    """Refuse a model of which `device_map` has offloaded layers: Accelerate drops their weights after each forward.

    Raises:
        ConfigurationError: It has.
    """
    for part in module.modules():
        device_map = vars(part).get("hf_device_map")  # set by Accelerate and transformers
        devices: dict[str, str] = {k: str(v) for k, v in device_map.items()} if isinstance(device_map, Mapping) else {}
        offloaded = [f"{key or 'all'} ({where})" for key, where in devices.items() if where in _OFFLOADED]
        if offloaded and ("disk" in devices.values() or len(set(devices.values())) > 1):
            raise ConfigurationError(
                f"device_map has offloaded {len(offloaded)} parts of {type(part).__name__}: {', '.join(offloaded[:3])}. Their "
                "weights are loaded for each forward and dropped after it, so they cannot be trained. Expected: every layer on "
                "a GPU. Load it without device_map, and offload with Trainer(strategy='fsdp_cpu_offload') or 'zero3_offload'"
            )


def move_rest(module: nn.Module, device: torch.device) -> None:
    """Move what is on the CPU, metrics too, in a module that the user has placed on several devices. The rest stays."""
    moved = [name for name, parameter in module.named_parameters() if parameter.device.type == "cpu"]
    module._apply(lambda tensor: tensor.to(device) if tensor.device.type == "cpu" else tensor)
    if moved:
        more = f" and {len(moved) - 3} more" if len(moved) > 3 else ""
        notice(f"{type(module).__name__} has layers on several devices, and {', '.join(moved[:3])}{more} moved to {device}.")


def move_state(optimizer: Optimizer) -> None:
    """Move the state of an optimizer to the devices of its parameters."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.device != parameter.device:
                state[key] = value.to(parameter.device)


@contextmanager
def _swapping(module: nn.Module) -> Iterator[None]:
    """In this context a module is moved by swapping the contents of its parameters.

    Otherwise a parameter cannot contain an XLA tensor, and a new parameter would be neither tied nor known to an optimizer.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        said = str(error).removeprefix("_apply(): ")
        raise ModuleError(
            f"{type(module).__name__} cannot be moved to or from XLA: {said}. Something refers to this parameter: a weak "
            "reference (weakref.ref(parameter)), or the graph of an earlier forward, kept by a loss that was not detached. "
            "Delete it before training: del loss."
        ) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def is_dtensor(value: Any) -> bool:
    """Whether a value is a `DTensor`."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def own_range(tensor: Any, first: int = 0) -> Range:
    """Where this rank's part of a `DTensor` lies in the whole one.

    The last dimension of the mesh comes first: `fully_shard` cuts into chunks what tensor parallelism has cut.
    `distribute_tensor` of torch 2.9 places unequal parts differently.

    Args:
        tensor: the tensor.
        first: the part that is sharded only over the dimensions of the mesh from this one on.
    """
    mesh, ranges = tensor.device_mesh, [(0, size) for size in tensor.shape]
    for dimension in reversed(range(first, mesh.ndim)):
        placement = tensor.placements[dimension]
        if not placement.is_replicate():
            start, end = ranges[placement.dim]
            size = -(-(end - start) // mesh.size(dimension))  # `torch.chunk` rounds up too.
            begin = min(start + size * mesh.get_local_rank(dimension), end)
            ranges[placement.dim] = begin, min(begin + size, end)
    return tuple(ranges)


def part_at(whole: Tensor, place: Range) -> Tensor:
    """The part of a whole tensor at a place, in the same memory."""
    return whole[tuple(slice(start, end) for start, end in place)]
