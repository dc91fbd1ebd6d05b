"""Prepare the parameters of a module for a strategy: refuse sharded parameters, and move them to a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.errors import ConfigurationError, ModuleError
from trainkit.registry import strategy_infos

__all__ = ["move_module", "move_state", "refuse_sharded", "whole_shape"]


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter, of which this process may have only a shard."""
    for info in strategy_infos():
        if info.shape_attribute is not None and hasattr(parameter, info.shape_attribute):
            return torch.Size(getattr(parameter, info.shape_attribute))
    return parameter.shape


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a module whose parameters are still sharded over processes by an earlier run.

    Raises:
        ConfigurationError: parameters are sharded, as DeepSpeed leaves them.
    """
    attributes = [info.shape_attribute for info in strategy_infos() if info.shape_attribute is not None]
    sharded = sum(any(hasattr(parameter, name) for name in attributes) for parameter in module.parameters())
    if sharded:
        raise ConfigurationError(
            f"{sharded} parameters are sharded by ZeRO-3: configure_model created them in an earlier run on several processes, "
            f"or under deepspeed.zero.Init. Expected whole parameters. Continue with strategy='zero3', or start from a "
            f"checkpoint: {type(module).__name__}.load_from_checkpoint(path)"
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
