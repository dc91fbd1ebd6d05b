"""Setting up a run: from a module, a data module and a trainer's arguments to the plans that the loops follow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from trainkit.console import notice, warn
from trainkit.data.loader import PreparedLoader
from trainkit.data.sources import batch_size_of, evaluation_sources, training_source
from trainkit.errors import ConfigurationError, EmptyLoaderError, HookError, MissingMethodError
from trainkit.metrics.store import MetricStore
from trainkit.module.overridable_hooks import DataHooks, find_source, is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.optim.optimizer_config import read_optimizers
from trainkit.optim.prepared_optimizer import clear_gradients
from trainkit.rng import Purpose, Stage, mix, seed_generators
from trainkit.trainer.arguments import limited
from trainkit.trainer.padding_steps import pad_manual_step, pad_training_step, pad_without_forward
from trainkit.trainer.plans import EvaluationPlan, FitPlan

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = ["evaluation_plan", "finish_fit_plan", "fit_plan", "overrides", "refuse_incomplete", "train_loader", "validate_every"]

_STAGES = {
    "validation": (Stage.VALIDATE, "val", "val_dataloader"),
    "test": (Stage.TEST, "test", "test_dataloader"),
    "predict": (Stage.PREDICT, "predict", "predict_dataloader"),
}


def overrides(owner: Any, name: str, base: type = TrainModule) -> bool:
    """Whether the user's class defines ``name`` itself, or it was assigned on the object; see :func:`is_overridden`."""
    return is_overridden(owner, name, base)


def refuse_incomplete(module: TrainModule, stage: str, has_optimizer: bool) -> None:
    """Refuse a module without the methods of the stage, before any data is prepared.

    Args:
        module: the user's.
        stage: "fit", "validate", "test" or "predict".
        has_optimizer: ``configure_optimizers`` may be missing.

    Raises:
        MissingMethodError: with the definition that is missing.
    """
    steps = {
        "training_step": "(self, batch, batch_idx): ... return loss",
        "configure_optimizers": "(self): return torch.optim.AdamW(self.parameters(), lr=1e-3)   (or return None to train "
        "without an optimizer)",
        "validation_step": "(self, batch, batch_idx): ...",
        "test_step": "(self, batch, batch_idx): ...",
    }
    needed = {"fit": ("training_step", "configure_optimizers"), "validate": ("validation_step",), "test": ("test_step",)}
    for name in needed.get(stage, ()):
        if not overrides(module, name) and not (has_optimizer and name == "configure_optimizers"):
            raise MissingMethodError(f"{type(module).__name__} has no {name}. Define: def {name}{steps[name]}")


def train_loader(trainer: Trainer, given: Any) -> PreparedLoader:
    """The training loader of a run.

    Raises:
        MissingMethodError: there is none.
        EmptyLoaderError: it has no batch.
    """
    module, arguments = trainer.lightning_module, trainer._arguments
    source = find_source("train_dataloader", given, trainer.datamodule, module)
    if source is None:
        raise MissingMethodError(
            f"fit needs training data: trainer.fit(module, DataLoader(...)), or define train_dataloader in "
            f"{type(module).__name__} or in a DataModule."
        )
    source = trainer.train_dataloader = training_source(source)
    trainer.accumulate_grad_batches = _accumulation(trainer, source)
    trainer.accelerator.gradient_accumulation_steps = trainer.accumulate_grad_batches
    trainer.strategy.check_batches(batch_size_of(source), trainer.accumulate_grad_batches)
    weighed = overrides(module, "batch_weight")
    loader = trainer.accelerator.prepare_loader(
        source,
        window=True,
        weigh=module.batch_weight if weighed else None,
        sequential=bool(arguments.overfit_batches),
        pads=not module.automatic_optimization or trainer.strategy.shards_parameters,
        **_transfer(trainer, Stage.TRAIN, 0),
    )
    if loader.samples is not None:
        trainer._train_metrics.count = lambda batch: loader.samples or 0  # not those that it was filled up with
    _refuse_empty(loader, source, "training")
    limit = arguments.limit_train_batches
    assert limit is not None
    loader.limit = _limit(loader, limit, "limit_train_batches")
    return loader


