"""One run from set-up to tear-down, in order and whatever happens: what the four verbs of `Trainer` share."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from trainkit.accelerator import Accelerator
from trainkit.accelerator.prepared_models import CompiledModules
from trainkit.callback import Callback
from trainkit.checkpoint.urls import remote_sync
from trainkit.console import each_once, notice, quantity, user_frames, with_article
from trainkit.distributed.failure_handling import report_failure
from trainkit.distributed.requested_devices import other_generators
from trainkit.errors import (
    CheckpointWriteError,
    ConfigurationError,
    DataError,
    MissingMethodError,
    ModuleError,
    NonFiniteError,
    Preempted,
    ProcessFailedError,
    TrainkitError,
    make_instance,
)
from trainkit.metrics.store import MetricResults, Scope
from trainkit.module.data_module import DataModule
from trainkit.module.hook_checks import check_callback, check_datamodule, check_module
from trainkit.module.hook_table import HookTable
from trainkit.module.hparams import StorableHyperParameters
from trainkit.module.overridable_hooks import DataHooks, is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.names.doors import is_open
from trainkit.registry import adapt, load_callback
from trainkit.rng import Purpose, RandomState, Stage, mix, seed_generators
from trainkit.tagged_json.codec import plain_container
from trainkit.trainer.best_weights import check_best, keeper_to_add
from trainkit.trainer.eval_loop import explain_inference_tensors
from trainkit.trainer.profiler import Profiler
from trainkit.trainer.progress import RunProgress
from trainkit.trainer.run import Run
from trainkit.trainer.run_folder import opens_files
from trainkit.trainer.safe_points import Signals, requeue
from trainkit.trainer.save_policy import SavePolicy
from trainkit.trainer.setup import begin_compiling, refuse_incomplete, unwrap_compiled
from trainkit.trainer.states import TrainerFn
from trainkit.tuner.executable_batch_size import is_out_of_memory

if TYPE_CHECKING:
    from trainkit.loggers.base import Logger
    from trainkit.trainer.trainer import Trainer

__all__ = [
    "agree_on_signals",
    "attach_callbacks",
    "attach_loggers",
    "build_hooks",
    "checked_callbacks",
    "interruptible",
    "merge_module_callbacks",
    "refuse_evaluation",
    "renew_loggers",
    "running",
    "set_up",
    "share_log_folders",
    "start_loggers",
    "torch_flags",
]


@contextmanager
def torch_flags(deterministic: bool | str | None, benchmark: bool | None, detect_anomaly: bool) -> Iterator[None]:
    """Within it torch's switches have the values of the Trainer's arguments; afterwards their earlier ones.

    Args:
        deterministic: `True` makes torch raise on nondeterministic kernels, `"warn"` warn; `None` does not change it.
        benchmark: cuDNN chooses kernels by benchmarking; `None` does not change it, but deterministic turns it off.
        detect_anomaly: autograd names the forward operation of a NaN gradient (slow).
    """
    before = _deterministic()
    benchmark_before = torch.backends.cudnn.benchmark
    workspace_before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    anomaly_before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    try:
        if deterministic is not None:
            torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
            if deterministic:
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS raises without it
        if benchmark is not None or deterministic:
            torch.backends.cudnn.benchmark = bool(benchmark)
        if detect_anomaly:
            torch.autograd.set_detect_anomaly(True)
        yield
    finally:
        if _deterministic() != before:  # this call imports modules, which fails if a signal came during an import
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark_before
        torch.autograd.set_detect_anomaly(anomaly_before[0], check_nan=anomaly_before[1])
        if workspace_before is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def attach_callbacks(
    trainer: Trainer,
    user_callbacks: Callback | Sequence[Callback] | None,
    progress_bar: bool | None,
    summary: bool | None,
    checkpoints: bool | None,
) -> list[Callback]:
    """The user's callbacks, then those of the Trainer's `enable_…` arguments, of which `None` counts as True.

    Raises:
        HookError: an object that is not a callback, or has a hook that cannot be called.
        ConfigurationError: the same callback twice, or one that contradicts an argument.
    """
    given = [] if user_callbacks is None else _as_list(user_callbacks)
    callbacks = checked_callbacks(given)
    if len({id(callback) for callback in given}) < len(given):
        raise ConfigurationError("callbacks contains the same object twice. Pass each callback once.")
    arguments = trainer._arguments
    of_value = ("accumulate_grad_batches", "gradient_clip_val", "max_time")  # arguments whose value the callback gets
    progress_bar, summary, checkpoints = (enabled is None or bool(enabled) for enabled in (progress_bar, summary, checkpoints))

    def attach(name: str, enabled: bool, argument: str, *values: Any) -> None:
        kind = load_callback(name) if enabled or argument in of_value else None
        if not enabled or kind is None:
            return
        if any(isinstance(callback, kind) for callback in callbacks):
            if argument in of_value:
                raise ConfigurationError(
                    f"{argument} and {with_article(kind.__name__)} in callbacks set the same thing. Give one of them."
                )
            return
        callbacks.append(kind(*values))

    has_bar = _has_bar(callbacks, progress_bar)
    # All processes have the bar; the main process shows it.
    attach("progress_bar", progress_bar and not has_bar, "enable_progress_bar")
    attach(_summary_to_add(callbacks), summary, "enable_model_summary")
    attach("timer", arguments.max_time is not None, "max_time", arguments.max_time)
    schedule = arguments.accumulation_schedule
    attach("gradient_accumulation_scheduler", schedule is not None, "accumulate_grad_batches", schedule)
    clip = arguments.gradient_clip_val
    attach("gradient_clipping", bool(clip), "gradient_clip_val", clip, arguments.gradient_clip_algorithm)
    attach("gradient_clipping", arguments.log_grad_norm, "log_grad_norm", math.inf)
    _check_norm_is_logged(arguments.log_grad_norm, callbacks)
    if not checkpoints and any(isinstance(callback, load_callback("model_checkpoint")) for callback in callbacks):
        raise ConfigurationError(
            "enable_checkpointing=False and a ModelCheckpoint in callbacks contradict each other. Remove one of them."
        )
    if checkpoints:
        callbacks += keeper_to_add(arguments, callbacks)
    attach("model_checkpoint", checkpoints, "enable_checkpointing")
    check_best(arguments, callbacks)
    return _checkpoints_last(callbacks)


def checked_callbacks(callbacks: Iterable[Any]) -> list[Callback]:
    """The callbacks; those of another framework are adapted.

    Raises:
        HookError: an object that is not a callback, or has a hook that cannot be called.
    """
    checked = list(map(_as_callback, callbacks))
    for callback in checked:
        check_callback(callback)
    return checked


def _as_callback(value: Any) -> Any:
    return value if isinstance(value, Callback) else adapt(value)


def _has_bar(callbacks: Iterable[Callback], enabled: bool) -> bool:
    """Whether the callbacks contain a progress bar.

    Raises:
        ConfigurationError: they contain two, or one although it is not enabled.
    """
    bars = [type(callback).__name__ for callback in callbacks if getattr(callback, "is_progress_bar", False)]
    if len(bars) > 1:
        raise ConfigurationError(
            f"callbacks contains {len(bars)} progress bars: {', '.join(bars)}. Expected one, since they draw over each other. "
            f"Remove all but one: callbacks=[{bars[0]}()]"
        )
    if bars and not enabled:
        raise ConfigurationError(
            f"enable_progress_bar=False and {with_article(bars[0])} in callbacks contradict each other. Remove one of them."
        )
    return bool(bars)


def _checkpoints_last(callbacks: list[Callback]) -> list[Callback]:
    """The callbacks in their order, but those that save checkpoints last: they save what the others have done."""
    kind = load_callback("checkpoint")
    return sorted(callbacks, key=lambda callback: isinstance(callback, kind))


def _summary_to_add(callbacks: Iterable[Callback]) -> str:
    """The registered name of the model summary that fits the progress bar, unless there is a summary already."""
    names = [name for callback in callbacks if (name := getattr(callback, "summary_callback", None)) is not None]
    if not names or any(isinstance(callback, load_callback("model_summary")) for callback in callbacks):
        return "model_summary"
    return str(names[0])


def _check_norm_is_logged(enabled: bool, callbacks: Iterable[Callback]) -> None:
    if enabled and any(not getattr(callback, "log_norm", True) for callback in callbacks):
        raise ConfigurationError(
            "log_grad_norm=True and GradientClipping(log_norm=False) in callbacks contradict each other. Remove one of them."
        )


def merge_module_callbacks(trainer: Trainer, module: TrainModule) -> None:
    """Add what `configure_callbacks` returns; a callback replaces those of its class that the trainer has.

    Callbacks of the module of an earlier run are removed, and those that they replaced are restored.
    """
    own_callbacks = [_as_callback(c) for c in trainer.callbacks if not _contains(trainer._module_callbacks, c)]
    own_callbacks += [c for c in trainer._replaced_callbacks if not _contains(own_callbacks, c)]
    configured = _configure_callbacks(module)
    kinds = {type(callback) for callback in configured}
    trainer._replaced_callbacks = [callback for callback in own_callbacks if type(callback) in kinds]
    kept = [callback for callback in own_callbacks if type(callback) not in kinds]
    clipping = load_callback("gradient_clipping")
    clips = module.automatic_optimization and is_overridden(module, "configure_gradient_clipping", TrainModule)
    if clips and not any(isinstance(callback, clipping) for callback in kept + configured):
        configured.append(clipping(None))  # It calls the module's own clipping.
    trainer._module_callbacks = configured
    trainer._run.callbacks = _checkpoints_last(kept + configured)
    for callback in trainer.callbacks:
        callback._module = module


def _contains(callbacks: list[Callback], callback: Callback) -> bool:
    """Whether it is one of these objects, by identity: a user's class may define `__eq__`."""
    return any(callback is other for other in callbacks)


