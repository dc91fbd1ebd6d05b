"""What DeepSpeed's engines are made around: ``training_step``, a model that users call, and parts of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from trainkit.accelerator.wrapped import Wrapped
from trainkit.errors import OptimizerError

__all__ = ["Dispatch", "ZeROModel", "holder"]


class Dispatch(nn.Module):
    """Calls a step of the user's module, which is inside it.

    Attributes:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """``run(*args)``."""
        return run(*args)


class ZeROModel(Wrapped):
    """The user's model, for calls in their own training loop.

    Attributes:
        call: what a call does; ``None``, until there is an engine: the forward of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.call: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's."""
        return (self.module if self.call is None else self.call)(*args, **kwargs)


def holder(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> nn.Module:
    """A module that holds exactly these parameters: the largest parts of ``modules`` that have no others.

    Raises:
        OptimizerError: a part has some of them and some that are not among them, in the same layer; or none has one.
    """
    wanted = {id(parameter) for parameter in parameters}
    parts: list[nn.Module] = []
    for module in modules:
        _collect(module, wanted, parts)
    found = {id(parameter) for part in parts for parameter in part.parameters() if parameter.requires_grad}
    if wanted - found:
        raise OptimizerError(
            f"{len(wanted - found)} of the {len(wanted)} parameters of an optimizer belong to no layer whose parameters are "
            "all in that optimizer. Under ZeRO with several optimizers give each one whole layers."
        )
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts)


def _collect(module: nn.Module, wanted: set[int], parts: list[nn.Module]) -> None:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not any(id(parameter) in wanted for parameter in trained):
        return
    if all(id(parameter) in wanted for parameter in trained):
        parts.append(module)
        return
    for child in module.children():
        _collect(child, wanted, parts)