def _limit(loader: PreparedLoader, limit: int | float, argument: str) -> int | None:
    """The rows at most. A length that a dataset says of itself may be wrong, and must not cut off what comes.

    A fraction is one of the micro-batches of all processes, so that it is the same data on any number of them.
    """
    if isinstance(limit, float) and 0.0 < limit < 1.0:
        loader.micro_limit = None  # of the whole epoch
        loader.micro_limit = limited(loader.micro_batches, limit, argument)
        return None
    count = limited(loader.length, limit, argument)
    if loader.exact or (isinstance(limit, float) and limit < 1.0):
        return count
    return limit if isinstance(limit, int) else None


def _accumulation(trainer: Trainer, source: Any) -> int:
    wanted = trainer._arguments.global_batch_size
    if wanted is None:
        return trainer._arguments.accumulate_grad_batches
    size = batch_size_of(source)
    if size is None:
        raise ConfigurationError(
            f"global_batch_size={wanted} needs a loader that says its batch_size; {type(source).__name__} does not. "
            "Use accumulate_grad_batches."
        )
    per_round = size * trainer.world_size
    if wanted % per_round:
        raise ConfigurationError(
            f"global_batch_size={wanted} is not a multiple of batch_size × devices = {size} × {trainer.world_size}. "
            f"Use {max(1, round(wanted / per_round)) * per_round}, or another batch_size."
        )
    return wanted // per_round


def _refuse_empty(loader: PreparedLoader, source: Any, what: str) -> None:
    if loader.length == 0:
        dataset = getattr(source, "dataset", None)
        size = len(dataset) if dataset is not None and hasattr(dataset, "__len__") else 0
        reason = (
            f"its {size} samples do not fill one batch of {batch_size_of(source)}, and drop_last=True drops the rest"
            if size
            else "its dataset is empty"
        )
        raise EmptyLoaderError(f"the {what} loader has no batch: {reason}.")


def _transfer(trainer: Trainer, stage: Stage, index: int) -> dict[str, Any]:
    """Options of a prepared loader for the transfer hooks that are overridden, by the data module or by the module."""
    module, datamodule, device = trainer.lightning_module, trainer.datamodule, trainer.strategy.device

    def owner(name: str) -> Any | None:
        owners = [o for o in (datamodule, module) if o is not None and overrides(o, name, DataHooks)]
        return owners[0] if owners else None

    before, move, after = (
        owner(name) for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    )
    options: dict[str, Any] = {}
    if before is not None or move is not None:

        def transfer(batch: Any, m: int) -> Any:
            if before is not None:
                seed_generators(mix(trainer.seed, stage.of_loader(index), Purpose.TRANSFER, trainer.current_epoch, m))
                batch = before.on_before_batch_transfer(batch, index)
            if move is not None:
                return move.transfer_batch_to_device(batch, device, index)
            return trainer.strategy.move(batch)

        options["transfer"] = transfer
    if after is not None:
        options["finish"] = lambda batch: after.on_after_batch_transfer(batch, index)
    return options


def fit_plan(trainer: Trainer, loader: PreparedLoader) -> FitPlan:
    """The plan of a fit; its optimizers are added by :func:`finish_fit_plan`, when the module is on its device."""
    module, engine = trainer.lightning_module, trainer.accelerator
    step = trainer.strategy.step_function(trainer._wrapped_module, module, "training_step", trainer._compiler)
    step = _with_arguments(step, module, "training_step", ("batch", "batch_idx"))
    profiler = trainer.profiler
    backward: Callable[..., Any] = engine.backward
    update: Callable[..., Any] = engine.step
    if profiler is not None:
        step, backward = profiler.wrapped("training_step", step), profiler.wrapped("backward", backward)
        update = profiler.wrapped("optimizer_step", update)
    return FitPlan(
        loader=loader,
        training_step=step,
        automatic=module.automatic_optimization,
        several=trainer.strategy.data_world.size > 1,
        without_optimizer=False,
        optimizer=None,
        backward=backward,
        step=update,
        zero_grad=lambda: None,
        schedulers=[],
        profiler=profiler,
    )


