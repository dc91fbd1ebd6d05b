"""Setting up a run: from a module, a data module and the arguments of a trainer to what the loops call, compiled or not."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from trainkit.accelerator.prepared_models import describe_modules, find_modules_to_compile
from trainkit.config.compiling import Compilation, compilation_of, refuse_compiled
from trainkit.config.settings import read_process_settings
from trainkit.console import notice, warn
from trainkit.data.loader import PreparedLoader
from trainkit.data.micro_batches import MicroBatch
from trainkit.errors import ConfigurationError, EmptyLoaderError, HookError, MissingMethodError
from trainkit.metrics.store import MetricResults, MetricStore
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.optim.optimizer_config import SchedulerConfig, read_optimizers
from trainkit.optim.optimizer_gradients import clear_gradients
from trainkit.strategy import Strategy
from trainkit.trainer.loaders import evaluation_loaders, train_loader
from trainkit.trainer.micro_batch_parts import MicroBatchParts
from trainkit.trainer.module_steps import (
    BatchIterator,
    ModuleStep,
    pad_alone,
    pad_manual_step,
    pad_training_step,
    pad_without_forward,
)
from trainkit.trainer.notices import notice_accumulated_steps
from trainkit.trainer.profiler import Profiler

if TYPE_CHECKING:
    from trainkit.optim.prepared import PreparedOptimizer
    from trainkit.trainer.run import Run
    from trainkit.trainer.safe_points import SafePoints

__all__ = [
    "Evaluation",
    "Training",
    "begin_compiling",
    "count_batches",
    "describe_compilation",
    "prepare_evaluation",
    "prepare_training",
    "read_compilation",
    "refresh_train_loader",
    "refresh_validation",
    "refuse_incomplete",
    "step_function",
    "unwrap_compiled",
    "validate_every",
]


@dataclass(frozen=True)
class Training:
    """What the training loop calls.

    Attributes:
        loader: the training batches.
        safe_points: where saves and signals are handled.
        training_step: called with (batch, batch_idx).
        automatic: the loop runs backward and optimizer step.
        distributed: other ranks have their own data.
        without_optimizer: there is no optimizer: windows are counted, nothing is trained.
        optimizer: the only one, or all as one, under automatic optimization.
        backward: of a loss.
        step: of the optimizer.
        module_step: the step through the module's `optimizer_step`; `None`: the loop calls `step`.
        zero_grad: of the optimizer.
        pad: called instead of `training_step` for a micro-batch without data on this rank.
        schedulers: those that the loop advances.
        profiler: measures the steps; `None`: nothing does.
        validate_every: validate after this many micro-batches; `None`: at the end of an epoch.
        parts: runs the forward and backward of a micro-batch, in parts if memory runs out; `None`: the loop does.
    """

    loader: PreparedLoader
    safe_points: SafePoints
    training_step: Callable[..., Any]
    automatic: bool
    distributed: bool
    without_optimizer: bool
    optimizer: Optimizer | None
    backward: Callable[..., None]
    step: Callable[..., bool]
    module_step: ModuleStep | None
    zero_grad: Callable[[], None]
    pad: Callable[[Run, Training, Any, int], None]
    schedulers: Sequence[SchedulerConfig]
    profiler: Profiler | None
    validate_every: int | None
    parts: MicroBatchParts | None = None

    @property
    def length(self) -> int | None:
        """Micro-batches of an epoch; `None` if that is unknown until its end."""
        return self.loader.length

    def micro_batches(self, epoch: int, start: int) -> Iterator[MicroBatch]:
        """The micro-batches of an epoch, from index `start` on."""
        batches = self.loader.iterate(epoch, start)
        return batches if self.profiler is None else self.profiler.iterate("next training batch", batches)

    def is_last(self, batch_idx: int) -> bool:
        """Whether this is known to be the last micro-batch of the epoch."""
        return self.length is not None and batch_idx + 1 >= self.length

    def refuse_empty(self) -> None:
        """Raise the error for a loader that has yielded nothing."""
        raise EmptyLoaderError(
            "the training loader yielded no batch. Check the dataset's length, drop_last and limit_train_batches. An iterator "
            "can be read only once: pass a DataLoader or a list."
        )


@dataclass
class Evaluation:
    """One validation, test or prediction: what its loop calls, and its results so far.

    Attributes:
        name: "validation", "test" or "predict", as in the names of the hooks.
        loaders: one or more.
        step: called with (batch, batch_idx, dataloader_idx).
        metrics: where `log` goes.
        logs: metrics may be logged (not in prediction).
        keeps: outputs are kept (prediction).
        count: batches of this stage since the run began, the step of what is logged by batch.
        began: the value of `count` when the running evaluation began.
        loaders_of: metric in `results` → the loaders in whose batches it was logged, `[]` if outside of batches.
        uneven: a loader is being read, and some ranks may have fewer of its batches than others.
    """

    name: str
    loaders: list[PreparedLoader]
    step: Callable[..., Any]
    metrics: MetricStore
    logs: bool = True
    keeps: bool = False
    count: int = 0
    began: int = 0
    uneven: bool = False
    outputs: list[list[Any]] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    loaders_of: dict[str, list[int]] = field(default_factory=dict)

    def begin_loader(self, index: int) -> None:
        """The evaluation begins to read this loader."""
        if index == 0:
            self.outputs = [[] for _ in self.loaders]
        self.metrics.suffix = f"/dataloader_idx_{index}" if len(self.loaders) > 1 else ""

    def refuse_empty(self, index: int) -> None:
        """Raise the error for a loader that has yielded nothing.

        Raises:
            EmptyLoaderError: always, unless a limit of 0 batches turned the loader off.
        """
        if self.loaders[index].limit != 0:
            raise EmptyLoaderError(
                f"{self.name} loader {index} yielded no batch, so its metrics cannot be computed. Check its dataset. An "
                "iterator can be read only once, and the sanity check reads it too: pass a DataLoader or a list."
            )

    def keep(self, index: int, outputs: Any) -> None:
        """Keep what a prediction returned."""
        if self.keeps:
            self.outputs[index].append(outputs)

    def finish(self) -> None:
        """Reduce what was logged; more calls add what was logged since."""
        self.results.update(self.metrics.flush_epoch())
        self.loaders_of |= self.metrics.loaders

    def by_loader(self) -> list[dict[str, float]]:
        """The metrics of each loader; those that were logged outside of batches, for example at the end, are in each."""
        metrics: list[dict[str, float]] = []
        for index in range(len(self.loaders)):
            where = {name: self.loaders_of[name] or [index] for name in self.results}
            metrics.append({name: value for name, value in self.results.items() if index in where[name]})
        return metrics


def read_compilation(argument: Any, strategy: Strategy) -> Compilation | None:
    """How the argument `compile` of a `Trainer`, or else the settings, compile its modules; `None`: they do not.

    Raises:
        ConfigurationError: the argument or the backend of the settings is wrong.
        UnsupportedArgumentError: it does not work with the strategy.
    """
    settings = read_process_settings()
    with settings.attribute_errors(*(("dynamo_backend", *settings.of_place) if argument is None else ())):
        compilation = compilation_of(None, None, settings) if argument is None else Compilation.of_trainer(argument)
        if compilation is not None:
            refuse_compiled(compilation, strategy)
    return compilation


def unwrap_compiled(module: Any, compilation: Compilation | None) -> tuple[Any, Callable[..., Any] | None]:
    """The module inside `torch.compile(module)`, and what compiles its steps in the same way.

    Raises:
        ConfigurationError: `Trainer(compile=)` is given too.
    """
    inner = getattr(module, "_orig_mod", None)
    if inner is None:
        return module, None
    if compilation is not None and compilation.source.startswith("compile="):
        raise ConfigurationError(
            f"Trainer({compilation.source}) and torch.compile(module) both compile the module. Pass the module itself: "
            f"trainer.fit({type(inner).__name__}(...)); or remove compile."
        )
    return inner, module.dynamo_ctx


def begin_compiling(run: Run) -> None:
    """Compile the module's blocks in place, or its steps from now on. What the user has compiled replaces the settings."""
    compilation = run.compilation
    if compilation is None or run.compiler is not None:
        return
    modules = find_modules_to_compile(run.module, compilation, run.strategy)
    run.compiled.compile(modules, compilation)
    if not modules:
        run.compiler = partial(torch.compile, **compilation.options)
    notice(f"compile: {describe_modules(modules, 'the steps')}, {compilation}.")


