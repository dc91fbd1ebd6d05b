"""The model that users call in their own training loop under `FSDPStrategy`."""

from __future__ import annotations

from functools import partial
from inspect import ismethod
from typing import Any

from torch import nn

from trainkit.accelerator.wrapped import Wrapped
from trainkit.strategies.fsdp.sharded_model import ShardedModel

__all__ = ["FSDPModel"]


class FSDPModel(Wrapped):
    """Wraps the user's model: its forward gathers the parameters that belong to no unit, and so do its other methods.

    Args:
        sharded: the sharded model.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        super().__init__(sharded.module)
        self.training = sharded.module.training
        vars(self)["_sharded"] = sharded

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the user's model."""
        return vars(self)["_sharded"].call(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if ismethod(found) and found.__self__ is self.module and not hasattr(nn.Module, name):
            return partial(vars(self)["_sharded"].call, found)  # such as generate
        return found
