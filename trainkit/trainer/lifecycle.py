"""One run from set-up to tear-down, in order and whatever happens: what ``Trainer``'s four verbs share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainkit.accelerator import Accelerator
from trainkit.console import counted, each_once, notice, users_frames
from trainkit.distributed.failure_report import report_failure
from trainkit.errors import (
    CheckpointWriteError,
    ConfigurationError,
    DataError,
    MissingMethodError,
    ModuleError,
    Preempted,
    ProcessFailedError,
)
from trainkit.hooks.hook_checks import check_datamodule, check_module
from trainkit.hooks.table import HookTable
from trainkit.metrics.store import MetricResults, MetricStore, Scope
from trainkit.module.data_module import DataModule
from trainkit.module.overridable_hooks import DataHooks
from trainkit.module.train_module import TrainModule
from trainkit.rng import Purpose, RandomState, Stage, mix, seed_generators
from trainkit.trainer.defaults import merge_module_callbacks, renew_loggers, share_log_folders
from trainkit.trainer.eval_loop import evaluate
from trainkit.trainer.from_config import compiled
from trainkit.trainer.metric_notices import check_monitors
from trainkit.trainer.plans import EvaluationPlan
from trainkit.trainer.save_policy import Checkpointing
from trainkit.trainer.setup import evaluation_plan, overrides, refuse_incomplete
from trainkit.trainer.signals import Signals, requeue
from trainkit.trainer.step_flags import Control
from trainkit.trainer.torch_flags import torch_flags

if TYPE_CHECKING:
    from trainkit.trainer.trainer import Trainer

__all__ = [
    "agree_on_signals",
    "build_hooks",
    "check_sanity",
    "interruptible",
    "plan_evaluation",
    "refuse_evaluation",
    "running",
    "set_up",
]


class interruptible:  # noqa: N801 - used as a function, like contextlib's own
    """Within it SIGTERM, SIGUSR1 and Ctrl-C let the step be finished and saved first.

    What Ctrl-C ends with says how to continue, so that this is the last line on the terminal. Its traceback keeps the user's
    frames only, as where the loop looks at signals tells nobody anything; after a second Ctrl-C, which ends a step that hangs,
    it keeps them all.

    Args:
        trainer: whose fit runs in it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._notices = trainer, each_once()

    def __enter__(self) -> None:
        trainer = self._trainer
        self._notices.__enter__()
        self._outer, trainer._signals = trainer._signals, Signals(trainer._look)
        trainer._signals.__enter__()

    def __exit__(self, kind: Any, ending: BaseException | None, trace: TracebackType | None) -> None:
        trainer, signals = self._trainer, self._trainer._signals
        signals.__exit__()
        try:
            if ending is None and signals.received is not None:  # it came when there was no step left to be finished
                ending = signals.ending("after the last step")
                self._explain(ending)
                raise ending
            if ending is not None:
                self._explain(ending)
            if sys.version_info < (3, 11) and isinstance(ending, KeyboardInterrupt) and ending.__traceback__ is not trace:
                raise ending  # else Python puts the traceback back
        finally:
            trainer._signals = self._outer
            self._notices.__exit__(None, None, None)

    def _explain(self, ending: BaseException) -> None:
        trainer = self._trainer
        newest = None if trainer._save_policy is None else trainer._checkpointing.newest
        fit = f"trainer.fit(..., ckpt_path={str(newest)!r}), or ckpt_path='auto' for the newest."
        if isinstance(ending, Preempted):
            if newest is not None:
                notice(f"fit ended by {ending}; to go on: {fit}")
            if trainer._arguments.slurm_requeue and trainer.is_global_zero:
                requeue()
        elif isinstance(ending, KeyboardInterrupt):
            if not ending.args:
                step = f"stopped after {counted(trainer.global_step, 'optimizer step')}"
                ending.args = (f"{step}; " + ("no checkpoint was saved." if newest is None else f"to go on: {fit}"),)
            if trainer._signals.received is not None and not trainer._signals.twice:
                ending.__cause__, ending.__suppress_context__ = None, True
                ending.__traceback__ = users_frames(ending.__traceback__)


