"""The wrapper around a user's model in their own training loop, to be used like the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Wrapped", "unwrapped"]


class Wrapped(nn.Module):
    """A wrapper with the state, the names and the attributes of the model in it.

    Attributes:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the user's model."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's."""
        return self.module.named_buffers(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied  # for example for an average of weights, which is not trained itself

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def unwrapped(model: nn.Module, inside: Callable[[nn.Module], nn.Module], keep_compiled: bool = False) -> nn.Module:
    """The innermost model.

    Args:
        model: wrapped or not.
        inside: what is inside a model, or the model itself.
        keep_compiled: if the innermost one was compiled, return what `torch.compile` returned.
    """
    inner = inside(model)
    if inner is model:
        return model
    found = unwrapped(inner, inside, keep_compiled)
    return model if keep_compiled and found is inner and isinstance(model, torch._dynamo.OptimizedModule) else found
