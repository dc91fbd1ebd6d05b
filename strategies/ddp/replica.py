"""A module with DDP around it: for ``training_step``, and for loops that call their model themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.accelerator.wrapped import Wrapped
from trainkit.distributed.world import World
from trainkit.errors import LossError, ModuleError
from trainkit.nested import leaves
from trainkit.strategies._reduction import no_rows, sparse_parameters
from trainkit.strategies.ddp.fixed_buckets import FixedDDP

__all__ = ["PreparedModel", "Replica", "TrainingStep"]

_REQUIRES_GRAD = attrgetter("requires_grad")
_CALLS = count(1)


class Replica:
    """DDP around a module, made anew when other parameters are to be trained.

    Args:
        module: the user's.
        make: DDP around what it is given; called also with what says whether gradients travel now.
        due: whether gradients travel in the micro-batch that is being worked on.
        world: the processes.
        late: make it in the first micro-batch in which they do.
        target: what DDP calls, which holds the module; default: the module.

    Attributes:
        ddp: ``None`` while there is none.
        late: as given.
        held: gradients stay here, whatever the window says.
        called: of a model that users call: the number, among the calls of all, of its last one with gradients; 0 once a
            backward pass has come.
        watched: there are other models, so that a backward pass may be theirs: ``reached`` tells.
        reached: a backward pass has come to what the last call returned.
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
        self.held = self.watched = self.reached = False
        self.called = 0
        self._build()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that DDP knows, frozen or not."""
        return self._parameters

    @property
    def trained(self) -> bool:
        """Whether any parameter was to be trained when that was last looked at."""
        return True in self._flags

    def due(self) -> bool:
        """Whether gradients travel now."""
        return not self.held and self._window_due()

    def follow(self) -> None:
        """Begin anew if other parameters are to be trained than before; collective then.

        Raises:
            ModuleError: not on all processes the same ones.
        """
        if list(map(_REQUIRES_GRAD, self._parameters)) != self._flags:
            self._build()

    def frozen(self) -> bool:
        """Whether no parameter is to be trained now."""
        return True not in map(_REQUIRES_GRAD, self._parameters)

    def reach(self, gradient: Tensor) -> None:
        """Note that a backward pass has come to what the last call returned."""
        self.reached = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ddp is None:
            if not (self.trained and self.due()):
                return self._target(*args, **kwargs)
            self.ddp = self._make(self._target, self.due)
        return self.ddp(*args, **kwargs)

    def close(self) -> None:
        """Leave the parameters as they were."""
        if self.ddp is not None:
            self.ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            self.ddp = None

    def backward_of_nothing(self, *others: tuple[Tensor, Tensor]) -> None:
        """Take part with zeros in the reduction that the last forward has announced.

        Args:
            *others: roots of the backward pass, each with its gradient.
        """
        ddp = self.ddp
        assert ddp is not None
        trained = [p for p in self._parameters if p.requires_grad]
        if ddp.watches_outputs:  # the others count as unused: where nobody uses them they shall get no gradient
            trained = [] if others else trained[:1]
        if trained:
            zero = _Nothing.apply(sparse_parameters(self._module), *trained)  # type: ignore[no-untyped-call]
            others = (*others, (zero, zero.detach()))
        roots, gradients = zip(*others, strict=True)
        ddp.expect(roots)
        torch.autograd.backward(roots, gradients)
        self.check_complete()

    def forget_backward(self) -> None:
        """The gradients that are here have been averaged without DDP."""
        if self.ddp is not None:
            self.ddp.forget_backward()

    def check_complete(self) -> None:
        """After a backward pass in which gradients travelled.

        Raises:
            ModuleError: some parameter has got none, and the others wait for it.
        """
        try:
            if self.ddp is not None:
                self.ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            without = [name for name, p in self._module.named_parameters() if p.requires_grad and p.grad is None]
            which = ", ".join(without[:5]) + (", …" if without[5:] else "") if without else "some parameters"
            raise ModuleError(
                f"the loss does not depend on {which}, and DDP waits for their gradients. Freeze them (requires_grad_(False)), "
                "or use strategy=DDPStrategy(find_unused_parameters=True). Of two backward passes after one forward make one: "
                "add up the losses."
            ) from error

    def _build(self) -> None:
        self.close()
        self._parameters = list(self._module.parameters())
        self._flags = list(map(_REQUIRES_GRAD, self._parameters))
        self._refuse_unlike()
        if self.trained and not self.late:
            self.ddp = self._make(self._target, self.due)

    def _refuse_unlike(self) -> None:
        said = self._world.exchange([len(self._flags), sum(self._flags), hash(tuple(self._flags))])
        odd = [f"{rank} ({trained} of {count})" for rank, (count, trained, _) in enumerate(said) if said[rank] != said[0]]
        if odd:
            raise ModuleError(
                f"the processes train different parameters: {said[0][1]} of {said[0][0]} on rank 0, others on rank "
                f"{', '.join(odd)}. Freeze and unfreeze the same parameters on all processes, in the same step."
            )


class _Nothing(torch.autograd.Function):
    """A zero whose backward pass gives parameters gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, sparse: set[int], *parameters: Tensor) -> Tensor:
        ctx.zeros = [(p.detach(), id(p) in sparse) for p in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(no_rows(p) if sparse else torch.zeros_like(p) for p, sparse in ctx.zeros)


class _Dispatch(nn.Module):
    """What DDP calls: it calls the step.

    Attributes:
        witness: a parameter that is none of the user's. Each loss adds 1 to its gradient.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._run = run
        kind = next((p for p in module.parameters() if p.requires_grad), None)  # so that they share a bucket
        self.witness = nn.Parameter(torch.zeros(1) if kind is None else torch.zeros(1, dtype=kind.dtype, device=kind.device))

    def forward(self, *args: Any) -> Any:
        return self._run(*args), self.witness.view(1)


class TrainingStep:
    """``training_step`` under automatic optimization: it runs inside DDP's forward.

    A process whose step has no loss takes part in the reduction with zeros. Whether any process has had one is told by the
    witness, whose gradient travels in the same buckets.

    Args:
        module: the user's.
        run: calls its step.
        static_graph: every backward pass must be like the first.
        **options: of :class:`Replica`.

    Attributes:
        replica: what it calls.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], *, static_graph: bool, **options: Any) -> None:
        self._dispatch, self._static = _Dispatch(module, run), static_graph
        self.replica = Replica(module, target=self._dispatch, late=static_graph, **options)
        self._one = torch.ones_like(self.witness)
        self._root: Tensor

    @property
    def witness(self) -> Tensor:
        """Its gradient says how many losses there were in the window."""
        return self._dispatch.witness

    def begin_window(self, uneven: bool) -> None:
        """Before the first forward of a window, or instead of one."""
        if not uneven:
            self.replica.follow()
        self.witness.grad = None

    def __call__(self, *args: Any) -> Any:
        outputs, self._root = self.replica(*args)
        return outputs

    def backward(self, loss: Tensor, due: bool, gradient: Tensor | None = None, **kwargs: Any) -> None:
        """The backward pass of the loss that the last call gave."""
        torch.autograd.backward((loss, self._root), (gradient, self._one), **kwargs)
        if due:
            self.replica.check_complete()

    def skip(self, had_loss: bool, due: bool) -> None:
        """Instead of :meth:`backward`: the last call gave no loss, or one that counts for nothing.

        Raises:
            LossError: that cannot be, because every step must be like the first.
        """
        if not due or not self.replica.trained:
            if had_loss:
                self.witness.grad = self._one.clone() if self.witness.grad is None else self.witness.grad + 1
            return
        if self._static:
            raise LossError(
                "training_step gave no loss, or one of a batch of weight 0, and under static_graph=True all steps must be like "
                "the first. Leave static_graph out, or return a loss at every step."
            )
        self.replica.backward_of_nothing((self.witness.view(1), self._one * had_loss))