@contextmanager
def running(
    trainer: Trainer,
    stage: str,
    module: TrainModule,
    datamodule: DataModule | None,
    *given: Any,
) -> Iterator[None]:
    """Within it the module is this trainer's and its callbacks are attached; afterwards all that the run took is released.

    The order: ``configure_callbacks``, the body, ``teardown``. The body begins with :func:`set_up`; a fit finds the checkpoint
    that it resumes from before that.
    """
    if trainer.stage is not None:
        raise ConfigurationError(
            f"this Trainer is in the middle of {trainer.stage!r}, and another run would take its state. Use a second one: "
            f"Trainer(...).{stage}(module, ...)"
        )
    random_state = RandomState(trainer.strategy.generators())
    outer: Trainer | None = None
    status, ending = "none", None  # there is nothing yet to be given back
    watchdog = trainer.strategy.world.watchdog
    if watchdog is not None:
        watchdog.folder = trainer.default_root_dir
        trainer.accelerator.collective_checks.enter_run(stage, watchdog.entered)
    try:
        trainer.accelerator.collective_checks.begin_run(stage)
        module, trainer._compiler = _uncompiled(compiled(module))
        _check_inputs(module, datamodule, given)
        refuse_incomplete(module, stage, trainer.strategy.has_optimizer)
        outer, status = module._trainer, "failed"
        _begin(trainer, stage, module, datamodule)
        merge_module_callbacks(trainer, module)
        build_hooks(trainer)
        with torch_flags(*trainer._flags):
            yield
        status = "success"
    except BaseException as exception:
        trainer.strategy.broken = trainer.strategy.world.size > 1
        ending = report_failure(trainer.strategy.world.channel, _cause(trainer, exception))
        if status != "none":
            _report(trainer, ending)
        if ending is exception:
            raise
        raise ending from exception
    finally:
        try:
            if status != "none":
                _tear_down(trainer, stage, status, ending)
        finally:
            trainer._progress.end()
            if outer is not None and outer.stage is not None:
                module._trainer = outer  # whose run goes on
            random_state.restore()
            if watchdog is not None:
                watchdog.left()


def agree_on_signals(trainer: Trainer) -> None:
    """A signal that has come to one process by now has come to all."""
    world = trainer.strategy.world
    if world.size > 1:
        trainer._signals.received = world.largest([trainer._signals.received or 0])[0] or None


def _log_folders(trainer: Trainer) -> Any:
    """What the checkpoint says of them. A function of its own, so that no frame of the run's holds the checkpoint in memory."""
    found = trainer._found
    return found.loaded.state["loggers"] if found is not None and "loggers" in found.wanted else ()


def _uncompiled(module: Any) -> tuple[Any, Callable[..., Any] | None]:
    """The module inside ``torch.compile(module)``, and what compiles its steps in the same way."""
    inner = getattr(module, "_orig_mod", None)
    return (module, None) if inner is None else (inner, module.dynamo_ctx)


def _check_inputs(module: object, datamodule: object, given: tuple[Any, ...]) -> None:
    if not isinstance(module, TrainModule):
        hint = f" Did you forget to make an instance: {module.__name__}()?" if isinstance(module, type) else ""
        raise ModuleError(
            f"expected a TrainModule, received {type(module).__name__}.{hint} A plain nn.Module can be trained by an own loop "
            "with trainkit.Accelerator."
        )
    if "_parameters" not in vars(module):
        raise ModuleError(f"{type(module).__name__}.__init__ must begin with super().__init__(), before anything is assigned.")
    check_module(module, TrainModule)
    if datamodule is not None and not isinstance(datamodule, DataModule):
        hint = f" Did you forget to make an instance: {datamodule.__name__}()?" if isinstance(datamodule, type) else ""
        raise DataError(f"datamodule must be a DataModule, not {type(datamodule).__name__}.{hint}")
    if datamodule is not None:
        check_datamodule(datamodule, DataModule)
    if datamodule is not None and any(value is not None for value in given):
        raise ConfigurationError("loaders and a datamodule were both given. Give one of them.")


