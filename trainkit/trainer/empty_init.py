"""Creating a module without initializing its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["uninitialized"]


class uninitialized(TorchFunctionMode):  # noqa: N801 - used as a function, like contextlib's own
    """In this context the random initialization of torch's layers is skipped.

    Functions of `torch.nn.init` that torch lets a mode replace return their tensor unchanged.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
