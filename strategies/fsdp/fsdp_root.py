"""`Root`: the outermost module that `fully_shard` is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import ModuleError
from trainkit.nested import leaves, map_tensors
from trainkit.strategies.fsdp.units import Slot

__all__ = ["Root"]


class _ZeroGradient(torch.autograd.Function):
    """A zero whose backward pass gives a parameter a zero gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (parameter,) = ctx.saved_tensors
        return torch.zeros_like(parameter)


def _without_base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor.clone()


class Root(nn.Module):
    """The outermost module that `fully_shard` is called with. Its forward calls a function, such as a step of the module.

    So any method of the user's module can run while the parameters that belong to no unit are whole.

    Args:
        module: the user's module.
        slots: the places of these parameters.

    Attributes:
        outputs: outputs of forwards that a backward pass can begin at, if their results are not used.
        units_ran: a unit has run in one of these forwards.
        forwards: number of forwards with gradients.
        in_backward: a backward pass runs, which may run forwards of units again.
    """

    def __init__(self, module: nn.Module, slots: list[Slot]) -> None:
        super().__init__()
        self.module = module
        self._slots = slots
        self._runs = self._keeps = self.units_ran = self._has_run = False
        self.in_backward = False
        self.outputs: list[Tensor] = []
        self.forwards = 0

    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `run`, and a tensor that depends on a parameter of the root, or `None`."""
        before = self._runs, self._keeps  # a method may be called inside another
        trains = torch.is_grad_enabled()
        self._runs, self._keeps, self._has_run = True, trains, True
        try:
            results = run(*args, **kwargs)
        finally:
            self._runs, self._keeps = before
        if not trains:
            return results, None
        self.forwards += 1
        if any(isinstance(leaf, Tensor) and leaf._base is not None for leaf in leaves(results)):
            results = map_tensors(results, _without_base)  # torch warns about each view, in each step
        return results, self._anchor()

    def _anchor(self) -> Tensor | None:
        """With it, a backward pass that does not reach the results still reaches torch's hooks of the root."""
        trained = (owner._parameters[name] for owner, name in self._slots)
        first = next((p for p in trained if p is not None and p.requires_grad), None)
        if first is None:
            return None
        anchor: Tensor = _ZeroGradient.apply(first)  # type: ignore[no-untyped-call]
        return anchor

    def check_unit(self, unit: nn.Module, args: Any) -> None:
        """Check that the unit is called in a forward of the root. A forward pre-hook of the unit, before torch's.

        Raises:
            ModuleError: It is not, so that gradients of parameters that are not sharded would not be averaged.
        """
        if self._runs or self.in_backward or (self._has_run and not torch.is_grad_enabled()):
            return
        name = next(name for name, part in self.module.named_modules() if part is unit)
        raise ModuleError(
            f"{name}, which FSDP shards by itself, was called outside of a forward of the model. Call the model "
            "that prepare returned, or name the method that calls it: FSDPStrategy(forward_methods=['encode']). To call a part "
            "by itself: with accelerator.strategy.gathered_parameters(model):"
        )

    def keep_outputs(self, unit: nn.Module, args: Any, outputs: Any) -> None:
        """Keep the outputs of a unit in the current forward. A forward hook of the unit."""
        if self._keeps:  # not where activation checkpointing runs the forward again
            self.units_ran = True
            self.outputs += [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
