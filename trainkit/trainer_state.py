"""What a ``Trainer`` knows of its run: counters, metrics, loaders, and when things are due. Read by loops and callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.errors import ModuleError
from trainkit.metrics import MetricResults, MetricStore
from trainkit.registry import load_callback
from trainkit.setup_run import count_batches

if TYPE_CHECKING:
    import torch

    from trainkit.accelerator import Accelerator
    from trainkit.arguments import TrainerArguments
    from trainkit.callback import Callback
    from trainkit.datamodule import DataModule
    from trainkit.hooks import HookTable
    from trainkit.loggers import Logger
    from trainkit.module import TrainModule
    from trainkit.optimizer import PreparedOptimizer
    from trainkit.optimizer_config import SchedulerConfig
    from trainkit.plans import EvaluationPlan, FitPlan
    from trainkit.precision import Precision
    from trainkit.profiler import Profiler
    from trainkit.strategy import Strategy

__all__ = ["TrainerState"]


class TrainerState:
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

    arguments: TrainerArguments
    strategy: Strategy
    accelerator: Accelerator
    callbacks: list[Callback]
    loggers: list[Logger]
    profiler: Profiler | None
    inference_mode: bool
    seed: int
    hooks: HookTable
    metrics: MetricStore
    fit_plan: FitPlan
    val_plan: EvaluationPlan | None
    wrapped_module: torch.nn.Module
    flags: tuple[bool | str | None, bool | None, bool]
    compiler: Callable[..., Any] | None

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
        self.evaluation_sources: dict[str, list[Any]] = {}
        self.prepared_optimizers: list[PreparedOptimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.brought_callbacks: list[Callback] = []  # by the module's configure_callbacks
        self.displaced_callbacks: list[Callback] = []  # by those
        self.datamodule: DataModule | None = None
        self.active_plan: EvaluationPlan | None = None
        self.results = MetricResults()
        self._module: TrainModule | None = None
        self.plans: dict[str, EvaluationPlan | None] = {}

    @property
    def lightning_module(self) -> TrainModule:
        """The user's module (Lightning's name; ``model`` is the same).

        Raises:
            ModuleError: nothing has been run yet.
        """
        if self._module is None:
            raise ModuleError("this Trainer has run no module yet. Call trainer.fit(module).")
        return self._module

    @property
    def model(self) -> TrainModule:
        """The user's module."""
        return self.lightning_module

    @property
    def optimizers(self) -> list[Optimizer]:
        """Torch's optimizers, as ``configure_optimizers`` returned them."""
        return [prepared.optimizer for prepared in self.prepared_optimizers]

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
    def max_epochs(self) -> int:
        """Epochs at most; -1: no limit."""
        assert self.arguments.max_epochs is not None
        return self.arguments.max_epochs

    @property
    def max_steps(self) -> int:
        """Updates at most; -1: no limit."""
        return self.arguments.max_steps

    @property
    def min_epochs(self) -> int | None:
        """Epochs at least, whoever asks for a stop."""
        return self.arguments.min_epochs

    @property
    def min_steps(self) -> int | None:
        """Updates at least, whoever asks for a stop."""
        return self.arguments.min_steps

    @property
    def log_every_n_steps(self) -> int:
        """Updates from one log boundary to the next; 0: only epochs are logged."""
        assert self.arguments.log_every_n_steps is not None
        return self.arguments.log_every_n_steps

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs from one validation to the next."""
        return self.arguments.check_val_every_n_epoch

    @property
    def default_root_dir(self) -> str:
        """The folder that logs go under."""
        return str(self.arguments.default_root_dir)

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
        return self.stage == "fit" and self.batch_idx >= 0 and self.fit_plan.is_last(self.batch_idx)

    @property
    def fast_dev_run(self) -> bool:
        """Whether this is a trial run of a few batches."""
        return bool(self.arguments.fast_dev_run)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger, or the run's root folder without one."""
        return self.loggers[0].log_dir if self.loggers else str(self.arguments.default_root_dir)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Every metric logged so far, by name; with both ``on_step`` and ``on_epoch`` under all three names."""
        import torch

        values = dict(self.results.callback)
        if self.stage is not None:
            values.update(self.metrics.step_values())
        with torch.inference_mode(False):  # copied in it, what a validation computed becomes an ordinary tensor
            tensors = {name: v if isinstance(v, Tensor) else torch.tensor(v) for name, v in values.items()}
            return {name: v.clone() if v.is_inference() else v for name, v in tensors.items()}

    @property
    def logged_metrics(self) -> dict[str, float]:
        """What the loggers got last, by name."""
        return dict(self.results.logged)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What was logged with ``prog_bar=True``, as of the last log boundary or epoch's end."""
        return dict(self.results.progress_bar)

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of a training epoch; infinity where only its end tells."""
        plan = getattr(self, "fit_plan", None)
        return 0 if plan is None else math.inf if plan.length is None else plan.length

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader."""
        return count_batches(self.plans.get("validation"))

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader in the sanity check."""
        return count_batches(self.plans.get("sanity"))

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader."""
        return count_batches(self.plans.get("test"))

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each loader to predict on."""
        return count_batches(self.plans.get("predict"))

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader as the user gave it, or the list of them; ``None`` without one."""
        sources = self.evaluation_sources.get("validation", [])
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def test_dataloaders(self) -> Any:
        """The test loader as the user gave it, or the list of them; ``None`` without one."""
        sources = self.evaluation_sources.get("test", [])
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def predict_dataloaders(self) -> Any:
        """The loader to predict on as the user gave it, or the list of them; ``None`` without one."""
        sources = self.evaluation_sources.get("predict", [])
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of updates that a whole fit makes, for schedulers; infinity where that is not known.

        Raises:
            ModuleError: read before the training loader is known, which is when ``configure_optimizers`` is called.
        """
        if not hasattr(self, "fit_plan"):
            raise ModuleError(
                "estimated_stepping_batches is not known yet: the training loader is asked for after setup. Read it in "
                "configure_optimizers: OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)"
            )
        length, epochs = self.num_training_batches, self.max_epochs
        if epochs == -1 or math.isinf(length):
            return self.max_steps if self.max_steps != -1 else math.inf
        updates = math.ceil(length / self.accumulate_grad_batches) * epochs
        return updates if self.max_steps == -1 else min(updates, self.max_steps)

    @property
    def early_stopping_callback(self) -> Callback | None:
        """The first ``EarlyStopping``."""
        kind = load_callback("early_stopping")
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if getattr(callback, "is_progress_bar", False)), None)

    @property
    def steps_done(self) -> bool:
        """Whether ``max_steps`` is reached."""
        return -1 < self.arguments.max_steps <= self.global_step

    @property
    def may_stop(self) -> bool:
        """Whether ``min_epochs`` and ``min_steps`` are reached, so that ``should_stop`` counts."""
        enough_epochs = self.min_epochs is None or self.current_epoch >= self.min_epochs
        return enough_epochs and (self.min_steps is None or self.global_step >= self.min_steps)

    @property
    def finished(self) -> bool:
        """Whether training ends before the next epoch."""
        if self.steps_done or -1 < self.max_epochs <= self.current_epoch:
            return True
        return self.should_stop and self.may_stop

    def log_due(self, step: int) -> bool:
        """Whether update number ``step`` ends in a log boundary."""
        every = self.arguments.log_every_n_steps
        return every is not None and every > 0 and step % every == 0

    def validation_due(self, batch_idx: int, updated: bool) -> bool:
        """Whether to validate after this window."""
        arguments, plan = self.arguments, self.fit_plan
        if self.val_plan is None:
            return False
        if arguments.val_every_n_steps is not None:
            return updated and self.global_step % arguments.val_every_n_steps == 0
        if plan.validate_every is None:
            return False
        done = batch_idx + 1
        if arguments.check_val_every_n_epoch is None:
            done += plan.earlier_batches
        elif not self._epoch_validates():
            return False
        # an interval that ends inside a window is due when the window is full: the parameters are the same until then
        reached = done // plan.validate_every
        due = reached > plan.validated
        plan.validated = reached
        return due

    def validation_due_at_end(self) -> bool:
        """Whether to validate at the end of an epoch whose length was not known."""
        if self.val_plan is None or self.arguments.val_every_n_steps is not None:
            return False
        return self.fit_plan.validate_every is None and self._epoch_validates()

    def _epoch_validates(self) -> bool:
        every = self.arguments.check_val_every_n_epoch
        return every is not None and (self.current_epoch + 1) % every == 0