def step_function(run: Run, name: str) -> Callable[..., Any]:
    """The step of this name, as the strategy runs it. What compiled code has logged is recorded after the step."""
    step = run.strategy.step_function(run.wrapped_module, run.module, name, run.compiler)
    if not run.compiles:
        return step

    def run_step(*args: Any) -> Any:
        outputs = step(*args)
        run.metrics.record_deferred()
        return outputs

    return run_step


def describe_compilation(compilation: Compilation, module: TrainModule | None, strategy: Strategy) -> str:
    """What is compiled of a module, or the user's request if there is no module yet; and the options."""
    if module is None:
        return f"{compilation.source}, {compilation}"
    return f"{describe_modules(find_modules_to_compile(module, compilation, strategy), 'the steps')}, {compilation}"


def refuse_incomplete(module: TrainModule, stage: str, has_optimizer: bool) -> None:
    """Refuse a module without the methods of the stage, before any data is prepared.

    Args:
        module: the user's.
        stage: "fit", "validate", "test" or "predict".
        has_optimizer: `configure_optimizers` may be missing.

    Raises:
        MissingMethodError: with the definition that is missing.
    """
    steps = {
        "training_step": "(self, batch, batch_idx): ... return loss",
        "configure_optimizers": "(self): return torch.optim.AdamW(self.parameters(), lr=1e-3)   (or return None to train "
        "without an optimizer)",
        "validation_step": "(self, batch, batch_idx): ...",
        "test_step": "(self, batch, batch_idx): ...",
        "predict_step": "(self, batch, batch_idx): ...   (or forward, which it calls by default)",
    }
    needed = {"fit": ("training_step", "configure_optimizers"), "validate": ("validation_step",), "test": ("test_step",)}
    if module.predict_step is None or not is_overridden(module, "forward", TrainModule):
        needed["predict"] = ("predict_step",)
    for name in needed.get(stage, ()):
        if not is_overridden(module, name, TrainModule) and not (has_optimizer and name == "configure_optimizers"):
            raise MissingMethodError(f"{type(module).__name__} has no {name}. Define: def {name}{steps[name]}")