def _configure_callbacks(module: TrainModule) -> list[Callback]:
    """What `configure_callbacks` returns, checked."""
    configured = module.configure_callbacks() if is_overridden(module, "configure_callbacks", TrainModule) else None
    return checked_callbacks([] if configured is None else _as_list(configured))


def _as_list(value: Any) -> list[Any]:
    """One object or several, as a list. A string or a class counts as one object, and is refused later."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | type) else [value]


def attach_loggers(trainer: Trainer, user_loggers: bool | str | Logger | Sequence[str | Logger] | None) -> list[Logger]:
    """The user's loggers, or the default one; in a `fast_dev_run` one that stores nothing for each.

    Raises:
        ConfigurationError: an object that is not a logger.
        UnknownNameError: a name that no logger has.
        MissingPackageError: a logger whose package is not installed.
    """
    if user_loggers is False:
        return []
    if trainer.fast_dev_run:
        from trainkit.loggers.base import DummyLogger

        return [DummyLogger() for _ in _as_list(user_loggers)]
    from trainkit.loggers.base import Logger
    from trainkit.loggers.logger_setup import attach, default_logger, make_logger

    if user_loggers is None or user_loggers is True:
        loggers = [default_logger()]
    else:
        loggers = [make_logger(one) if isinstance(one, str) else one for one in _as_list(user_loggers)]
    loggers = [logger if isinstance(logger, Logger) else adapt(logger) for logger in loggers]
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise ConfigurationError(
                f"logger must be True, False, a Logger, its name or a list of them, not {logger!r}."
                + (make_instance(logger, Logger) or " For example: CSVLogger()")
            )
    root = trainer._arguments.default_root_dir
    assert root is not None
    attach(loggers, root, trainer.strategy.rank)
    return loggers


def renew_loggers(trainer: Trainer) -> None:
    """Give another fit of the same Trainer a new log version, unless it continues a run."""
    if trainer.loggers:
        from trainkit.loggers.logger_setup import attach_again

        attach_again(trainer.loggers, trainer.default_root_dir, trainer.strategy.rank)


def share_log_folders(run: Run, saved: Sequence[Mapping[str, Any]] = ()) -> None:
    """Set `trainer.log_dir` on all ranks to the main process's, before the first hook of a run can read it. Collective.

    Args:
        run: the run.
        saved: the states of the loggers in the checkpoint, if the run continues in their files.

    Raises:
        ConfigurationError: a folder cannot be created.
    """
    for logger in run.loggers:
        logger._open_early()
    if run.distributed and run.loggers:
        from trainkit.loggers.logger_setup import share_folders

        share_folders(run.loggers, run.strategy.world, saved)


def start_loggers(run: Run) -> None:
    """Give the loggers their folders, for new logs unless they continue one, and the hyper-parameters.

    Raises:
        ConfigurationError: the data module and the module contradict each other, or a folder cannot be written.
    """
    owners = [o for o in (run.datamodule, run.module) if o is not None and o._log_hyperparams]
    entries = [entry for owner in owners for entry in plain_container(owner.hparams).items()]
    values = dict(entries)
    differing = [str(name) for name, value in entries if repr(value) != repr(values[name])]
    if differing:
        raise ConfigurationError(
            f"the data module and the module have different hyper-parameters of the same name: {', '.join(differing)}. "
            "Rename one, or do not log those of the module or the data module: save_hyperparameters(logger=False)"
        )
    _make_log_folders(run.loggers)
    if values and run.loggers:
        kept = {name: value for owner in owners for name, value in StorableHyperParameters(owner, code=True).values.items()}
        _log_hyperparams(run.loggers, kept)
    for logger in run.loggers:
        logger._log_module(run.module)


def _log_hyperparams(loggers: list[Logger], values: Mapping[str, Any]) -> None:
    for logger in loggers:
        with logger._surviving("write the hyper-parameters"):
            logger.log_hyperparams(values)


def _make_log_folders(loggers: list[Logger]) -> None:
    """Create the folders now: one that cannot be written must stop a run before training, not when it first logs."""
    if loggers:
        from trainkit.loggers.log_folder import set_aside

        set_aside(loggers)
    for logger in loggers:
        if not logger.is_main_process or not opens_files(logger):
            continue
        folder = logger.log_dir
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)  # log_dir does not create a folder whose version was given
        except OSError as error:
            raise ConfigurationError(
                f"{type(logger).__name__}: the log folder {folder} cannot be created: {error}. "
                "Fix: use a folder that can be written, save_dir='runs' or Trainer(default_root_dir='runs')"
            ) from error


class interruptible:  # noqa: N801 - used as a function, like contextlib's own
    """Within it SIGTERM, SIGUSR1, SIGHUP and Ctrl-C let the step be finished and saved first.

    The KeyboardInterrupt of Ctrl-C says how to continue, so that this is the last line on the terminal. Its traceback contains
    only the user's frames, since the place where the loop checks for signals does not help a user. After a second Ctrl-C, which
    ends a step that hangs, it contains all frames.

    Args:
        trainer: whose fit runs in it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._notices = each_once()
        self._signals = Signals(lambda: trainer._run.request_safe_point())

    def __enter__(self) -> Signals:
        self._notices.__enter__()
        self._signals.__enter__()
        return self._signals

    def __exit__(self, kind: Any, ending: BaseException | None, trace: TracebackType | None) -> None:
        signals = self._signals
        signals.__exit__()
        try:
            if ending is None and signals.received is not None:  # it came after the last step
                ending = signals.ending("after the last step")
                self._explain(ending)
                raise ending
            if ending is not None:
                self._explain(ending)
            if sys.version_info < (3, 11) and isinstance(ending, KeyboardInterrupt) and ending.__traceback__ is not trace:
                raise ending  # otherwise Python restores the full traceback
        finally:
            self._notices.__exit__(None, None, None)

    def _explain(self, ending: BaseException) -> None:
        trainer = self._trainer
        saves = trainer._run.save_policy
        newest = None if saves is None else saves.newest
        fit = f"trainer.fit(..., ckpt_path={str(newest)!r}), or ckpt_path='auto' for the newest."
        if isinstance(ending, Preempted):
            if newest is not None:
                notice(f"fit ended by {ending}; to continue: {fit}")
            if trainer._arguments.slurm_requeue and trainer.is_global_zero:
                requeue()
        elif isinstance(ending, KeyboardInterrupt):
            if not ending.args:
                step = f"stopped after {quantity(trainer.global_step, 'optimizer step')}"
                ending.args = (f"{step}; " + ("no checkpoint was saved." if newest is None else f"to continue: {fit}"),)
            if self._signals.received is not None and not self._signals.twice:
                ending.__cause__, ending.__suppress_context__ = None, True
                ending.__traceback__ = user_frames(ending.__traceback__)
        elif isinstance(ending, Exception) and not isinstance(ending, TrainkitError) and is_out_of_memory(ending):
            notice(f"memory ran out at step {trainer.global_step}. {_what_needs_less(trainer)}", everywhere=True)


