"""What ``Accelerator.prepare`` gives back for a model in another precision than float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainkit.data.nested import map_tensors
from trainkit.precision import Precision

__all__ = ["InPrecision"]


class InPrecision(nn.Module):
    """A model whose forward runs under the precision, for loops that call the model themselves.

    Mixed precision gives float32 outputs, so that a loss computed outside autocast is not computed in half precision; within
    ``accelerator.autocast()`` outputs are as autocast makes them.
    """

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self._precision = precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._precision
        # under accelerator.autocast() the loss is computed as the Trainer does it, in autocast too
        within = torch.is_autocast_enabled(precision.device_type)
        with precision.forward_context():
            outputs = self.module(*precision.convert_input(args), **precision.convert_input(kwargs))
        if precision.autocast_dtype is None or within:
            return outputs
        return map_tensors(outputs, lambda t: t.float() if t.dtype is precision.autocast_dtype else t)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's: its parameters keep their names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the user's model."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
