"""The state of a ``Trainer``'s run beside its model and optimizers: counters, metrics, callbacks, loggers, hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.all_ranks import run_on_all_ranks
from trainkit.checkpoint.draft import Content, Draft
from trainkit.console import notice
from trainkit.distributed.world import World
from trainkit.errors import UnsavableError
from trainkit.metrics.merge import gather_states, merge_states
from trainkit.state.hyper import stored
from trainkit.state.parts import Parts
from trainkit.tagged_json.encode import unsavable

if TYPE_CHECKING:
    from trainkit.callback import Callback
    from trainkit.trainer.trainer import Trainer

__all__ = ["Phase", "capture_run", "consumed", "drafted", "logger_states", "parts_of", "restore_loop", "restore_run"]


class Phase(str, Enum):
    """What of the present update is done, so that a resumed run does the rest of it and nothing twice."""

    STEP = "step"
    """All of it: the last window is complete, logged and validated."""
    UPDATED = "updated"
    """The parameters are updated; logging and validation come next."""
    VALIDATING = "validating"
    """A validation is running, its hooks included. It is repeated whole."""
    EPOCH_END = "epoch_end"
    """The hooks of the epoch's end are running. They are run again."""


def parts_of(trainer: Trainer) -> Parts:
    """What is trained."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return Parts([trainer.lightning_module], trainer.optimizers, schedulers, trainer.precision, trainer.strategy)


def capture_run(trainer: Trainer, weights_only: bool) -> dict[str, Any]:
    """Everything that is no tensor file; with ``weights_only`` what the module needs to be built again.

    Over several processes all of them call it: what each has its own part of is gathered, the rest is the main process's.
    """
    module, datamodule, world = trainer.lightning_module, trainer.datamodule, trainer.strategy.data_world
    state: dict[str, Any] = {
        "hyper_parameters": stored(module),
        "hyper_parameters_name": getattr(module, "_hparams_name", None),
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
    }
    if weights_only:
        return state
    state["loop"] = _capture_loop(trainer)
    metrics = trainer._train_metrics.state_dict(trainer.lightning_module, trainer._metric_updates)
    state["metrics"] = metrics if world.size == 1 else gather_states(world, metrics)
    state["results"] = trainer._results.state_dict()
    state["callbacks"] = {key: callback.state_dict() for key, callback in keyed(trainer.callbacks).items()}
    state["loggers"] = trainer._states_of_loggers or logger_states(trainer)
    if datamodule is not None:
        state["datamodule"] = datamodule.state_dict()
        state["datamodule_hyper_parameters"] = stored(datamodule)
    return state


def _added_by_hooks(state: Mapping[str, Any]) -> UnsavableError | None:
    """What ``on_save_checkpoint`` has added to a checkpoint and cannot be stored, all of it in one error; None if nothing."""
    added = {f'checkpoint["{name}"]': value for name, value in state.get("user", {}).items()}
    given = state.get("hyper_parameters", {})  # without those that cannot be stored; what a hook has added is there too
    added |= {f'checkpoint["hyper_parameters"][{name!r}]': value for name, value in given.items()}
    refused = {place: problem for place, value in added.items() if (problem := unsavable(value, place)) is not None}
    if not refused:
        return None
    place, (_, kind) = next(iter(refused.items()))
    return UnsavableError(
        "on_save_checkpoint added to the checkpoint what cannot be stored:\n  "
        + "\n  ".join(text for text, _ in refused.values())
        + "\nA checkpoint holds numbers, text, tensors, numpy arrays, lists and dicts, and no code. There are three ways out:\n"
        f"  1. store its state, and load that in on_load_checkpoint: {place} = self.thing.state_dict()\n"
        "  2. register its type, once, where it is defined: "
        f"trainkit.checkpoint.register({kind.__name__}, encode, decode)\n"
        f"  3. leave it out, and make it again in setup or on_load_checkpoint: remove the line {place} = ..."
    )


def drafted(world: World, content: Content) -> Draft:
    """A content laid out for writing. Collective: if that fails on one rank, it is an error on all.

    Raises:
        UnsavableError: a value that cannot be stored, with the path to it.
    """
    drafts: list[Draft] = []

    def lay_out() -> None:
        try:
            drafts.append(Draft(content, rank=world.rank, ranks=world.size))
        except UnsavableError as error:
            explained = _added_by_hooks(content.state)
            if explained is None:
                raise
            raise explained from error

    run_on_all_ranks(world, lay_out)
    return drafts[0]


def logger_states(trainer: Trainer) -> list[dict[str, Any]]:
    """Where each logger is in its files."""
    return [{"kind": type(logger).__name__, "state": logger.state_dict()} for logger in trainer.loggers]


def keyed(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by the key of their state; a second one with the same key gets a number."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        key = name = callback.state_key
        number = 1
        while key in found:
            number += 1
            key = f"{name}#{number}"
        found[key] = callback
    return found


def _capture_loop(trainer: Trainer) -> dict[str, Any]:
    plan, validation = trainer._fit_plan, trainer._val_plan
    # left by an error too; also at the end of an epoch of unknown length, where a resumed run comes by itself
    validating = trainer._states_of_loggers is not None
    between = trainer._phase is Phase.STEP and (plan.stopping or plan.done == 0)
    # a stop that was obeyed, or is about to be, must not end the run that goes on from here; who asked for it will ask again
    asked = not (trainer._ended or (between and trainer._may_stop))
    # over several processes what was asked for in the step that is complete is still on its way
    underway = trainer._control is not None and trainer._phase is Phase.STEP and trainer.should_stop
    return {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "phase": trainer._phase.value,
        "position": plan.loader.gathered(plan.loader.position(trainer.current_epoch, consumed(trainer))),
        "validated": plan.validated,
        "earlier_batches": plan.earlier_batches,
        "validation_pending": validating,
        "validation_batches": 0 if validation is None else validation.began if validating else validation.count,
        "epoch_complete": plan.complete,
        "stop_asked": (plan.stop_asked or underway) and asked,
        "stopping": plan.stopping and asked,
        "should_stop": trainer.should_stop and asked,
        "computed": dict(trainer._computed),
    }


def consumed(trainer: Trainer) -> int:
    """The micro-batches of the epoch whose windows are complete."""
    return trainer._fit_plan.done if trainer._phase in (Phase.STEP, Phase.EPOCH_END) else trainer.batch_idx + 1


def restore_loop(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Counters and position.

    Raises:
        StateMismatchError: the position does not fit the training loader.
    """
    plan, size, before = trainer._fit_plan, trainer.world_size, int(saved["position"].get("processes", 1))
    usual = plan.length
    plan.start = plan.done = plan.loader.start_of(saved["position"])
    plan.loader.resume(saved["position"], plan.start)
    plan.surplus = 0 if usual is None or plan.length is None else plan.length - usual
    trainer.global_step, trainer.current_epoch = int(saved["global_step"]), int(saved["current_epoch"])
    trainer._phase = Phase(saved["phase"])
    trainer.batch_idx = plan.start - 1
    plan.validated, plan.earlier_batches = int(saved["validated"]), int(saved["earlier_batches"])
    if size != before:  # a row is another number of micro-batches now
        plan.earlier_batches = plan.earlier_batches * before // size
        if plan.validate_every is not None:
            unfinished = trainer.accumulate_grad_batches if trainer._phase is Phase.UPDATED else 0
            plan.validated = max(0, plan.earlier_batches + plan.start - plan.surplus - unfinished) // plan.validate_every
    plan.complete = bool(saved["epoch_complete"])
    plan.stop_asked, plan.stopping = bool(saved["stop_asked"]), bool(saved["stopping"])
    trainer.should_stop = bool(saved["should_stop"])
    trainer._computed = {str(name): int(step) for name, step in saved["computed"].items()}
    if trainer._val_plan is not None:
        trainer._val_plan.count = int(saved["validation_batches"])