def _what_needs_less(trainer: Trainer) -> str:
    splits = trainer.strategy.info.splits_micro_batches and trainer._run.module.automatic_optimization
    if splits and not trainer._arguments.auto_micro_batch:
        less = "Trainer(auto_micro_batch=True) runs a micro-batch that does not fit in parts, with the same gradients"
    else:
        less = "Use a smaller batch_size with a larger accumulate_grad_batches, or Trainer(activation_checkpointing=True)"
    return f"{less}; in a validation, use a smaller batch_size."


@contextmanager
def running(
    trainer: Trainer,
    stage: str,
    module: TrainModule,
    datamodule: DataModule | None,
    *args: Any,
    signals: Signals | None = None,
) -> Iterator[Run]:
    """Within it the trainer has a new run, with the module and its callbacks; afterwards the run's resources are released.

    The order: `configure_callbacks`, the body, `teardown`. The body begins with `set_up`; a fit finds the checkpoint
    that it resumes from before that.

    Args:
        trainer: whose run it is.
        stage: "fit", "validate", "test" or "predict".
        module: the user's.
        datamodule: the user's.
        *given: the loaders that the user passed.
        signals: of `interruptible`; default: signals are not handled.
    """
    if trainer.stage is not None:
        raise ConfigurationError(
            f"this Trainer is running {trainer.stage!r}, and another run would overwrite its state. Use a second Trainer: "
            f"Trainer(...).{stage}(module, ...)"
        )
    strategy, checks = trainer.strategy, trainer.accelerator.collective_checks
    random_state = RandomState([*strategy.generators(), *other_generators(strategy.device)])
    outer: Trainer | None = None
    run, status, ending = None, "failed", None
    watchdog = strategy.world.watchdog
    if watchdog is not None:
        watchdog.folder = trainer.default_root_dir
        checks.enter_run(stage, watchdog.enter)
    try:
        checks.begin_run(stage)
        module, compiler = unwrap_compiled(module, trainer._run.compilation)
        _check_inputs(module, datamodule, args)
        datamodule = _choose_datamodule(trainer, stage, module, datamodule, args)
        refuse_incomplete(module, stage, strategy.has_optimizer)
        outer = module._trainer
        run = trainer._run = _new_run(trainer, stage, module, datamodule, compiler, signals or Signals(lambda: None))
        _attach(trainer, module, datamodule)
        merge_module_callbacks(trainer, module)
        build_hooks(trainer, run)
        with torch_flags(*trainer._flags):
            yield run
        status = "success"
    except BaseException as exception:
        strategy.broken = strategy.world.size > 1
        if run is not None:
            explain_inference_tensors(run, exception)
        ending = report_failure(strategy.world.channel, exception if run is None else _cause(run, exception))
        if run is not None:
            run.progress.interrupt()
            _report_exception(run, ending)
        if ending is exception:
            raise
        raise ending from exception
    finally:
        try:
            if run is not None:
                _tear_down(trainer, run, stage, status, ending)
        finally:
            if run is not None:
                run.progress.end()
            if outer is not None and outer.stage is not None:
                module.trainer = outer  # The outer run continues.
            random_state.restore()
            if watchdog is not None:
                watchdog.leave()
            remote_sync.finish()  # last, as Ctrl-C may end it


