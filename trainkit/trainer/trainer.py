"""`Trainer`: arguments → one run."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from trainkit.accelerator import Accelerator
from trainkit.callback import Callback
from trainkit.checks import accepts, describe_arguments
from trainkit.console import echo, notice
from trainkit.data.combined import as_passed
from trainkit.errors import ConfigurationError, ModuleError, NotAvailableError
from trainkit.launch.cluster_plugins import check_cluster_environments, take_cluster_environments
from trainkit.launch.strategy_choice import join_strategy, read_devices
from trainkit.loggers.run_files import utc_now
from trainkit.memory.estimate import RunEstimator
from trainkit.memory.report import PROCESSES, MemoryEstimate
from trainkit.metrics.store import as_tensors
from trainkit.metrics.values import read
from trainkit.module.activation_checkpointing import checkpointing_choice
from trainkit.module.data_module import DataModule
from trainkit.module.hook_table import HookTable
from trainkit.module.train_module import TrainModule
from trainkit.names import absent_attribute, refuse_unknown
from trainkit.nested import batch_size
from trainkit.paths import local_path
from trainkit.precision import Precision
from trainkit.registry import load_callback
from trainkit.rng import resolve_seed
from trainkit.trainer import train_loop as loop
from trainkit.trainer.arguments import (
    ArgumentView,
    TrainerArguments,
    assign_argument,
    attribute_errors,
    read_arguments,
    with_settings,
)
from trainkit.trainer.best_weights import check_best, check_validation, restore_best
from trainkit.trainer.eval_loop import check_sanity, evaluate, gather_predictions
from trainkit.trainer.explain import StartRecord, end_line, explain, folders_line, results_table
from trainkit.trainer.lifecycle import (
    agree_on_signals,
    attach_callbacks,
    attach_loggers,
    build_hooks,
    checked_callbacks,
    interruptible,
    refuse_datamodule,
    refuse_evaluation,
    running,
    set_up,
    start_loggers,
)
from trainkit.trainer.lightning_views import ConnectorView, FitLoopView
from trainkit.trainer.loaders import train_loader, warn_of_no_batch
from trainkit.trainer.notices import announce_fit, warn_eval_mode
from trainkit.trainer.profiler import PASS_THROUGH, Profiler, make_profiler
from trainkit.trainer.resume import begin_resume, best_of_fit, check_restore, load_weights, restore_fit
from trainkit.trainer.run import Run
from trainkit.trainer.save_policy import SavePolicy
from trainkit.trainer.setup import count_batches, prepare_evaluation, prepare_training, read_compilation, refresh_train_loader
from trainkit.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from trainkit.trainer.trial import run_trial

if TYPE_CHECKING:
    from trainkit.loggers import Logger
    from trainkit.optim.optimizer_config import SchedulerConfig

__all__ = ["Trainer"]

# The arguments of validate and test.
_EVALUATION_ARGUMENTS = ("model", "dataloaders", "ckpt_path", "verbose", "datamodule", "strict")


class Trainer:
    """Runs a `TrainModule`: trains it with `fit`, and evaluates it with `validate`, `test` and `predict`.

    All arguments are keywords. An argument of Lightning's that is not here is an error that names what to use, unless it
    has Lightning's default, such as `plugins=None`.

    Raises:
        ConfigurationError: An argument is wrong, unknown or unsupported, or contradicts another.

    Example:
        ```python
        trainer = Trainer(max_epochs=10, precision="bf16-mixed", gradient_clip_val=1.0)
        trainer.fit(module, train_loader, val_loader)
        trainer.test(module, test_loader, ckpt_path="best")
        ```
    """

    @accepts(TrainerArguments)
    def __init__(self, **arguments: Any) -> None:
        environments = take_cluster_environments(arguments)
        arguments = read_arguments(arguments)
        values, notes = with_settings(arguments)
        resolved = TrainerArguments.from_values(values)
        devices = read_devices(values["accelerator"], values["devices"], arguments["num_nodes"])
        with attribute_errors(arguments):
            place = values["strategy"], devices, arguments["sync_batchnorm"], values["precision"]
            self.strategy = join_strategy(*place, resolved.of_step, notes)
        check_cluster_environments(environments, self.strategy)
        compilation = read_compilation(arguments["compile"], self.strategy)
        self._run = Run.before_the_first(resolved, self.strategy, arguments["seed"], compilation)
        self._gpus = devices.indices
        self._flags = arguments["deterministic"], arguments["benchmark"], arguments["detect_anomaly"]
        self._run.inference_mode = arguments["inference_mode"]
        self._run.profiler = make_profiler(arguments["profiler"])
        self._run.loggers = attach_loggers(self, arguments["logger"])
        self._module_callbacks, self._replaced_callbacks = [], []
        additions = (arguments[f"enable_{name}"] for name in ("progress_bar", "model_summary", "checkpointing"))
        self._run.callbacks = attach_callbacks(self, arguments["callbacks"], *additions)

    _assigned_ckpt_path: str | Path | None = None
    _assigned_datamodule: DataModule | None = None
    _module_callbacks: list[Callback]  # Callbacks that configure_callbacks has returned.
    _replaced_callbacks: list[Callback]  # Callbacks that these have replaced.

    # ------------------------------------------------------------------------------------- arguments, as they were resolved

    max_epochs = ArgumentView[int]()
    min_epochs = ArgumentView[int | None]()
    max_steps = ArgumentView[int]()
    min_steps = ArgumentView[int | None]()
    limit_train_batches = ArgumentView[int | float]()
    limit_val_batches = ArgumentView[int | float]()
    limit_test_batches = ArgumentView[int | float]()
    limit_predict_batches = ArgumentView[int | float]()
    overfit_batches = ArgumentView[int | float]()
    val_check_interval = ArgumentView[int | float | timedelta]()
    check_val_every_n_epoch = ArgumentView[int | None]()
    num_sanity_val_steps = ArgumentView[int]()
    log_every_n_steps = ArgumentView[int]()
    reload_dataloaders_every_n_epochs = ArgumentView[int]()
    fast_dev_run = ArgumentView[int | bool](fixed=True)
    gradient_clip_val = ArgumentView[float | None](fixed=True)
    gradient_clip_algorithm = ArgumentView[str | None](fixed=True)

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        restore: Collection[str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        strict: bool = True,
        **unknown: Any,
    ) -> None:
        """Train a module: a new run from step 0 with the module's current parameters, or a resumed run.

        Args:
            model: The module to train.
            train_dataloaders: A `DataLoader`, any iterable of batches, a dict or list of loaders (trained on together), or
                a `DataModule`. Default: what `train_dataloader` of the data module or the module returns.
            val_dataloaders: One validation loader or a list. Default: what `val_dataloader` returns, if it is defined.
            datamodule: A `DataModule`, instead of loaders.
            ckpt_path: Resume from this checkpoint. `"auto"`: the newest valid checkpoint of the runs of this module below
                `default_root_dir`, or a new run if there is none. `"last"`: the same, but an error if there is none.
                `"best"`: the best one of `ModelCheckpoint`, of this trainer's fit or in the `dirpath` that it was given. Or a
                path. `"auto"` and `"last"` name a damaged checkpoint and use the next older one; otherwise it is an error.
            restore: Restore only these parts: `"model"`, `"optimizer"`, `"scheduler"`, `"scaler"`, `"loop"` (counters,
                position in the data, metrics), `"callbacks"`, `"loggers"`. Default: all.
            overrides: Optimizer options that replace the restored ones, such as `{"lr": 1e-4}`. With a schedule, `lr` is
                its initial value, and the rest of the schedule is scaled.
            strict: A name that is missing in the checkpoint or in the model is an error. `False`: a notice lists these
                names, and the optimizer starts without state for parameters that were not saved. Different shapes are
                always an error.

        Raises:
            ModuleError: The module lacks something. Raised before training starts.
            DataError: A loader cannot be used. Raised before training starts.
            ConfigurationError: An argument is wrong. Raised before training starts.
            CheckpointError: Before training, the checkpoint is missing or damaged, or does not fit. Later, three saves in a
                row failed.
            Preempted: SIGTERM, SIGUSR1 or SIGHUP stopped the run, which saved a checkpoint. It is a `SystemExit` with code
                143.
            KeyboardInterrupt: Ctrl-C stopped the run. The step was completed and saved.
        """
        known = ["model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "restore", "overrides", "strict"]
        refuse_unknown("Trainer.fit", unknown, known)
        if isinstance(train_dataloaders, DataModule) and datamodule is None:
            train_dataloaders, datamodule = None, train_dataloaders
        ckpt_path = self._assigned_ckpt_path if ckpt_path is None else ckpt_path
        components = check_restore(ckpt_path, restore, overrides, strict)
        loaders, began = (train_dataloaders, val_dataloaders), utc_now()
        with interruptible(self) as signals, running(self, "fit", model, datamodule, *loaders, signals=signals) as run:
            saves = run.save_policy
            assert saves is not None  # each fit has them
            run.user_loaders = loaders
            check_best(run.arguments, run.callbacks)  # configure_callbacks may have replaced some
            begin_resume(run, saves, ckpt_path, components, chosen=restore is not None, strict=strict)
            set_up(self, run)
            loader = train_loader(run, train_dataloaders)
            run.limit_epochs()
            if loader.limit == 0 or self.max_epochs == 0 or self.max_steps == 0:
                run.train_loader = None  # Without a loader, nothing can be saved that could not be resumed.
                notice("nothing to train: max_epochs, max_steps or limit_train_batches is 0.")
                return
            run.validation = prepare_evaluation(run, "validation", val_dataloaders)
            check_validation(run)
            build_hooks(self, run)
            training = prepare_training(run, loader, saves.safe_points)
            resumed = restore_fit(run, training, components, overrides or {}, strict)
            if loader.length == 0:
                warn_of_no_batch(loader)
                return
            run.note_start()
            start_loggers(run)
            saves.begin()
            run.start_record = StartRecord(run, ckpt_path, began)
            announce_fit(run, training.optimizer)
            run.hooks.run("on_fit_start")
            if not resumed:
                check_sanity(run)
            warn_eval_mode(run.module)
            loop.begin_training(run, training)
            while loop.training_continues(run):
                training = refresh_train_loader(run, training)
                loop.train_epoch(run, training)
            loop.end_training(run)
            agree_on_signals(run)
            restore_best(run)
            run.hooks.run("on_fit_end")
            agree_on_signals(run)
        notice(" ".join(filter(None, (end_line(self), folders_line(self)))))

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        *,
        strict: bool = True,
        **unknown: Any,
    ) -> list[dict[str, float]]:
        """Run the validation loop once.

        Args:
            model: The module. Default: the one that this trainer ran last.
            dataloaders: One loader, a list, or a `DataModule`.
            ckpt_path: Load the weights of this checkpoint: a path, `"best"`, `"last"` or `"auto"`, as in `fit`. They stay
                in the module. Default: use the weights as they are.
            verbose: Print the metrics.
            datamodule: A `DataModule`, instead of loaders.
            strict: A name that is missing in the checkpoint or in the model is an error; `False`: a notice lists these
                names.

        Returns:
            One dict for each loader: the name of each metric → its value.
        """
        refuse_unknown("Trainer.validate", unknown, _EVALUATION_ARGUMENTS)
        _check_switch("verbose", verbose)
        return _evaluate(self, "validate", "validation", model, dataloaders, datamodule, verbose, ckpt_path, strict)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        *,
        strict: bool = True,
        **unknown: Any,
    ) -> list[dict[str, float]]:
        """Run the test loop once.

        Args:
            model: As in `validate`.
            dataloaders: As in `validate`.
            ckpt_path: As in `validate`.
            verbose: As in `validate`.
            datamodule: As in `validate`.
            strict: As in `validate`.

        Returns:
            One dict for each loader: the name of each metric → its value.
        """
        refuse_unknown("Trainer.test", unknown, _EVALUATION_ARGUMENTS)
        _check_switch("verbose", verbose)
        return _evaluate(self, "test", "test", model, dataloaders, datamodule, verbose, ckpt_path, strict)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = True,
        ckpt_path: str | Path | None = None,
        *,
        strict: bool = True,
        **unknown: Any,
    ) -> list[Any] | None:
        """Collect what `predict_step` returns for each batch.

        With several processes each of them returns the predictions for all batches, in the order of the data. Predictions
        that are not made of tensors must then be picklable.

        Args:
            model: The module. Default: the one that this trainer ran last.
            dataloaders: One loader, a list, or a `DataModule`.
            datamodule: A `DataModule`, instead of loaders.
            return_predictions: `False` keeps and gathers nothing, for callbacks that write the predictions, such as
                `PredictionWriter`. `None` means `True`.
            ckpt_path: As in `validate`.
            strict: As in `validate`.

        Returns:
            A list with the prediction for each batch; with several loaders, a list of these lists. `None` with
            `return_predictions=False`.
        """
        known = ["model", "dataloaders", "datamodule", "return_predictions", "ckpt_path", "strict"]
        refuse_unknown("Trainer.predict", unknown, known)
        return_predictions = return_predictions is None or return_predictions
        _check_switch("return_predictions", return_predictions)
        _evaluate(self, "predict", "predict", model, dataloaders, datamodule, False, ckpt_path, strict, return_predictions)
        evaluation = self._run.evaluations.get("predict")
        if not return_predictions or evaluation is None:
            return None
        outputs, evaluation.outputs = evaluation.outputs, []
        return outputs[0] if len(outputs) == 1 else outputs

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, *, blocking: bool = True) -> None:
        """Save a checkpoint of this moment to a folder. A checkpoint that exists there is replaced.

        It is not replaced by one whose parameters are not finite if its own are: that one is saved to `<filepath>-nonfinite`.

        Call it from any hook or after `fit`. A run that resumes from it does what was left of the step. Inside an
        accumulation window, the position at the start of the window is saved, and the window is repeated. During a
        validation, the whole validation is repeated. In `on_train_epoch_end`, that hook is called again, also for callbacks
        that it had been called for.

        Every rank must call it.

        Args:
            filepath: The folder that becomes the checkpoint. An empty file that exists there, such as a temporary one, becomes
                a file as `ModelCheckpoint(also="ckpt")` writes it, with the state of optimizers and schedules: a run resumes
                from it at the start of the epoch, without that of callbacks and loggers. Where `import lightning` gives
                trainkit's names, `x.ckpt`, `.pt`, `.pth`, `.bin` or `.tar` becomes a file of the weights, and the folder `x`
                the checkpoint; `x.pt.folder` if `x` is something else, or the checkpoint of another file.
            weights_only: Save the model only, without optimizers, schedulers, counters and callbacks. It cannot be resumed.
                Always so, with a notice, if this Trainer has evaluated the module and not trained it.
            blocking: Return when the checkpoint is complete on disk. `False`: return when the state is copied; a thread
                writes it. If it cannot be written, the next step warns or the next save does; at the latest the program
                prints the error when it ends.

        Raises:
            CheckpointError: `filepath` is something other than a checkpoint; or, if `blocking`, it cannot be written.
            CollectiveError: A rank did not call it; the message names the lines of code.
            UnsavableError: A value cannot be stored; the message names the path to it.
        """
        path = local_path(filepath, "filepath")
        self.accelerator.collective_checks.wait("trainer.save_checkpoint")
        run = self._run
        if run.given_module is None:
            raise ModuleError("save_checkpoint saves what was run. Call trainer.fit(module, ...) first.")
        if not weights_only and (run.train_loader is None or run.given_module is not run.fitted):
            weights_only = True
            notice("this Trainer has not run fit with the module, so save_checkpoint saves its weights only.")
        elif not weights_only and run.restored is not None:
            weights_only = True
            notice(
                f"the module has the weights of {run.restored} (restore_best), and the optimizer is that of the last step, so "
                "save_checkpoint saves the weights only. To resume, use the last checkpoint: fit(..., ckpt_path='last')"
            )
        if run.save_policy is None:
            run.save_policy = SavePolicy(run)
        run.save_policy.save_to(path, weights_only=weights_only, blocking=blocking)

    def release_save_buffers(self) -> None:
        """Free the host memory that asynchronous saves keep for their copies, until the next one allocates it again.

        Call it in a hook, before something else in a fit needs that memory: on each rank as much as the part of the state
        that it writes. It waits for a save in flight. The end of a fit frees it too. Every rank must call it.

        Raises:
            CheckpointError: The save in flight could not be written, and it was the third failure in a row.
        """
        if self._run.save_policy is not None:
            self._run.save_policy.release_buffers()

    def explain(self, module: TrainModule | None = None) -> str:
        """Print how the arguments were resolved, when the run logs, validates and saves, and which object handles which hook.

        Args:
            module: The module that will be trained. Default: the one that this trainer ran last.

        Returns:
            The text.
        """
        text = explain(self, module if module is not None else self._run.given_module)
        self.print(text)
        return text

    def plan(
        self,
        module: TrainModule,
        train_dataloaders: Any = None,
        *,
        processes: Sequence[int] = PROCESSES,
        per_host: int | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
    ) -> MemoryEstimate:
        """Print how much memory each strategy needs to train a module, and the smallest one that fits.

        Nothing is trained, and nothing of the module's size is allocated. The module may be built under
        `torch.device("meta")`; `configure_model` runs there, on a copy. The text below the table says what is counted and
        what is not. To count activations, `training_step` and its backward run once on a copy of the module and of a batch,
        with tensors that have a shape but no values (`FakeTensor`).

        Args:
            module: The module that would be trained. It is not changed.
            train_dataloaders: What `fit` accepts; its first batch is read. Default: what `train_dataloader` of the module
                returns. Without any, or if the step reads values of tensors, the plan has no activations and says why.
            processes: Numbers of processes to plan for.
            per_host: Maximum number of these processes on one node. Default: all of them.
            device_memory: Memory of a device: a number of bytes, or `"80G"` (GiB). Default: that of this trainer's GPU.
            host_memory: Memory of a node, in the same form. Default: that of this node.

        Returns:
            The estimate, whose text was printed.

        Raises:
            ModuleError: The module cannot be planned.
            OptimizerError: Its optimizer cannot be planned.
            ConfigurationError: A number is out of range.
        """
        limits = (processes, per_host, device_memory, host_memory)
        estimate = self._memory_estimator().estimate(module, train_dataloaders, *limits)
        self.print(estimate)
        return estimate

    def _memory_estimator(self) -> RunEstimator:
        arguments, schedule = self._arguments, self._run.accumulation_schedule
        checkpointing = checkpointing_choice(arguments.activation_checkpointing)
        return RunEstimator(
            trainer=self,
            strategy=self.strategy,
            window=max([arguments.accumulation] if schedule is None else schedule.scheduling.values()),
            checkpointing=checkpointing if self.stage is None else None,  # a run has applied it to its module
            max_steps=arguments.max_steps,
            stage=TrainerFn.FITTING,
        )

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """A context in which a module is created on the device and in the dtype of the run; under ZeRO-3 in shards.

        `configure_model` of the module runs in such a context by itself.

        Args:
            empty_init: Skip the random initialization of torch's layers, for a module whose weights are loaded. `None` means
                `False`.

        Raises:
            ConfigurationError: `empty_init=True` with a strategy that shards parameters.

        Example:
            ```python
            with trainer.init_module():
                module = MyModule()
            ```
        """
        if empty_init and self.strategy.shards_parameters:
            raise ConfigurationError(
                f"init_module(empty_init=True) does not work with {self.strategy.where}, which shards parameters as they are "
                "created. Use trainer.init_module()"
            )
        strategy, empty = self.strategy, _Uninitialized() if empty_init else nullcontext()
        with strategy.building(), strategy.precision.init_context(), self.device, empty:
            yield

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process only, above the progress bar; the arguments are those of `print`."""
        if not self.is_global_zero:
            return
        bar: Any = self.progress_bar_callback
        (echo if bar is None else bar.print)(*args, **kwargs)

    # ---------------------------------------------------------------------------------------------------- what can be read

    @property
    def stage(self) -> str | None:
        """`"fit"`, `"validate"`, `"test"` or `"predict"`; `None` outside a run."""
        return self._run.progress.stage

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far."""
        return self._run.progress.global_step

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch, from 0; after a fit, number of completed epochs."""
        return self._run.progress.current_epoch

    @property
    def batch_idx(self) -> int:
        """Index of the current micro-batch in the epoch; -1 between epochs."""
        return self._run.progress.batch_idx

    @property
    def should_stop(self) -> bool:
        """Set it to `True` to end training after the next optimizer step, or at once in a validation or at the end of an
        epoch.

        One process is enough: all stop after the same step.
        """
        return self._run.progress.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._run.progress.should_stop = bool(stop)  # callbacks assign numpy's booleans too, which no collective takes

    @property
    def fit_loop(self) -> FitLoopView:
        """Limits of a fit under Lightning's names; after `trainer.fit_loop.max_epochs = n` the next fit continues."""
        return FitLoopView(self)

    @property
    def _accelerator_connector(self) -> ConnectorView:
        return ConnectorView(self)

    @property
    def should_log(self) -> bool:
        """Whether the current accumulation window ends at a log boundary."""
        return self._run.progress.should_log

    @property
    def state(self) -> TrainerState:
        """What the Trainer is doing: its `status`, `fn` and `stage`, see `trainkit.trainer.states.TrainerState`."""
        return self._run.progress.state

    @property
    def training(self) -> bool:
        """Whether a fit is running, but none of its validations."""
        return self._run.progress.running_stage is RunningStage.TRAINING

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation batches before training are running."""
        return self._run.progress.running_stage is RunningStage.SANITY_CHECKING

    @property
    def validating(self) -> bool:
        """Whether a validation is running, of a fit or of `validate`, but not the sanity check."""
        return self._run.progress.running_stage is RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        """Whether `test` is running."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether `predict` is running."""
        return self.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether a validation, a test or the sanity check is running."""
        stage = self._run.progress.running_stage
        return stage is not None and stage.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether an exception ended the last run, such as that of a signal."""
        return self.state.status is TrainerStatus.INTERRUPTED

    @property
    def received_sigterm(self) -> bool:
        """Whether this fit has received SIGTERM. It ends when the step is complete and saved."""
        return self._run.signals.received == signal.SIGTERM

    @property
    def enable_validation(self) -> bool:
        """Whether this fit validates: it has validation data and a `validation_step`."""
        return self._run.validation is not None

    @property
    def ckpt_path(self) -> str | Path | None:
        """The checkpoint that the run has loaded; `None` if it has loaded none.

        A path or word that you assign is used by every run that is called without `ckpt_path`, until you assign `None`.
        """
        return self._run.ckpt_path or self._assigned_ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, ckpt_path: str | Path | None) -> None:
        self._assigned_ckpt_path = self._run.ckpt_path = ckpt_path

    @property
    def lightning_module(self) -> TrainModule:
        """The user's module, under Lightning's name; `model` is the same.

        Raises:
            NotAvailableError: Nothing has been run yet.
        """
        return self._run.module

    @property
    def model(self) -> TrainModule | None:
        """The user's module; `None` before the first run."""
        return self._run.given_module

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the run; `None` without one.

        One that you assign is used by the runs that get no loaders and no data module and whose module defines none, until you
        assign `None` or a run gets another one. Assign it between runs only.
        """
        return self._run.datamodule if self._assigned_datamodule is None else self._assigned_datamodule

    @datamodule.setter
    def datamodule(self, datamodule: DataModule | None) -> None:
        if self.stage is not None:
            raise ConfigurationError(
                "trainer.datamodule cannot change during a run, whose loaders are fixed. Assign it before: "
                f"trainer.datamodule = {type(datamodule).__name__}(...)"
            )
        refuse_datamodule(datamodule)
        self._assigned_datamodule = datamodule

    @property
    def accelerator(self) -> Accelerator:
        """The `Accelerator` of the run, whose methods the training loop calls."""
        return self._run.accelerator

    @property
    def seed(self) -> int:
        """The seed of order, augmentation and dropout; a resumed run uses that of its checkpoint.

        Assign it between runs only.
        """
        return self._run.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        if self.stage is not None:
            raise ConfigurationError("the seed cannot change during a run. Assign it before: trainer.seed = 42")
        self._run.seed, self._run.seed_given = resolve_seed(seed), True

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks; during a run also those of the module's `configure_callbacks`."""
        return self._run.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        self._run.callbacks = checked_callbacks(callbacks)

    @property
    def loggers(self) -> list[Logger]:
        """The loggers."""
        return self._run.loggers

    @loggers.setter
    def loggers(self, loggers: list[Logger]) -> None:
        self._run.loggers = attach_loggers(self, loggers or [])

    @property
    def logger(self) -> Logger | None:
        """The first logger, or `None`. Assign one to replace all loggers."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def profiler(self) -> Profiler:
        """The profiler; without one, a `PassThroughProfiler`, so that `trainer.profiler.profile("name")` always works.

        Assigning another one takes effect in the next run.
        """
        return PASS_THROUGH if self._run.profiler is None else self._run.profiler

    @profiler.setter
    def profiler(self, profiler: str | Profiler | None) -> None:
        self._run.profiler = make_profiler(profiler)

    @property
    def inference_mode(self) -> bool:
        """Whether `validate`, `test` and `predict` run under `torch.inference_mode` instead of `torch.no_grad`."""
        return self._run.inference_mode

    @inference_mode.setter
    def inference_mode(self, inference_mode: bool) -> None:
        self._run.inference_mode = inference_mode

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of micro-batches in an accumulation window of the current epoch. Assign it between runs only."""
        return self._run.accumulation

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, micro_batches: int) -> None:
        assign_argument(self, "accumulate_grad_batches", micro_batches)

    @property
    def train_dataloader(self) -> Any:
        """The training loader, or the dict or list of loaders, as the user passed it; `None` before a fit."""
        return as_passed([self._run.train_source])

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The schedulers of the fit, each with its `scheduler`, `interval`, `frequency` and `monitor`."""
        return self._run.schedulers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers as `configure_optimizers` returned them."""
        return self._run.torch_optimizers

    @property
    def precision(self) -> str:
        """The name of the precision, such as `"bf16-mixed"`; `precision_plugin` is the object."""
        return self.strategy.precision.name

    @property
    def precision_plugin(self) -> Precision:
        """The `Precision` of the strategy."""
        return self.strategy.precision

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of `"16-mixed"`; `None` with other precisions."""
        return self.strategy.precision.scaler

    @property
    def device(self) -> torch.device:
        """The device of the module and the batches."""
        return self.strategy.device

    @property
    def world_size(self) -> int:
        """Number of processes; where one process uses several devices (XLA), number of devices."""
        return self.strategy.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process (rank 0), which prints, logs and writes."""
        return self.strategy.is_main_process

    @property
    def default_root_dir(self) -> str:
        """The folder of logs and checkpoints."""
        return str(self._arguments.default_root_dir)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.strategy.num_nodes

    @property
    def node_rank(self) -> int:
        """The index of this process's node."""
        return self.strategy.node_rank

    @property
    def device_ids(self) -> list[int]:
        """The indices of the devices on this node."""
        world = self.strategy.world
        devices = world.local_size * world.devices
        if devices == 1:
            return [self.device.index or 0]
        return list(range(devices)) if self._gpus is None else list(self._gpus)

    @property
    def num_devices(self) -> int:
        """Number of devices on this node."""
        return len(self.device_ids)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """Arguments for a `DistributedSampler` of yours, `num_replicas` and `rank`; `None` with one process.

        You need none: loaders are sharded by position.
        """
        data = self.strategy.data_world
        return None if data.size == 1 else {"num_replicas": data.size, "rank": data.rank}

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return self.strategy.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self.strategy.local_rank

    @property
    def sample_mask(self) -> Tensor:
        """Which samples of the current batch are real, see `TrainModule.sample_mask`.

        Raises:
            NotAvailableError: There is no current batch.
        """
        run = self._run
        loader = run.train_loader if run.evaluation is None and self.stage == "fit" else None
        if loader is not None and loader.samples is not None:
            return loader.sample_mask
        batch = run.metrics.batch if self.stage is not None else None
        if batch is None:
            raise NotAvailableError(
                "self.sample_mask belongs to the current batch, and there is none. Use it in training_step."
            )
        return torch.ones(batch_size(batch), dtype=torch.bool, device=self.device)

    @property
    def is_last_batch(self) -> bool:
        """Whether the current micro-batch is the last of its epoch; `False` if the loader has no length.

        Between epochs and after training: whether the epoch before is complete.
        """
        progress, loader = self._run.progress, self._run.train_loader
        if progress.batch_idx < 0:
            return progress.current_epoch > 0 and progress.epoch_start == 0
        length = None if loader is None else loader.length
        return length is not None and progress.batch_idx + 1 >= length

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger; without a logger or in a `fast_dev_run`, `default_root_dir`."""
        return self.loggers[0].log_dir if self.loggers and not self.fast_dev_run else self.default_root_dir

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Every metric logged so far, by name; with both `on_step` and `on_epoch` under all three names.

        A metric logged in an evaluation has the value of the whole evaluation. In the hooks at the end of an epoch or an
        evaluation, the values are those of all its batches; what these hooks log is added after them. If training and
        validation log the same name, the value is that of the validation.
        """
        return self._run.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The latest values passed to the loggers, by name, as tensors on the CPU."""
        return as_tensors(self._run.results.logged)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The latest value of each metric logged with `prog_bar=True`, as floats: in training those of this process."""
        run = self._run
        waiting = {} if run.strategy.lazy_tensors else run.train_metrics.in_bar()  # reading one would run a part of a step
        values = {**run.results.progress_bar, **waiting}
        return dict(zip(values, read(list(values.values())), strict=True))

    @property
    def num_val_batches(self) -> list[int | float]:
        """Number of batches of each validation loader."""
        return count_batches(self._run.evaluations.get("validation"))

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Number of batches of each validation loader in the sanity check."""
        steps = self.num_sanity_val_steps
        return [batches if steps == -1 else min(steps, batches) for batches in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """Number of batches of each test loader."""
        return count_batches(self._run.evaluations.get("test"))

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Number of batches of each loader of `predict`."""
        return count_batches(self._run.evaluations.get("predict"))

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader as the user passed it, or the list of them; `None` without one."""
        return as_passed(self._run.evaluation_sources.get("validation", []))

    @property
    def test_dataloaders(self) -> Any:
        """The test loader as the user passed it, or the list of them; `None` without one."""
        return as_passed(self._run.evaluation_sources.get("test", []))

    @property
    def predict_dataloaders(self) -> Any:
        """The loader of `predict` as the user passed it, or the list of them; `None` without one."""
        return as_passed(self._run.evaluation_sources.get("predict", []))

    @property
    def early_stopping_callback(self) -> Callback | None:
        """The first `EarlyStopping`, or `None`."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Callback]:
        """Every `EarlyStopping`."""
        kind = load_callback("early_stopping")
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first `ModelCheckpoint`, or `None`."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """Every `ModelCheckpoint`."""
        kind = load_callback("model_checkpoint")
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The progress bar, or `None`."""
        return next((callback for callback in self.callbacks if getattr(callback, "is_progress_bar", False)), None)

    @property
    def num_training_batches(self) -> int | float:
        """Maximum number of micro-batches in a training epoch; infinite for a loader without a length."""
        return self._run.max_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Number of optimizer steps of the whole fit, for schedulers; infinite for a loader without a length.

        Read it in `configure_optimizers`.

        Raises:
            NotAvailableError: Read before the training loader is known.
        """
        if self._run.train_loader is None:
            raise NotAvailableError(
                "estimated_stepping_batches is not known yet: the training loader is created after setup. Read it in "
                "configure_optimizers: OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)"
            )
        length, epochs = self.num_training_batches, self.max_epochs
        if epochs == -1 or math.isinf(length):
            return self.max_steps if self.max_steps != -1 else math.inf
        updates = math.ceil(length / self.accumulate_grad_batches) * epochs
        if self._run.accumulation_schedule is not None:
            updates = sum(math.ceil(length / self._run.accumulation_in(epoch)) for epoch in range(epochs))
        return updates if self.max_steps == -1 else min(updates, self.max_steps)

    # ---------------------------------------------------------------------------------------------------- for this package

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property has raised an AttributeError: show that
                return object.__getattribute__(self, name)
            raise absent_attribute(self, "trainer", "a Trainer", name)

    @property
    def _arguments(self) -> TrainerArguments:
        """The numbers among its arguments, with defaults filled in."""
        return self._run.arguments

    def _hook_owners(self, module: TrainModule) -> dict[str, tuple[str, ...]]:
        """For each hook the classes that handle it, in order."""
        return HookTable(self, module, self.callbacks).owners

    @property
    def _save_policy(self) -> SavePolicy:
        """What saves the checkpoints of the fit; it exists from the start of a fit on."""
        if self._run.save_policy is None:
            raise NotAvailableError("this Trainer saves checkpoints only in a fit. Call trainer.fit(module) first.")
        return self._run.save_policy

    def _run_trial(self, stage: str, module: TrainModule, callback: Callback, **options: Any) -> Trainer:
        """A short run on a copy of the module, for `trainkit.tuner`; see `run_trial`."""
        return run_trial(self, stage, module, callback, **options)


Trainer.__doc__ = describe_arguments(Trainer.__doc__, TrainerArguments)


class _Uninitialized(TorchFunctionMode):
    """In this context the random initialization of torch's layers is skipped.

    Functions of `torch.nn.init` that torch lets a mode replace return their tensor unchanged.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _check_switch(name: str, value: Any) -> None:
    """Refuse a value that is not True or False, most likely another argument that was passed by position."""
    if isinstance(value, str) or value not in (True, False):
        raise ConfigurationError(
            f"{name} must be True or False, not {value!r}. If you mean another argument, pass it by name, such as "
            "ckpt_path='last' or datamodule=data."
        )