def prepare_training(run: Run, loader: PreparedLoader, safe_points: SafePoints) -> Training:
    """Get the optimizers of the module, which is on its device; returns what the training loop calls."""
    module, engine, profiler = run.module, run.accelerator, run.profiler
    interval = validate_every(run, loader)  # first: it may raise, before the user's code is called
    automatic, distributed = module.automatic_optimization, run.strategy.data_world.size > 1
    # before the optimizers: an engine is built around the training step
    step = _with_arguments(step_function(run, "training_step"), module, "training_step", ("batch", "batch_idx"))
    optimizer, pad, zero_grad = None, _pad(run, distributed), _no_zero_grad
    run.optimizers, run.schedulers = _optimizers(run)
    if not automatic:
        _refuse_under_manual(run)
        if is_overridden(module, "optimizer_step", TrainModule):
            warn(
                f"{type(module).__name__}.optimizer_step is not called under manual optimization: training_step makes the "
                "steps. Move its code there, or remove automatic_optimization = False."
            )
        engine.begin_fit(module, partial(_before_manual_step, run))
    else:
        notice_accumulated_steps(run)
        optimizer = engine.begin_fit(module, before_step=None)
        if optimizer is not None:
            zero_grad = _zero_grad(run, optimizer)
    backward, update = engine.verbs_of_loop()
    if is_overridden(module, "backward", TrainModule):
        if automatic and run.strategy.owns_backward:
            raise ConfigurationError(
                f"{type(module).__name__}.backward cannot be called with {run.strategy!r}, which reduces gradients during the "
                "backward pass and runs it itself. Use on_before_backward and on_after_backward, or strategy='zero1' or 'ddp'."
            )
        backward = partial(backward, call=module.backward)
    if profiler is not None:
        step, backward = profiler.wrap("training_step", step), profiler.wrap("backward", backward)
        update = profiler.wrap("optimizer_step", update)
    module_step = None
    if optimizer is not None and ModuleStep.is_needed(run, optimizer):
        module_step = ModuleStep(run, optimizer, step, pad)
        step, pad = module_step.training_step, module_step.pad
    return Training(
        loader=loader,
        safe_points=safe_points,
        training_step=step,
        automatic=automatic and optimizer is not None,
        distributed=distributed,
        without_optimizer=automatic and optimizer is None,
        optimizer=optimizer,
        backward=backward,
        step=update,
        module_step=module_step,
        zero_grad=zero_grad,
        pad=pad,
        schedulers=run.schedulers if automatic else [],
        profiler=profiler,
        validate_every=interval,
        parts=MicroBatchParts.of_fit(run, optimizer, module_step),
    )


