"""The evaluation loop: validation, test and prediction over all loaders.

Each of several ranks has its own micro-batches, and the ranks advance together, one micro-batch each. After each they exchange
how many batches there were, whether a signal has come and whether a metric waits for the loggers. At the end of a loader a
rank may have no batch: it takes part in that exchange only, so that no sample is repeated or skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.data.micro_batches import NO_BATCH, MicroBatch, MicroBatchKind
from trainkit.errors import ConfigurationError
from trainkit.metrics.store import Scope
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.nested import map_tensors
from trainkit.trainer.module_steps import pad_evaluation
from trainkit.trainer.notices import check_monitors
from trainkit.trainer.setup import prepare_evaluation

if TYPE_CHECKING:
    from trainkit.data.loader import PreparedLoader
    from trainkit.distributed.world import World
    from trainkit.trainer.run import Run
    from trainkit.trainer.setup import Evaluation

__all__ = ["check_sanity", "evaluate", "explain_inference_tensors", "gather_predictions"]

_NO_MICRO_BATCH = MicroBatch(NO_BATCH, 0, True, True, 0.0, MicroBatchKind.NONE)


def evaluate(run: Run, evaluation: Evaluation) -> list[dict[str, float]]:
    """Validation, test or prediction over all loaders; the metrics of each loader."""
    name, metrics = evaluation.name, evaluation.metrics
    hooks, module = run.hooks, run.module
    metrics.discard()
    metrics.scope = Scope.EVAL_EPOCH if evaluation.logs else Scope.NOWHERE
    with _active(run, evaluation), _eval_mode(module, name), _no_gradients(run):
        hooks.run(f"on_{name}_start")
        hooks.run(f"on_{name}_epoch_start")
        count = 0
        for index, loader in enumerate(evaluation.loaders):
            evaluation.begin_loader(index)
            evaluation.uneven = not loader.even
            count = evaluate_loader(run, evaluation, index, loader.iterate(run.progress.current_epoch), count)
        evaluation.uneven = False
        metrics.end_loaders()
        metrics.scope = Scope.EVAL_EPOCH if evaluation.logs else Scope.NOWHERE
        evaluation.results = {}
        evaluation.loaders_of = {}
        run.preview_metrics(f"on_{name}_epoch_end")
        hooks.run(f"on_{name}_epoch_end")
        evaluation.finish()
        metrics.scope = Scope.NOWHERE  # the evaluation's metrics are complete
        run.signals.ignore_worker_exits()
        if not run.progress.sanity_checking:
            run.progress.computed.update(dict.fromkeys(evaluation.results, run.progress.global_step))
        hooks.run(f"on_{name}_end")
    return evaluation.by_loader()


def evaluate_loader(run: Run, evaluation: Evaluation, index: int, micro_batches: Iterator[MicroBatch], count: int) -> int:
    """Evaluate this rank's batches of one loader; `count` and the result are numbers of micro-batches before and after it."""
    hooks, metrics, step, signals = run.hooks, evaluation.metrics, evaluation.step, run.signals
    before: tuple[Callable[..., Any], ...] = getattr(hooks, f"on_{evaluation.name}_batch_start")
    after: tuple[Callable[..., Any], ...] = getattr(hooks, f"on_{evaluation.name}_batch_end")
    if evaluation.logs:
        metrics.scope = Scope.EVAL_BATCH
    alone = run.strategy.world.size == 1
    batch_idx = -1
    for batch_idx, micro in enumerate(micro_batches if alone else _align_ranks(run, evaluation, index, micro_batches)):
        if micro.kind is MicroBatchKind.NONE:
            if run.strategy.shards_parameters:
                pad_evaluation(run, evaluation, evaluation.loaders[index].padding(), batch_idx, index)
            continue
        batch = micro.batch
        metrics.stamp = count + batch_idx
        metrics.batch = batch
        for hook in before:
            hook(batch, batch_idx, index)
        outputs = step(batch, batch_idx, index)
        evaluation.keep(index, outputs)
        for hook in after:
            hook(outputs, batch, batch_idx, index)
        if not alone:
            continue
        evaluation.count += 1
        if metrics.pending:
            metrics.flush_step()
        if signals.received is not None:
            raise signals.ending(f"at step {run.progress.global_step}, in the {evaluation.name}")
    if batch_idx < 0:
        evaluation.refuse_empty(index)
    metrics.end_loader(index, count)
    count += batch_idx + 1
    if metrics.stamp + 1 < count:
        metrics.missing_stamps.append((metrics.stamp + 1, count))
    return count