def _evaluate(
    trainer: Trainer,
    stage: str,
    name: str,
    module: TrainModule | None,
    dataloaders: Any,
    datamodule: DataModule | None,
    verbose: bool,
    ckpt_path: str | Path | None,
    strict: bool,
    keeps: bool = False,
) -> list[dict[str, float]]:
    """Run one evaluation: "validate" is the stage, "validation" the name."""
    ckpt_path = trainer._assigned_ckpt_path if ckpt_path is None else ckpt_path
    check_restore(ckpt_path, None, None, strict)
    if module is None:
        module = trainer.lightning_module
        ckpt_path = best_of_fit(trainer._run, stage) if ckpt_path is None else ckpt_path
    if isinstance(dataloaders, DataModule) and datamodule is None:
        dataloaders, datamodule = None, dataloaders
    with running(trainer, stage, module, datamodule, dataloaders) as run:
        run.user_loaders = (None, dataloaders)
        set_up(trainer, run)
        evaluation = prepare_evaluation(run, name, dataloaders, keeps=keeps)
        if evaluation is None:
            refuse_evaluation(run, stage, name)
            return []
        build_hooks(trainer, run)
        if ckpt_path is not None:
            load_weights(run, ckpt_path, strict)
        run.progress.validating = stage == "validate"
        results = evaluate(run, evaluation)
        if evaluation.keeps:
            evaluation.outputs = gather_predictions(trainer.strategy.data_world, evaluation.outputs, trainer.device)
        if verbose and trainer.is_global_zero:
            trainer.print(results_table(stage, results))
        return results
