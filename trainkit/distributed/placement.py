"""The parameters of a module that is given to a strategy: what they must be, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.console import notice
from trainkit.errors import ConfigurationError, ModuleError
from trainkit.precision import Precision
from trainkit.registry import strategy_infos

__all__ = ["move_module", "move_state", "note_other_dtypes", "refuse_divided", "whole_shape"]


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter, of which this process may hold a shard only."""
    for info in strategy_infos():
        if info.shape_attribute is not None and hasattr(parameter, info.shape_attribute):
            return torch.Size(getattr(parameter, info.shape_attribute))
    return parameter.shape


def refuse_divided(module: nn.Module) -> None:
    """Refuse a module whose parameters an earlier run has left sharded over processes.

    Raises:
        ConfigurationError: parameters are sharded, as DeepSpeed leaves them.
    """
    attributes = [info.shape_attribute for info in strategy_infos() if info.shape_attribute is not None]
    divided = sum(any(hasattr(parameter, name) for name in attributes) for parameter in module.parameters())
    if divided:
        raise ConfigurationError(
            f"{divided} parameters are sharded by ZeRO-3: configure_model has made them in an earlier run on several "
            f"processes, or deepspeed.zero.Init. Continue with strategy='zero3', or start from a checkpoint: "
            f"{type(module).__name__}.load_from_checkpoint(path)"
        )


def note_other_dtypes(module: nn.Module, precision: Precision) -> None:
    """Say which dtypes a precision has left as they were."""
    odd = {str(p.dtype) for p in module.parameters() if p.is_floating_point() and p.dtype != precision.parameter_dtype}
    if odd:
        notice(
            f"precision {precision.name} leaves parameters as they are, and some are {', '.join(sorted(odd))}. To train in "
            "that dtype name it: precision='bf16-true'; for float32: module.float()."
        )


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module; its parameters stay the objects that they are, so that ties and optimizers made before hold.

    Raises:
        ModuleError: that is not possible, to or from XLA, since something else holds on to what a parameter was.
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
    """Within it a module is moved by swapping what its parameters hold: an XLA tensor cannot be put into a parameter otherwise,
    nor out of it, and a new parameter would be tied to nothing, and no optimizer's.
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
            f"{type(module).__name__} cannot be moved to or from XLA: {said}. Something holds on to this parameter: a weak "
            "reference (weakref.ref(parameter)), or the graph of an earlier forward, kept with a loss that was not detached. "
            "Let go of it before training."
        ) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
