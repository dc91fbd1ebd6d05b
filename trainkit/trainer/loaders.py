"""The loaders of a run: found in the arguments of its verb, the data module or the module, and prepared with their limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.console import notice, quantity, warn
from trainkit.data.combined import batch_size_of, evaluation_sources, training_source
from trainkit.data.loader import PreparedLoader
from trainkit.errors import ConfigurationError, EmptyLoaderError, MissingMethodError
from trainkit.module.overridable_hooks import DataHooks, find_source, is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.names.doors import is_open
from trainkit.rng import Purpose, Stage, mix, seed_generators
from trainkit.trainer.notices import notice_few_workers, notice_iterator, notice_overfitting, warn_shuffled

if TYPE_CHECKING:
    from trainkit.trainer.run import Run

__all__ = ["evaluation_loaders", "limit_batches", "train_loader", "warn_of_no_batch"]

_STAGES = {
    "validation": (Stage.VALIDATE, "val", "val_dataloader"),
    "test": (Stage.TEST, "test", "test_dataloader"),
    "predict": (Stage.PREDICT, "predict", "predict_dataloader"),
}


def train_loader(run: Run, user_loader: Any) -> PreparedLoader:
    """The training loader of a run.

    Raises:
        MissingMethodError: there is none.
        EmptyLoaderError: it has no batch.
    """
    module, arguments = run.module, run.arguments
    source = find_source("train_dataloader", user_loader, run.datamodule, module)
    if source is None:
        raise MissingMethodError(
            f"fit needs training data: trainer.fit(module, DataLoader(...)), or define train_dataloader in "
            f"{type(module).__name__} or in a DataModule."
        )
    source = run.train_source = training_source(source)
    windows = _accumulation(run, source)
    for window in windows:
        run.strategy.check_batches(batch_size_of(source), window)
    run.accumulation = run.accelerator.gradient_accumulation_steps = max(windows)  # the loader is prepared for the largest
    weighed = is_overridden(module, "batch_weight", TrainModule)
    loader = run.accelerator.prepare_loader(
        source,
        window=True,
        weigh=module.batch_weight if weighed else None,
        sequential=bool(arguments.overfit_batches),
        pads=not module.automatic_optimization or run.strategy.shards_parameters,
        **_transfer(run, Stage.TRAIN, 0),
    )
    if weighed:  # metrics are weighted like the gradient
        run.train_metrics.count = lambda batch: run.accelerator.accumulation.current.weight or 0.0
    elif loader.samples is not None:
        run.train_metrics.count = lambda batch: loader.samples or 0  # Padding is not counted.
    if not (run.checkpoint is not None and is_open("lightning")):  # there, a fit without batches restores a checkpoint
        _refuse_empty(loader, "training")
    notice_overfitting(run, source)
    notice_iterator(run, source)
    notice_few_workers(source, run.strategy.device.type)
    limit = arguments.limit_train_batches
    assert limit is not None
    if loader.length != 0:
        _set_limits(loader, [limit], "limit_train_batches")
    run.train_loader = loader
    run.begin_accumulation()
    return loader


def evaluation_loaders(run: Run, name: str, user_loaders: Any, sanity: bool) -> list[PreparedLoader]:
    """The loaders of an evaluation; none if there is no data or no step for it, or if a limit of 0 batches turns it off.

    Args:
        run: the run.
        name: "validation", "test" or "predict".
        user_loaders: the loaders that the user passed.
        sanity: for the sanity check.

    Raises:
        EmptyLoaderError: a loader has no batch.
    """
    if getattr(run.arguments, f"limit_{_STAGES[name][1]}_batches") == 0:
        run.evaluation_sources.pop(name, None)
        return []
    # The sanity check takes loaders that are known already, so that val_dataloader is called once.
    sources = run.evaluation_sources.get(name, []) if sanity else []
    if not sources or any(isinstance(source, Iterator) for source in sources):  # an iterator can be read only once
        sources = _sources(run, name, user_loaders)
    if sanity and user_loaders is not None and any(isinstance(source, Iterator) for source in sources):
        notice("no sanity check: the validation batches come from an iterator, which can be read only once.")
        return []
    return [_evaluation_loader(run, name, source, index, sanity) for index, source in enumerate(sources)]


def _sources(run: Run, name: str, value: Any) -> list[Any]:
    """The loaders of an evaluation as the user passed or defined them; none if there is no step for them."""
    module, fitting = run.module, run.progress.stage == "fit"
    run.evaluation_sources.pop(name, None)  # An earlier run may have left them.
    sources = evaluation_sources(find_source(_STAGES[name][2], value, run.datamodule, module))
    if sources and fitting and _overfits(run, name) and _is_shareable(run.train_source):
        sources = [run.train_source]  # the batches that are trained on
    has_step = name == "predict" or is_overridden(module, f"{name}_step", TrainModule)
    if fitting and has_step != bool(sources):
        _say_that_nothing_is_validated(run, has_step)
    if not (sources and has_step):
        return []
    run.evaluation_sources[name] = sources
    return sources


def _say_that_nothing_is_validated(run: Run, has_step: bool) -> None:
    """A fit has a validation step without data, or data without a step."""
    owner = type(run.module).__name__
    if has_step and run.module.validation_step.__module__.startswith("trainkit."):
        return  # such as TransformersModule: the user has not written the step, and need not have data for it
    if has_step:
        notice(
            f"{owner} has a validation_step, but there is no validation data: nothing is validated. Pass it: "
            "trainer.fit(module, train_loader, val_loader); or define val_dataloader. Trainer(limit_val_batches=0) hides this."
        )
    elif run.module.validation_step is not None:
        warn(f"there is validation data, but {owner} has no validation_step: nothing is validated.")


def _overfits(run: Run, name: str) -> bool:
    return bool(run.arguments.overfit_batches) and name == "validation"


def _is_shareable(source: Any) -> bool:
    """Whether a validation can read the training loader without changing the position of training in it."""
    parts = [source, getattr(source, "dataset", None)]
    return not any(isinstance(part, Iterator) or hasattr(part, "state_dict") for part in parts)


def _evaluation_loader(run: Run, name: str, source: Any, index: int, sanity: bool) -> PreparedLoader:
    """Prepare one loader of an evaluation, with its limit."""
    own_stage, short, _ = _STAGES[name]
    stage = Stage.SANITY if sanity else own_stage
    loader = run.accelerator.prepare_loader(
        source,
        window=False,
        stage=stage,
        index=index,
        sequential=_overfits(run, name),
        pads=run.strategy.shards_parameters,
        **_transfer(run, stage, index),
    )
    _refuse_empty(loader, name)
    if not sanity and not _overfits(run, name):
        limit, length = getattr(run.arguments, f"limit_{short}_batches"), loader.length
        whole = limit == 1.0 if isinstance(limit, float) else length is not None and limit >= length
        warn_shuffled(run, name, source, partial=not whole and limit != 0)
    argument = f"limit_{short}_batches"
    limits: list[int | float] = [getattr(run.arguments, argument)]
    if sanity:
        steps = run.arguments.num_sanity_val_steps
        limits.append(1.0 if steps is None or steps == -1 else steps)
    _set_limits(loader, limits, argument)
    return loader


def _set_limits(loader: PreparedLoader, limits: Sequence[int | float], argument: str) -> None:
    """Let a loader end at the smallest of the limits, also when its length changes."""

    def set_limits() -> None:
        loader.limit = loader.micro_limit = None  # Without a limit, `length` is that of the whole epoch.
        counts = [_limit(loader, limit, argument) for limit in limits]
        loader.limit = min((count for count in counts if count is not None), default=None)

    set_limits()
    loader.limits = set_limits


def _limit(loader: PreparedLoader, limit: int | float, argument: str) -> int | None:
    """The largest number of micro-batches of this rank; the loader ends at its length by itself.

    A fraction counts the micro-batches of all processes, so that it is the same data on any number of processes.
    """
    if isinstance(limit, float) and 0.0 < limit < 1.0:
        loader.micro_limit = limit_batches(loader.micro_batches, limit, argument)
        return None
    count = limit_batches(loader.length, limit, argument)
    if loader.exact or (isinstance(limit, float) and limit < 1.0):
        return count
    return limit if isinstance(limit, int) else None


def limit_batches(length: int | None, limit: int | float, argument: str) -> int | None:
    """The number of batches to use of a loader of `length`; `None` if neither the length nor the limit determines it.

    Raises:
        ConfigurationError: a fraction of an unknown length, or one that leaves no batch.
    """
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    if limit == 0.0:
        return 0
    if length is None:
        if limit == 1.0:
            return None
        raise ConfigurationError(
            f"{argument}={limit} is a fraction, but the loader's length is unknown. Use a number of batches: {argument}=100"
        )
    count = int(length * limit)
    if count == 0 < length:
        raise ConfigurationError(
            f"{argument}={limit} of {quantity(length, 'batch')} leaves no batch. Use a fraction of at least {1 / length:.3g}, "
            f"or a number of batches: {argument}=1"
        )
    return count


def _accumulation(run: Run, source: Any) -> set[int]:
    """The numbers of micro-batches in an accumulation window that the epochs have."""
    batch_size, schedule = run.arguments.global_batch_size, run.accumulation_schedule
    if schedule is not None:
        _refuse_second_accumulation(run)
        return set(schedule.scheduling.values())
    if batch_size is None:
        return {run.arguments.accumulation}
    size = batch_size_of(source)
    if size is None:
        raise ConfigurationError(
            f"global_batch_size={batch_size} needs a loader with a batch_size, which {type(source).__name__} does not have. "
            "Use accumulate_grad_batches instead."
        )
    per_round = size * run.strategy.world_size
    if batch_size % per_round:
        raise ConfigurationError(
            f"global_batch_size={batch_size} is not a multiple of batch_size × devices = {size} × {run.strategy.world_size}. "
            f"Use {max(1, round(batch_size / per_round)) * per_round}, or another batch_size."
        )
    return {batch_size // per_round}


def _refuse_second_accumulation(run: Run) -> None:
    """Refuse arguments that set the accumulation in addition to `GradientAccumulationScheduler`."""
    arguments = run.arguments
    number = arguments.accumulation if arguments.accumulation_schedule is None else 1
    for name, value, default in (
        ("accumulate_grad_batches", number, 1),
        ("global_batch_size", arguments.global_batch_size, None),
    ):
        if value != default:
            raise ConfigurationError(
                f"{name}={value} and a GradientAccumulationScheduler both set the accumulation. Fix: remove {name}, or give "
                "one number for all epochs instead of a schedule"
            )


def _refuse_empty(loader: PreparedLoader, what: str) -> None:
    if loader.length == 0:
        raise EmptyLoaderError(f"the {what} loader has no batch: {loader.why_empty()}.")


def warn_of_no_batch(loader: PreparedLoader) -> None:
    """Say that a fit has restored its checkpoint and cannot train."""
    warn(f"the training loader has no batch: {loader.why_empty()}. The checkpoint is restored, nothing is trained.")


def _transfer(run: Run, stage: Stage, index: int) -> dict[str, Any]:
    """Options of a prepared loader for the transfer hooks that are overridden, by the data module or by the module."""
    module, datamodule, device = run.module, run.datamodule, run.strategy.device

    def owner(name: str) -> Any | None:
        owners = [o for o in (datamodule, module) if o is not None and is_overridden(o, name, DataHooks)]
        return owners[0] if owners else None

    before, move, after = (
        owner(name) for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    )
    options: dict[str, Any] = {}
    if before is not None or move is not None:

        def transfer(batch: Any, m: int) -> Any:
            if before is not None:
                seed_generators(mix(run.seed, stage.of_loader(index), Purpose.TRANSFER, run.progress.current_epoch, m))
                batch = before.on_before_batch_transfer(batch, index)
            if move is not None:
                return move.transfer_batch_to_device(batch, device, index)
            return run.strategy.move(batch)

        options["transfer"] = transfer
    if after is not None:
        options["finish"] = lambda batch: after.on_after_batch_transfer(batch, index)
    return options
