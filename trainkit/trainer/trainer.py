"""`Trainer`: arguments → one run."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.accelerator import Accelerator
from trainkit.callback import Callback
from trainkit.console import notice, printable
from trainkit.errors import ConfigurationError, ModuleError
from trainkit.hooks.hook_checks import check_callback
from trainkit.hooks.table import HookTable
from trainkit.launch.resolve import joined_strategy, read_wanted
from trainkit.memory.report import PROCESSES, MemoryPlan
from trainkit.metrics.results import as_tensors
from trainkit.module.data_module import DataModule
from trainkit.module.train_module import TrainModule
from trainkit.nested import batch_size
from trainkit.paths import local_path
from trainkit.precision import Precision
from trainkit.registry import load_callback
from trainkit.rng import resolve_seed
from trainkit.strategy import Strategy
from trainkit.trainer import train_loop as loop
from trainkit.trainer.arguments import TrainerArguments, check_switches
from trainkit.trainer.defaults import attach_callbacks, attach_loggers, start_loggers
from trainkit.trainer.eval_loop import check_sanity, evaluate, gather_predictions
from trainkit.trainer.explain import end_line, explain, folders_line, results_table
from trainkit.trainer.from_config import attribute_errors, with_settings
from trainkit.trainer.lifecycle import (
    agree_on_signals,
    build_hooks,
    interruptible,
    refuse_evaluation,
    running,
    set_up,
)
from trainkit.trainer.loaders import train_loader
from trainkit.trainer.memory_plan import make_plan
from trainkit.trainer.metric_notices import warn_rare_logs
from trainkit.trainer.profiler import Profiler, make_profiler
from trainkit.trainer.resume import begin_resume, check_restore, load_weights, restore_fit
from trainkit.trainer.run import Run
from trainkit.trainer.save_policy import SavePolicy
from trainkit.trainer.setup import count_batches, evaluation_plan, fit_plan, refresh_train_loader
from trainkit.unsupported import refuse_unknown

if TYPE_CHECKING:
    from trainkit.loggers import Logger
    from trainkit.optim.optimizer_config import SchedulerConfig

__all__ = ["Trainer"]

_KNOWN = ("model", "dataloaders", "ckpt_path", "verbose", "datamodule", "strict")  # of validate and test


class Trainer:
    """Runs a `TrainModule`: `fit`, `validate`, `test`, `predict`. All arguments are keywords.

    Args: Where it runs
        accelerator: `"auto"`, `"cpu"`, `"gpu"` (`"cuda"`), `"mps"` or `"tpu"`.
        devices: processes on a node, one per device: a number, `-1` for all GPUs, or a list of GPUs. `"auto"`: all GPUs in
            a script, one in a notebook, one process on the CPU.
        num_nodes: number of nodes.
        strategy: `"auto"`, `"ddp"`, `"zero1"` to `"zero3"`, `"zero3_offload"`, `"xla"`, or a
            `Strategy`.
        sync_batchnorm: BatchNorm takes its statistics over all processes (CUDA).
        precision: `"32-true"`, `"64-true"`, `"bf16-mixed"`, `"16-mixed"`, `"bf16-true"`, `"16-true"`, or a
            `Precision`.
        seed: of order, augmentation and dropout (default: the one given to `seed_everything`, else torch's own).
        deterministic: `True`: torch raises on nondeterministic kernels; `"warn"`: it warns.
        benchmark: let cuDNN choose kernels by benchmarking.

    Args: How long
        max_epochs: largest number of epochs; -1: no limit. Without it, `max_steps` and `max_time`: 1000.
        min_epochs: smallest number of epochs, also after a stop request.
        max_steps: largest number of optimizer steps; -1: no limit.
        min_steps: smallest number of optimizer steps.
        max_time: `"DD:HH:MM:SS"`, a `timedelta` or its arguments as a dict.
        fast_dev_run: try everything on one batch (or N), without loggers.

    Args: Batches and optimizer steps
        accumulate_grad_batches: micro-batches in an optimizer step (default: 1).
        global_batch_size: samples in an optimizer step; the accumulation follows from it.
        gradient_clip_val: largest norm, or absolute value, of the gradient.
        gradient_clip_algorithm: `"norm"` or `"value"`.
        limit_train_batches: a number of batches (int) or a fraction (float); all four default to `1.0`, everything.
        limit_val_batches: the same for validation.
        limit_test_batches: the same for `test`.
        limit_predict_batches: the same for `predict`.
        overfit_batches: train on these few batches, unshuffled, and validate on the same ones, whatever the validation loader.
        reload_dataloaders_every_n_epochs: ask for the training and validation loaders again; 0: never.

    Args: Validation
        val_check_interval: training batches between validations (int), or a fraction of an epoch (float).
        val_every_n_steps: optimizer steps between validations.
        check_val_every_n_epoch: only in every n-th epoch; `None`: an integer `val_check_interval` counts across epochs.
        num_sanity_val_steps: validation batches before training, to find errors early; -1: all.
        inference_mode: evaluate under `torch.inference_mode`, else `torch.no_grad`.

    Args: What is shown and kept
        logger: `True` (TensorBoard if installed, else CSV), `False`, a logger, its name such as `"mlflow"`, or a list.
        callbacks: a callback or a list.
        default_root_dir: where logs and checkpoints go (default `./trainkit_runs`); each run has a folder of its own.
        log_every_n_steps: optimizer steps between log boundaries; 0: log epochs only.
        enable_progress_bar: attach `TQDMProgressBar`.
        enable_model_summary: attach `ModelSummary`.
        enable_checkpointing: attach `ModelCheckpoint`, unless `callbacks` has one: the two newest checkpoints are kept in
            `checkpoints` in the folder of the run, written at the end of each epoch, every 30 minutes and when training ends.
        slurm_requeue: after SIGTERM or SIGUSR1, when the checkpoint is written, ask SLURM to run the job again.
        profiler: `"simple"`, `"advanced"`, `"pytorch"` or a `Profiler`.
        detect_anomaly: autograd names the forward operation of a NaN gradient (slow).

    Raises:
        ConfigurationError: an argument that is wrong, unknown, not supported or contradicts another.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: str | int | Sequence[int] = "auto",
        num_nodes: int | None = None,
        strategy: str | Strategy = "auto",
        precision: str | int | Precision | None = None,
        logger: bool | str | Logger | Sequence[str | Logger] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        default_root_dir: str | Path | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | Mapping[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        fast_dev_run: int | bool = False,
        num_sanity_val_steps: int | None = None,
        val_check_interval: int | float | None = None,
        val_every_n_steps: int | None = None,
        check_val_every_n_epoch: int | None = 1,
        accumulate_grad_batches: int | None = None,
        global_batch_size: int | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        log_every_n_steps: int | None = None,
        enable_progress_bar: bool | None = True,
        enable_model_summary: bool | None = True,
        enable_checkpointing: bool | None = True,
        slurm_requeue: bool = False,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        detect_anomaly: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        profiler: str | Profiler | None = None,
        seed: int | None = None,
        sync_batchnorm: bool = False,
        **unknown: Any,
    ) -> None:
        given = dict(locals())
        refuse_unknown("Trainer", unknown, [name for name in given if name not in ("self", "unknown")])
        given, notes = with_settings(asked := check_switches(given))
        self._arguments = TrainerArguments(**{name: given[name] for name in TrainerArguments.__dataclass_fields__})
        wanted, kind = read_wanted(given["accelerator"], given["devices"], num_nodes), given["strategy"]
        with attribute_errors(asked):
            self.strategy = joined_strategy(kind, wanted, sync_batchnorm, given["precision"], self._arguments, notes)
        self._flags = deterministic, benchmark, detect_anomaly
        self._run = Run.before_the_first(self._arguments, self.strategy, seed)
        self.inference_mode, self.profiler = inference_mode, make_profiler(profiler)
        self.loggers = attach_loggers(self, logger)
        attached = attach_callbacks(self, callbacks, enable_progress_bar, enable_model_summary, enable_checkpointing)
        self._run.callbacks = attached
        self._module_callbacks: list[Callback] = []  # from configure_callbacks of the module
        self._replaced_callbacks: list[Callback] = []  # that those have replaced

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
        """Train a module: a new run from step 0 with the module's parameters as they are, or one that resumes.

        Args:
            model: what to train.
            train_dataloaders: a `DataLoader`, an iterable of batches, a dict or list of loaders (trained on together), or a
                `DataModule`.
            val_dataloaders: one loader or a list.
            datamodule: instead of loaders.
            ckpt_path: resume from a checkpoint: `"auto"`, the newest good one of the runs of this module below
                `default_root_dir`, or a fresh start if there is none; `"last"`, the same, but an error if there is none;
                `"best"`, that of `ModelCheckpoint`; or a path. A damaged one is named and the next older one taken; one
                named by its path is an error.
            restore: only these parts of it, of "model", "optimizer", "scheduler", "scaler", "loop" (counters, position in the
                data, metrics), "callbacks", "loggers" (default: all).
            overrides: options of the optimizer that replace the restored ones, such as `{"lr": 1e-4}`; with a schedule `lr`
                is what the schedule starts from, and the rest of the schedule is scaled.
            strict: names that are missing in the checkpoint or in the model are an error. `False`: a notice lists them, and
                the optimizer starts without state for parameters that were not there. Other shapes are an error always.

        Raises:
            ModuleError, DataError, ConfigurationError: something that the module or the data lacks; before training starts.
            CheckpointError: the checkpoint is missing, damaged, or does not fit; before training starts. Or: three saves in a
                row have failed.
            Preempted: SIGTERM or SIGUSR1 came; the run was saved. It is a `SystemExit` with code 143.
            KeyboardInterrupt: Ctrl-C; the step was finished and the run saved.
        """
        known = ["model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "restore", "overrides", "strict"]
        refuse_unknown("Trainer.fit", unknown, known)
        if isinstance(train_dataloaders, DataModule) and datamodule is None:
            train_dataloaders, datamodule = None, train_dataloaders
        wanted = check_restore(ckpt_path, restore, overrides, strict)
        loaders = train_dataloaders, val_dataloaders
        with interruptible(self) as signals, running(self, "fit", model, datamodule, *loaders, signals=signals) as run:
            saves = run.save_policy
            assert saves is not None  # each fit has them
            begin_resume(run, saves, ckpt_path, wanted, chosen=restore is not None, strict=strict)
            set_up(self, run)
            run.given_loaders = loaders
            loader = train_loader(run, train_dataloaders)
            if loader.limit == 0 or self.max_epochs == 0 or self.max_steps == 0:
                run.train_loader = None  # so that nothing can be saved that could not be resumed
                notice("nothing to train: max_epochs, max_steps or limit_train_batches is 0.")
                return
            run.validation_plan = evaluation_plan(run, "validation", val_dataloaders)
            build_hooks(self, run)
            plan = fit_plan(run, loader, saves.safe_points)
            resumed = restore_fit(run, plan, wanted, overrides or {}, strict)
            run.loaded_in = run.val_loaded_in = run.progress.current_epoch
            run.progress.first_step = run.progress.global_step
            start_loggers(run)
            saves.begin()
            if self._arguments.ends_by_default:
                notice(f"neither max_epochs nor max_steps nor max_time was given: training for up to {self.max_epochs} epochs.")
            notice(f"fit on {self.strategy.where}, {self.precision.name}, seed {run.seed}.")
            warn_rare_logs(run)
            run.hooks.run("on_fit_start")
            if not resumed:
                check_sanity(run)
            loop.begin_training(run, plan)
            while loop.training_continues(run):
                plan = refresh_train_loader(run, plan)
                loop.train_epoch(run, plan)
            loop.end_training(run)
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
            model: default: the one that this trainer ran last.
            dataloaders: one loader, a list, or a `DataModule`.
            ckpt_path: with the weights of a checkpoint: a path, `"best"`, `"last"` or `"auto"`, as in `fit`.
                Default: the weights as they are.
            verbose: print the metrics.
            datamodule: instead of loaders.
            strict: names that are missing in the checkpoint or in the model are an error; `False`: a notice lists them.

        Returns:
            The metrics of each loader.
        """
        refuse_unknown("Trainer.validate", unknown, _KNOWN)
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
        """Run the test loop once; arguments and result as of `validate`."""
        refuse_unknown("Trainer.test", unknown, _KNOWN)
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
        """What `predict_step` returns for each batch; with several loaders, a list of that for each.

        Over several processes every one of them returns the whole list, in the order of the batches. What is not made of
        tensors must be picklable then.

        Args:
            model: default: the one that this trainer ran last.
            dataloaders: one loader, a list, or a `DataModule`.
            datamodule: instead of loaders.
            return_predictions: `False` keeps and gathers nothing, for callbacks that write the predictions:
                `trainkit.callbacks.PredictionWriter`. `None` is `True`.
            ckpt_path: as in `validate`.
            strict: as in `validate`.
        """
        known = ["model", "dataloaders", "datamodule", "return_predictions", "ckpt_path", "strict"]
        refuse_unknown("Trainer.predict", unknown, known)
        return_predictions = return_predictions is None or return_predictions
        _check_switch("return_predictions", return_predictions)
        _evaluate(self, "predict", "predict", model, dataloaders, datamodule, False, ckpt_path, strict, return_predictions)
        plan = self._run.plans.get("predict")
        if not return_predictions or plan is None:
            return None
        outputs, plan.outputs = plan.outputs, []
        return outputs[0] if len(outputs) == 1 else outputs

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, *, blocking: bool = True) -> None:
        """Write a checkpoint of this moment to a folder of your choice; a checkpoint that is there is replaced.

        It can be called from any hook and after `fit`; a run that resumes does what was left to do of the step. In the middle
        of an accumulation window, what is saved is the position at its start, and the window is repeated. In a validation the
        validation is repeated whole, and in `on_train_epoch_end` that hook, also for callbacks that had run before.

        Every rank must call it: each has a part in what is saved, though most of it is written by rank 0.

        Args:
            filepath: the folder that the checkpoint becomes.
            weights_only: skip optimizers, schedulers, counters, callbacks.
            blocking: return when the checkpoint is complete on the disk. `False`: return when the state is copied, while a
                thread writes it. If it cannot be written, the next step warns, or the next save; without either, the program
                prints the error when it ends.

        Raises:
            CheckpointError: `filepath` is something other than a checkpoint; or, if `blocking`, it cannot be written.
            CollectiveError: not every rank has called it; names the lines, within seconds.
            UnsavableError: a value that cannot be stored, with the path to it.
        """
        path = local_path(filepath, "filepath")
        self.accelerator.collective_checks.wait("trainer.save_checkpoint")
        self._save_policy_for(weights_only).save_to(path, weights_only=weights_only, blocking=blocking)

    def explain(self, module: TrainModule | None = None) -> str:
        """Print, and return, who handles which hook, what runs when, and how the arguments were resolved."""
        text = explain(self, module if module is not None else self._run.given_module)
        self.print(text)
        return text

    def plan(
        self,
        module: TrainModule,
        *,
        processes: Sequence[int] = PROCESSES,
        per_host: int | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
    ) -> MemoryPlan:
        """Print, and return, what each strategy would hold in memory to train a module, and the smallest that fits.

        Nothing is trained, and nothing of the module's size is made. It may be one built under `torch.device("meta")`;
        `configure_model` is run there, on a copy. What is counted, and what is not, is said below the table.

        Args:
            module: what would be trained; it is not changed.
            processes: numbers of processes to plan for.
            per_host: of these on one machine, at most; default: all.
            device_memory: bytes, or `"80G"` (GiB); default: what this trainer's GPU has.
            host_memory: of a machine; default: what this one has.

        Raises:
            ModuleError, OptimizerError: the module cannot be planned.
            ConfigurationError: a number that makes no sense.
        """
        plan = make_plan(self, module, processes, per_host, device_memory, host_memory)
        self.print(plan)
        return plan

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` in the main process only, above the progress bar."""
        if not self.is_global_zero:
            return
        bar: Any = self.progress_bar_callback
        (print if bar is None else bar.print)(*args, **kwargs)

    # ---------------------------------------------------------------------------------------------------- what can be read

    @property
    def stage(self) -> str | None:
        """ "fit", "validate", "test" or "predict"; `None` outside a run."""
        return self._run.progress.stage

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far."""
        return self._run.progress.global_step

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs, which is the index of the running one."""
        return self._run.progress.current_epoch

    @property
    def batch_idx(self) -> int:
        """Index of the micro-batch in the epoch; -1 between epochs."""
        return self._run.progress.batch_idx

    @property
    def should_stop(self) -> bool:
        """Set it to end training after the next optimizer step, or immediately in a validation or at an epoch's end."""
        return self._run.progress.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self._run.progress.should_stop = stop

    @property
    def should_log(self) -> bool:
        """Whether the open accumulation window ends in a log boundary."""
        return self._run.progress.should_log

    @property
    def sanity_checking(self) -> bool:
        """Whether the few validation batches before training are running."""
        return self._run.progress.sanity_checking

    @property
    def validating(self) -> bool:
        """Whether a validation is running."""
        return self._run.progress.validating

    @property
    def lightning_module(self) -> TrainModule:
        """The user's module (Lightning's name; `model` is the same, and `None` before the first run).

        Raises:
            ModuleError: nothing has been run yet.
        """
        return self._run.module

    @property
    def model(self) -> TrainModule | None:
        """The user's module; `None` before the first run."""
        return self._run.given_module

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the run, if there is one."""
        return self._run.datamodule

    @property
    def accelerator(self) -> Accelerator:
        """The `Accelerator` of the run, whose verbs the loop calls."""
        return self._run.accelerator

    @property
    def seed(self) -> int:
        """The seed of order, augmentation and dropout; a resumed run takes over that of its checkpoint.

        It can be assigned between runs.
        """
        return self._run.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        if self.stage is not None:
            raise ConfigurationError("the seed cannot change during a run. Assign it before: trainer.seed = 42")
        self._run.seed, self._run.seed_given = resolve_seed(seed), True

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks; in a run with those of the module's `configure_callbacks`."""
        return self._run.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        for callback in callbacks:
            check_callback(callback)
        self._run.callbacks = callbacks

    @property
    def loggers(self) -> list[Logger]:
        """The loggers."""
        return self._run.loggers

    @loggers.setter
    def loggers(self, loggers: list[Logger]) -> None:
        self._run.loggers = loggers

    @property
    def profiler(self) -> Profiler | None:
        """What measures the steps of the next run; `None`: nothing does."""
        return self._run.profiler

    @profiler.setter
    def profiler(self, profiler: Profiler | None) -> None:
        self._run.profiler = profiler

    @property
    def inference_mode(self) -> bool:
        """Whether evaluations run under `torch.inference_mode`, not `torch.no_grad`."""
        return self._run.inference_mode

    @inference_mode.setter
    def inference_mode(self, inference_mode: bool) -> None:
        self._run.inference_mode = inference_mode

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of micro-batches in an accumulation window."""
        return self._run.accumulation

    @property
    def train_dataloader(self) -> Any:
        """The training loader as the user passed it; `None` before a fit."""
        return self._run.train_source

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The schedulers of the fit, each with its interval, frequency and monitor."""
        return self._run.schedulers

    @property
    def optimizers(self) -> list[Optimizer]:
        """Torch's optimizers, as `configure_optimizers` returned them."""
        return self._run.torch_optimizers

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
        """The rank of this process."""
        return self.strategy.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self.strategy.local_rank

    @property
    def training(self) -> bool:
        """Whether a fit is running and is not validating just now."""
        return self.stage == "fit" and not self.validating

    @property
    def sample_mask(self) -> Tensor:
        """See `trainkit.TrainModule.sample_mask`.

        Raises:
            ModuleError: there is no current batch.
        """
        run = self._run
        loader = run.train_loader if run.evaluation_plan is None and self.stage == "fit" else None
        if loader is not None and loader.samples is not None:
            return loader.sample_mask
        batch = run.metrics.batch if self.stage is not None else None
        if batch is None:
            raise ModuleError("self.sample_mask belongs to the current batch, and there is none. Use it in training_step.")
        return torch.ones(batch_size(batch), dtype=torch.bool, device=self.device)

    @property
    def testing(self) -> bool:
        """Whether `test` is running."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether `predict` is running."""
        return self.stage == "predict"

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch being trained on is known to be the last of its epoch."""
        loader, batch_idx = self._run.train_loader, self.batch_idx
        length = None if loader is None else loader.length
        return self.stage == "fit" and length is not None and batch_idx >= 0 and batch_idx + 1 >= length

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
        """Every metric logged so far, by name; with both `on_step` and `on_epoch` under all three names.

        Of an evaluation only the values of the whole evaluation are here. A metric that training and validation log under
        one name is the validation's.
        """
        return self._run.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What the loggers got last, by name, as tensors on the CPU."""
        return as_tensors(self._run.results.logged)

    @property
    def progress_bar_metrics(self) -> dict[str, Tensor]:
        """What was logged with `prog_bar=True`, as of the last log boundary or epoch's end, as tensors on the CPU."""
        return as_tensors(self._run.results.progress_bar)

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader."""
        return count_batches(self._run.plans.get("validation"))

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader in the sanity check."""
        return count_batches(self._run.plans.get("sanity"))

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader."""
        return count_batches(self._run.plans.get("test"))

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each loader to predict on."""
        return count_batches(self._run.plans.get("predict"))

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader as the user passed it, or the list of them; `None` without one."""
        sources = self._run.evaluation_sources.get("validation", [])
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def test_dataloaders(self) -> Any:
        """The test loader as the user passed it, or the list of them; `None` without one."""
        sources = self._run.evaluation_sources.get("test", [])
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def predict_dataloaders(self) -> Any:
        """The loader to predict on as the user passed it, or the list of them; `None` without one."""
        sources = self._run.evaluation_sources.get("predict", [])
        return sources[0] if len(sources) == 1 else sources or None

    @property
    def early_stopping_callback(self) -> Callback | None:
        """The first `EarlyStopping`."""
        kind = load_callback("early_stopping")
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first `ModelCheckpoint`."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """Every `ModelCheckpoint`."""
        kind = load_callback("model_checkpoint")
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if getattr(callback, "is_progress_bar", False)), None)

    @property
    def max_epochs(self) -> int:
        """Largest number of epochs; -1: no limit."""
        assert self._arguments.max_epochs is not None
        return self._arguments.max_epochs

    @property
    def max_steps(self) -> int:
        """Largest number of optimizer steps; -1: no limit."""
        return self._arguments.max_steps

    @property
    def min_epochs(self) -> int | None:
        """Smallest number of epochs, also after a stop request."""
        return self._arguments.min_epochs

    @property
    def min_steps(self) -> int | None:
        """Smallest number of optimizer steps, also after a stop request."""
        return self._arguments.min_steps

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps from one log boundary to the next; 0: only epochs are logged."""
        assert self._arguments.log_every_n_steps is not None
        return self._arguments.log_every_n_steps

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs from one validation to the next."""
        return self._arguments.check_val_every_n_epoch

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of a training epoch, at most; infinity if unknown."""
        return self._run.max_batches

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of optimizer steps in the whole fit, for schedulers; infinity if unknown.

        Raises:
            ModuleError: read before the training loader is known, which is when `configure_optimizers` is called.
        """
        if self._run.train_loader is None:
            raise ModuleError(
                "estimated_stepping_batches is not known yet: the training loader is created after setup. Read it in "
                "configure_optimizers: OneCycleLR(optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches)"
            )
        length, epochs = self.num_training_batches, self.max_epochs
        if epochs == -1 or math.isinf(length):
            return self.max_steps if self.max_steps != -1 else math.inf
        updates = math.ceil(length / self.accumulate_grad_batches) * epochs
        return updates if self.max_steps == -1 else min(updates, self.max_steps)

    # ---------------------------------------------------------------------------------------------------- for this package

    def _hook_owners(self, module: TrainModule) -> dict[str, tuple[str, ...]]:
        """For each hook the classes that handle it, in order."""
        return HookTable(self, module, self.callbacks).owners

    @property
    def _save_policy(self) -> SavePolicy:
        """What saves the checkpoints of the fit; it exists from the start of a fit on."""
        assert self._run.save_policy is not None
        return self._run.save_policy

    def _save_policy_for(self, weights_only: bool) -> SavePolicy:
        """What saves a checkpoint of this moment.

        Raises:
            ModuleError: there is nothing to be saved.
        """
        run = self._run
        fitted = run.train_loader is not None and run.given_module is run.fitted
        if run.given_module is None or not (weights_only or fitted):
            raise ModuleError(
                "save_checkpoint saves a run, but this Trainer has not run fit with this module. Call trainer.fit(module, ...) "
                "first, or save only the weights of a module that it has evaluated: save_checkpoint(path, weights_only=True)"
            )
        if run.save_policy is None:
            run.save_policy = SavePolicy(run)
        return run.save_policy


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
    check_restore(ckpt_path, None, None, strict)
    module = trainer.lightning_module if module is None else module
    if isinstance(dataloaders, DataModule) and datamodule is None:
        dataloaders, datamodule = None, dataloaders
    with running(trainer, stage, module, datamodule, dataloaders) as run:
        set_up(trainer, run)
        plan = evaluation_plan(run, name, dataloaders, keeps=keeps)
        if plan is None:
            refuse_evaluation(run, stage, name)
            return []
        build_hooks(trainer, run)
        if ckpt_path is not None:
            load_weights(run, ckpt_path, strict)
        run.progress.validating = stage == "validate"
        results = evaluate(run, plan)
        if plan.keeps:
            plan.outputs = gather_predictions(trainer.strategy.data_world, plan.outputs, trainer.device)
        if verbose and trainer.is_global_zero:
            trainer.print(printable(results_table(stage, results), sys.stdout))
        return results
