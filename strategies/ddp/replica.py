"""A module wrapped in DDP: for `training_step`, and for your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.accelerator.wrapped import Wrapped
from trainkit.console import shortened
from trainkit.distributed.world import World
from trainkit.errors import LossError, ModuleError
from trainkit.nested import leaves
from trainkit.strategies._reduction import empty_sparse_gradient, sparse_parameters
from trainkit.strategies.ddp.fixed_buckets import FixedDDP

__all__ = ["PreparedModel", "Replica", "TrainingStep"]

_REQUIRES_GRAD = attrgetter("requires_grad")
_CALLS = count(1)


class Replica:
    """A module wrapped in DDP, which is wrapped again when parameters are frozen or unfrozen.

    Args:
        module: the user's module.
        make: `make(target, due)` wraps a module in DDP.
        due: returns whether the current micro-batch averages gradients.
        world: the ranks of the run.
        late: wrap the module in the first micro-batch that averages gradients, not immediately.
        target: the module that DDP wraps, which contains `module`. Default: `module`.

    Attributes:
        ddp: the DDP wrapper, or `None`.
        late: as given.
        sync_disabled: do not average gradients, even if `due` returns `True`.
        called: for a model in your own training loop: when its last forward with gradients ran, as a number that counts the
            forwards of all models. 0 after a backward pass.
        watched: there are other models too, so `reached` must show whether a backward pass used this one.
        reached: a backward pass reached the outputs of the last forward.
    """

    def __init__(
        self,
        module: nn.Module,
        make: Callable[[nn.Module, Callable[[], bool]], FixedDDP],
        due: Callable[[], bool],
        world: World,
        *,
        late: bool,
        target: nn.Module | None = None,
    ) -> None:
        self._module, self._make, self._world, self.late = module, make, world, late
        self._window_due = due
        self._target = module if target is None else target
        self.ddp: FixedDDP | None = None
        self.sync_disabled = self.watched = self.reached = False
        self.called = 0
        self._build()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that DDP knows, including frozen ones."""
        return self._parameters

    @property
    def trained(self) -> bool:
        """Whether any parameter required a gradient at the last check."""
        return True in self._flags

    def due(self) -> bool:
        """Whether gradients are averaged now."""
        return not self.sync_disabled and self._window_due()

    def rewrap_if_changed(self) -> None:
        """Wrap the module again if parameters were frozen or unfrozen since the last call. Collective in that case.

        Raises:
            ModuleError: the ranks train different parameters.
        """
        if list(map(_REQUIRES_GRAD, self._parameters)) != self._flags:
            self._build()

    def frozen(self) -> bool:
        """Whether all parameters are frozen now."""
        return True not in map(_REQUIRES_GRAD, self._parameters)

    def record_reached(self, gradient: Tensor) -> None:
        """Record that a backward pass reached the outputs of the last forward. A tensor hook."""
        self.reached = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ddp is None:
            if not (self.trained and self.due()):
                return self._target(*args, **kwargs)
            self.ddp = self._make(self._target, self.due)
        return self.ddp(*args, **kwargs)

    def close(self) -> None:
        """Remove the DDP wrapper and its hooks on the parameters."""
        if self.ddp is not None:
            self.ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            self.ddp = None

    def backward_zero_gradients(self, *others: tuple[Tensor, Tensor]) -> None:
        """Run a backward pass with zero gradients, so that this rank participates in the all-reduce of the last forward.

        Args:
            *others: more roots of the backward pass, each with its gradient.
        """
        ddp = self.ddp
        assert ddp is not None
        trained = [p for p in self._parameters if p.requires_grad]
        if ddp.watches_outputs:  # the other parameters count as unused; if they are unused on all ranks, they get no gradient
            trained = [] if others else trained[:1]
        if trained:
            zero = _ZeroGradients.apply(sparse_parameters(self._module), *trained)  # type: ignore[no-untyped-call]
            others = (*others, (zero, zero.detach()))
        roots, gradients = zip(*others, strict=True)
        ddp.prepare_backward(roots)
        torch.autograd.backward(roots, gradients)
        self.check_complete()

    def forget_backward(self) -> None:
        """Forget the last backward passes, whose gradients were averaged without DDP."""
        if self.ddp is not None:
            self.ddp.forget_backward()

    def check_complete(self) -> None:
        """Check that DDP got all gradients, after a backward pass that averages them.

        Raises:
            ModuleError: the loss did not depend on some parameters, so DDP still waits for their gradients.
        """
        try:
            if self.ddp is not None:
                self.ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            without = [name for name, p in self._module.named_parameters() if p.requires_grad and p.grad is None]
            which = shortened(without) if without else "some parameters"
            raise ModuleError(
                f"the loss does not depend on {which}, but DDP expects a gradient for each parameter. Freeze them with "
                "requires_grad_(False), or use strategy=DDPStrategy(find_unused_parameters=True). If one forward has two "
                "backward passes, add up the losses: accelerator.backward(loss1 + loss2)"
            ) from error

    def _build(self) -> None:
        self.close()
        self._parameters = list(self._module.parameters())
        self._flags = list(map(_REQUIRES_GRAD, self._parameters))
        self._check_same_trainable()
        if self.trained and not self.late:
            self.ddp = self._make(self._target, self.due)

    def _check_same_trainable(self) -> None:
        first, *others = self._world.exchange([len(self._flags), sum(self._flags), hash(tuple(self._flags))])
        odd = [(rank, found) for rank, found in enumerate(others, 1) if found != first]
        if odd:
            counts = ", ".join(f"rank {rank} trains {trained} of {count}" for rank, (count, trained, _) in [(0, first), *odd])
            raise ModuleError(
                f"the ranks train different parameters, but must train the same: {counts}. Freeze the same parameters in the "
                "same step on all ranks: parameter.requires_grad_(False)"
            )


