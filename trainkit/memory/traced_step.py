"""One training step on tensors without values: its memory at each moment, and its FLOPs.

The step runs on a copy of the module whose tensors are `FakeTensor`s, which have a shape, a dtype and a device but no values
(https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html). So it takes the same path as on the real device, under
autocast and activation checkpointing too, and neither computes nor allocates anything. The copy logs nothing, has no
optimizers, and communicates with no other rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the documented base class of dispatch modes

from trainkit.console import user_frames
from trainkit.errors import TrainkitError
from trainkit.memory.inventory import placeholder_of
from trainkit.nested import leaves, map_tensors
from trainkit.precision import Precision
from trainkit.rng import RandomState

if TYPE_CHECKING:
    from trainkit.module.train_module import TrainModule

__all__ = ["NoLossError", "StepTraceError", "activation_profile", "reasons", "step_flops"]


class StepTraceError(TrainkitError):
    """A training step cannot run on tensors without values."""


class NoLossError(StepTraceError):
    """The training step returns no loss for this batch."""


def activation_profile(
    module: TrainModule, batch: Any, precision: Precision, device: torch.device, trainer: Any
) -> tuple[tuple[int, int], ...]:
    """The memory of one micro-batch's forward and backward, in addition to parameters and buffers.

    Args:
        module: The module, possibly without values, in the precision of the run. It is not changed.
        batch: A batch of the training loader.
        precision: The precision of the run.
        device: Where the run would be.
        trainer: What the module sees as its trainer.

    Returns:
        Pairs (bytes of activations, bytes of gradients so far), one for each moment at which no other moment has more of
        both. Activations are all tensors that the step creates, and the batch.

    Raises:
        StepTraceError: The step reads values, communicates, or raises an error.
    """
    with _on_fake_tensors(module, batch, precision, device, trainer) as (copy, fake, run):
        fake = copy.transfer_batch_to_device(copy.on_before_batch_transfer(fake, 0), device, 0)
        live = _LiveBytes([*copy.parameters(), *copy.buffers()])
        live.add(leaves(fake))
        with live:
            run(copy.on_after_batch_transfer(fake, 0), 0)
        gradients = [p.grad for p in copy.parameters() if p.grad is not None]
        return live.profile(gradients)


def step_flops(
    module: TrainModule, batch: Any, batch_idx: int, precision: Precision, device: torch.device, trainer: Any
) -> int:
    """The FLOPs of one micro-batch's forward and backward, without what activation checkpointing computes again.

    Matrix products, convolutions and attention count (`torch.utils.flop_counter`). For the arguments and errors see
    `activation_profile`; the batch is as `training_step` receives it. An operation of another package that no formula is
    registered for is an error too.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    counter = FlopCounterMode(display=False)
    mode = _WithoutRecomputation(counter)
    # written out as matrix products, attention counts on every device
    with _on_fake_tensors(module, batch, precision, device, trainer) as (_, fake, run), sdpa_kernel(SDPBackend.MATH):
        with counter, mode:
            run(fake, batch_idx, mode.backward)
        return int(counter.get_total_flops()) - mode.recomputed