def finish_fit_plan(trainer: Trainer, plan: FitPlan) -> None:
    """Ask the module for its optimizers and put them into the plan."""
    module, engine = trainer.lightning_module, trainer.accelerator
    automatic = module.automatic_optimization
    optimizers, configs = read_optimizers(trainer.strategy.configure_optimizers(module), module, automatic)
    prepared = engine.prepare(*optimizers) if optimizers else ()
    trainer._prepared_optimizers = list(prepared) if isinstance(prepared, tuple) else [prepared]
    trainer.lr_scheduler_configs = configs
    if not automatic:
        _refuse_under_manual(trainer)
        engine.before_step = trainer._before_manual_step
        engine.averages_in_step = plan.several
        plan.pad = partial(pad_manual_step, trainer)
        return
    plan.schedulers = configs
    plan.pad = partial(pad_training_step if trainer.strategy.shards_parameters else pad_without_forward, trainer)
    if not optimizers:
        plan.automatic, plan.without_optimizer = False, True
        return
    optimizer = plan.optimizer = trainer._prepared_optimizers[0].optimizer
    if overrides(module, "optimizer_zero_grad"):
        plan.zero_grad = lambda: module.optimizer_zero_grad(trainer.current_epoch, trainer.batch_idx, optimizer)
    else:
        plan.zero_grad = partial(clear_gradients, optimizer)


def _refuse_under_manual(trainer: Trainer) -> None:
    """Arguments that automatic optimization carries out, and nobody would under manual optimization."""
    arguments = trainer._arguments
    given = {"global_batch_size": arguments.global_batch_size}
    if arguments.accumulate_grad_batches != 1:
        given = {"accumulate_grad_batches": arguments.accumulate_grad_batches}
    for name, value in given.items():
        if value is not None:
            raise ConfigurationError(
                f"Trainer({name}={value}) needs automatic optimization. Under manual optimization, step in training_step when "
                "a window is full: if (batch_idx + 1) % 4 == 0: opt.step(); opt.zero_grad()"
            )
    if trainer._arguments.gradient_clip_val is not None:
        raise ConfigurationError(
            "gradient_clip_val needs automatic optimization. Call self.clip_gradients(optimizer, 1.0) before opt.step()."
        )
    if overrides(trainer.lightning_module, "batch_weight"):
        raise ConfigurationError("batch_weight needs automatic optimization. Weight the loss in training_step instead.")


def validate_every(trainer: Trainer, loader: PreparedLoader) -> int | None:
    """Micro-batches between validations.

    ``None`` where nothing is validated, where the end of the epoch tells, or where optimizer steps are counted.
    """
    arguments, length, exact = trainer._arguments, loader.length, loader.exact
    interval = arguments.val_check_interval
    if trainer._val_plan is None or arguments.val_every_n_steps is not None:
        return None
    if isinstance(interval, int):
        if arguments.check_val_every_n_epoch is not None and length is not None and interval > length:
            raise ConfigurationError(
                f"val_check_interval={interval} is more than the {length} training batches of an epoch, so validation would "
                "never run. Use a smaller number, or check_val_every_n_epoch=None to count across epochs."
            )
        return interval
    assert interval is not None
    if interval == 1.0:
        return length if exact else None
    if length is None:
        raise ConfigurationError(
            f"val_check_interval={interval} is a fraction of a loader whose length is not known. Use a number of batches: "
            "val_check_interval=1000"
        )
    return max(1, int(length * interval))