def agree_on_signals(run: Run) -> None:
    """Share a signal that has come to one process by now: it counts as received on all."""
    if run.distributed:
        run.signals.received = run.strategy.world.largest([run.signals.received or 0])[0] or None


def _read_saved_loggers(run: Run) -> Any:
    """The states of the loggers in the checkpoint. A function, so that no frame of the run keeps the checkpoint in memory."""
    checkpoint = run.checkpoint
    return checkpoint.loaded.state["loggers"] if checkpoint is not None and "loggers" in checkpoint.components else ()


def _check_inputs(module: object, datamodule: object, loaders: tuple[Any, ...]) -> None:
    if not isinstance(module, TrainModule):
        adapt(module)
        raise ModuleError(
            f"expected a TrainModule{' (LightningModule)' * is_open('lightning')}, received {type(module).__name__}."
            f"{make_instance(module)} For a model of transformers: TransformersModule(model) of "
            "trainkit.integrations.transformers. To train a plain nn.Module, write your own training loop with "
            "trainkit.Accelerator."
        )
    if "_parameters" not in vars(module):
        raise ModuleError(f"{type(module).__name__}.__init__ must begin with super().__init__(), before anything is assigned.")
    check_module(module, TrainModule)
    refuse_datamodule(datamodule)
    if datamodule is not None and any(value is not None for value in loaders):
        raise ConfigurationError("loaders and a datamodule were both given. Give one of them.")