def _align_ranks(run: Run, evaluation: Evaluation, index: int, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """This rank's micro-batches, one for each exchange; of kind `NONE` where only other ranks have a batch."""
    loader = evaluation.loaders[index]
    if loader.length is None or not loader.exact:
        return _align_to_the_end(run, evaluation, loader, micro_batches)
    return _align_length(run, evaluation, micro_batches, loader.length)


def _align_length(run: Run, evaluation: Evaluation, micro_batches: Iterator[MicroBatch], length: int) -> Iterator[MicroBatch]:
    """`length` micro-batches: the exchange of one runs while the next is fetched."""
    world, metrics, signals = run.strategy.world, evaluation.metrics, run.signals
    pending, had = None, False
    for _ in range(length):
        micro = next(micro_batches, _NO_MICRO_BATCH)
        if pending is not None:
            _end_exchange(run, evaluation, had, *pending.wait())
        yield micro
        had = micro.kind is not MicroBatchKind.NONE
        place = run.strategy.data_world.rank + 1 if had else 0  # At the end of a loader, only the first ranks have a batch.
        pending = world.begin_largest([place, signals.received or 0, metrics.pending])
    if pending is not None:
        _end_exchange(run, evaluation, had, *pending.wait())


def _align_to_the_end(
    run: Run, evaluation: Evaluation, loader: PreparedLoader, micro_batches: Iterator[MicroBatch]
) -> Iterator[MicroBatch]:
    """Micro-batches until no rank has one: each begins with an exchange of whether there is one."""
    world, metrics, signals = run.strategy.world, evaluation.metrics, run.signals
    had, count = False, 0
    while True:
        micro = next(micro_batches, _NO_MICRO_BATCH)
        has = micro.kind is not MicroBatchKind.NONE
        there, numbers, waiting = zip(*world.rows([has, signals.received or 0, metrics.pending]), strict=True)
        _end_exchange(run, evaluation, had, count, int(max(numbers)), int(max(waiting)))
        if not any(there):
            loader.end_epoch()
            return
        yield micro
        had, count = has, min(int(sum(there)), run.strategy.data_world.size)  # ranks that read the same data count once


def _end_exchange(run: Run, evaluation: Evaluation, had: bool, count: int, signal: int, waiting: int) -> None:
    """Act on what the ranks exchanged, the same on all of them.

    Args:
        run: the run.
        evaluation: the running one.
        had: this rank had a batch.
        count: number of ranks that had one.
        signal: the number of the signal that has come to a process, or 0.
        waiting: a metric waits for the loggers on some process.
    """
    evaluation.count += count
    if waiting:
        evaluation.metrics.flush_row(run.strategy.world, had, evaluation.count)
    if signal:
        run.signals.received = signal
        raise run.signals.ending(f"at step {run.progress.global_step}, in the {evaluation.name}")


def check_sanity(run: Run) -> None:
    """A few validation batches before training; what they log is dropped, the names are compared with monitors."""
    if run.validation is None:
        check_monitors(run, None)
    if run.validation is None or run.arguments.num_sanity_val_steps == 0:
        return
    evaluation = prepare_evaluation(run, "validation", run.user_loaders[1], sanity=True)
    if evaluation is None:
        return
    run.progress.sanity_checking = run.progress.validating = True
    results, run.results = run.results, evaluation.metrics.results
    try:
        run.hooks.run("on_sanity_check_start")
        evaluate(run, evaluation)
        run.hooks.run("on_sanity_check_end")
    finally:
        run.progress.sanity_checking = run.progress.validating = False
        run.results = results
        for loader in evaluation.loaders:
            loader.close()
    check_monitors(run, evaluation.metrics.results.evaluated)


def gather_predictions(world: World, outputs: list[list[Any]], device: torch.device) -> list[list[Any]]:
    """The predictions of all processes: for each loader the outputs in the order of its batches, the same on each process.

    Args:
        world: the processes.
        outputs: of this rank, by loader and micro-batch.
        device: where the tensors of the result are.

    Raises:
        ConfigurationError: an output cannot be pickled.
    """
    if world.size == 1:
        return outputs
    try:
        by_rank = world.exchange_user_objects(map_tensors(outputs, _to_send))
    except RuntimeError:  # The connection to another rank was lost.
        raise
    except Exception as error:
        raise ConfigurationError(
            "predict returns the predictions of all processes on each process, so predict_step must return tensors or objects "
            f"that can be pickled: {error}. To write them to files instead: predict(..., return_predictions=False) with a "
            "PredictionWriter callback"
        ) from error
    gathered: list[list[Any]] = []
    for per_rank in zip(*by_rank, strict=True):
        longest = max(len(batches) for batches in per_rank)
        gathered.append([batches[index] for index in range(longest) for batches in per_rank if index < len(batches)])
    received: list[list[Any]] = map_tensors(gathered, lambda tensor: tensor.to(device))
    return received


def _to_send(tensor: Tensor) -> Tensor:
    """A tensor on the CPU without the rest of its storage: pickling a view would send the whole storage."""
    tensor = tensor.detach().cpu()
    whole = tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


@contextmanager
def _active(run: Run, evaluation: Evaluation) -> Iterator[None]:
    """Within it, what is logged goes to the evaluation's metrics."""
    outer = run.metrics, run.evaluation
    run.results.add(run.metrics.agree_on_step_values())  # monitors see what training has logged by step
    evaluation.metrics.outer = run.metrics
    run.metrics = evaluation.metrics
    run.evaluation = evaluation
    try:
        yield
    finally:
        evaluation.metrics.outer = None
        run.metrics, run.evaluation = outer


@contextmanager
def _eval_mode(module: TrainModule, name: str) -> Iterator[None]:
    """Within it the module is in eval mode; afterwards each submodule has its earlier mode: frozen BatchNorm stays frozen.

    A module that overrides `on_<name>_model_eval` or `on_<name>_model_train` sets its modes itself.
    """
    modes = [(part, part.training) for part in module.modules()]
    before, after = f"on_{name}_model_eval", f"on_{name}_model_train"
    restored = False
    try:
        getattr(module, before)() if is_overridden(module, before, TrainModule) else module.eval()
        yield
        if is_overridden(module, after, TrainModule):
            getattr(module, after)()
            restored = True
    finally:
        for part, training in [] if restored else modes:
            part.training = training


def explain_inference_tensors(run: Run, error: BaseException) -> None:
    """Add the fix to torch's errors about tensors that were made under `inference_mode`, also if a later fit uses them."""
    text = str(error)
    without_graph = run.progress.stage != "fit" and "does not require grad and does not have a grad_fn" in text
    if run.inference_mode and isinstance(error, RuntimeError) and (without_graph or "inference tensor" in text.lower()):
        error.args = (
            f"{text}\ntrainkit: validate, test and predict run under torch.inference_mode(). To use gradients in them, or to "
            "train with tensors that they have made: Trainer(inference_mode=False)",
        )


def _no_gradients(run: Run) -> AbstractContextManager[Any]:
    # what is made under inference_mode cannot be trained with, such as gathered parameters and, in a fit, any cache of the
    # module; XLA has no inference tensors
    strategy = run.strategy
    plain = run.inference_mode and not (run.progress.stage == "fit" or strategy.shards_parameters or strategy.lazy_tensors)
    return torch.inference_mode() if plain else torch.no_grad()