def restore_run(trainer: Trainer, state: Mapping[str, Any], wanted: set[str]) -> None:
    """Metrics, callbacks, loggers and the data module, as far as they are wanted."""
    if "loop" in wanted:
        world = trainer.strategy.data_world
        metrics = merge_states(state["metrics"], world.rank, world.size)
        trainer._train_metrics.load_state_dict(metrics, trainer.lightning_module, trainer.device)
        trainer._results.load_state_dict(state["results"])
        if trainer.datamodule is not None and state.get("datamodule"):
            trainer.datamodule.load_state_dict(state["datamodule"])
    if "callbacks" in wanted:
        _restore_callbacks(trainer, state["callbacks"])
    if "loggers" in wanted:
        _restore_loggers(trainer, state["loggers"])


def _restore_callbacks(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    present = keyed(trainer.callbacks)
    for key, callback in present.items():
        if saved.get(key):
            callback.load_state_dict(saved[key])
    fresh = [key for key, callback in present.items() if key not in saved and callback.state_dict()]
    if fresh:
        notice(f"these callbacks were not in the checkpoint and start anew: {', '.join(fresh)}.")
    gone = [key for key, state in saved.items() if key not in present and state]
    if gone:
        notice(f"the checkpoint has the state of callbacks that are not attached: {', '.join(gone)}.")


def _restore_loggers(trainer: Trainer, saved: Sequence[Mapping[str, Any]]) -> None:
    left = list(saved)
    for logger in trainer.loggers:
        match = next((entry for entry in left if entry["kind"] == type(logger).__name__), None)
        if match is not None:
            left.remove(match)
            logger.load_state_dict(match["state"])
