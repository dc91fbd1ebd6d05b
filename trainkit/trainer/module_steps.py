"""The steps of a module as the loops call them: what they return, ranks without data, and the optimizer step of a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.console import notice
from trainkit.data.micro_batches import NO_BATCH, MicroBatch, MicroBatchKind
from trainkit.errors import DataError, LossError, OptimizerError
from trainkit.metrics.metric_objects import metric_objects, object_state, set_state
from trainkit.metrics.store import MetricResults, MetricStore
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.nested import map_tensors
from trainkit.optim.optimizer_config import needs_closure
from trainkit.optim.prepared import PreparedOptimizer
from trainkit.rng import seed_generators

if TYPE_CHECKING:
    from trainkit.trainer.run import Run
    from trainkit.trainer.setup import Evaluation, Training

__all__ = [
    "BatchIterator",
    "Effects",
    "ModuleStep",
    "check_loss",
    "detach_loss",
    "loss_in",
    "pad_alone",
    "pad_evaluation",
    "pad_manual_step",
    "pad_training_step",
    "pad_without_forward",
    "without_data",
    "without_effects",
]


def loss_in(outputs: Any) -> Tensor | None:
    """The loss in what `training_step` returned, if it is not the loss itself: a dict, or `None`.

    Raises:
        LossError: it is something else, or a dict without a loss.
    """
    if outputs is None:
        return None
    if not isinstance(outputs, dict) or "loss" not in outputs:
        raise LossError(
            "training_step must return the mean loss (a scalar tensor), a dict with it under 'loss', or None; it returned "
            f"{_describe(outputs)}."
        )
    loss = outputs["loss"]
    if loss is not None and not isinstance(loss, Tensor):
        raise LossError(f"training_step: outputs['loss'] must be a scalar tensor, not {_describe(loss)}.")
    return loss


def check_loss(loss: Tensor) -> None:
    """Raise a `LossError` for a loss that cannot be trained on."""
    if loss.numel() != 1:
        raise LossError(
            f"training_step must return a scalar loss, not a tensor of shape {tuple(loss.shape)}. Return its mean: "
            "return loss.mean()"
        )
    if not loss.requires_grad:
        raise LossError(
            "the loss that training_step returned has no graph, so nothing can be trained. Do not use .item(), .detach() or "
            "torch.no_grad() to compute it, and check that at least one parameter has requires_grad=True."
        )


def detach_loss(outputs: Any) -> Any:
    """What `on_train_batch_end` gets: the outputs as a dict, the loss without its graph."""
    if isinstance(outputs, Tensor):
        return {"loss": outputs.detach()}
    if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
        return {**outputs, "loss": outputs["loss"].detach()}
    return outputs


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {sorted(map(str, value))}"
    return f"{value!r} ({type(value).__name__})"


class BatchIterator:
    """Yields the current batch once: `batch, batch_idx, dataloader_idx = next(dataloader_iter)`.

    The loop has fetched it, so that hooks see the batch, and a checkpoint knows how many batches were used.

    Args:
        batch: On the device.
        batch_idx: Its index in the epoch.
        dataloader_idx: The index of its loader.

    Raises:
        DataError: A second batch is requested.
    """

    def __init__(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._item: tuple[Any, int, int] | None = (batch, batch_idx, dataloader_idx)

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._item is None:
            raise DataError(
                "next(dataloader_iter) was called twice in one step, but each step has one batch. Use a larger batch_size, or "
                "Trainer(accumulate_grad_batches=2), which calls training_step for each batch."
            )
        item, self._item = self._item, None
        return item


class Effects:
    """The buffers and torchmetrics objects of a module as they are before a step, to restore them after it.

    Args:
        module: The module.
        copy: Copies a buffer, to any device.
    """

    def __init__(self, module: nn.Module, copy: Callable[[Tensor], Tensor] = torch.clone) -> None:
        self._buffers = [
            (owner, name, buffer, None if buffer is None else (copy(buffer), buffer._version))
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
        ]
        objects = metric_objects(module).values()
        # These states change in place.
        self._states = [(metric, map_tensors(object_state(metric), torch.clone)) for metric in objects]

    def restore(self) -> None:
        """Undo what a step has changed."""
        for metric, state in self._states:
            set_state(metric, state)
        with torch.no_grad():
            for owner, name, buffer, kept in self._buffers:
                if owner._buffers.get(name) is not buffer:  # the step has assigned another tensor
                    owner._buffers[name] = buffer
                if buffer is not None and kept is not None:
                    buffer.copy_(kept[0])

    def changed_buffers(self) -> list[str]:
        """The names of the buffers that have changed since, each in its own layer."""
        return [
            f"{type(owner).__name__}.{name}"
            for owner, name, buffer, kept in self._buffers
            if owner._buffers.get(name) is not buffer
            or (buffer is not None and kept is not None and buffer._version != kept[1])
        ]


@contextmanager
def without_effects(run: Run, batch: Any) -> Iterator[None]:
    """Within it logged values are dropped; afterwards buffers and torchmetrics objects have their values from before."""
    outer = run.metrics
    run.metrics = MetricStore(lambda metrics, for_step: None, MetricResults())
    run.metrics.scope = outer.scope
    run.metrics.batch = batch
    effects = Effects(run.module)
    try:
        yield
    finally:
        run.metrics = outer
        effects.restore()


def without_data(training: Training, micro: MicroBatch) -> MicroBatch:
    """The micro-batch where the training loader yielded `None`: this rank has no data in it.

    Raises:
        DataError: the other ranks wait in the training step.
    """
    if training.distributed and training.loader.pads:
        raise DataError(
            "the training loader yielded None instead of a batch. With several processes, manual optimization and strategies "
            "that shard parameters need a batch in every step. Return a usable one from the collate_fn, for example: "
            "return default_collate(kept or [fallback_sample])"
        )
    notice("the training loader yielded None instead of a batch. Such batches are skipped.", everywhere=True)
    return micro._replace(batch=NO_BATCH, kind=MicroBatchKind.NONE, share=0.0)


def pad_alone(run: Run, training: Training, batch: Any, batch_idx: int) -> None:
    """Do nothing: there are no other ranks."""


def pad_without_forward(run: Run, training: Training, batch: Any, batch_idx: int) -> None:
    """Contribute zero gradients, for a strategy that can average gradients without a forward."""
    training.backward(None)


def pad_manual_step(run: Run, training: Training, batch: Any, batch_idx: int) -> None:
    """Run the training step: under manual optimization only the module's code knows the collectives of a step."""
    with without_effects(run, batch):
        training.training_step(batch, batch_idx)