def _optimizers(run: Run) -> tuple[list[PreparedOptimizer], list[SchedulerConfig]]:
    """What `configure_optimizers` returns, prepared."""
    module = run.module
    optimizers, schedulers = read_optimizers(run.strategy.configure_optimizers(module), module, module.automatic_optimization)
    if not optimizers:
        notice(
            f"{type(module).__name__}.configure_optimizers returned None: this fit runs without an optimizer, so parameters "
            "change only where your code changes them."
        )
    prepared = run.accelerator.prepare(*optimizers) if optimizers else ()
    return list(prepared) if isinstance(prepared, tuple) else [prepared], schedulers


def _pad(run: Run, distributed: bool) -> Callable[..., None]:
    """What replaces the training step for a micro-batch without data on this rank."""
    if not distributed:
        return pad_alone
    if not run.module.automatic_optimization:
        return pad_manual_step
    return pad_training_step if run.strategy.shards_parameters else pad_without_forward


def _no_zero_grad() -> None:
    """Under manual optimization and without an optimizer the loop clears no gradients."""


def _zero_grad(run: Run, optimizer: Optimizer) -> Callable[[], None]:
    clear = _clear(run, optimizer)
    if not is_overridden(run.strategy, "discard_gradients", Strategy):
        return clear

    def zero_grad() -> None:
        run.strategy.discard_gradients(optimizer)
        clear()

    return zero_grad


def _clear(run: Run, optimizer: Optimizer) -> Callable[[], None]:
    module, progress = run.module, run.progress
    if is_overridden(module, "optimizer_zero_grad", TrainModule):
        return lambda: module.optimizer_zero_grad(progress.current_epoch, progress.batch_idx, optimizer)
    return partial(clear_gradients, optimizer)


def _before_manual_step(run: Run, optimizer: Optimizer) -> None:
    """Before each optimizer step under manual optimization."""
    run.progress.tried_to_learn = True
    run.accelerator.unscale_gradients(optimizer)
    run.hooks.run("on_before_optimizer_step", optimizer)


def _refuse_under_manual(run: Run) -> None:
    """Refuse arguments that only automatic optimization implements."""
    arguments = run.arguments
    refused: dict[str, Any] = {"global_batch_size": arguments.global_batch_size}
    number: int | str = "n"  # how many micro-batches a global batch has is not known yet
    schedule = run.accumulation_schedule
    if schedule is not None:
        refused = {"accumulate_grad_batches": schedule.scheduling}
    elif arguments.accumulation != 1:
        number = arguments.accumulation
        refused = {"accumulate_grad_batches": number}
    for name, value in refused.items():
        if value is not None:
            raise ConfigurationError(
                f"Trainer({name}={value}) needs automatic optimization. Under manual optimization, accumulate in "
                f"training_step: if (batch_idx + 1) % {number} == 0: opt.step(); opt.zero_grad()"
            )
    if run.arguments.gradient_clip_val:
        raise ConfigurationError(
            "gradient_clip_val needs automatic optimization. Call self.clip_gradients(optimizer, 1.0) before opt.step()."
        )
    if is_overridden(run.module, "batch_weight", TrainModule):
        raise ConfigurationError("batch_weight needs automatic optimization. Weight the loss in training_step instead.")


def validate_every(run: Run, loader: PreparedLoader) -> int | None:
    """Micro-batches between validations.

    `None` if there is no validation, if it comes at the end of the epoch, or if its interval is a time or counts optimizer
    steps.
    """
    arguments, length, exact = run.arguments, loader.length, loader.exact
    interval = arguments.val_check_interval
    if run.validation is None or arguments.val_every_n_steps is not None or isinstance(interval, timedelta):
        return None
    if isinstance(interval, int):
        if arguments.check_val_every_n_epoch is not None and length is not None and interval > length:
            raise ConfigurationError(
                f"val_check_interval={interval} is more than the {length} training batches of an epoch, so validation would "
                "never run. Use a smaller number, or check_val_every_n_epoch=None to count across epochs."
            )
        return interval
    assert isinstance(interval, float)  # checked and filled in by the arguments
    if interval == 1.0:
        return length if exact else None
    if length is None:
        raise ConfigurationError(
            f"val_check_interval={interval} is a fraction, but the length of the training loader is unknown. Use a number of "
            "batches: val_check_interval=1000"
        )
    return max(1, int(length * interval))


