"""A module wrapped in DDP, with fixed buckets: for `training_step`, and for your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.accelerator.prepared_models import Wrapped
from trainkit.console import join_names, warn
from trainkit.distributed.world import World
from trainkit.errors import LossError, ModuleError
from trainkit.nested import leaves
from trainkit.strategies._collectives import empty_sparse_gradient, sparse_parameters

__all__ = ["FixedDDP", "PreparedModel", "Replica", "TrainingStep"]


_REQUIRES_GRAD = attrgetter("requires_grad")
_CALLS = count(1)


class Replica:
    """A module wrapped in DDP, which is wrapped again when parameters are frozen or unfrozen.

    Args:
        make: `make(target, due)` wraps a module in DDP.
        due: Returns whether the current micro-batch averages gradients.
        late: Wrap the module in the first micro-batch that averages gradients, not immediately.
        target: The module that DDP wraps, which contains `module`. Default: `module`.

    Attributes:
        ddp: The DDP wrapper, or `None`.
        late: As given.
        sync_disabled: Do not average gradients, even if `due` returns `True`.
        called: For a model in your own training loop: when its last forward with gradients ran, as a number that counts the
            forwards of all models. 0 after a backward pass.
        watched: There are other models too, so `reached` must show whether a backward pass used this one.
        reached: A backward pass reached the outputs of the last forward.
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
        self._module = module
        self._make = make
        self._world = world
        self.late = late
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
    def is_trained(self) -> bool:
        """Whether any parameter required a gradient at the last check."""
        return True in self._flags

    def due(self) -> bool:
        """Whether gradients are averaged now."""
        return not self.sync_disabled and self._window_due()

    def rewrap_if_changed(self) -> None:
        """Wrap the module again if parameters were frozen or unfrozen since the last call. Collective in that case.

        Raises:
            ModuleError: The ranks train different parameters.
        """
        if list(map(_REQUIRES_GRAD, self._parameters)) != self._flags:
            self._build()

    def is_frozen(self) -> bool:
        """Whether all parameters are frozen now."""
        return True not in map(_REQUIRES_GRAD, self._parameters)

    def record_reached(self, gradient: Tensor) -> None:
        """Record that a backward pass reached the outputs of the last forward. A tensor hook."""
        self.reached = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ddp is None:
            if not (self.is_trained and self.due()):
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
            *others: More roots of the backward pass, each with its gradient.
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
        """Check that DDP got all gradients, after a backward pass that averages them."""
        try:
            if self.ddp is not None:
                self.ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            without = [name for name, p in self._module.named_parameters() if p.requires_grad and p.grad is None]
            which = join_names(without) if without else "some parameters"
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
        if self.is_trained and not self.late:
            self.ddp = self._make(self._target, self.due)

    def _check_same_trainable(self) -> None:
        first, *others = self._world.exchange([len(self._flags), sum(self._flags), hash(tuple(self._flags))])
        odd = [(rank, other) for rank, other in enumerate(others, 1) if other != first]
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
        # An expanded zero takes no memory: it is added to the gradient in place.
        return None, *(empty_sparse_gradient(p) if sparse else p.new_zeros(()).expand_as(p) for p, sparse in ctx.zeros)


