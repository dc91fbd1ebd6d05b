"""`Run`: what one run of a `Trainer` is made of. The loops, saving and resume take it instead of the Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainkit.accelerator import Accelerator
from trainkit.accelerator.prepared_models import CompiledModules
from trainkit.errors import ConfigurationError, NotAvailableError
from trainkit.loggers.logged_values import take_step
from trainkit.metrics.store import MetricResults, MetricStore, as_tensors
from trainkit.module.activation_checkpointing import (
    CheckpointedModules,
    checkpoint_activations,
    checkpointing_choice,
    refuse_checkpointing,
    refuse_eager_backend,
)
from trainkit.module.hook_table import HookTable
from trainkit.module.overridable_hooks import ModuleHooks, is_overridden
from trainkit.registry import load_callback
from trainkit.rng import resolve_seed, seed_was_given
from trainkit.trainer.notices import warn_shared_names
from trainkit.trainer.progress import DueDates, RunProgress
from trainkit.trainer.safe_points import Signals

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainkit.callback import Callback
    from trainkit.config.compiling import Compilation
    from trainkit.data.loader import PreparedLoader
    from trainkit.loggers import Logger
    from trainkit.module.data_module import DataModule
    from trainkit.module.train_module import TrainModule
    from trainkit.optim.optimizer_config import SchedulerConfig
    from trainkit.optim.prepared import PreparedOptimizer
    from trainkit.strategy import Strategy
    from trainkit.trainer.arguments import TrainerArguments
    from trainkit.trainer.explain import StartRecord
    from trainkit.trainer.profiler import Profiler
    from trainkit.trainer.resume import FoundCheckpoint
    from trainkit.trainer.save_policy import SavePolicy
    from trainkit.trainer.setup import Evaluation

__all__ = ["Run"]

_COPIED = (
    "arguments",
    "strategy",
    "seed",
    "seed_given",
    "inference_mode",
    "compilation",
    "callbacks",
    "loggers",
    "profiler",
    "accumulation",
    "continues",
    "progress",
    "results",
    "given_module",
    "datamodule",
)


@dataclass
class Run:
    """What a run is made of.

    A Trainer has a new one for each run. That of a fit begins from step 0; that of an evaluation takes over the progress, the
    optimizers and the saves of the fit before it, so that `trainer.global_step` and `save_checkpoint` continue to work.
    Set-up fills in the rest. After that, only `progress` changes.

    Attributes:
        arguments: of the Trainer.
        strategy: where it runs.
        accelerator: the `Accelerator`, whose verbs the loops call.
        seed: of order, augmentation and dropout.
        seed_given: the user chose the seed.
        inference_mode: evaluate under `torch.inference_mode`.
        callbacks: those that are attached, with those of the module's `configure_callbacks`.
        loggers: of the Trainer.
        profiler: measures the steps; `None`: there is none.
        accumulation: number of micro-batches in an accumulation window of the current epoch.
        continues: the next fit counts epochs and steps from where the last one has ended.
        progress: counters, phase, and what the run has been asked for.
        signals: what the process has received.
        hooks: what is called for which hook.
        early_hooks: hooks that, on any rank, the module or a callback that does not run last overrides.
        results: the latest values of all metrics.
        given_module: the user's module; `None` before the first run. See `module`.
        fitted: the module of the last fit.
        datamodule: the data module, if there is one.
        compilation: how modules are compiled, as the user or the settings ask for; `None`: they are not.
        compiler: compiles the steps, if `compilation` asks for that or the user passed a module from `torch.compile`.
        compiled: the blocks that are compiled in this run.
        user_loaders: what `fit` was passed for training and validation; an evaluation has only the second one.
        train_source: the training loader as the user passed or defined it.
        evaluation_sources: the loaders of each evaluation, by name, as the user passed or defined them.
        loaded_in: epoch in which the training loader was last requested.
        val_loaded_in: epoch in which the validation loaders were last requested.
        optimizers: of the fit.
        schedulers: of the fit.
        train_loader: the training batches; `None` before a fit is set up.
        ckpt_path: the checkpoint that the run has loaded; `None`: it has loaded none.
        restored: the best checkpoint, if the module has its weights instead of those of the last step.
        validation: the validation within a fit; `None`: no validation.
        evaluation: the evaluation that is running.
        evaluations: all evaluations of this run, by name.
        save_policy: saves the checkpoints of the fit.
        start_record: records in the run's folder how the fit starts and ends.
        checkpoint: the one to resume from, until it is restored.
        recomputed: the modules of the fit whose activations are recomputed; `None`: of none.
        wrapped_module: the module as the strategy has wrapped it.
        due: when the run logs, validates and ends.
        train_metrics: where `self.log` goes in training.
        metrics: where `self.log` goes now: an evaluation has its own store.
    """

    arguments: TrainerArguments
    strategy: Strategy
    accelerator: Accelerator
    seed: int
    seed_given: bool = False
    inference_mode: bool = True
    callbacks: list[Callback] = field(default_factory=list)
    loggers: list[Logger] = field(default_factory=list)
    profiler: Profiler | None = None
    accumulation: int = 1
    continues: bool = False
    progress: RunProgress = field(default_factory=RunProgress)
    signals: Signals = field(default_factory=lambda: Signals(lambda: None))
    hooks: HookTable = field(default_factory=HookTable.nothing)
    early_hooks: frozenset[str] = frozenset()
    results: MetricResults = field(default_factory=MetricResults)
    given_module: TrainModule | None = None
    fitted: TrainModule | None = None
    datamodule: DataModule | None = None
    compilation: Compilation | None = None
    compiler: Callable[..., Any] | None = None
    compiled: CompiledModules = field(default_factory=CompiledModules)
    user_loaders: tuple[Any, Any] = (None, None)
    train_source: Any = None
    evaluation_sources: dict[str, list[Any]] = field(default_factory=dict)
    loaded_in: int = 0
    val_loaded_in: int = 0
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[SchedulerConfig] = field(default_factory=list)
    train_loader: PreparedLoader | None = None
    validation: Evaluation | None = None
    evaluation: Evaluation | None = None
    evaluations: dict[str, Evaluation | None] = field(default_factory=dict)
    save_policy: SavePolicy | None = None
    start_record: StartRecord | None = None
    checkpoint: FoundCheckpoint | None = None
    ckpt_path: str | Path | None = None
    restored: Path | None = None
    recomputed: CheckpointedModules | None = None
    wrapped_module: nn.Module = field(init=False)
    due: DueDates = field(init=False)
    train_metrics: MetricStore = field(init=False)
    metrics: MetricStore = field(init=False)

    def __post_init__(self) -> None:
        self.due = DueDates(self.arguments, self.progress)
        self.train_metrics = self.metrics = self.metric_store(self.results)

    @classmethod
    def before_the_first(
        cls, arguments: TrainerArguments, strategy: Strategy, seed: int | None, compilation: Compilation | None = None
    ) -> Run:
        """What a Trainer has before its first run; all processes use the main process's seed."""
        refuse_checkpointing(arguments.activation_checkpointing, strategy)
        if compilation is not None:
            refuse_eager_backend(arguments.activation_checkpointing, compilation.options.get("backend"))
        chosen = int(strategy.world.from_main(resolve_seed(seed)))
        accelerator = Accelerator.of_trainer(strategy)
        accumulation = arguments.accumulation
        return cls(
            arguments,
            strategy,
            accelerator,
            chosen,
            seed_was_given(seed),
            accumulation=accumulation,
            compilation=compilation,
        )

    def use_arguments(self, arguments: TrainerArguments) -> None:
        """Use other arguments in the next run."""
        self.arguments = arguments
        self.accumulation = arguments.accumulation
        self.due = DueDates(arguments, self.progress)

    def limit_epochs(self) -> None:
        """Limit a fit whose `max_epochs` is not whole to a number of optimizer steps, when the training loader is known.

        Raises:
            ConfigurationError: the loader has no length.
        """
        epochs, batches = self.arguments.fractional_epochs, self.max_batches
        if epochs is None:
            return
        if math.isinf(batches):
            raise ConfigurationError(
                f"max_epochs={epochs} needs a training loader with a length, and this one has none. Limit the optimizer steps, "
                "max_steps=1000, or the micro-batches of an epoch, limit_train_batches=1000"
            )
        by_epoch = [math.ceil(batches / self.accumulation_in(epoch)) for epoch in range(math.ceil(epochs))]
        part = (epochs - math.floor(epochs)) * by_epoch.pop()
        steps = sum(by_epoch) + math.ceil(round(part, 6))  # 0.1 * 10 of 1.1 epochs is not exactly 1
        self.arguments = self.arguments.limited_to(steps)
        self.due = DueDates(self.arguments, self.progress)

    def note_start(self) -> None:
        """A fit starts, new or resumed, with the loaders that it has, at the step that it has."""
        self.loaded_in = self.val_loaded_in = self.progress.current_epoch
        self.progress.first_step = self.progress.global_step

    def __getstate__(self) -> dict[str, Any]:
        """What a copy keeps: what the user chose, and the results. What belongs to this process and its data is made again.

        Raises:
            ConfigurationError: the run is in progress.
        """
        if self.progress.stage is not None:
            raise ConfigurationError(
                "a Trainer that is running cannot be copied or pickled. Copy what you need of it, such as "
                "trainer.callback_metrics; or copy it after the run."
            )
        return {name: getattr(self, name) for name in _COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(accelerator=Accelerator.of_trainer(state["strategy"]), **state)  # type: ignore[misc]

    def recompute_activations(self) -> None:
        """Let the backward pass recompute the activations that the user has chosen. The strategy wraps or shards the result."""
        chosen = checkpointing_choice(self.arguments.activation_checkpointing)
        self.recomputed = None if chosen is None else checkpoint_activations(self.module, chosen)

    def metric_store(self, results: MetricResults) -> MetricStore:
        """A store of metrics whose latest values go to `results`."""
        return MetricStore(self.emit, results, compiled=self.compiles, world=self.strategy.data_world)

    @property
    def compiles(self) -> bool:
        """Whether a step or its blocks are compiled."""
        return self.compiler is not None or self.compilation is not None

    @property
    def module(self) -> TrainModule:
        """The user's module.

        Raises:
            NotAvailableError: nothing has been run yet.
        """
        if self.given_module is None:
            raise NotAvailableError("this Trainer has run no module yet. Call trainer.fit(module).")
        return self.given_module

    @property
    def max_batches(self) -> int | float:
        """Largest number of micro-batches in a training epoch; infinity if unknown, 0 without a loader."""
        loader = self.train_loader
        if loader is None:
            return 0
        most = loader.limit if loader.length is None else loader.length
        return math.inf if most is None else most

    @property
    def accumulation_schedule(self) -> Any | None:
        """The `GradientAccumulationScheduler`; `None`: the accumulation window is the same in all epochs."""
        kind = load_callback("gradient_accumulation_scheduler")
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    def accumulation_in(self, epoch: int) -> int:
        """Number of micro-batches in an accumulation window of this epoch."""
        schedule = self.accumulation_schedule
        return self.accumulation if schedule is None else int(schedule.get_accumulate_grad_batches(epoch))

    def begin_accumulation(self) -> None:
        """Use the accumulation window of the current epoch."""
        if self.accumulation_schedule is not None:
            self.accumulation = self.accumulation_in(self.progress.current_epoch)
            self.accelerator.gradient_accumulation_steps = self.accumulation

    def request_safe_point(self) -> None:
        """Check for saves and signals at the next safe point; may be called by any thread.

        With several processes the step flags do that, so that all ranks check after the same step.
        """
        if not self.distributed:
            self.progress.safe_point_due = True

    def manual_backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`trainkit.TrainModule.manual_backward`."""
        if self.progress.should_log:
            self.progress.note_loss(loss)
        self.hooks.run("on_before_backward", loss)
        if is_overridden(self.module, "backward", ModuleHooks):
            kwargs["call"] = self.module.backward
        backward = (
            self.accelerator.backward if self.profiler is None else self.profiler.wrap("backward", self.accelerator.backward)
        )
        backward(loss, **kwargs)
        self.hooks.run("on_after_backward")

    @property
    def distributed(self) -> bool:
        """Whether there are several processes."""
        return self.strategy.world.size > 1

    @property
    def root_dir(self) -> str:
        """The folder that logs and checkpoints go under."""
        return str(self.arguments.default_root_dir)

    @property
    def torch_optimizers(self) -> list[Optimizer]:
        """Torch's optimizers, as `configure_optimizers` returned them."""
        return [prepared.optimizer for prepared in self.optimizers]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Every `ModelCheckpoint`."""
        kind = load_callback("model_checkpoint")
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The latest value of each metric, as callbacks see them: see `Trainer.callback_metrics`."""
        values, evaluated = dict(self.results.callback), self.results.evaluated
        # An evaluation has no value before its end, and in the hooks at its end an epoch has those of the epoch.
        if self.progress.stage is not None and self.evaluation is None and not self.metrics.previewed:
            values.update((name, value) for name, value in self.metrics.step_values().items() if name not in evaluated)
        return as_tensors(values)

    def emit(self, metrics: dict[str, float], for_step: bool, step: int | None = None) -> None:
        """Pass metrics to the loggers.

        Args:
            metrics: name → value.
            for_step: they are of a step and not of an epoch.
            step: of this optimizer step; default: the current one, or in an evaluation its batch.
        """
        progress, evaluating = self.progress, self.evaluation
        if progress.sanity_checking:
            return
        if step is None:
            step = evaluating.count if evaluating is not None and for_step else progress.global_step
        row = {"epoch": progress.current_epoch, **metrics}  # a module may log its own "epoch", and "step": the x axis
        own_step = take_step(row)
        step = step if own_step is None else own_step
        for logger in self.loggers:
            with logger._surviving(f"write the metrics of step {step}"):  # Loggers that override log_metrics are covered too.
                logger.log_metrics(row, step)

    def preview_metrics(self, hook: str) -> None:
        """Before a hook at the end of an epoch: callbacks and the module read the metrics of the epoch in it."""
        if hook in self.early_hooks:
            self.metrics.preview_epoch()

    def finish_metrics(self) -> None:
        """Reduce what was logged in the epoch that ends, before the callbacks that run last."""
        if self.evaluation is None:
            self.end_metrics_of_epoch()
        else:
            self.evaluation.finish()

    def end_metrics_of_epoch(self) -> None:
        """Reduce what was logged in the training epoch; note which values are of the current step."""
        store, step, computed = self.train_metrics, self.progress.global_step, self.progress.computed
        window = store.stamp - store.stamp % self.accumulation  # first micro-batch of the last one
        trained, present = set(store.step_values()), store.list_logged_since(window)
        ended = store.flush_epoch()
        for names, last in ((trained, step - 1), ((*present, *ended), step)):
            computed.update((name, last) for name in names if name not in self.results.evaluated)
        warn_shared_names(self, trained.union(ended))

    def find_logged_step(self, name: str) -> float:
        """The `global_step` in which a metric was logged last; infinity if that is unknown."""
        stamp = None if name in self.results.evaluated else self.train_metrics.last_stamp(name)
        if stamp is None:
            return self.find_computed_step(name)
        windows = self.progress.batch_idx // self.accumulation - stamp // self.accumulation
        return self.progress.global_step - windows

    def find_computed_step(self, name: str) -> float:
        """The `global_step` in which the value of an epoch or an evaluation was computed; infinity if that is unknown."""
        base, of_loader, index = name.partition("/dataloader_idx_")
        known = [self.progress.computed.get(key) for key in (name, f"{base}_epoch{of_loader}{index}")]
        return max((step for step in known if step is not None), default=math.inf)
