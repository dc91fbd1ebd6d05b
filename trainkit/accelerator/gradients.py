"""The gradients of a window, before the update: complete on all processes, unscaled, clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.accelerator.accumulation import AccumulationState
from trainkit.accelerator.collective_checks import CollectiveChecks, described
from trainkit.console import with_article
from trainkit.errors import ConfigurationError
from trainkit.strategy import Strategy

__all__ = ["GradientVerbs"]


class GradientVerbs:
    """The verbs of :class:`trainkit.Accelerator` that work on gradients."""

    strategy: Strategy
    accumulation: AccumulationState
    averages_in_step: bool
    collective_checks: CollectiveChecks
    _averaged: set[int]
    _compares: bool

    @property
    def optimizers(self) -> list[Optimizer]:
        """The prepared optimizers, as torch's own objects."""
        raise NotImplementedError

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Take the loss scale of ``16-mixed`` out of the gradients, before they are looked at; clipping does it by itself.

        Args:
            optimizer: of these optimizers, prepared or torch's own; default: all.
        """
        self._check_begun("unscale_gradients")
        if not self.accumulation.current.last:
            return
        given: list[Any] = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or self.optimizers)
        chosen: list[Optimizer] = [getattr(one, "optimizer", one) for one in given]
        if self._compares:
            self._compare("unscale_gradients", [p for own in chosen for group in own.param_groups for p in group["params"]])
        self._average(chosen)
        if self.strategy.precision.scaler is not None:
            for own in chosen:
                self.strategy.unscale(own)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Scale the gradients down to a norm of at most ``max_norm``.

        Where a DeepSpeed plugin or a configuration file has a ``gradient_clipping``, that is the norm.

        Returns:
            The norm before, a scalar on the device; ``None`` inside a window, where nothing is clipped.
        """
        self._check_begun("clip_grad_norm_")
        if not self.accumulation.current.last:
            return None
        listed = _listed("clip_grad_norm_", parameters)
        if self._compares:
            self._compare("clip_grad_norm_", listed)
        self._complete(listed)
        return self.strategy.clip_grad_norm_(listed, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp each element of the gradients to [-clip_value, clip_value]; nothing inside a window."""
        self._check_begun("clip_grad_value_")
        if self.accumulation.current.last:
            listed = _listed("clip_grad_value_", parameters)
            if self._compares:
                self._compare("clip_grad_value_", listed)
            self._complete(listed)
            self.strategy.clip_grad_value_(listed, clip_value)

    def any_rank_had_loss(self, had_loss: bool) -> bool:
        """Whether any rank had a loss in the current window, given whether this rank had one. All ranks call it.

        It averages the gradients first where no backward pass has: those of a rank without a loss are zero.
        """
        self._average(self.optimizers)
        found = self.strategy.any_loss(had_loss)
        if not found:
            self.strategy.sync_buffers()  # no update does it
        return found

    def _check_begun(self, verb: str) -> None:
        raise NotImplementedError

    def _compare(self, verb: str, tensors: Iterable[Tensor] | None) -> None:
        """In debug mode: that all processes have called it in the same place, with the same tensors."""
        self.collective_checks.compare(verb, None if tensors is None else described(tensors))

    def _complete(self, parameters: list[Tensor]) -> None:
        """Make the gradients of the optimizers that these parameters belong to what they will be updated by."""
        if self.strategy.precision.scaler is None and not (self.accumulation.current.uneven or self.averages_in_step):
            return
        wanted = {id(parameter) for parameter in parameters}
        for own in self.optimizers:
            if any(id(p) in wanted for group in own.param_groups for p in group["params"]):
                self.unscale_gradients(own)

    def _average(self, optimizers: Iterable[Optimizer]) -> None:
        """Average the gradients over the processes where the backward passes have not: once for each optimizer."""
        micro = self.accumulation.current
        if not (micro.last and (micro.uneven or self.averages_in_step)):
            return
        for own in optimizers:
            if id(own) not in self._averaged:
                self._averaged.add(id(own))
                parameters = [p for group in own.param_groups for p in group["params"]]
                self.strategy.reduce_gradients(parameters, micro)

    def _averaged_closure(self, own: Optimizer, closure: Callable[[], Any]) -> Any:
        """A closure's loss and gradients, over all processes: an optimizer that decides by them decides the same on each."""
        loss = closure()
        self._averaged.discard(id(own))
        self._average([own])
        if not isinstance(loss, Tensor):
            return loss
        share = self.accumulation.current.share
        return self.strategy.mean(loss.detach() * share if share else torch.zeros_like(loss))


def _listed(verb: str, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    found = [parameters] if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable) else list(parameters)
    odd = next((one for one in found if not isinstance(one, Tensor)), None)
    if odd is not None:
        raise ConfigurationError(
            f"{verb} takes parameters, and there is {with_article(type(odd).__name__)}. For example: "
            f"accelerator.{verb}(model.parameters(), 1.0)"
        )
    return found