class _StepModule(nn.Module):
    """The module that DDP wraps: its forward calls the training step.

    Attributes:
        probe_parameter: An extra parameter, not in the user's module. Each loss adds 1 to its gradient.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._run = run
        # The probe parameter has its dtype and device, so that they share a bucket.
        kind = next((p for p in module.parameters() if p.requires_grad), None)
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
        run: Calls the training step.
        static_graph: Every backward pass must be like the first.
        **options: Arguments of `Replica`.

    Attributes:
        replica: The module wrapped in DDP.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], *, static_graph: bool, **options: Any) -> None:
        self._step_module = _StepModule(module, run)
        self._static = static_graph
        self.replica = Replica(module, target=self._step_module, late=static_graph, **options)
        self._one = torch.ones_like(self.probe_parameter)
        self._root: Tensor

    @property
    def probe_parameter(self) -> Tensor:
        """A parameter whose gradient counts the losses of the accumulation window."""
        return self._step_module.probe_parameter

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
        """Run the backward pass through the `backward` of a module."""
        reached: list[Tensor] = []
        with self._root.register_hook(reached.append):
            # Adding the root, which is 0, makes the loss depend on it.
            call(loss + self._root.view(()).to(loss.dtype), **options)
        if not reached:
            raise LossError(
                "backward of the module did not compute the gradients of the loss, for which the other processes wait. Call "
                "loss.backward() in it. To skip a micro-batch, return None from training_step."
            )

    def skip(self, had_loss: bool, due: bool) -> None:
        """Called instead of `backward` if the last call returned no loss, or a loss of weight 0."""
        if not due or not self.replica.is_trained:
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
        **options: Arguments of `Replica`.

    Attributes:
        replica: The model wrapped in DDP.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module)
        self.training = module.training
        self.replica = Replica(module, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        replica = self.replica
        if not torch.is_grad_enabled() or replica.is_frozen():
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
        """Called instead of a backward pass if this rank has no loss: participates in the all-reduce of the other ranks."""
        replica = self.replica
        called, replica.called = replica.called, 0
        if not replica.due() or replica.is_frozen():
            return
        if not called:
            replica.rewrap_if_changed()  # the other ranks do so in their forward
        if replica.late:
            raise LossError(
                "backward was called with None or with a loss of weight 0, but with static_graph=True all steps must be like "
                "the first. Remove static_graph=True, or call backward with a loss in every step."
            )
        replica.backward_zero_gradients()


# -------------------------------------------------------------------------------------------------------- fixed buckets


# torch's default. It is passed to torch as None, so that it also makes the first bucket small.
_DEFAULT_CAP_MB = 25


class FixedDDP(DistributedDataParallel):
    """DDP that uses the same buckets in its first step as in all later ones.

    torch starts with one bucket for all parameters, and after the first step rebuilds the buckets in the order in which the
    gradients arrived. With three or more ranks, other buckets add up in another order, so a resumed run would differ in the
    last bit. This class builds the final buckets at the start, from the last parameter to the first.

    Args:
        module: The module that computes the loss. Its parameters must be equal on all ranks already.
        due: Returns whether the current forward and backward average gradients. With `static_graph`, create this object only
            when it returns `True`: torch counts all gradient hooks until its first all-reduce.
        bucket_cap_mb: Bucket size in MB.
        static_graph: As in `DistributedDataParallel`.
        find_unused_parameters: As in `DistributedDataParallel`.
        **options: Other arguments of `DistributedDataParallel`.
    """

    def __init__(
        self,
        module: nn.Module,
        due: Callable[[], bool],
        *,
        bucket_cap_mb: float,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> None:
        self._due = due
        self._fixed = static_graph or not find_unused_parameters  # torch would rebuild the buckets after the first step
        cap: Any = None if bucket_cap_mb == _DEFAULT_CAP_MB else bucket_cap_mb
        super().__init__(
            module,
            bucket_cap_mb=cap,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            init_sync=False,
            **options,
        )
        self.broadcast_buffers = False  # Some versions of torch warn if it is passed as an argument.
        if self._fixed:
            self._build_buckets()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients are averaged now. torch reads this before and after each forward."""
        return self._due()

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        """Ignore the value that torch's `__init__` sets."""

    @property
    def watches_outputs(self) -> bool:
        """Whether torch searches the graph of each forward's outputs for unused parameters."""
        return bool(self.find_unused_parameters and not self.static_graph)

    def prepare_backward(self, roots: Sequence[Tensor]) -> None:
        """Prepare for a backward pass that starts at `roots` instead of the outputs of the forward."""
        self.reducer.prepare_for_backward(list(roots) if self.watches_outputs else [])

    def forget_backward(self) -> None:
        """Forget the backward passes whose gradients were averaged without DDP.

        torch has recorded which parameters they used, and would count these as used in the next all-reduce too.
        """
        if self.watches_outputs:
            self.reducer._reset_state()

    def _build_buckets(self) -> None:
        """Build the final buckets, as torch does after the first step."""
        try:
            self.reducer._push_all_rebuilt_params()
            made = self.reducer._rebuild_buckets()
        except AttributeError:
            made = False
        if not made:
            warn(
                f"DDP of torch {torch.__version__} rebuilds its buckets after the first step, which trainkit cannot prevent in "
                "this version. With three or more processes, a resumed run may differ in the last bit from an uninterrupted "
                "one. Use torch 2.9 to 2.13, which are known to work."
            )

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        # Fixed buckets are reduced in the order of this list. The gradients of the last layers are ready first, so they come
        # first. Buckets that torch rebuilds are reversed by torch.
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], sparse[::-1]) if self._fixed else (parameters, sparse)

    def _post_forward(self, output: Any) -> Any:
        if torch.is_grad_enabled() and self._due():
            return super()._post_forward(output)  # type: ignore[no-untyped-call]
        return output  # torch would still search for unused parameters, and with static_graph all-reduce in the first step