def refuse_datamodule(datamodule: object) -> None:
    """Refuse a data module that is none, or that has a hook that would never be called.

    Raises:
        DataError: It is another object.
        HookError: One of its hooks is refused.
    """
    if datamodule is None:
        return
    if not isinstance(datamodule, DataModule):
        adapt(datamodule)
        raise DataError(f"datamodule must be a DataModule, not {type(datamodule).__name__}.{make_instance(datamodule)}")
    check_datamodule(datamodule, DataModule)


_LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


def _choose_datamodule(
    trainer: Trainer, stage: str, module: TrainModule, datamodule: DataModule | None, loaders: tuple[Any, ...]
) -> DataModule | None:
    """The data module that the run was given, or the assigned one if the loaders of the run come from nowhere else."""
    if datamodule is not None:
        trainer._assigned_datamodule = None
        return datamodule
    given = any(value is not None for value in loaders) or is_overridden(module, _LOADERS[stage], DataHooks)
    return None if given else trainer._assigned_datamodule


def _new_run(
    trainer: Trainer,
    stage: str,
    module: TrainModule,
    datamodule: DataModule | None,
    compiler: Callable[..., Any] | None,
    signals: Signals,
) -> Run:
    """A new run: a fit from step 0, or an evaluation with the progress of the fit before it."""
    trainer.strategy.broken = False
    before = trainer._run
    run = replace(
        before,
        accelerator=Accelerator.of_trainer(trainer.strategy),
        signals=signals,
        hooks=HookTable.nothing(),
        results=MetricResults(),
        given_module=module,
        datamodule=datamodule,
        compiler=compiler,
        compiled=CompiledModules(),
        validation=None,
        evaluation=None,
        evaluations={},
        checkpoint=None,
        ckpt_path=None,
    )
    run.accelerator.seed = run.seed
    if stage == "fit":
        across_epochs = before.arguments.check_val_every_n_epoch is None
        progress = before.progress.continued(across_epochs) if before.continues else RunProgress()
        run = replace(run, continues=False, progress=progress, fitted=module, optimizers=[], schedulers=[], train_loader=None)
        run.restored = None
        if before.save_policy is not None:
            renew_loggers(trainer)
        run.save_policy = SavePolicy(run)
        trainer.precision_plugin.reset()
    elif run.save_policy is not None:
        run.save_policy.continue_in(run)
    run.progress.begin(stage)
    return run


