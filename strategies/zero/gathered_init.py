"""`torch.nn.init` on parameters that stage 3 has already sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["GatheredInit"]


class GatheredInit(TorchFunctionMode):
    """Context manager that gathers a sharded parameter before an in-place operation, and keeps rank 0's result.

    It allows layers to be initialized after all of them are created, as in `transformers` and PEFT.

    Args:
        gathered: context manager that gathers parameters; with `True` it keeps changes to them.
    """

    def __init__(self, gathered: Callable[[Iterable[Tensor], bool], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._gathered = gathered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        if isinstance(target, nn.Parameter) and _in_place(func) and _sharded(target):
            with self._gathered([target], True):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _in_place(func: Any) -> bool:
    name = str(getattr(func, "__name__", ""))
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _sharded(parameter: Any) -> bool:
    return bool(parameter.numel() != getattr(parameter, "ds_numel", parameter.numel()))