class _ZeroGradients(torch.autograd.Function):
    """Returns a zero whose backward pass gives each parameter a zero gradient."""

    @staticmethod
    def forward(ctx: Any, sparse: set[int], *parameters: Tensor) -> Tensor:
        ctx.zeros = [(p.detach(), id(p) in sparse) for p in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(empty_sparse_gradient(p) if sparse else torch.zeros_like(p) for p, sparse in ctx.zeros)


class _Dispatch(nn.Module):
    """The module that DDP wraps: its forward calls the training step.

    Attributes:
        probe_parameter: an extra parameter, not in the user's module. Each loss adds 1 to its gradient.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._run = run
        kind = next((p for p in module.parameters() if p.requires_grad), None)  # to share its bucket
        self.probe_parameter = nn.Parameter(
            torch.zeros(1) if kind is None else torch.zeros(1, dtype=kind.dtype, device=kind.device)
        )

    def forward(self, *args: Any) -> Any:
        return self._run(*args), self.probe_parameter.view(1)


class TrainingStep:
    """`training_step` with automatic optimization: runs inside DDP's forward.

    A rank without a loss participates in the all-reduce with zeros. The gradient of the probe parameter, which is averaged in
    the same buckets, shows whether any rank had a loss.

    Args:
        module: the user's module.
        run: calls the training step.
        static_graph: every backward pass must be like the first.
        **options: arguments of `Replica`.

    Attributes:
        replica: the module wrapped in DDP.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], *, static_graph: bool, **options: Any) -> None:
        self._dispatch, self._static = _Dispatch(module, run), static_graph
        self.replica = Replica(module, target=self._dispatch, late=static_graph, **options)
        self._one = torch.ones_like(self.probe_parameter)
        self._root: Tensor

    @property
    def probe_parameter(self) -> Tensor:
        """A parameter whose gradient counts the losses of the accumulation window."""
        return self._dispatch.probe_parameter

    def begin_window(self, uneven: bool) -> None:
        """Start an accumulation window; called before its first forward, or instead of it if there is none."""
        if not uneven:
            self.replica.rewrap_if_changed()
        self.probe_parameter.grad = None

    def __call__(self, *args: Any) -> Any:
        outputs, self._root = self.replica(*args)
        return outputs

    def backward(
        self,
        loss: Tensor,
        due: bool,
        call: Callable[..., Any] = Tensor.backward,
        gradient: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Run the backward pass of the loss of the last call."""
        if call is Tensor.backward:
            torch.autograd.backward((loss, self._root), (gradient, self._one), **kwargs)
        else:
            self._call_backward(call, loss, kwargs if gradient is None else {"gradient": gradient, **kwargs})
        if due:
            self.replica.check_complete()

    def _call_backward(self, call: Callable[..., Any], loss: Tensor, options: dict[str, Any]) -> None:
        """Run the backward pass through the `backward` of a module.

        Raises:
            LossError: it ran none, so the other ranks would wait for the gradients.
        """
        reached: list[Tensor] = []
        with self._root.register_hook(reached.append):
            call(loss + self._root.view(()).to(loss.dtype), **options)  # one root; it adds 0
        if not reached:
            raise LossError(
                "backward of the module did not compute the gradients of the loss, for which the other processes wait. Call "
                "loss.backward() in it. To skip a micro-batch, return None from training_step."
            )

    def skip(self, had_loss: bool, due: bool) -> None:
        """Called instead of `backward` if the last call returned no loss, or a loss of weight 0.

        Raises:
            LossError: `static_graph` is set, so every step must be like the first.
        """
        if not due or not self.replica.trained:
            if had_loss:
                self.probe_parameter.grad = (
                    self._one.clone() if self.probe_parameter.grad is None else self.probe_parameter.grad + 1
                )
            return
        if self._static:
            raise LossError(
                "training_step returned no loss, or its batch has weight 0, but with static_graph=True all steps must be like "
                "the first. Remove static_graph=True, or return a loss with nonzero weight in every step."
            )
        self.replica.backward_zero_gradients((self.probe_parameter.view(1), self._one * had_loss))


class PreparedModel(Wrapped):
    """The model that your own training loop calls. Gradients are averaged in the backward pass.

    Parameters, buffers and the state dict have the same names as in the user's model, whose other attributes also work here.

    Args:
        module: the user's model.
        **options: arguments of `Replica`.

    Attributes:
        replica: the model wrapped in DDP.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module)
        self.training = module.training
        self.replica = Replica(module, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        replica = self.replica
        if not torch.is_grad_enabled() or replica.frozen():
            return self.module(*args, **kwargs)  # frozen for now, like the discriminator of a GAN in a generator step
        replica.rewrap_if_changed()
        replica.called = next(_CALLS)
        outputs = replica(*args, **kwargs)
        if replica.watched:
            for leaf in leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(replica.record_reached)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which forward and backward do not average gradients; a later backward averages their sum."""
        before, self.replica.sync_disabled = self.replica.sync_disabled, True
        try:
            yield
        finally:
            self.replica.sync_disabled = before

    def finish_backward(self) -> None:
        """Check a backward pass through this model, after it ran."""
        self.replica.called = 0
        if self.replica.due():
            self.replica.check_complete()

    def skip_backward(self) -> None:
        """Called instead of a backward pass if this rank has no loss: participates in the all-reduce of the other ranks.

        Raises:
            LossError: `static_graph` is set, so every step must be like the first.
        """
        replica = self.replica
        called, replica.called = replica.called, 0
        if not replica.due() or replica.frozen():
            return
        if not called:
            replica.rewrap_if_changed()  # the other ranks do so in their forward
        if replica.late:
            raise LossError(
                "backward was called with None or with a loss of weight 0, but with static_graph=True all steps must be like "
                "the first. Remove static_graph=True, or call backward with a loss in every step."
            )
        replica.backward_zero_gradients()
