"""The evaluation loop: validation, test and prediction over all loaders.

Over several processes each has the micro-batches that are its own, and they go from row to row together: a row is a
micro-batch for each of them. After each row they exchange one word: how many batches there were, whether a signal has come,
whether a metric waits for the loggers. A process without a batch in the last row takes part in that and in nothing else, so
that no sample is repeated and none is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.data.window import NOTHING
from trainkit.errors import ConfigurationError
from trainkit.metrics.store import Scope
from trainkit.nested import map_tensors
from trainkit.trainer.padding_steps import fill_evaluation
from trainkit.trainer.setup import overrides

if TYPE_CHECKING:
    from trainkit.distributed.world import World
    from trainkit.module.train_module import TrainModule
    from trainkit.trainer.plans import EvaluationPlan
    from trainkit.trainer.trainer import Trainer

__all__ = ["evaluate", "gather_predictions"]


def evaluate(trainer: Trainer, plan: EvaluationPlan) -> list[dict[str, float]]:
    """Validation, test or prediction over all loaders; the metrics of each loader."""
    name, metrics = plan.name, plan.metrics
    hooks, module = trainer._hooks, trainer.lightning_module
    metrics.discard()
    metrics.scope = Scope.EVAL_EPOCH if plan.logs else Scope.NOWHERE
    with _active(trainer, plan), _eval_mode(module, name), _no_gradients(trainer):
        hooks.run(f"on_{name}_start")
        hooks.run(f"on_{name}_epoch_start")
        rows = 0
        for index, loader in enumerate(plan.loaders):
            plan.begin_loader(index)
            plan.uneven = not loader.even
            rows = evaluate_loader(trainer, plan, index, loader.iterate(trainer.current_epoch), rows)
        plan.uneven = False
        metrics.suffix, metrics.batch = "", None
        metrics.scope = Scope.EVAL_EPOCH if plan.logs else Scope.NOWHERE
        plan.results, plan.loaders_of = {}, {}
        hooks.run(f"on_{name}_epoch_end")
        plan.finish()
        metrics.scope = Scope.NOWHERE  # the evaluation's metrics are complete
        trainer._evaluated(plan)
        hooks.run(f"on_{name}_end")
    return plan.by_loader()


def evaluate_loader(trainer: Trainer, plan: EvaluationPlan, index: int, batches: Iterator[Any], rows: int) -> int:
    """All batches of one loader; of several processes, those of this one. Rows before it → rows after it."""
    hooks, metrics, step, signals = trainer._hooks, plan.metrics, plan.step, trainer._signals
    before: tuple[Callable[..., Any], ...] = getattr(hooks, f"on_{plan.name}_batch_start")
    after: tuple[Callable[..., Any], ...] = getattr(hooks, f"on_{plan.name}_batch_end")
    if plan.logs:
        metrics.scope = Scope.EVAL_BATCH
    alone = trainer.strategy.world.size == 1
    batch_idx = -1
    for batch_idx, batch in enumerate(batches if alone else _in_rows(trainer, plan, index, batches)):
        if batch is NOTHING:
            if trainer.strategy.shards_parameters:
                fill_evaluation(trainer, plan.loaders[index].filler(), batch_idx, index)
            continue
        metrics.stamp, metrics.batch = rows + batch_idx, batch
        for hook in before:
            hook(batch, batch_idx, index)
        outputs = step(batch, batch_idx, index)
        plan.keep(index, outputs)
        for hook in after:
            hook(outputs, batch, batch_idx, index)
        if not alone:
            continue
        plan.count += 1
        if metrics.pending:
            metrics.flush_step()
        if signals.received is not None:
            raise signals.ending(f"at step {trainer.global_step}, in the {plan.name}")
    if batch_idx < 0:
        plan.refuse_empty(index)
    metrics.end_loader(index, rows)
    rows += batch_idx + 1
    if metrics.stamp + 1 < rows:
        metrics.gaps.append((metrics.stamp + 1, rows))
    return rows


def _in_rows(trainer: Trainer, plan: EvaluationPlan, index: int, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of this process, as many as there are rows: ``NOTHING`` in a row in which only others have one."""
    loader = plan.loaders[index]
    if loader.length is None or not loader.exact:
        return _rows_to_the_end(trainer, plan, batches)
    return _rows_of(trainer, plan, batches, loader.length)


