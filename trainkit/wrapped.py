"""What stands around a user's model, in a loop of his own, and is to be used as the model is."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

__all__ = ["Wrapped"]


class Wrapped(nn.Module):
    """A model in another one that has its state, its names and its attributes.

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
        return copied  # an average of weights, say, which learns nothing by itself

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
