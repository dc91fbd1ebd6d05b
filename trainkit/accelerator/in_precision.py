"""What `Accelerator.prepare` returns for a model in a precision other than float32."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainkit.accelerator.wrapped import Wrapped, unwrapped
from trainkit.nested import map_tensors
from trainkit.precision import Precision
from trainkit.strategy import Strategy

__all__ = ["InPrecision", "without_wrappers"]


class InPrecision(Wrapped):
    """A model whose forward runs under the precision, for loops that call the model themselves.

    Mixed precision gives float32 outputs, so that a loss computed outside autocast is not computed in half precision; within
    `accelerator.autocast()` outputs are as autocast makes them.

    Args:
        module: the user's, or what a strategy has wrapped around it.
        precision: that of the run.
        autocast: options of `torch.autocast` in a mixed precision: `enabled`, `cache_enabled`.
    """

    def __init__(self, module: nn.Module, precision: Precision, **autocast: Any) -> None:
        super().__init__(module)
        self._precision, self._autocast = precision, autocast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._precision
        # under accelerator.autocast() the loss is computed in autocast too, as in a Trainer
        within = torch.is_autocast_enabled(precision.device_type)
        with self._context():
            outputs = self.module(*precision.convert_input(args), **precision.convert_input(kwargs))
        if precision.autocast_dtype is None or within:
            return outputs
        return map_tensors(outputs, lambda t: t.float() if t.dtype is precision.autocast_dtype else t)

    def _context(self) -> AbstractContextManager[Any]:
        return self._precision.forward_context(**self._autocast)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return InPrecision(copy.deepcopy(self.module, memo), self._precision, **self._autocast)


def without_wrappers(model: nn.Module, strategy: Strategy, keep_compiled: bool = False) -> nn.Module:
    """The user's model, without the wrappers of `prepare` and `torch.compile`.

    Args:
        model: prepared or not.
        strategy: which has wrapped it.
        keep_compiled: of a compiled model, return what `torch.compile` returned.
    """

    def inside(outer: nn.Module) -> nn.Module:
        return outer.module if isinstance(outer, InPrecision) else strategy.unwrap(outer)

    return unwrapped(model, inside, keep_compiled)
