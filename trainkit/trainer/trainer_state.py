"""What a ``Trainer`` knows of its run: counters, metrics, loaders, and when things are due. Read by loops and callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.optim import Optimizer

from trainkit.errors import ModuleError
from trainkit.metrics.results import MetricResults, as_tensors
from trainkit.metrics.saved_objects import count_updates
from trainkit.metrics.store import MetricStore
from trainkit.nested import batch_size
from trainkit.registry import load_callback
from trainkit.state.run import Phase, logger_states
from trainkit.trainer.due import Cadence
from trainkit.trainer.metric_notices import tell_shared_names
from trainkit.trainer.setup import count_batches
from trainkit.trainer.signals import Signals

if TYPE_CHECKING:
    import torch

    from trainkit.accelerator import Accelerator
    from trainkit.callback import Callback
    from trainkit.hooks.table import HookTable
    from trainkit.loggers import Logger
    from trainkit.module.data_module import DataModule
    from trainkit.module.train_module import TrainModule
    from trainkit.optim.optimizer_config import SchedulerConfig
    from trainkit.optim.prepared_optimizer import PreparedOptimizer
    from trainkit.precision import Precision
    from trainkit.strategy import Strategy
    from trainkit.trainer.arguments import TrainerArguments
    from trainkit.trainer.plans import EvaluationPlan, FitPlan
    from trainkit.trainer.profiler import Profiler
    from trainkit.trainer.resume import Found
    from trainkit.trainer.save_policy import Checkpointing
    from trainkit.trainer.step_flags import Control
    from trainkit.trainer.trainer import Trainer

__all__ = ["TrainerState"]


class TrainerState(Cadence):
    """Attributes and properties of :class:`trainkit.Trainer`.

    Attributes:
        global_step: optimizer updates.
        current_epoch: epochs completed, which is the number of the epoch that is running, from 0.
        batch_idx: number of the micro-batch in the epoch, -1 between epochs.
        should_stop: set it to end training after the next step, or at once if it is set in a validation or at an epoch's end.
        should_log: the window being worked on ends in a log boundary.
        stage: "fit", "validate", "test" or "predict"; ``None`` outside a run.
        sanity_checking: the few validation batches before training are running.
        validating: a validation is running.
        accumulate_grad_batches: micro-batches in an update.
        train_dataloader: the training loader as the user gave it.
        callbacks: the attached callbacks.
        loggers: the loggers.
        strategy: where the run runs.
        seed: the seed of the run.
    """

    _arguments: TrainerArguments
    strategy: Strategy
    accelerator: Accelerator
    callbacks: list[Callback]
    loggers: list[Logger]
    profiler: Profiler | None
    inference_mode: bool
    seed: int
    _seed_given: bool
    _hooks: HookTable
    _metrics: MetricStore  # where log goes now
    _train_metrics: MetricStore  # where it goes in training; an evaluation has a store of its own
    _fit_plan: FitPlan
    _val_plan: EvaluationPlan | None
    _wrapped_module: torch.nn.Module
    _flags: tuple[bool | str | None, bool | None, bool]
    _compiler: Callable[..., Any] | None
    _checkpointing: Checkpointing

    def __init__(self) -> None:
        self.global_step = 0
        self.current_epoch = 0
        self.batch_idx = -1
        self.should_stop = False
        self.should_log = False
        self.stage: str | None = None
        self.sanity_checking = False
        self.validating = False
        self.accumulate_grad_batches = 1
        self.train_dataloader: Any = None
        self._evaluation_sources: dict[str, list[Any]] = {}
        self._prepared_optimizers: list[PreparedOptimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self._brought_callbacks: list[Callback] = []  # by the module's configure_callbacks
        self._displaced_callbacks: list[Callback] = []  # by those
        self.datamodule: DataModule | None = None
        self._active_plan: EvaluationPlan | None = None
        self._results = MetricResults()
        self._module: TrainModule | None = None
        self._fitted: TrainModule | None = None  # the module of the last fit
        self._plans: dict[str, EvaluationPlan | None] = {}
        self._phase = Phase.STEP  # what of the current optimizer step is done
        self._attention = False  # there is a save or a signal to look at when the step is complete
        self._control: Control | None = (
            None  # exchanges stop requests and the like between the processes of a fit; None for one process
        )
        self._found: Found | None = None  # the checkpoint to resume from, until it is restored
        self._next_save_step: float = math.inf  # as _attention, from this global_step on
        self._ended = False  # the loop of this fit is over
        self._computed: dict[str, int] = {}  # metric → global_step at which its value of an epoch or an evaluation was computed
        self._told: set[str] = set()  # metrics of one name in training and validation that a notice named
        self._metric_updates: dict[str, int] | None = None  # of each torchmetrics object, when the running validation began
        self._states_of_loggers: list[dict[str, Any]] | None = None  # as the running validation began
        self._signals = Signals(lambda: None)

    def _look(self) -> None:
        """Look at saves and signals when the step is complete; may be called by any thread.

        Over several processes the next control word tells, and all of them look after the same step.
        """
        if self._control is None:
            self._attention = True

    def _checkpointing_now(self, weights_only: bool) -> Checkpointing:
        """What saves a checkpoint of this moment.

        Raises:
            ModuleError: there is nothing to be saved.
        """
        fitted = hasattr(self, "_fit_plan") and self._module is self._fitted
        if self._module is None or not (weights_only or fitted):
            raise ModuleError(
                "save_checkpoint saves a run, and this Trainer has had no fit of this module. Call trainer.fit(module, ...) "
                "first, or save the weights of a module that it has evaluated: save_checkpoint(path, weights_only=True)"
            )
        if not hasattr(self, "_checkpointing"):
            from trainkit.trainer.save_policy import Checkpointing

            self._checkpointing = Checkpointing(cast("Trainer", self))
        return self._checkpointing

    def _begin_validation(self, plan: EvaluationPlan, at_end: bool) -> None:
        """A validation in a fit begins."""
        self.validating = True
        plan.began = plan.count
        self._metric_updates = count_updates(self.lightning_module)
        self._states_of_loggers = logger_states(cast("Trainer", self))
        if not at_end:
            self._phase = Phase.VALIDATING

    def _evaluated(self, plan: EvaluationPlan) -> None:
        """The metrics of an evaluation are complete."""
        self._signals.follow_workers()
        if not self.sanity_checking:
            self._computed.update(dict.fromkeys(plan.results, self.global_step))

    def _end_metrics_of_epoch(self) -> None:
        """Reduce what was logged in the training epoch; note which values are of the present step."""
        store = self._train_metrics
        window = store.stamp - store.stamp % self.accumulate_grad_batches  # where the last one began
        trained, present = set(store.step_values()), store.logged_since(window)
        ended = store.flush_epoch()
        own = [name for name in (*present, *ended) if name not in self._results.evaluated]
        self._computed.update(dict.fromkeys(own, self.global_step))
        tell_shared_names(cast("Trainer", self), trained.union(ended))

    @property
    def lightning_module(self) -> TrainModule:
        """The user's module (Lightning's name; ``model`` is the same, and ``None`` before the first run).

        Raises:
            ModuleError: nothing has been run yet.
        """
        if self._module is None:
            raise ModuleError("this Trainer has run no module yet. Call trainer.fit(module).")
        return self._module

    @property
    def model(self) -> TrainModule | None:
        """The user's module; ``None`` before the first run."""
        return self._module

    @property
    def optimizers(self) -> list[Optimizer]:
        """Torch's optimizers, as ``configure_optimizers`` returned them."""
        return [prepared.optimizer for prepared in self._prepared_optimizers]

    @property
    def precision(self) -> Precision:
        """The precision of the strategy."""
        return self.strategy.precision

    @property
    def device(self) -> torch.device:
        """Where the module and the batches are."""
        return self.strategy.device

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.strategy.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that prints, logs and writes."""
        return self.strategy.is_main_process

    @property
    def default_root_dir(self) -> str:
        """The folder that logs go under."""
        return str(self._arguments.default_root_dir)

    @property
    def global_rank(self) -> int:
        """The number of this process among all."""
        return self.strategy.rank

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its machine."""
        return self.strategy.local_rank

    @property
    def training(self) -> bool:
        """Whether a fit is running and is not validating just now."""
        return self.stage == "fit" and not self.validating

    @property
    def sample_mask(self) -> Tensor:
        """See :attr:`trainkit.TrainModule.sample_mask`.

        Raises:
            ModuleError: no batch is being worked on.
        """
        import torch

        if self._active_plan is None and self.stage == "fit" and self._fit_plan.loader.samples is not None:
            return self._fit_plan.loader.sample_mask
        batch = self._metrics.batch if self.stage is not None else None
        if batch is None:
            raise ModuleError("self.sample_mask is of the batch that is being worked on, and there is none. Use it in a step.")
        return torch.ones(batch_size(batch), dtype=torch.bool, device=self.device)

    @property
    def testing(self) -> bool:
        """Whether ``test`` is running."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether ``predict`` is running."""
        return self.stage == "predict"

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch being trained on is known to be the last of its epoch."""
        return self.stage == "fit" and self.batch_idx >= 0 and self._fit_plan.is_last(self.batch_idx)

    @property
    def fast_dev_run(self) -> bool:
        """Whether this is a trial run of a few batches."""
        return bool(self._arguments.fast_dev_run)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger, or the run's root folder without one."""
        return self.loggers[0].log_dir if self.loggers else str(self._arguments.default_root_dir)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Every metric logged so far, by name; with both ``on_step`` and ``on_epoch`` under all three names.

        Of an evaluation only the values of the whole evaluation are here. A metric that training and validation log under
        one name is the validation's.
        """
        values, evaluated = dict(self._results.callback), self._results.evaluated
        if self.stage is not None and self._active_plan is None:  # an evaluation has no value before its end
            values.update((name, value) for name, value in self._metrics.step_values().items() if name not in evaluated)
        return as_tensors(values)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What the loggers got last, by name, as tensors on the CPU."""
        return as_tensors(self._results.logged)

    @property
    def progress_bar_metrics(self) -> dict[str, Tensor]:
        """What was logged with ``prog_bar=True``, as of the last log boundary or epoch's end, as tensors on the CPU."""
        return as_tensors(self._results.progress_bar)

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader."""
        return count_batches(self._plans.get("validation"))

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader in the sanity check."""
        return count_batches(self._plans.get("sanity"))

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader."""
        return count_batches(self._plans.get("test"))

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each loader to predict on."""
        return count_batches(self._plans.get("predict"))

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader as the user gave it, or the list of them; ``None`` without one."""
        sources = self._evaluation_sources.get("validation", [])
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def test_dataloaders(self) -> Any:
        """The test loader as the user gave it, or the list of them; ``None`` without one."""
        sources = self._evaluation_sources.get("test", [])
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def predict_dataloaders(self) -> Any:
        """The loader to predict on as the user gave it, or the list of them; ``None`` without one."""
        sources = self._evaluation_sources.get("predict", [])
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def early_stopping_callback(self) -> Callback | None:
        """The first ``EarlyStopping``."""
        kind = load_callback("early_stopping")
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first ``ModelCheckpoint``."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """Every ``ModelCheckpoint``."""
        kind = load_callback("model_checkpoint")
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if getattr(callback, "is_progress_bar", False)), None)
