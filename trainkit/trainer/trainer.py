"""``Trainer``: arguments → one run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.accelerator import Accelerator
from trainkit.callback import Callback
from trainkit.config.for_trainer import blamed, with_settings
from trainkit.console import notice, warn
from trainkit.hooks.table import HookTable
from trainkit.launch.resolve import joined_strategy, read_wanted
from trainkit.memory.report import PROCESSES, MemoryPlan, make_plan
from trainkit.metrics.store import MetricStore
from trainkit.module.data_module import DataModule
from trainkit.module.train_module import TrainModule
from trainkit.paths import local_path
from trainkit.precision import Precision
from trainkit.rng import resolve_seed, seed_was_given
from trainkit.strategy import Strategy
from trainkit.trainer import train_loop as loop
from trainkit.trainer.arguments import TrainerArguments, check_switches, refuse_unknown
from trainkit.trainer.defaults import attach_callbacks, attach_loggers, start_loggers
from trainkit.trainer.evaluating import Evaluating
from trainkit.trainer.explain import explain, where_it_is, why_it_ended
from trainkit.trainer.lifecycle import agree_on_signals, build_hooks, check_sanity, interruptible, plan_evaluation, running
from trainkit.trainer.metric_notices import tell_rare_logs
from trainkit.trainer.profiler import Profiler, make_profiler
from trainkit.trainer.resume import begin_resume, check_restore, restore_fit
from trainkit.trainer.setup import finish_fit_plan, fit_plan, train_loader, validate_every

if TYPE_CHECKING:
    from trainkit.loggers import Logger

__all__ = ["Trainer"]


class Trainer(Evaluating):
    """Runs a :class:`~trainkit.TrainModule`: ``fit``, ``validate``, ``test``, ``predict``. All arguments are keywords.

    **Where it runs**

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"`` (``"cuda"``), ``"mps"`` or ``"tpu"``.
        devices: processes of a machine, one a device: a number, ``-1`` for all GPUs, or a list of GPUs. ``"auto"``: all GPUs in
            a script, one in a notebook, one process on the CPU.
        num_nodes: machines.
        strategy: ``"auto"``, ``"ddp"``, ``"zero1"`` to ``"zero3"``, ``"zero3_offload"``, ``"xla"``, or a
            :class:`~trainkit.Strategy`.
        sync_batchnorm: BatchNorm takes its statistics over all processes (CUDA).
        precision: ``"32-true"``, ``"64-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"``, or a
            :class:`~trainkit.Precision`.
        seed: of order, augmentation and dropout (default: the one given to ``seed_everything``, else torch's own).
        deterministic: ``True``: torch raises on nondeterministic kernels; ``"warn"``: it warns.
        benchmark: let cuDNN choose kernels by trying.

    **How long**

        max_epochs: epochs at most; -1: no limit. Without it, ``max_steps`` and ``max_time``: 1000.
        min_epochs: epochs at least, whoever asks for a stop.
        max_steps: optimizer updates at most; -1: no limit.
        min_steps: optimizer updates at least.
        max_time: ``"DD:HH:MM:SS"``, a ``timedelta`` or its arguments as a dict.
        fast_dev_run: try everything on one batch (or N), without loggers.

    **Batches and updates**

        accumulate_grad_batches: micro-batches in an update (default: 1).
        global_batch_size: samples in an update; the accumulation follows from it.
        gradient_clip_val: largest norm, or absolute value, of the gradient.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: a number of batches (int) or a
            fraction (float).
        overfit_batches: train on these few batches, unshuffled, and validate on the same ones, whatever the validation loader.
        reload_dataloaders_every_n_epochs: ask for the training and validation loaders anew; 0: never.

    **Validation**

        val_check_interval: training batches between validations (int), or a fraction of an epoch (float).
        val_every_n_steps: optimizer updates between validations.
        check_val_every_n_epoch: only in every n-th epoch; ``None``: an integer ``val_check_interval`` counts across epochs.
        num_sanity_val_steps: validation batches before training, to find errors early; -1: all.
        inference_mode: evaluate under ``torch.inference_mode``, else ``torch.no_grad``.

    **What is shown and kept**

        logger: ``True`` (TensorBoard if installed, else CSV), ``False``, a logger, its name such as ``"mlflow"``, or a list.
        callbacks: a callback or a list.
        default_root_dir: where logs and checkpoints go (default ``./trainkit_runs``); each run has a folder of its own.
        log_every_n_steps: optimizer updates between log boundaries; 0: log epochs only.
        enable_progress_bar: attach ``TQDMProgressBar``.
        enable_model_summary: attach ``ModelSummary``.
        enable_checkpointing: attach ``ModelCheckpoint``, unless ``callbacks`` has one: the two newest checkpoints are kept in
            ``checkpoints`` in the folder of the run, written at the end of each epoch, every 30 minutes and when training ends.
        slurm_requeue: after SIGTERM or SIGUSR1, when the checkpoint is written, ask SLURM to run the job again.
        profiler: ``"simple"``, ``"advanced"``, ``"pytorch"`` or a ``Profiler``.
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
        super().__init__()
        refuse_unknown("Trainer", unknown, [name for name in given if name not in ("self", "unknown", "__class__")])
        given, said = with_settings(asked := check_switches(given))
        self._arguments = TrainerArguments(**{name: given[name] for name in TrainerArguments.__dataclass_fields__})
        self.accumulate_grad_batches = self._arguments.accumulate_grad_batches
        wanted, kind = read_wanted(given["accelerator"], given["devices"], num_nodes), given["strategy"]
        with blamed(asked):
            self.strategy = joined_strategy(kind, wanted, sync_batchnorm, given["precision"], self._arguments, said)
        self.accelerator = Accelerator.of_trainer(self.strategy)
        self.seed = self.accelerator.seed = self.strategy.world.from_main(resolve_seed(seed))
        self._seed_given, self.inference_mode = seed_was_given(seed), inference_mode
        self.profiler, self._flags = make_profiler(profiler), (deterministic, benchmark, detect_anomaly)
        self._metrics, self.loggers = MetricStore(self._emit, self._results), attach_loggers(self, logger)
        self.callbacks = attach_callbacks(self, callbacks, enable_progress_bar, enable_model_summary, enable_checkpointing)

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
        """Train a module: a new run from step 0 with the module's parameters as they are, or one that goes on.

        Args:
            model: what to train.
            train_dataloaders: a ``DataLoader``, an iterable of batches, a dict or list of loaders (trained on together), or a
                ``DataModule``.
            val_dataloaders: one loader or a list.
            datamodule: instead of loaders.
            ckpt_path: go on from a checkpoint: ``"auto"``, the newest good one of the runs of this module below
                ``default_root_dir``, or a fresh start if there is none; ``"last"``, likewise, but an error if there is none;
                ``"best"``, that of ``ModelCheckpoint``; or a path. A damaged one is named and the next older one taken; one
                named by its path is an error.
            restore: only these parts of it, of "model", "optimizer", "scheduler", "scaler", "loop" (counters, position in the
                data, metrics), "callbacks", "loggers" (default: all).
            overrides: options of the optimizer to be put over the restored ones, such as ``{"lr": 1e-4}``; under a schedule
                ``lr`` is what the schedule starts from, and what is left of it is scaled.
            strict: names that are missing in the checkpoint or in the model are an error. ``False``: a notice lists them, and
                the optimizer starts without state for parameters that were not there. Other shapes are an error always.

        Raises:
            ModuleError, DataError, ConfigurationError: something that the module or the data lacks; before training starts.
            CheckpointError: the checkpoint is missing, damaged, or does not fit; before training starts. Or: three saves in a
                row have failed.
            Preempted: SIGTERM or SIGUSR1 came; the run was saved. It is a ``SystemExit`` with code 143.
            KeyboardInterrupt: Ctrl-C; the step was finished and the run saved.
        """
        known = ["model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "restore", "overrides", "strict"]
        refuse_unknown("Trainer.fit", unknown, known)
        if isinstance(train_dataloaders, DataModule) and datamodule is None:
            train_dataloaders, datamodule = None, train_dataloaders
        wanted = check_restore(ckpt_path, restore, overrides, strict)
        first = partial(begin_resume, self, ckpt_path, wanted, chosen=restore is not None, strict=strict)
        with interruptible(self), running(self, "fit", model, datamodule, train_dataloaders, val_dataloaders, first=first):
            self._given = train_dataloaders, val_dataloaders
            loader = train_loader(self, train_dataloaders)
            if loader.limit == 0 or self.max_epochs == 0 or self.max_steps == 0:
                notice("nothing to train: max_epochs, max_steps or limit_train_batches is 0.")
                return
            self._fit_plan = fit_plan(self, loader)
            self._val_plan = plan_evaluation(self, "validation", val_dataloaders)
            self._fit_plan.validate_every = validate_every(self, loader)
            build_hooks(self)
            finish_fit_plan(self)
            resumed = restore_fit(self, wanted, overrides or {}, strict)
            self._loaded_in = self._val_loaded_in = self.current_epoch
            start_loggers(self)
            self._checkpointing.begin()
            if self._arguments.ends_by_default:
                notice(f"neither max_epochs nor max_steps nor max_time was given: training for up to {self.max_epochs} epochs.")
            notice(f"fit on {self.strategy.where}, {self.precision.name}, seed {self.seed}.")
            tell_rare_logs(self)
            self._hooks.run("on_fit_start")
            if not resumed:
                check_sanity(self, val_dataloaders)
            for _ in loop.epochs(self):
                loop.train_epoch(self)
            self._hooks.run("on_fit_end")
            agree_on_signals(self)
        notice(" ".join(filter(None, (why_it_ended(self), where_it_is(self)))))

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False, *, blocking: bool = True) -> None:
        """Write a checkpoint of this moment to a folder of your choice; a checkpoint that is there is replaced.

        It can be called from any hook and after ``fit``; a run that resumes does what was left to do of the step. In the middle
        of an accumulation window, what is saved is the position at its start, and the window is repeated. In a validation the
        validation is repeated whole, and in ``on_train_epoch_end`` that hook, also for callbacks that had run before.

        Every rank must call it: each has a part in what is saved, though most of it is written by rank 0.

        Args:
            filepath: the folder that the checkpoint becomes.
            weights_only: leave out optimizers, schedulers, counters, callbacks.
            blocking: return when the checkpoint is complete on the disk. ``False``: return when the state is copied, while a
                thread writes it. If it cannot be written, the next step warns, or the next save; without either, the program
                prints the error when it ends.

        Raises:
            CheckpointError: ``filepath`` is something other than a checkpoint; or, if ``blocking``, it cannot be written.
            CollectiveError: not every rank has called it; names the lines, within seconds.
            UnsavableError: a value that cannot be stored, with the path to it.
        """
        path = local_path(filepath, "filepath")
        self.accelerator.meeting.wait("trainer.save_checkpoint")
        self._checkpointing_now(weights_only).save_to(path, weights_only=weights_only, blocking=blocking)

    def explain(self, module: TrainModule | None = None) -> str:
        """Print, and return, who handles which hook, what runs when, and how the arguments were resolved."""
        text = explain(self, module if module is not None else self._module)
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

        Nothing is trained, and nothing of the module's size is made. It may be one built under ``torch.device("meta")``;
        ``configure_model`` is run there, on a copy. What is counted, and what is not, is said below the table.

        Args:
            module: what would be trained; it is not changed.
            processes: numbers of processes to plan for.
            per_host: of these on one machine, at most; default: all.
            device_memory: bytes, or ``"80G"`` (GiB); default: what this trainer's GPU has.
            host_memory: of a machine; default: what this one has.

        Raises:
            ModuleError, OptimizerError: the module cannot be planned.
            ConfigurationError: a number that makes no sense.
        """
        plan = make_plan(self, module, processes, per_host, device_memory, host_memory)
        self.print(plan)
        return plan

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` in the main process only, above the progress bar."""
        if not self.is_global_zero:
            return
        bar: Any = self.progress_bar_callback
        (print if bar is None else bar.print)(*args, **kwargs)

    def _attach(self, module: TrainModule, datamodule: DataModule | None) -> None:
        """Make the module, and the data module, this trainer's."""
        self._module, self.datamodule = module, datamodule
        module._trainer = self
        if datamodule is not None:
            datamodule.trainer = self

    def _hook_owners(self, module: TrainModule) -> dict[str, tuple[str, ...]]:
        """For each hook the classes that handle it, in order."""
        return HookTable(self, module, self.callbacks).owners

    def _finish_metrics(self) -> None:
        """Reduce what was logged in the epoch that ends, before the callbacks that run last."""
        if self._active_plan is None:
            self._end_metrics_of_epoch()
        else:
            self._active_plan.finish()

    def _refresh_loaders(self) -> None:
        """Ask for the training loader of a fit again where ``reload_dataloaders_every_n_epochs`` says so."""
        every, plan = self._arguments.reload_dataloaders_every_n_epochs, self._fit_plan
        if not every or self.current_epoch == self._loaded_in or self.current_epoch % every:
            return
        self.accelerator.release_loader(plan.loader)
        plan.loader = train_loader(self, self._given[0])
        plan.validate_every = validate_every(self, plan.loader)

    def _refresh_validation(self) -> None:
        """Ask for the validation loaders of a fit again where ``reload_dataloaders_every_n_epochs`` says so."""
        every, plan = self._arguments.reload_dataloaders_every_n_epochs, self._val_plan
        if not every or plan is None or self.current_epoch // every == self._val_loaded_in // every:
            return
        self._val_loaded_in = self.current_epoch
        for loader in plan.loaders:
            self.accelerator.release_loader(loader)
        self._val_plan = plan_evaluation(self, "validation", self._given[1])
        if self._val_plan is not None:
            self._val_plan.count = plan.count

    def _before_manual_step(self, optimizer: Optimizer) -> None:
        """What comes before each update under manual optimization."""
        self._fit_plan.tried = True
        self.accelerator.unscale_gradients(optimizer)
        self._hooks.run("on_before_optimizer_step", optimizer)

    def _manual_backward(self, loss: Tensor, **kwargs: Any) -> None:
        """:meth:`trainkit.TrainModule.manual_backward`."""
        self._hooks.run("on_before_backward", loss)
        self._fit_plan.backward(loss, **kwargs)
        self._hooks.run("on_after_backward")

    def _emit(self, metrics: dict[str, float], for_step: bool, step: int | None = None) -> None:
        """Give metrics to the loggers: those of ``step``, if it is given."""
        if self.sanity_checking:
            return
        evaluating = self._active_plan
        if step is None:
            step = evaluating.count if evaluating is not None and for_step else self.global_step
        for logger in self.loggers:
            try:
                logger.log_metrics({**metrics, "epoch": self.current_epoch}, step)
            except OSError as error:  # a full disk must not end a run that could go on without its log
                name = type(logger).__name__
                warn(f"{name} could not write the metrics of step {step}: {error}. Training goes on without them.")
