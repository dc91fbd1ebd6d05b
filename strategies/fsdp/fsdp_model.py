"""The model that users call in their own training loop under `FSDPStrategy`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, wraps
from inspect import ismethod
from typing import Any

from torch import nn

from trainkit.accelerator.wrapped import Wrapped
from trainkit.errors import ModuleError
from trainkit.strategies.fsdp.sharded_model import ShardedModel

__all__ = ["FSDPModel"]

_FORWARD_METHODS = ("generate", "training_step", "validation_step", "test_step", "predict_step")


class FSDPModel(Wrapped):
    """Wraps the user's model: its forward gathers the parameters that belong to no unit, and so do some other methods.

    Args:
        sharded: the sharded model.
        forward_methods: the names of these methods, besides `forward`, `generate` and the steps of a `TrainModule`.
    """

    def __init__(self, sharded: ShardedModel, forward_methods: Collection[str]) -> None:
        super().__init__(sharded.module)
        self.training = sharded.module.training
        vars(self).update(_sharded=sharded, _forward_methods={*_FORWARD_METHODS, *forward_methods})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the user's model."""
        return vars(self)["_sharded"].call(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not ismethod(found) or found.__self__ is not self.module or hasattr(nn.Module, name):
            return found
        if name in vars(self)["_forward_methods"]:
            return partial(vars(self)["_sharded"].call, found)
        return _with_advice(found)


def _with_advice(method: Callable[..., Any]) -> Callable[..., Any]:
    """Where a method computes with sharded parameters, torch's message is about tensors that the user has not made."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            name = method.__name__
            raise ModuleError(
                f"{name} computes with parameters that are sharded: only forward, generate and the methods that you name have "
                f"whole ones. Use FSDPStrategy(forward_methods=[{name!r}])"
            ) from error

    return call