def pad_training_step(run: Run, training: Training, batch: Any, batch_idx: int) -> None:
    """Run the training step with zero gradients, for a strategy whose forward has collectives."""
    with without_effects(run, batch):
        outputs = training.training_step(batch, batch_idx)
        training.backward(outputs["loss"] if isinstance(outputs, dict) else outputs)


def pad_evaluation(run: Run, evaluation: Evaluation, batch: Any, batch_idx: int, index: int) -> None:
    """Run the step of an evaluation and drop its outputs."""
    with without_effects(run, batch):
        evaluation.step(batch, batch_idx, index)


Closure = Callable[[], Any]
_SKIP, _COMPUTE, _STEP = range(3)  # The next action of a rank in `optimizer_step`.


@dataclass
class _Recorded:
    """A micro-batch of the window, to run it again.

    Attributes:
        micro: the micro-batch, without its batch if it runs only once.
        loss: what `training_step` returned, without its graph; `None`: no loss.
    """

    micro: MicroBatch
    loss: Tensor | None = None


class ModuleStep:
    """Runs the optimizer step of a window where the module overrides `optimizer_step` or its optimizer calls a closure.

    By then the loop has run the forward and backward passes of the window, so the first call of the closure returns a known
    loss. Each later call (sharpness-aware minimization, LBFGS) runs the micro-batches of the window again, with the same
    random numbers.

    Args:
        run: the run.
        optimizer: the only one, or all as one.
        training_step: called with (batch, batch_idx).
        pad: called for a micro-batch without data on this rank.
    """

    def __init__(self, run: Run, optimizer: Optimizer, training_step: Callable[..., Any], pad: Callable[..., None]) -> None:
        self._run = run
        self._own = optimizer
        self._training_step = training_step
        self._pad = pad
        self._closure_optimizer = _ClosureOptimizer(optimizer, run.accelerator, self._step)
        self._repeats = needs_closure(optimizer)
        self._why_once = _why_once(run)
        if self._repeats and self._why_once:
            raise OptimizerError(
                f"{type(optimizer).__name__} computes the gradients several times in a step, which does not work "
                f"{self._why_once}. {_FIX}, or another optimizer: torch.optim.AdamW(self.parameters())"
            )
        self._window: list[_Recorded] = []
        self._calls = self._steps = 0
        self._training: Training

    @staticmethod
    def is_needed(run: Run, optimizer: Optimizer) -> bool:
        """Whether the loop cannot simply call the optimizer's `step`."""
        return is_overridden(run.module, "optimizer_step", TrainModule) or needs_closure(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The training step of the loop: it records the micro-batch."""
        recorded = self._record()
        outputs = self._training_step(batch, batch_idx)
        loss = _loss_of(outputs)
        recorded.loss = None if loss is None else loss.detach()
        return outputs

    def pad(self, run: Run, training: Training, batch: Any, batch_idx: int) -> None:
        """A micro-batch without data on this rank: it is recorded, because other ranks have data."""
        self._record()
        self._pad(run, training, batch, batch_idx)

    def _record(self) -> _Recorded:
        micro = self._run.accelerator.accumulation.current
        recorded = _Recorded(micro._replace(batch=None) if self._why_once else micro)
        if recorded.micro.first:
            self._window.clear()
        self._window.append(recorded)
        return recorded

    def __call__(self, training: Training) -> None:
        """Call the module's `optimizer_step`, at the end of a window.

        Raises:
            OptimizerError: it has called neither the optimizer's step nor the closure.
        """
        progress, module = self._run.progress, self._run.module
        self._training = training
        self._calls = 0
        self._steps = 0
        module.optimizer_step(progress.current_epoch, progress.batch_idx, self._closure_optimizer, self._closure)
        if not self._calls and not self._steps:
            raise OptimizerError(
                f"{type(module).__name__}.optimizer_step called neither the optimizer nor the closure, so the gradients of the "
                "window would be lost. Call optimizer.step(closure=optimizer_closure). To skip a step on purpose, call "
                "optimizer_closure() alone."
            )
        if not self._steps:
            self._agree(_SKIP)
            self._run.accelerator.skip_update()
            training.step(self._own)  # makes no step, and does what all ranks do in each window
        self._window.clear()

    def _agree(self, act: int) -> None:
        """Check that all ranks do the same next.

        Raises:
            OptimizerError: some do something else.
        """
        if self._training.distributed:
            highest, lowest = self._run.strategy.world.largest([act, -act])
            if highest != -lowest:
                raise OptimizerError(
                    f"{type(self._run.module).__name__}.optimizer_step called the optimizer or the closure on some processes "
                    "only, so the others would wait. Decide by what is the same on all: self.global_step, or a reduced value "
                    "such as self.all_gather(loss).mean()."
                )

    def _step(self, closure: Closure | None) -> bool:
        """What `optimizer.step(closure)` does in the module's `optimizer_step`: the closure, the hooks, the step."""
        self._steps += 1
        if closure is None:  # the gradients are there already
            closure, loss, self._calls = self._closure, self._loss(), max(1, self._calls)
        else:
            loss = closure()
        self._agree(_STEP)
        self._before_step()
        if self._repeats:
            return self._training.step(self._own, _KnownFirst(loss, closure, self._before_step))
        return self._training.step(self._own)

    def _before_step(self) -> None:
        hooks = self._run.hooks.on_before_optimizer_step
        if hooks and not self._run.accelerator.accumulation.current.empty:
            self._run.accelerator.unscale_gradients(self._own)  # the hooks see the true gradients
            for hook in hooks:
                hook(self._own)

    def _closure(self) -> Tensor:
        """The `optimizer_closure` of the module: the gradients of the window, and the mean loss of this rank's part of it."""
        self._calls += 1
        if self._calls > 1:
            self._compute_again()
        return self._loss()

    def _loss(self) -> Tensor:
        if self._repeats:
            self._run.accelerator.accumulation.take_whole_window()  # the engine multiplies the loss of a closure by its share
        weighted = [(one.loss, one.micro.share) for one in self._window if one.loss is not None]
        losses = [loss if share == 1.0 else loss * share for loss, share in weighted]
        if len(losses) == 1:
            loss = losses[0]
        else:
            loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self._run.strategy.device)
        # Ranks without data must have the same dtype.
        return loss.double() if self._repeats and self._training.distributed else loss

    def _compute_again(self) -> None:
        """Compute the gradients of the window again. Metrics are dropped, and buffers keep their values.

        Raises:
            OptimizerError: this run cannot.
        """
        run = self._run
        if self._why_once:
            raise OptimizerError(
                f"{type(run.module).__name__}.optimizer_step called optimizer_closure twice, which does not work "
                f"{self._why_once}. Call it once. {_FIX}"
            )
        self._agree(_COMPUTE)
        with torch.enable_grad(), without_effects(run, run.metrics.batch):
            self._training.zero_grad()
            for recorded in self._window:
                run.accelerator.accumulation.begin(recorded.micro)
                self._run_again(recorded, recorded.micro)

    def _run_again(self, recorded: _Recorded, micro: MicroBatch) -> None:
        run, training = self._run, self._training
        if micro.kind is not MicroBatchKind.DATA:
            self._pad(run, training, micro.batch, micro.index)
            return
        run.metrics.batch = micro.batch
        seed_generators(training.loader.forward_key(micro.index), run.strategy.generators())
        loss = _loss_of(self._training_step(micro.batch, micro.index))
        recorded.loss = None if loss is None else loss.detach()
        if loss is not None or training.distributed:
            training.backward(loss)