def _begin(trainer: Trainer, stage: str, module: TrainModule, datamodule: DataModule | None) -> None:
    """The trainer's state as it is before a run; first what the tear-down needs, whatever fails here."""
    trainer._hooks, trainer.strategy.broken = HookTable.nothing(), False
    trainer.accelerator = Accelerator.of_trainer(trainer.strategy)
    trainer.accelerator.seed = trainer.seed
    trainer._attach(module, datamodule)
    if stage == "fit":
        trainer._new_progress()
    trainer._progress.begin(stage)
    trainer._active_plan = trainer._val_plan = None
    trainer._plans = {}
    trainer._results = MetricResults()
    compiled, world = trainer._compiler is not None, trainer.strategy.data_world
    trainer._metrics = MetricStore(trainer._emit, trainer._results, compiled=compiled, world=world)
    trainer._train_metrics = trainer._metrics
    if stage == "fit":
        if trainer._save_policy is not None:
            renew_loggers(trainer)
        trainer._save_policy = Checkpointing(trainer)
        trainer._control = Control(trainer) if trainer.strategy.world.size > 1 else None
        trainer._fitted = module
        trainer._prepared_optimizers, trainer.lr_scheduler_configs = [], []
        trainer._plan = None  # what is asked of it before there is a new one must not be the old one's
        trainer.precision.reset()


def set_up(trainer: Trainer) -> None:
    """Set up the run: log folders, ``prepare_data``, ``setup``, ``configure_model``, the module on its device."""
    stage, module = trainer.stage, trainer.lightning_module
    assert stage is not None
    share_log_folders(trainer, _log_folders(trainer))
    if trainer.profiler is not None:
        trainer.profiler.start(Path(trainer.log_dir or "."))
    seed_generators(mix(trainer.seed, Stage.TRAIN, Purpose.INIT), trainer.strategy.generators())
    _prepare_data(trainer, module)
    if trainer.datamodule is not None and overrides(trainer.datamodule, "setup", DataModule):
        trainer.datamodule.setup(stage)
    trainer._hooks.run("setup", stage)
    built = module.__dict__.pop("_built", False)  # by load_from_checkpoint
    if not built and overrides(module, "configure_model"):
        with trainer.strategy.building(), trainer.precision.init_context():
            module.configure_model()
    trainer._wrapped_module = trainer.strategy.prepare_module(module)


def _prepare_data(trainer: Trainer, module: TrainModule) -> None:
    """In one process of each machine, or in one of all; the others wait, however long it takes."""
    world = trainer.strategy.world
    for owner in (trainer.datamodule, module):
        if owner is None or not overrides(owner, "prepare_data", DataHooks):
            continue
        if (world.local_rank if owner.prepare_data_per_node else world.rank) == 0:
            owner.prepare_data()
    world.team("prepare_data").exchange(None)


def build_hooks(trainer: Trainer) -> None:
    """Who is called for which hook, now that callbacks and loaders are known."""
    trainer._hooks = HookTable(
        trainer,
        trainer.lightning_module,
        trainer.callbacks,
        inserted={f"on_{name}_epoch_end": trainer._finish_metrics for name in ("train", "validation", "test")},
        several_loaders=any(plan is not None and len(plan.loaders) > 1 for plan in trainer._plans.values()),
        timed=None if trainer.profiler is None else trainer.profiler.wrapped,
    )


def plan_evaluation(trainer: Trainer, name: str, given: Any, *, sanity: bool = False) -> EvaluationPlan | None:
    """The plan of an evaluation, also kept for ``num_val_batches`` and the like; ``None`` if there is nothing to run."""
    results = MetricResults() if sanity else trainer._results
    compiled, world = trainer._compiler is not None, trainer.strategy.data_world
    store = MetricStore(trainer._emit, results, compiled=compiled, world=world)
    plan = evaluation_plan(trainer, name, given, store, sanity=sanity)
    trainer._plans["sanity" if sanity else name] = plan
    return plan


