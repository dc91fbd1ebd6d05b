"""The state of a run in addition to its model and optimizers: progress, metrics, callbacks, loggers, hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainkit.metrics.sync import gather_states, merge_states
from trainkit.module.hparams import StorableHyperParameters, omegaconf_names
from trainkit.state.callback_state import (
    callbacks_by_key,
    explain_load_errors,
    logger_states,
    report_callbacks,
    restore_callbacks,
    restore_loggers,
)
from trainkit.state.training_objects import TrainingObjects
from trainkit.trainer.progress import Phase, Stop
from trainkit.trainer.safe_points import agree_on_parts

if TYPE_CHECKING:
    from trainkit.data.loader import PreparedLoader
    from trainkit.trainer.run import Run
    from trainkit.trainer.setup import Training

__all__ = ["capture_run", "restore_loop", "restore_run", "training_objects"]


def training_objects(run: Run) -> TrainingObjects:
    """What is trained."""
    schedulers = [config.scheduler for config in run.schedulers]
    known = run.accelerator.known_parameters
    return TrainingObjects([run.module], run.torch_optimizers, schedulers, run.strategy.precision, run.strategy, known)


def capture_run(run: Run, loader: PreparedLoader | None) -> dict[str, Any]:
    """Everything that is not in tensor files; without a training loader, only what is needed to build the module again.

    All processes call it: state that differs between them is gathered, and the rest is the main process's.
    """
    module, datamodule, world = run.module, run.datamodule, run.strategy.data_world
    state: dict[str, Any] = {
        **_hyper_parameters(module, "hyper_parameters"),
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
    }
    if loader is None:
        return state
    start = run.progress.validation_start
    state["loop"] = _capture_loop(run, loader)
    metrics = run.train_metrics.state_dict(module, None if start is None else start.metric_updates)
    state["metrics"] = metrics if world.size == 1 else gather_states(world, metrics)
    state["results"] = run.results.state_dict()
    state["callbacks"] = {key: callback.state_dict() for key, callback in callbacks_by_key(run.callbacks).items()}
    state["loggers"] = logger_states(run.loggers) if start is None else start.loggers
    if datamodule is not None:
        state["datamodule"] = datamodule.state_dict()
        state.update(_hyper_parameters(datamodule, "datamodule_hyper_parameters"))
    return state


def _hyper_parameters(owner: Any, key: str) -> dict[str, Any]:
    """What `load_from_checkpoint` needs to create the module or the data module."""
    storable = StorableHyperParameters(owner)
    state = {
        key: storable.values,
        f"{key}_name": owner._hparams_name,
        f"{key}_omegaconf": omegaconf_names(owner),
        f"{key}_attributes": storable.attributes,
        f"{key}_omitted": storable.omitted,
    }
    return state if owner._hparams_class is None else {**state, f"{key}_class": owner._hparams_class}


def _capture_loop(run: Run, loader: PreparedLoader) -> dict[str, Any]:
    progress, validation = run.progress, run.validation
    if run.arguments.auto_micro_batch:
        agree_on_parts(run)  # a rank may have learned in this step what fits
    # also at the end of an epoch of unknown length, where a resumed run reaches its validation by itself
    validating = progress.validation_start is not None
    between = progress.phase is Phase.STEP and (progress.stop is Stop.STOPPING or progress.batches_done == 0)
    # a stop that was carried out, or is about to be, must not end the run that resumes here: it will be requested again
    requested = not (progress.stop is Stop.STOPPED or (between and run.due.may_stop))
    # over several processes a request of the step that is complete has not been exchanged yet
    underway = run.distributed and progress.phase is Phase.STEP and progress.should_stop
    stop_asked = progress.stop in (Stop.REQUESTED, Stop.STOPPING) or underway
    return {
        "global_step": progress.global_step,
        "current_epoch": progress.current_epoch,
        "phase": progress.phase.value,
        "position": loader.gather_position(loader.position(progress.current_epoch, progress.batches_consumed)),
        "window": progress.batches_consumed - progress.batches_done,
        "validated": progress.validations,
        "validated_step": progress.validated_step,
        "earlier_batches": progress.earlier_batches,
        "validation_pending": validating,
        "validation_batches": 0 if validation is None else validation.began if validating else validation.count,
        "epoch_complete": progress.epoch_complete,
        "stop_asked": bool(stop_asked and requested),
        "stopping": bool(progress.stop is Stop.STOPPING and requested),
        "should_stop": bool(progress.should_stop and requested),
        "computed": dict(progress.computed),
        "advanced": dict(progress.advanced),
        "largest_part": progress.largest_part,
    }


def restore_loop(run: Run, training: Training, saved: Mapping[str, Any]) -> None:
    """Counters and position.

    Raises:
        StateMismatchError: the position does not fit the training loader.
    """
    progress = run.progress
    size, before = run.strategy.world_size, int(saved["position"].get("processes", 1))
    usual = training.length
    progress.epoch_start = progress.batches_done = training.loader.start_of(saved["position"])
    training.loader.resume(saved["position"], progress.epoch_start)
    progress.extra_batches = 0 if usual is None or training.length is None else training.length - usual
    progress.global_step, progress.current_epoch = int(saved["global_step"]), int(saved["current_epoch"])
    progress.phase = Phase(saved["phase"])
    progress.batch_idx = progress.epoch_start - 1
    progress.validations, progress.earlier_batches = int(saved["validated"]), int(saved["earlier_batches"])
    if size != before:  # an epoch has a different number of micro-batches per process now
        progress.earlier_batches = progress.earlier_batches * before // size
    _restore_intervals(run, training, int(saved.get("window", 0)) * before // size)
    progress.epoch_complete = bool(saved["epoch_complete"])
    progress.agree_on_stop(bool(saved["stop_asked"]))
    if saved["stopping"]:
        progress.begin_stopping()
    progress.should_stop = bool(saved["should_stop"])
    progress.computed = {str(name): int(step) for name, step in saved["computed"].items()}
    # absent from checkpoints of earlier versions
    advanced, progress.validated_step = saved.get("advanced", {}), int(saved.get("validated_step", 0))
    progress.advanced = {str(index): int(step) for index, step in advanced.items()}
    progress.largest_part = saved.get("largest_part")  # absent from checkpoints of earlier versions
    if run.validation is not None:
        run.validation.count = int(saved["validation_batches"])


def _restore_intervals(run: Run, training: Training, window: int) -> None:
    """Count the validation intervals that are over by the arguments of this run, not by those of the run that was saved.

    Args:
        run: The fit, whose position is restored.
        training: What its loop calls.
        window: Micro-batches of the accumulation window whose step was saved; 0: it is not known.
    """
    progress, batches = run.progress, run.progress.epoch_start
    if progress.phase is Phase.UPDATED:  # the validation of this step comes next, if it is due
        batches -= window or run.accumulation_in(progress.current_epoch)
    if training.validate_every is not None:
        progress.validations = run.due.intervals(batches, training.validate_every)


def restore_run(
    run: Run,
    state: Mapping[str, Any],
    components: set[str],
    what: str = "the checkpoint",
    restore_objects: Callable[[], None] = lambda: None,
) -> None:
    """Metrics, callbacks, loggers and the data module, as far as `components` names them.

    Args:
        run: The fit.
        state: The state in the checkpoint, whose position is restored.
        components: The parts to restore.
        what: The checkpoint, for messages.
        restore_objects: Restores the model and the optimizers. Those of trainkit's callbacks whose state is refused are found
            before; loggers remove what was written later, and come last.

    Raises:
        CorruptCheckpointError: The owner of a state cannot load it.
    """
    if "callbacks" in components:
        restore_callbacks(run.callbacks, state["callbacks"], what, of_trainkit=True)
    restore_objects()
    if "loop" in components:
        world = run.strategy.data_world
        metrics = merge_states(state["metrics"], world.rank, world.size)
        run.train_metrics.load_state_dict(metrics, run.module, run.strategy.device)
        run.results.load_state_dict(state["results"])
        if run.datamodule is not None and state.get("datamodule"):
            with explain_load_errors(run.datamodule, "datamodule", what):
                run.datamodule.load_state_dict(state["datamodule"])
    if "callbacks" in components:
        restore_callbacks(run.callbacks, state["callbacks"], what, of_trainkit=False)
        report_callbacks(run.callbacks, state["callbacks"])
    if "loggers" in components:
        restore_loggers(run.loggers, state["loggers"], what)