def _attach(trainer: Trainer, module: TrainModule, datamodule: DataModule | None) -> None:
    """Attach the trainer to the module and the data module."""
    module.trainer = trainer
    if datamodule is not None:
        datamodule.trainer = trainer


def set_up(trainer: Trainer, run: Run) -> None:
    """Set up the run: log folders, `prepare_data`, `setup`, `configure_model`, the module on its device."""
    stage, module, strategy = run.progress.stage, run.module, run.strategy
    assert stage is not None
    share_log_folders(run, _read_saved_loggers(run))
    if run.profiler is not None:
        run.profiler._rank = strategy.world.rank if run.distributed else None
        run.profiler.setup(stage, strategy.local_rank if run.distributed else None, trainer.log_dir)
    generators = [*strategy.generators(), *other_generators(strategy.device)]  # configure_model may create layers anywhere
    seed_generators(mix(run.seed, Stage.TRAIN, Purpose.INIT), generators)
    _prepare_data(run)
    if run.datamodule is not None and is_overridden(run.datamodule, "setup", DataModule):
        run.datamodule.setup(TrainerFn(stage))
    run.hooks.run("setup", TrainerFn(stage))
    built = module.__dict__.pop("_built", False)  # load_from_checkpoint has set it.
    if not built and is_overridden(module, "configure_model", TrainModule):
        with strategy.building(), strategy.precision.init_context():
            module.configure_model()
    if stage == "fit":
        run.recompute_activations()
    begin_compiling(run)
    run.wrapped_module = strategy.prepare_module(module)
    strategy.connect(module, run.wrapped_module)