def refuse_evaluation(trainer: Trainer, stage: str, name: str) -> None:
    """An evaluation that was asked for and cannot be is an error; one that a limit turned off is a notice."""
    if name not in trainer._evaluation_sources:
        raise MissingMethodError(
            f"{stage} needs data: trainer.{stage}(module, DataLoader(...)), or define the loader in "
            f"{type(trainer.lightning_module).__name__} or in a DataModule."
        )
    notice(f"nothing to {stage}: the limit of batches is 0.")


def check_sanity(trainer: Trainer, given: Any) -> None:
    """A few validation batches before training; what they log is thrown away, the names are compared with monitors."""
    if trainer._val_plan is None:
        check_monitors(trainer, None)
    if trainer._val_plan is None or trainer._arguments.num_sanity_val_steps == 0:
        return
    plan = plan_evaluation(trainer, "validation", given, sanity=True)
    if plan is None:
        return
    trainer._progress.sanity_checking = trainer._progress.validating = True
    results, trainer._results = trainer._results, plan.metrics.results
    try:
        trainer._hooks.run("on_sanity_check_start")
        evaluate(trainer, plan)
        trainer._hooks.run("on_sanity_check_end")
    finally:
        trainer._progress.sanity_checking = trainer._progress.validating = False
        trainer._results = results
        for loader in plan.loaders:
            loader.close()
    check_monitors(trainer, plan.metrics.results.evaluated)


def _cause(trainer: Trainer, exception: BaseException) -> BaseException:
    """What the run ends with: a signal to the whole process group ends the loader's workers too, and is the reason then."""
    workers = trainer.stage == "fit" and isinstance(exception, RuntimeError) and "DataLoader worker" in str(exception)
    return trainer._signals.ending(f"at step {trainer.global_step}") if workers and trainer._signals.soon() else exception


def _report(trainer: Trainer, exception: BaseException) -> None:
    """Tell the callbacks; an error of theirs must not hide the first."""
    for hook in trainer._hooks.on_exception:
        try:
            hook(exception)
        except ProcessFailedError:
            notice("on_exception was not completed: it needs all ranks, and the run has failed.", everywhere=True)
        except Exception as error:
            if not _same(error, exception):
                notice(f"on_exception failed: {error!r}", everywhere=True)


def _same(error: BaseException, exception: BaseException | None) -> bool:
    """Whether an error says nothing that the one that ended the run does not say: saves that fail go on failing."""
    saves = isinstance(error, CheckpointWriteError) and isinstance(exception, CheckpointWriteError)
    return saves or error is exception or (type(error) is type(exception) and str(error) == str(exception))


def _tear_down(trainer: Trainer, stage: str, status: str, exception: BaseException | None) -> None:
    """All of it, whatever fails on the way; an error here must not hide the one that ended the run."""
    trainer._metrics.scope = Scope.NOWHERE
    trainer._metrics.batch = None
    errors: list[BaseException] = []
    for part in _parts_to_release(trainer, stage, status):
        try:
            part()
        except BaseException as error:  # an interrupt too: what comes after it releases locks and threads
            errors.append(error)
    for callback in trainer.callbacks:
        callback._module = None
    trainer._found = None
    interrupts = [error for error in errors if not isinstance(error, Exception)]
    if errors and (status == "success" or interrupts):
        raise (interrupts or errors)[0]
    for failure in errors:
        if isinstance(failure, ProcessFailedError) or _same(failure, exception):  # what ended the run says as much or more
            continue
        notice(f"the tear-down failed too: {failure!r}", everywhere=True)


def _parts_to_release(trainer: Trainer, stage: str, status: str) -> Iterator[Callable[[], Any]]:
    """What a run took, in the order in which it is released."""
    for hook in trainer._hooks.teardown:
        yield partial(hook, stage)
    if trainer.datamodule is not None and overrides(trainer.datamodule, "teardown", DataModule):
        yield partial(trainer.datamodule.teardown, stage)
    if stage == "fit" and trainer._save_policy is not None:
        yield trainer._checkpointing.close
    for logger in trainer.loggers:
        yield partial(logger.finalize, status)
    yield trainer.accelerator.free_memory
    yield trainer.strategy.teardown
    profiler = trainer.profiler
    if profiler is not None:
        yield profiler.stop
        yield lambda: trainer.print(profiler.summary())
