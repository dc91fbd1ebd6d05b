"""The modules that DeepSpeed's engines wrap: `training_step`, a model that users call, or some layers of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from trainkit.accelerator.wrapped import Wrapped
from trainkit.errors import OptimizerError

__all__ = ["Dispatch", "ZeROModel", "holder"]


class Dispatch(nn.Module):
    """Wraps the user's module; its forward calls one of the module's steps.

    Attributes:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Returns `run(*args)`."""
        return run(*args)


class ZeROModel(Wrapped):
    """Wraps the user's model in their own training loop.

    Attributes:
        call: called instead of the module; `None` before the engine exists, when the module itself is called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.call: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the user's model."""
        return (self.module if self.call is None else self.call)(*args, **kwargs)


def holder(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> nn.Module:
    """Returns a module with exactly these parameters, made of the largest submodules of `modules` that have no others.

    Raises:
        OptimizerError: a layer has both parameters of the optimizer and others, or a parameter is in none of `modules`.
    """
    wanted = {id(parameter) for parameter in parameters}
    parts: list[nn.Module] = []
    for module in modules:
        _collect(module, wanted, parts)
    found = {id(parameter) for part in parts for parameter in part.parameters() if parameter.requires_grad}
    if wanted - found:
        raise OptimizerError(
            f"{len(wanted - found)} of the {len(wanted)} parameters of an optimizer are in no layer whose parameters are all "
            "in that optimizer. With several optimizers, ZeRO needs all parameters of a layer in the same optimizer: "
            "torch.optim.AdamW(self.generator.parameters())."
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
