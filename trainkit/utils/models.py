"""`extract_model_from_parallel`, `is_compiled_module`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from trainkit.accelerator.wrapped import Wrapped, unwrapped
from trainkit.errors import UnsupportedArgumentError

__all__ = ["extract_model_from_parallel", "is_compiled_module"]

_AROUND = (Wrapped, nn.parallel.DistributedDataParallel, nn.DataParallel)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False, recursive: bool = False
) -> nn.Module:
    """Return a user's model, without the wrappers of `Accelerator.prepare`, DDP and `torch.compile`.

    Args:
        model: A model, wrapped or not.
        keep_fp32_wrapper: No effect: the user's own model is not changed.
        keep_torch_compile: As in `Accelerator.unwrap_model`.
        recursive: Only `False`.

    Raises:
        UnsupportedArgumentError: `recursive=True`.
    """
    if recursive:
        raise UnsupportedArgumentError(
            "extract_model_from_parallel(recursive=True) is not supported: prepare wraps whole models. Remove it."
        )
    return unwrapped(model, _inside, keep_torch_compile)


def _inside(model: nn.Module) -> nn.Module:
    inner: Any = model.module if isinstance(model, _AROUND) else getattr(model, "_orig_mod", model)
    return cast(nn.Module, inner)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `torch.compile` returned this module."""
    return isinstance(module, torch._dynamo.OptimizedModule)