def _prepare_data(run: Run) -> None:
    """Call `prepare_data` in one process of each node, or in one process of all; the others wait without a timeout."""
    world = run.strategy.world
    for owner in (run.datamodule, run.module):
        if owner is None or not is_overridden(owner, "prepare_data", DataHooks):
            continue
        if (world.local_rank if owner.prepare_data_per_node else world.rank) == 0:
            owner.prepare_data()
    world.thread_exchange("prepare_data").exchange(None)


def build_hooks(trainer: Trainer, run: Run) -> None:
    """Collect the methods to call for each hook, now that callbacks and loaders are known."""
    epoch_ends = [f"on_{name}_epoch_end" for name in ("train", "validation", "test")]
    run.hooks = HookTable(
        trainer,
        run.module,
        run.callbacks,
        inserted=dict.fromkeys(epoch_ends, run.finish_metrics),
        several_loaders=any(evaluation is not None and len(evaluation.loaders) > 1 for evaluation in run.evaluations.values()),
        timed=None if run.profiler is None else run.profiler.wrap,
    )
    names = [name for name in epoch_ends if name in run.hooks.early]
    run.early_hooks = frozenset(chain.from_iterable(run.strategy.world.exchange(names)))  # callbacks may differ by rank


def refuse_evaluation(run: Run, stage: str, name: str) -> None:
    """Raise for an evaluation without data; print a notice for one that a limit of 0 batches turned off."""
    argument = f"limit_{'val' if stage == 'validate' else stage}_batches"
    if name not in run.evaluation_sources and getattr(run.arguments, argument) != 0:
        raise MissingMethodError(
            f"{stage} needs data: trainer.{stage}(module, DataLoader(...)), or define the loader in "
            f"{type(run.module).__name__} or in a DataModule."
        )
    notice(f"nothing to {stage}: {argument} is 0.")


