"""The best checkpoint of a fit: which callback keeps it, and how the module gets its weights after training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.checkpoint.pointers import resolve_pointer
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.reader import inspect_checkpoint
from trainkit.console import notice, warn
from trainkit.errors import CheckpointError, ConfigurationError
from trainkit.module.monitors import of_validation, why_no_validation
from trainkit.registry import load_callback
from trainkit.trainer.resume import load_found, read_checkpoint

if TYPE_CHECKING:
    from trainkit.trainer.arguments import TrainerArguments
    from trainkit.trainer.run import Run

__all__ = ["check_best", "check_validation", "describe_best", "keeper_to_add", "restore_best"]


def best_mode(metric: str) -> str:
    """`"min"` for a metric whose name ends in "loss", else `"max"`, as the Hugging Face Trainer decides.

    What trainkit appends to a name does not count: `val_loss_epoch`, `val_loss/dataloader_idx_0`.
    """
    base = metric.partition("/dataloader_idx_")[0].removesuffix("_epoch").removesuffix("_step")
    return "min" if base.endswith("loss") else "max"


def keeper_to_add(arguments: TrainerArguments, callbacks: Iterable[Callback]) -> list[Callback]:
    """The `ModelCheckpoint` that `restore_best` needs, if it is not among the callbacks."""
    wanted, known = arguments.restore_best, _checkpoint_callbacks(callbacks)
    if wanted is None or _keeper(arguments, known) is not None:
        return []
    if not isinstance(wanted, str):
        return [wanted]
    mode = best_mode(wanted)
    # a callback of the user's saves the newest checkpoints already
    more = {"keep_last": 0} if known else {}
    return [load_callback("model_checkpoint")(monitor=wanted, mode=mode, **more)]


def check_best(arguments: TrainerArguments, callbacks: Iterable[Callback]) -> None:
    """Check that the callbacks keep what `restore_best` and `save_total_limit` ask for.

    Raises:
        ConfigurationError: they do not.
    """
    known = _checkpoint_callbacks(callbacks)
    if arguments.restore_best is not None:
        _check_keeper(arguments, known)
    limit = arguments.save_total_limit
    if limit is None:
        return
    if len(known) != 1:
        raise ConfigurationError(
            f"save_total_limit={limit} is the number of checkpoints that one ModelCheckpoint keeps, and this Trainer has "
            f"{len(known)}: {', '.join(one.state_key for one in known) or 'enable_checkpointing=False'}. Use one, which ranks "
            "and saves: ModelCheckpoint(monitor='val_loss', every_n_train_steps=100); or give each its keep_last instead"
        )
    [one] = known
    top = one.save_top_k
    if top == -1 or one.keep_last == -1 or (one.monitor is not None and top > limit):
        argument = f"keep_last={one.keep_last}" if one.keep_last == -1 else f"save_top_k={top}"
        raise ConfigurationError(
            f"save_total_limit={limit} and ModelCheckpoint({argument}) contradict each other. Remove one of them."
        )


def _check_keeper(arguments: TrainerArguments, known: Sequence[Any]) -> None:
    keeper = _keeper(arguments, known)
    if keeper is None:
        raise ConfigurationError(
            f"{_argument(arguments)} needs a ModelCheckpoint that keeps the best checkpoint, and there is none: "
            "enable_checkpointing=False, or configure_callbacks of the module has replaced it. Remove that, or return from "
            f"configure_callbacks: ModelCheckpoint(monitor={_metric(arguments)!r})"
        )
    same = [one.state_key for one in known if one.monitor == arguments.restore_best]
    if len(same) > 1:
        raise ConfigurationError(
            f"{_argument(arguments)} is the metric of {len(same)} callbacks, which may have different best checkpoints: "
            f"{', '.join(same)}. Pass the one to restore: best = ModelCheckpoint(...), restore_best=best, "
            "callbacks=[best, ...]"
        )
    if keeper.save_top_k == 0:
        raise ConfigurationError(
            f"{_argument(arguments)} needs the best checkpoint, and ModelCheckpoint(save_top_k=0) ranks none. Fix: "
            f"ModelCheckpoint(monitor={_metric(arguments)!r}, save_top_k=1)"
        )


def check_validation(run: Run) -> None:
    """Refuse a fit whose best checkpoint or last evaluation needs a validation that there is not.

    Raises:
        ConfigurationError: there is none.
    """
    arguments = run.arguments
    wanted, reason = arguments.restore_best, why_no_validation(run.module.trainer)
    if reason is None:
        return
    if isinstance(wanted, str) and of_validation(wanted):
        raise ConfigurationError(
            f"restore_best={wanted!r} needs a validation, which this fit does not have: {reason}. If another hook logs this "
            f"metric: restore_best=ModelCheckpoint(monitor={wanted!r}, mode={best_mode(wanted)!r})"
        )
    if arguments.validate_at_end and arguments.limit_val_batches != 0:
        raise ConfigurationError(f"validate_at_end=True needs a validation, which this fit does not have: {reason}.")


def describe_best(arguments: TrainerArguments, callbacks: Iterable[Callback]) -> str | None:
    """Which checkpoint is the best, in words; `None` without `restore_best`."""
    keeper = _keeper(arguments, _checkpoint_callbacks(callbacks))
    return None if keeper is None else f"{_extreme(keeper)} {keeper.monitor}"


def restore_best(run: Run) -> None:
    """After the last checkpoint of a fit, give the module the weights of the best one, unless a signal has come. Collective.

    With averaged weights (`ExponentialMovingAverage`) these are the average, which the metric was computed with.

    Raises:
        CheckpointError: the best checkpoint is missing or damaged. The module has the weights of the last step.
    """
    arguments, saves = run.arguments, run.save_policy
    if arguments.restore_best is None or arguments.fast_dev_run or saves is None:
        return
    if run.signals.received is not None:  # The fit will be resumed, from its last state.
        return
    saves.wait()  # a save in flight may be the best
    keeper = _keeper(arguments, run.checkpoint_callbacks)
    assert keeper is not None  # check_best has seen it
    kept = f"the module keeps the weights of the last step ({run.progress.global_step})"
    world, path = run.strategy.world, keeper.best_model_path

    def find() -> list[Any] | None:
        if not world.is_main or not path:
            return None
        best = resolve_pointer(Path(path))
        manifest = inspect_checkpoint(best)[0]
        last = (saves.run_id, run.progress.global_step, False)
        is_last = manifest is not None and (manifest.run_id, manifest.step, saves.replaced) == last
        return [str(best), is_last, f"{keeper.monitor}={float(keeper.best_model_score):.6g}, the {_extreme(keeper)}"]

    found = run_on_all_ranks(world, find)
    if found is None:
        warn(
            f"{_argument(arguments)}: no checkpoint has a value of {_metric(arguments)!r} that is a number, so {kept}. A "
            "checkpoint is ranked by a value that was logged in its step: save after each validation. To validate the last "
            "step: Trainer(validate_at_end=True)"
        )
        return
    best, is_last, score = found
    if is_last:
        notice(f"restore_best: {best} ({score}) is of the last step, whose weights the module has.")
        return
    try:
        checkpoint = read_checkpoint(run, Path(best))
        load_found(run, checkpoint)
    except CheckpointError as error:  # raised before anything has changed
        raise type(error)(f"restore_best: the best checkpoint cannot be restored, and {kept}. {error}") from error
    run.restored = checkpoint.path
    instead = "of the last step" if not saves.replaced else "that a callback has averaged at the end"
    notice(f"restore_best: the module has the weights of {checkpoint}, {score}, instead of those {instead}.")


def _checkpoint_callbacks(callbacks: Iterable[Callback]) -> list[Any]:
    kind = load_callback("model_checkpoint")
    return [callback for callback in callbacks if isinstance(callback, kind)]


def _keeper(arguments: TrainerArguments, known: Sequence[Any]) -> Any | None:
    """The `ModelCheckpoint` that keeps the best checkpoint; `None` if it is not there."""
    wanted = arguments.restore_best
    if isinstance(wanted, str):
        return next((one for one in known if one.monitor == wanted), None)
    return next((one for one in known if one is wanted), None)


def _extreme(keeper: Any) -> str:
    return "smallest" if keeper.mode == "min" else "largest"


def _metric(arguments: TrainerArguments) -> str:
    wanted: Any = arguments.restore_best
    return str(wanted if isinstance(wanted, str) else wanted.monitor)


def _argument(arguments: TrainerArguments) -> str:
    wanted = arguments.restore_best
    return f"restore_best={wanted!r}" if isinstance(wanted, str) else f"restore_best=ModelCheckpoint({_metric(arguments)!r})"
