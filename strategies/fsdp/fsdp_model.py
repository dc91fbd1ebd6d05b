"""The model that users call in their own training loop under `FSDPStrategy`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from inspect import ismethod
from typing import Any

from torch import nn

from trainkit.accelerator.wrapped import Wrapped
from trainkit.errors import ConfigurationError
from trainkit.strategies.fsdp.sharded_model import ShardedModel

__all__ = ["FSDPModel", "model_of"]


def model_of(module: nn.Module, models: Iterable[ShardedModel]) -> ShardedModel:
    """The sharded model of a module.

    Raises:
        ConfigurationError: its submodules are sharded instead, for manual optimization.
    """
    found = next((model for model in models if model.module is module), None)
    if found is None:
        raise ConfigurationError(
            f"{type(module).__name__}.automatic_optimization is False, which is for the Trainer. In your own training loop "
            "prepare its models: accelerator.prepare(module.generator, module.discriminator)"
        )
    return found


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