def _cause(run: Run, exception: BaseException) -> BaseException:
    """The exception that ends the run: that of a signal if a signal to the process group has ended the loader's workers."""
    failed = isinstance(exception, RuntimeError | DataError)
    workers = run.progress.stage == "fit" and failed and "DataLoader worker" in str(exception)
    return run.signals.ending(f"at step {run.progress.global_step}") if workers and run.signals.wait_for_signal() else exception


def _report_exception(run: Run, exception: BaseException) -> None:
    """Call `on_exception` of the callbacks and the data module; an error in it must not hide the first one."""
    of_data = () if run.datamodule is None else (run.datamodule.on_exception,)
    for hook in (*run.hooks.on_exception, *of_data):
        try:
            hook(exception)
        except ProcessFailedError:
            notice("on_exception was not completed: it needs all ranks, and the run has failed.", everywhere=True)
        except Exception as error:
            if not _repeats(error, exception):
                notice(f"on_exception failed: {error!r}", everywhere=True)


def _repeats(error: BaseException, exception: BaseException | None) -> bool:
    """Whether an error only repeats the one that ended the run.

    A save after a failed save fails again, and `NonFiniteGuard` refuses to save after the error that it has raised.
    """
    again = any(isinstance(error, kind) and isinstance(exception, kind) for kind in (CheckpointWriteError, NonFiniteError))
    return again or error is exception or (type(error) is type(exception) and str(error) == str(exception))


def _tear_down(trainer: Trainer, run: Run, stage: str, status: str, exception: BaseException | None) -> None:
    """Run all steps of the tear-down, even if one fails; an error here must not hide the one that ended the run."""
    run.metrics.scope = Scope.NOWHERE
    run.metrics.batch = None
    errors: list[BaseException] = []
    for step in _tear_down_steps(trainer, run, stage, status):
        try:
            step()
        except BaseException as error:  # An interrupt is caught too: the steps after it release locks and threads.
            errors.append(error)
    if run.start_record is not None:
        run.start_record.end(trainer, exception or next(iter(errors), None))
    for callback in run.callbacks:
        callback._module = None
    run.checkpoint = None
    interrupts = [error for error in errors if not isinstance(error, Exception)]
    if errors and (status == "success" or interrupts):
        raise (interrupts or errors)[0]
    for failure in errors:
        if isinstance(failure, ProcessFailedError) or _repeats(failure, exception):
            continue
        notice(f"the tear-down failed too: {failure!r}", everywhere=True)


def _finish_logger(logger: Logger, status: str) -> None:
    with logger._surviving("write to its end"):
        logger.finalize(status)


def _show_profile(trainer: Trainer, profiler: Profiler) -> None:
    """Write the profile to its file on each process, or print it on the main process."""
    if profiler.filename is not None or is_overridden(profiler, "describe", Profiler):
        profiler.describe()
    elif text := profiler.summary():
        trainer.print(text)


def _tear_down_steps(trainer: Trainer, run: Run, stage: str, status: str) -> Iterator[Callable[[], Any]]:
    """The steps of the tear-down, in order."""
    for hook in run.hooks.teardown:
        yield partial(hook, TrainerFn(stage))
    if run.datamodule is not None and is_overridden(run.datamodule, "teardown", DataModule):
        yield partial(run.datamodule.teardown, TrainerFn(stage))
    if stage == "fit" and run.save_policy is not None:
        yield run.save_policy.close
    for logger in run.loggers:
        yield partial(_finish_logger, logger, status)
    yield run.compiled.undo
    yield run.accelerator.free_memory
    yield run.strategy.teardown
    yield run.strategy.precision.restore_layers
    yield partial(run.strategy.connect, run.module)
    if run.recomputed is not None:
        yield run.recomputed.restore
    if run.profiler is not None:
        yield partial(run.profiler.teardown, stage)
        yield partial(_show_profile, trainer, run.profiler)
