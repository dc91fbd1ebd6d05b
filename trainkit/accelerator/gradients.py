"""The gradients of an accumulation window, before the optimizer step: computed, averaged over all ranks, unscaled, clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.accelerator.collective_checks import described
from trainkit.accelerator.naming import NumberedCheckpoints
from trainkit.accelerator.preparing import PrepareVerbs
from trainkit.accelerator.weighing import Weighing
from trainkit.console import notice, warn, with_article
from trainkit.errors import ConfigurationError

__all__ = ["GradientVerbs"]


class GradientVerbs(PrepareVerbs):
    """The methods of `trainkit.Accelerator` that work on gradients.

    Attributes:
        skip_requested: The optimizer step of the current window is to be skipped.
        step_pending: The gradients of a window are complete, and no optimizer step has used them.
    """

    averages_in_step: bool
    skip_requested: bool
    step_pending: bool
    _averaged: set[int]
    _backwards: int
    _begun: bool
    _compares: bool
    _numbered: NumberedCheckpoints
    _own: bool
    _weighing: dict[tuple[int, ...], Weighing]

    def backward(self, loss: Tensor | None, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """Run the backward pass of a micro-batch: call it instead of `loss.backward()`.

        It scales the loss to the micro-batch's share of its accumulation window and passes the gradients to the strategy. A
        micro-batch of weight 0 adds nothing; its loss may be NaN, as a mean over nothing is.

        Args:
            loss: The mean loss of the micro-batch, a scalar. `None`: it has no loss, and its gradient counts as zero.
            weight: Its weight among the micro-batches of its window, on all processes: a number ≥ 0, such as the number of
                tokens in the loss. Default: its number of samples, or the result of `batch_weight`.
            **kwargs: Arguments of `Tensor.backward`.

        Raises:
            ConfigurationError: Nothing was prepared; or a weight is not a number, or is given in a part of a window only.
        """
        if self._averaged:
            self._averaged.clear()  # of gradients that were not used
        if self._own:
            self._begin_own_backward(loss)
        micro = self.accumulation.current
        share = micro.share
        if self._own and (weight is not None or self._weighing):
            share = self._weighed(weight)
        if not self.strategy.reduces_late and self.accumulation.unsure:
            micro = micro._replace(last=True)  # the gradients are complete if the window turns out to have ended here
        if loss is None or share == 0.0:
            self.strategy.skip_backward(loss, micro)
        else:
            if self._batch_padding is not None:
                self._batch_padding.note_backward()
            if share != 1.0:
                loss = loss * share
            self.strategy.backward(loss, micro, **kwargs)
        self.step_pending = self.accumulation.current.last
        if self._own and self.step_pending:
            self._correct_gradients()

    def _correct_gradients(self) -> None:
        """At the end of a window, multiply the gradients so that the shares of its micro-batches add up to 1."""
        state = self.accumulation
        weighing = self._weighing.get(state.key)
        factor = 1.0 if state.window is None else state.window.factor
        if weighing is not None and weighing.weighed:
            factor = weighing.factor
        if factor != 1.0:
            own = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
            models, others = (self._bare, own) if state.trained is None else (state.trained, [])
            parameters = {id(p): p for p in [*(p for model in models for p in model.parameters()), *others]}
            self.strategy.scale_gradients(parameters.values(), factor)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide the gradients by the loss scale of `16-mixed`, to read or change them. Clipping does this itself.

        Args:
            optimizer: One or several optimizers, prepared or torch's own. Default: all.
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
        """Scale the gradients down to a norm of at most `max_norm`. Inside an accumulation window it does nothing.

        If a `DeepSpeedPlugin` or a configuration file sets `gradient_clipping`, that is the maximum norm.

        Args:
            parameters: The parameters of the model.
            max_norm: The maximum norm of all gradients together.
            norm_type: The norm; `inf` is the largest absolute value.

        Returns:
            The norm before clipping, a scalar on the device; `None` inside an accumulation window.
        """
        self._check_begun("clip_grad_norm_")
        listed = _listed("clip_grad_norm_", parameters)
        self.accumulation.note_verb(self.clip_grad_norm_, listed, max_norm, norm_type)
        if not self.accumulation.current.last:
            return None
        if self._compares:
            self._compare("clip_grad_norm_", listed)
        self._complete(listed)
        return self.strategy.clip_grad_norm_(listed, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp each element of the gradients to [-clip_value, clip_value]. Inside an accumulation window it does nothing."""
        self._check_begun("clip_grad_value_")
        listed = _listed("clip_grad_value_", parameters)
        self.accumulation.note_verb(self.clip_grad_value_, listed, clip_value)
        if self.accumulation.current.last:
            if self._compares:
                self._compare("clip_grad_value_", listed)
            self._complete(listed)
            self.strategy.clip_grad_value_(listed, clip_value)

    def any_rank_had_loss(self, had_loss: bool) -> bool:
        """Whether any rank had a loss in the current window, given whether this rank had one. All ranks call it.

        It first averages gradients that no backward pass has averaged; those of a rank without a loss are zero.
        """
        self._average(self.optimizers)
        found = self.strategy.any_loss(had_loss)
        if not found:
            self.strategy.sync_buffers()  # otherwise the optimizer step does it
        return found

    def _begin_own_backward(self, loss: Tensor | None) -> None:
        """In your own training loop, the checks before a backward pass."""
        state = self.accumulation
        if state.size > 1 and (state.pending is not None or state.by_hand is not False):
            self._by_hand()
        state.note_backward()
        if state.current.first:
            self.skip_requested = False  # of a window that is over
        if not self._begun:  # checked here, because a call at every step takes time
            self._check_begun("backward")
        if self.step_pending:
            self._check_step_pending()
        self.reading.working()
        self._backwards += 1
        if not self.strategy.precision.entered:
            self._check_precision()
        if self._compares and state.current.last:
            self._compare("backward", None if loss is None else [loss])

    def _by_hand(self) -> None:
        """`backward` outside of `accumulate`: as in Accelerate its loss is still divided, and each step updates."""
        steps = self.accumulation.size
        if self.accumulation.note_by_hand():
            notice(
                f"gradient_accumulation_steps={steps}, but backward is called outside of accumulate(): as in Accelerate, "
                f"each loss is divided by {steps}, and each optimizer.step() updates the parameters. To accumulate gradients, "
                "put the body of the loop under: with accelerator.accumulate(model):"
            )

    def _check_precision(self) -> None:
        """Warn once if no prepared model has been called: the user's own model computes in float32."""
        precision = self.strategy.precision
        precision.entered = True  # warn once
        if self._models and precision.autocast_dtype is not None:
            warn(
                f"the loss was not computed in {precision.name}: no prepared model has been called. Call what prepare "
                "returned: model, optimizer = accelerator.prepare(model, optimizer); or compute within accelerator.autocast()."
            )

    def _weighed(self, weight: float | Tensor | None) -> float:
        state = self.accumulation
        weighing = self._weighing.get(state.key)
        if weighing is None:
            if weight is None:
                return state.current.share
            if any(loader.weighs for loader in self._loaders):
                raise ConfigurationError("backward(weight=) and prepare(batch_weight=) set the same thing. Give one of them.")
            weighing = Weighing(state, self.strategy.world, self.strategy, self.collective_checks)
            self._weighing[state.key] = weighing
        return weighing.share(weight)

    def _check_begun(self, verb: str) -> None:
        if self._begun or not self._own:
            return
        if not (self._models or self._optimizers):
            raise ConfigurationError(
                f"{verb} was called before prepare. First: model, optimizer, loader = "
                "accelerator.prepare(model, optimizer, loader)"
            )
        if self.strategy.world.size > 1 and not self._models:
            raise ConfigurationError(
                f"{verb}: an optimizer has been prepared but no model, so the gradients would not be averaged over the "
                "processes. Prepare the model too: model, optimizer = accelerator.prepare(model, optimizer)"
            )
        self._numbered.check()
        self._begun = True

    def _check_step_pending(self) -> None:
        """ZeRO drops the gradients of a window that had no step when the next one begins: refuse that."""
        if self.accumulation.current.first and self.strategy.accumulates_in_engine and len(self._optimizers) == 1:
            raise ConfigurationError(
                "under ZeRO the gradients of several backward passes are accumulated only within a window, and there has been "
                "no optimizer step since the last one. Use Accelerator(gradient_accumulation_steps=n), or "
                "accelerator.no_sync(model) around all backward passes but the last. Add up several losses: "
                "accelerator.backward(loss1 + loss2)."
            )

    def _compare(self, verb: str, tensors: Iterable[Tensor] | None) -> None:
        """In debug mode, check that all processes call `verb` in the same place with the same tensors."""
        self.collective_checks.compare(verb, None if tensors is None else described(tensors))

    def _complete(self, parameters: list[Tensor]) -> None:
        """Average and unscale the gradients of the optimizers that these parameters belong to."""
        if self.strategy.precision.scaler is None and not (self.accumulation.current.uneven or self.averages_in_step):
            return
        wanted = {id(parameter) for parameter in parameters}
        for own in self.optimizers:
            if any(id(p) in wanted for group in own.param_groups for p in group["params"]):
                self.unscale_gradients(own)

    def _average(self, optimizers: Iterable[Optimizer]) -> None:
        """Average the gradients over the processes if the backward passes have not: once for each optimizer."""
        micro = self.accumulation.current
        if not (micro.last and (micro.uneven or self.averages_in_step)):
            return
        for own in optimizers:
            if id(own) not in self._averaged:
                self._averaged.add(id(own))
                parameters = [p for group in own.param_groups for p in group["params"]]
                self.strategy.reduce_gradients(parameters, micro)

    def _averaged_closure(self, own: Optimizer, closure: Callable[[], Any]) -> Any:
        """Average a closure's loss and gradients over the processes: an optimizer that decides by them decides the same."""
        loss = closure()
        self._averaged.discard(id(own))
        self._average([own])
        if not isinstance(loss, Tensor):
            return loss
        share = self.accumulation.current.share
        return self.strategy.mean(loss.detach() * share if share else torch.zeros_like(loss))


def _listed(verb: str, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    found = [parameters] if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable) else list(parameters)
    other = next((one for one in found if not isinstance(one, Tensor)), None)
    if other is not None:
        raise ConfigurationError(
            f"{verb} takes parameters, but received {with_article(type(other).__name__)}. For example: "
            f"accelerator.{verb}(model.parameters(), 1.0)"
        )
    return found