@contextmanager
def _on_fake_tensors(
    module: TrainModule, batch: Any, precision: Precision, device: torch.device, trainer: Any
) -> Iterator[tuple[Any, Any, Callable[..., None]]]:
    """A context that yields a copy of the module and of the batch without values, and a function that runs the step once."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import; documented, see above

    random_state = RandomState()
    try:
        with reasons(), FakeTensorMode(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            device = device if device.type == "cuda" else torch.device("cpu")
            copy: Any = placeholder_of(module, device)
            copy.trainer = _Bystander(trainer)
            copy.train()
            fake = map_tensors(batch, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))

            def run(batch: Any, batch_idx: int, backward: Callable[..., None] = Tensor.backward) -> None:
                copy.trainer._run.manual_backward = backward
                outputs = precision.wrap_step(copy.training_step)(batch, batch_idx)
                if not copy.automatic_optimization:
                    return
                loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
                if not isinstance(loss, Tensor):
                    raise NoLossError("training_step returned no loss")
                del outputs
                backward(loss)

            yield copy, fake, run
    finally:
        random_state.restore()


@contextmanager
def reasons() -> Iterator[None]:
    """A context that turns errors into `StepTraceError`s, which say what is wrong and where."""
    try:
        yield
    except StepTraceError:
        raise
    except Exception as error:
        raise StepTraceError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """What a step did that does not work without values, and where."""
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        what = f"it reads the value of a tensor ({error})"
    else:
        lines = str(error).strip().splitlines()
        what = f"{kind}: {lines[0]}" if lines else kind
    frames = user_frames(error.__traceback__)
    if frames is None:
        return what
    while frames.tb_next is not None:
        frames = frames.tb_next
    return f"{what}, in {Path(frames.tb_frame.f_code.co_filename).name}, line {frames.tb_lineno}"


class _LiveBytes(TorchDispatchMode):
    """Records when the storages of tensors come and go.

    Args:
        others: Tensors whose storages do not count.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._others = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in others)}
        self._numbers: dict[int, int] = {}  # id of a living storage → its number
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._events: list[tuple[int, int]] = []  # number of the storage, and bytes; negative if they are freed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_communication(func)
        output = func(*args, **(kwargs or {}))
        self.add(leaves(output))
        return output

    def add(self, values: Iterable[Any]) -> None:
        """Record the storages of those values that are tensors, unless they are known."""
        for value in values:
            if isinstance(value, Tensor):
                self._record(value.untyped_storage())

    def _record(self, storage: Any) -> None:
        key = id(storage)
        if key in self._numbers or key in self._others:
            return
        number, size = len(self._events), storage.nbytes()

        def freed(_: Any) -> None:
            del self._numbers[key], self._alive[number]
            self._events.append((number, -size))

        self._numbers[key] = number
        self._alive[number] = weakref.ref(storage, freed)
        self._events.append((number, size))

    def profile(self, gradients: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
        """The pairs of `activation_profile`; `gradients` are those at the end."""
        kept = {self._numbers.get(id(gradient.untyped_storage())) for gradient in gradients}
        most_at: dict[int, int] = {}  # bytes of gradients → most bytes of activations at that time
        now = {True: 0, False: 0}
        for number, size in self._events:
            now[number in kept] += size
            most_at[now[True]] = max(most_at.get(now[True], 0), now[False])
        pairs: list[tuple[int, int]] = []
        for have, most in sorted(most_at.items(), reverse=True):  # fewer gradients count only with more activations
            if not pairs or most > pairs[-1][0]:
                pairs.append((most, have))
        return tuple(pairs)


class _WithoutRecomputation(TorchDispatchMode):
    """Sums the FLOPs that the backward spends on computing activations again.

    `torch.utils.checkpoint` computes them with gradients enabled, and a backward computes gradients with them disabled.

    Args:
        counter: Counts all FLOPs.
    """

    def __init__(self, counter: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recomputed = 0
        self._counter = counter
        self._in_backward = False

    def backward(self, loss: Tensor, **options: Any) -> None:
        """`loss.backward()`."""
        self._in_backward = True
        loss.backward(**options)
        self._in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_communication(func)
        if func.namespace not in _OWN and func._overloadpacket not in self._counter.flop_registry:
            raise StepTraceError(f"torch has no formula for the FLOPs of {func}")
        if not (self._in_backward and torch.is_grad_enabled()):
            return func(*args, **(kwargs or {}))
        before = self._counter.get_total_flops()
        output = func(*args, **(kwargs or {}))
        self.recomputed += self._counter.get_total_flops() - before
        return output


_OWN = ("aten", "prim", "prims")


def _refuse_communication(func: Any) -> None:
    if "c10d" in func.namespace:
        raise StepTraceError(f"it communicates with other ranks ({func})")


class _Bystander:
    """The trainer as a module sees it in such a step: it logs nothing, and its optimizers and schedulers do nothing."""

    def __init__(self, trainer: Any) -> None:
        self._of = trainer
        self._run = _BystanderRun(trainer)
        self.loggers = [_Nothing()]
        self.optimizers = self._run.optimizers
        self.lr_scheduler_configs = [_Nothing() for _ in trainer.lr_scheduler_configs]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class _BystanderRun:
    """The run of a `_Bystander`."""

    manual_backward: Callable[..., None]

    def __init__(self, trainer: Any) -> None:
        self._of = trainer
        self.metrics = _Nothing()
        self.optimizers = [_Nothing() for _ in trainer.optimizers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of._run, name)


class _Nothing:
    """An object whose attributes are itself, and which does nothing when it is called."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())