def _rows_of(trainer: Trainer, plan: EvaluationPlan, batches: Iterator[Any], length: int) -> Iterator[Any]:
    """So many rows: the word of a row travels while the next batch is fetched."""
    world, metrics, signals = trainer.strategy.world, plan.metrics, trainer._signals
    word, had = None, False
    for _ in range(length):
        batch = next(batches, NOTHING)
        if word is not None:
            _end_row(trainer, plan, had, *word.wait())
        yield batch
        had = batch is not NOTHING
        place = trainer.strategy.data_world.rank + 1 if had else 0  # rows are filled from the first rank on
        word = world.begin_largest([place, signals.received or 0, metrics.pending])
    if word is not None:
        _end_row(trainer, plan, had, *word.wait())


def _rows_to_the_end(trainer: Trainer, plan: EvaluationPlan, batches: Iterator[Any]) -> Iterator[Any]:
    """Rows until no process has a batch any more: each row begins with the question whether there is one."""
    world, metrics, signals = trainer.strategy.world, plan.metrics, trainer._signals
    had, count = False, 0
    while True:
        batch = next(batches, NOTHING)
        has = batch is not NOTHING
        there, numbers, waiting = zip(*world.rows([has, signals.received or 0, metrics.pending]), strict=True)
        _end_row(trainer, plan, had, count, int(max(numbers)), int(max(waiting)))
        if not any(there):
            return
        yield batch
        had, count = has, min(int(sum(there)), trainer.strategy.data_world.size)  # or all of them read all


def _end_row(trainer: Trainer, plan: EvaluationPlan, had: bool, count: int, signal: int, waiting: int) -> None:
    """What follows from the word of a row, on all processes alike.

    Args:
        trainer: the trainer.
        plan: of the evaluation.
        had: this process had a batch.
        count: the batches of the row.
        signal: the number of the signal that has come to a process, or 0.
        waiting: a metric waits for the loggers on some process.
    """
    plan.count += count
    if waiting:
        plan.metrics.flush_row(trainer.strategy.world, had, plan.count)
    if signal:
        trainer._signals.received = signal
        raise trainer._signals.ending(f"at step {trainer.global_step}, in the {plan.name}")


def gather_predictions(world: World, outputs: list[list[Any]], device: torch.device) -> list[list[Any]]:
    """What all processes have predicted: for each loader the outputs in the order of its batches, the same on each process.

    Args:
        world: the processes.
        outputs: of this one, by loader and row.
        device: where the tensors of the result are.

    Raises:
        ConfigurationError: something in them cannot be sent.
    """
    if world.size == 1:
        return outputs
    try:
        by_rank = world.exchange_user_objects(map_tensors(outputs, _to_send))
    except RuntimeError:  # of the connection
        raise
    except Exception as error:
        raise ConfigurationError(
            "predict gives each process what all have predicted, so what predict_step returns must be tensors or something "
            f"that can be pickled: {error}. To write them instead: predict(..., return_predictions=False), a PredictionWriter"
        ) from error
    gathered: list[list[Any]] = []
    for per_rank in zip(*by_rank, strict=True):
        rows = range(max(len(own) for own in per_rank))
        gathered.append([own[row] for row in rows for own in per_rank if row < len(own)])
    received: list[list[Any]] = map_tensors(gathered, lambda tensor: tensor.to(device))
    return received


def _to_send(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that brings no more memory with it than its own: a view would bring all that it is a view of."""
    tensor = tensor.detach().cpu()
    whole = tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


@contextmanager
def _active(trainer: Trainer, plan: EvaluationPlan) -> Iterator[None]:
    """What is logged goes to the evaluation's metrics."""
    outer = trainer._metrics, trainer._active_plan
    trainer._results.add(trainer._metrics.agreed_step_values())  # monitors see what training has logged by step
    trainer._metrics, trainer._active_plan = plan.metrics, plan
    try:
        yield
    finally:
        trainer._metrics, trainer._active_plan = outer


@contextmanager
def _eval_mode(module: TrainModule, name: str) -> Iterator[None]:
    """Eval mode, and afterwards each submodule in the mode that it was in: frozen BatchNorm stays frozen.

    Or what the module says instead, in ``on_validation_model_eval`` and ``on_validation_model_train`` and the like.
    """
    modes = [(part, part.training) for part in module.modules()]
    before, after = f"on_{name}_model_eval", f"on_{name}_model_train"
    restored = False
    try:
        getattr(module, before)() if overrides(module, before) else module.eval()
        yield
        if overrides(module, after):
            getattr(module, after)()
            restored = True
    finally:
        for part, training in [] if restored else modes:
            part.training = training


def _no_gradients(trainer: Trainer) -> AbstractContextManager[Any]:
    # parameters that are gathered under inference_mode could not be trained afterwards, and XLA has no inference tensors
    strategy = trainer.strategy
    plain = trainer.inference_mode and not (strategy.shards_parameters or strategy.lazy_tensors)
    return torch.inference_mode() if plain else torch.no_grad()
