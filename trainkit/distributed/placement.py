"""The parameters of a module that is passed to a strategy: no shards, and on the device of the strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainkit.errors import ConfigurationError, ModuleError

__all__ = ["move_module", "refuse_sharded"]


def refuse_sharded(module: nn.Module) -> None:
    """Refuse a module whose parameters an earlier run has left sharded.

    Raises:
        ConfigurationError: parameters are sharded by DeepSpeed.
    """
    sharded = sum(hasattr(parameter, "ds_id") for parameter in module.parameters())
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
    if "xla" in {device.type, *(parameter.device.type for parameter in module.parameters())}:
        with _swapping(module):
            module.to(device)
    else:
        module.to(device)


@contextmanager
def _swapping(module: nn.Module) -> Iterator[None]:
    """Within it a module is moved by swapping the contents of its parameters.

    A parameter cannot hold an XLA tensor otherwise, and a new parameter would be neither tied nor known to an optimizer.
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