def refresh_train_loader(run: Run, training: Training) -> Training:
    """Prepare the training loader for the epoch that begins; returns what the loop calls, with it.

    It is requested again if `reload_dataloaders_every_n_epochs` says so, and has the accumulation window of the epoch.
    """
    every, epoch = run.arguments.reload_dataloaders_every_n_epochs, run.progress.current_epoch
    if not every or epoch == run.loaded_in or epoch % every:
        run.begin_accumulation()
        return training
    run.accelerator.release_loader(training.loader)
    loader = train_loader(run, run.user_loaders[0])
    return replace(training, loader=loader, validate_every=validate_every(run, loader))


def refresh_validation(run: Run) -> None:
    """Request the validation loaders of a fit again if `reload_dataloaders_every_n_epochs` says so."""
    every, evaluation, epoch = run.arguments.reload_dataloaders_every_n_epochs, run.validation, run.progress.current_epoch
    if not every or evaluation is None or epoch // every == run.val_loaded_in // every:
        return
    run.val_loaded_in = epoch
    for loader in evaluation.loaders:
        run.accelerator.release_loader(loader)
    run.validation = prepare_evaluation(run, "validation", run.user_loaders[1])
    if run.validation is not None:
        run.validation.count = evaluation.count


def prepare_evaluation(
    run: Run, name: str, user_loaders: Any, *, sanity: bool = False, keeps: bool = True
) -> Evaluation | None:
    """Prepare an evaluation, kept in `run.evaluations`; `None` if there is no data or no step for it.

    Args:
        run: the run.
        name: "validation", "test" or "predict".
        user_loaders: the loaders that the user passed.
        sanity: for the sanity check, whose metrics are dropped.
        keeps: a prediction keeps its outputs.

    Raises:
        EmptyLoaderError: a loader has no batch.
        HookError: several loaders, and the step does not take `dataloader_idx`.
    """
    key = "sanity" if sanity else name
    run.evaluations[key] = None
    loaders = evaluation_loaders(run, name, user_loaders, sanity)
    if all(loader.limit == 0 for loader in loaders):
        return None
    module, step_name = run.module, f"{name}_step"
    step = step_function(run, step_name)
    step = _with_arguments(step, module, step_name, ("batch", "batch_idx", "dataloader_idx"), several_loaders=len(loaders) > 1)
    if run.profiler is not None:
        step = run.profiler.wrap(step_name, step)
    metrics = run.metric_store(MetricResults() if sanity else run.results)
    evaluation = Evaluation(name, loaders, step, metrics, logs=name != "predict", keeps=name == "predict" and keeps)
    run.evaluations[key] = evaluation
    return evaluation


def _with_arguments(
    step: Callable[..., Any], module: TrainModule, name: str, arguments: tuple[str, ...], several_loaders: bool = False
) -> Callable[..., Any]:
    """The step as a function of all arguments; the user's method may take fewer.

    With one loader, `dataloader_idx` is not passed to a method that would receive it only in `*args`.

    Raises:
        HookError: it cannot be called, or there are several loaders and it does not take `dataloader_idx`.
    """
    signature = inspect.signature(getattr(module, name))
    if "dataloader_iter" in signature.parameters:
        return lambda *values: step(BatchIterator(*values))
    for count in range(len(arguments), 0, -1):
        try:
            bound = signature.bind(*arguments[:count])
        except TypeError:
            continue
        if several_loaders and count < len(arguments):
            raise HookError(
                f"{type(module).__name__}.{name} must take dataloader_idx, because there are several loaders: "
                f"def {name}(self, {', '.join(arguments)})"
            )
        if not several_loaders and count == 3 and arguments[-1] not in bound.arguments.values():  # it is one of *args
            continue
        if count == len(arguments):
            return step
        return lambda *values: step(*values[:count])
    raise HookError(
        f"{type(module).__name__}.{name} cannot be called. Expected: def {name}(self, {', '.join(arguments)}); received: "
        f"def {name}{signature}"
    )


def count_batches(evaluation: Evaluation | None) -> list[int | float]:
    """The number of batches of each loader, which a limit bounds if the length is unknown; otherwise infinity."""
    known = (
        []
        if evaluation is None
        else [loader.limit if loader.length is None else loader.length for loader in evaluation.loaders]
    )
    return [math.inf if count is None else count for count in known]