class PreparedModel(Wrapped):
    """What a loop of one's own calls instead of its model: gradients are averaged in the backward pass.

    Parameters, buffers and state dict have the names that they have in the model, whose other attributes are there too.

    Args:
        module: the user's.
        **options: of :class:`Replica`.

    Attributes:
        replica: what it calls.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module)
        self.training = module.training
        self.replica = Replica(module, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        replica = self.replica
        if not torch.is_grad_enabled() or replica.frozen():
            return self.module(*args, **kwargs)  # frozen for a while, as a discriminator is while the generator learns
        replica.follow()
        replica.called = next(_CALLS)
        outputs = replica(*args, **kwargs)
        if replica.watched:
            for leaf in leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(replica.reach)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of a forward and backward within it stay on their process, to be averaged with those that come after."""
        before, self.replica.held = self.replica.held, True
        try:
            yield
        finally:
            self.replica.held = before

    def finish_backward(self) -> None:
        """After a backward pass that concerns the model."""
        self.replica.called = 0
        if self.replica.due():
            self.replica.check_complete()

    def skip_backward(self) -> None:
        """Instead of a backward pass: there is nothing to learn from, but the other processes wait.

        Raises:
            LossError: that cannot be, because every step must be like the first.
        """
        replica = self.replica
        called, replica.called = replica.called, 0
        if not replica.due() or replica.frozen():
            return
        if not called:
            replica.follow()  # as the others do when they call it
        if replica.late:
            raise LossError(
                "backward(None), or a loss of weight 0: under static_graph=True all steps must be like the first. Leave "
                "static_graph out, or give a loss at every step."
            )
        replica.backward_of_nothing()