class _KnownFirst:
    """A closure whose first result is known."""

    def __init__(self, loss: Any, closure: Closure, before_step: Callable[[], None]) -> None:
        self._loss = loss
        self._closure = closure
        self._before_step = before_step
        self._first = True

    def __call__(self) -> Any:
        if self._first:
            self._first = False
            return self._loss
        loss = self._closure()
        self._before_step()
        return loss


class _ClosureOptimizer(PreparedOptimizer):
    """The optimizer that the module's `optimizer_step` receives."""

    def __init__(self, optimizer: Optimizer, accelerator: Any, step: Callable[[Closure | None], bool]) -> None:
        super().__init__(optimizer, accelerator)
        self._step = step

    def step(self, closure: Closure | None = None) -> bool:  # type: ignore[override]
        """Call the closure, run `on_before_optimizer_step` and clipping, and make the optimizer step."""
        return self._step(closure)


_FIX = "Use strategy='ddp' or 'auto', with precision='32-true' or 'bf16-mixed'"


def _why_once(run: Run) -> str:
    """Why the gradients of a window can be computed only once; empty if they can be computed again."""
    strategy = run.strategy
    if strategy.accumulates_in_engine:
        return f"with {type(strategy).__name__}, whose engine sums the gradients of a window"
    if strategy.lazy_tensors:
        return f"with {type(strategy).__name__}, which runs one recorded graph per step"
    if strategy.precision.scaler is not None:
        return f"with precision={strategy.precision.name!r}, whose loss scaler reads the gradients once"
    return ""


def _loss_of(outputs: Any) -> Tensor | None:
    return outputs if isinstance(outputs, Tensor) else loss_in(outputs)