def evaluation_plan(
    trainer: Trainer, name: str, given: Any, metrics: MetricStore, *, sanity: bool = False
) -> EvaluationPlan | None:
    """The plan of "validation", "test" or "predict"; ``None`` if there is no data or no step for it.

    Raises:
        EmptyLoaderError: a loader has no batch.
        HookError: several loaders, and the step does not take ``dataloader_idx``.
    """
    stage, short, method = _STAGES[name]
    module = trainer.lightning_module
    step_name = f"{name}_step"
    trainer._evaluation_sources.pop(name, None)  # those of an earlier run
    sources = evaluation_sources(find_source(method, given, trainer.datamodule, module))
    overfitting = bool(trainer._arguments.overfit_batches) and name == "validation"
    if overfitting and sources and trainer.stage == "fit" and _can_be_shared(trainer.train_dataloader):
        sources = [trainer.train_dataloader]  # the batches that it trains on
    if sources and name != "predict" and not overrides(module, step_name):
        if trainer.stage == "fit" and getattr(module, step_name) is not None:
            warn(f"there is validation data, but {type(module).__name__} has no validation_step: nothing is validated.")
        return None
    if not sources:
        return None
    trainer._evaluation_sources[name] = sources
    if sanity and given is not None and any(isinstance(source, Iterator) for source in sources):
        notice("no sanity check: the validation batches come from an iterator, which can be read only once.")
        return None
    argument = f"limit_{short}_batches"
    limit: int | float = getattr(trainer._arguments, argument)
    if sanity:
        steps = trainer._arguments.num_sanity_val_steps
        limit = 1.0 if steps is None or steps == -1 else steps
    loaders = []
    for index, source in enumerate(sources):
        own = Stage.SANITY if sanity else stage
        loader = trainer.accelerator.prepare_loader(
            source,
            window=False,
            stage=own,
            index=index,
            sequential=overfitting,
            pads=trainer.strategy.shards_parameters,
            **_transfer(trainer, own, index),
        )
        _refuse_empty(loader, source, name)
        limits = [_limit(loader, value, argument) for value in (getattr(trainer._arguments, argument), limit)]
        loader.limit = min((value for value in limits if value is not None), default=None)
        loaders.append(loader)
    if all(loader.limit == 0 for loader in loaders):
        return None
    step = trainer.strategy.step_function(trainer._wrapped_module, module, step_name, trainer._compiler)
    several = len(loaders) > 1
    arguments = ("batch", "batch_idx", "dataloader_idx")
    step = _with_arguments(step, module, step_name, arguments, several)
    if trainer.profiler is not None:
        step = trainer.profiler.wrapped(step_name, step)
    return EvaluationPlan(name, loaders, step, metrics, logs=name != "predict", keeps=name == "predict")


def _can_be_shared(source: Any) -> bool:
    """Whether reading a training loader in a validation leaves the training's position in it alone."""
    parts = [source, getattr(source, "dataset", None)]
    return not any(isinstance(part, Iterator) or hasattr(part, "state_dict") for part in parts)


def _with_arguments(
    step: Callable[..., Any], module: TrainModule, name: str, arguments: tuple[str, ...], several: bool = False
) -> Callable[..., Any]:
    """The step, to be called with all arguments, however few of them the user's method takes.

    With one loader a method that would take ``dataloader_idx`` only into its ``*args`` does not get it.

    Raises:
        HookError: it cannot be called, or there are several loaders and it does not take ``dataloader_idx``.
    """
    signature = inspect.signature(getattr(module, name))
    for count in range(len(arguments), 0, -1):
        try:
            bound = signature.bind(*arguments[:count])
        except TypeError:
            continue
        if several and count < len(arguments):
            raise HookError(
                f"{type(module).__name__}.{name} must take dataloader_idx, as there are several loaders: "
                f"def {name}(self, {', '.join(arguments)})"
            )
        if not several and count == 3 and arguments[-1] not in bound.arguments.values():  # it is one of *args
            continue
        if count == len(arguments):
            return step
        return lambda *given: step(*given[:count])
    raise HookError(
        f"{type(module).__name__}.{name} cannot be called. Expected: def {name}(self, {', '.join(arguments)}); received: "
        f"def {name}{signature}"
    )


def count_batches(plan: EvaluationPlan | None) -> list[int | float]:
    """The number of batches of each loader, infinity where it is not known."""
    return [] if plan is None else [float("inf") if ld.length is None else ld.length for ld in plan.loaders]
