"""``torch.nn.init`` on a parameter that stage 3 has divided already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["WholeInit"]


class WholeInit(TorchFunctionMode):
    """Within it what changes a divided parameter in place gets it whole, on all processes; rank 0's values are kept.

    So layers can be initialised when all of them are there, as ``transformers`` and PEFT do it.

    Args:
        gathered: makes parameters whole for a moment; ``True``: what becomes of them is kept.
    """

    def __init__(self, gathered: Callable[[Iterable[Tensor], bool], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._gathered = gathered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init gives it by name
        if isinstance(target, nn.Parameter) and _in_place(func) and _divided(target):
            with self._gathered([target], True):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _in_place(func: Any) -> bool:
    name = str(getattr(func, "__name__", ""))
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _divided(parameter: Any) -> bool:
    return bool(parameter.numel() != getattr(parameter, "ds_numel", parameter.numel()))
