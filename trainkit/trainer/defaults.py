"""Which callbacks and loggers a `Trainer` has: the user's, and those that its arguments stand for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.console import with_article
from trainkit.errors import ConfigurationError
from trainkit.module.hook_checks import check_callback
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.registry import load_callback
from trainkit.state.hyper import logged
from trainkit.tagged_json.omegaconf import without_omegaconf
from trainkit.trainer.run_folder import opens_files

if TYPE_CHECKING:
    from trainkit.loggers import Logger
    from trainkit.trainer.run import Run
    from trainkit.trainer.trainer import Trainer

__all__ = [
    "attach_callbacks",
    "attach_loggers",
    "merge_module_callbacks",
    "renew_loggers",
    "share_log_folders",
    "start_loggers",
]


def attach_callbacks(
    trainer: Trainer,
    given: Callback | Sequence[Callback] | None,
    progress_bar: bool | None,
    summary: bool | None,
    checkpoints: bool | None,
) -> list[Callback]:
    """The user's callbacks, then those of the Trainer's `enable_…` arguments, of which `None` counts as True.

    Raises:
        HookError: an object that is not a callback, or has a hook that cannot be called.
        ConfigurationError: the same callback twice, or one that contradicts an argument.
    """
    callbacks: list[Callback] = [] if given is None else _listed(given)
    for callback in callbacks:
        check_callback(callback)
    if len({id(callback) for callback in callbacks}) < len(callbacks):
        raise ConfigurationError("callbacks contains the same object twice. Pass each callback once.")
    arguments = trainer._arguments
    of_value = ("accumulate_grad_batches", "gradient_clip_val", "max_time")  # arguments whose value the callback gets
    progress_bar, summary, checkpoints = (asked is None or bool(asked) for asked in (progress_bar, summary, checkpoints))

    def attach(name: str, wanted: bool, argument: str, *values: Any) -> None:
        kind = load_callback(name) if wanted or argument in of_value else None
        if not wanted or kind is None:
            return
        if any(isinstance(callback, kind) for callback in callbacks):
            if argument in of_value:
                raise ConfigurationError(
                    f"{argument} and {with_article(kind.__name__)} in callbacks set the same thing. Give one of them."
                )
            return
        callbacks.append(kind(*values))

    has_bar = _has_bar(callbacks, progress_bar)
    attach("progress_bar", progress_bar and not has_bar, "enable_progress_bar")  # on all processes; the main process shows it
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
    attach("model_checkpoint", checkpoints, "enable_checkpointing")
    return _checkpoints_last(callbacks)


def _has_bar(callbacks: Iterable[Callback], wanted: bool) -> bool:
    """Whether the callbacks contain a progress bar.

    Raises:
        ConfigurationError: they contain two, or one that is not wanted.
    """
    bars = [type(callback).__name__ for callback in callbacks if getattr(callback, "is_progress_bar", False)]
    if len(bars) > 1:
        raise ConfigurationError(
            f"callbacks contains {len(bars)} progress bars: {', '.join(bars)}. Expected one, since they draw over each other. "
            f"Remove all but one: callbacks=[{bars[0]}()]"
        )
    if bars and not wanted:
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


def _check_norm_is_logged(wanted: bool, callbacks: Iterable[Callback]) -> None:
    if wanted and any(not getattr(callback, "log_norm", True) for callback in callbacks):
        raise ConfigurationError(
            "log_grad_norm=True and GradientClipping(log_norm=False) in callbacks contradict each other. Remove one of them."
        )


def merge_module_callbacks(trainer: Trainer, module: TrainModule) -> None:
    """Add what `configure_callbacks` returns; a callback replaces those of its class that the trainer has.

    Callbacks of the module of an earlier run are removed, and those that they replaced are restored.
    """
    own = [c for c in trainer.callbacks if not _contains(trainer._module_callbacks, c)]
    own += [c for c in trainer._replaced_callbacks if not _contains(own, c)]
    configured = _configured_callbacks(module)
    kinds = {type(callback) for callback in configured}
    trainer._replaced_callbacks = [callback for callback in own if type(callback) in kinds]
    kept = [callback for callback in own if type(callback) not in kinds]
    clipping = load_callback("gradient_clipping")
    clips = module.automatic_optimization and is_overridden(module, "configure_gradient_clipping", TrainModule)
    if clips and not any(isinstance(callback, clipping) for callback in kept + configured):
        configured.append(clipping(None))  # so that the module's own clipping is called
    trainer._module_callbacks = configured
    trainer._run.callbacks = _checkpoints_last(kept + configured)
    for callback in trainer.callbacks:
        callback._module = module


def _contains(callbacks: list[Callback], callback: Callback) -> bool:
    """Whether it is one of these objects, by identity: a user's class may define `__eq__`."""
    return any(callback is other for other in callbacks)


def _configured_callbacks(module: TrainModule) -> list[Callback]:
    """What `configure_callbacks` returns, checked."""
    configured = module.configure_callbacks() if is_overridden(module, "configure_callbacks", TrainModule) else None
    callbacks = [] if configured is None else _listed(configured)
    for callback in callbacks:
        check_callback(callback)
    return callbacks


def _listed(given: Any) -> list[Any]:
    """One object or several, as a list. A string or a class counts as one object, and is refused later."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | type) else [given]


def attach_loggers(trainer: Trainer, given: bool | str | Logger | Sequence[str | Logger] | None) -> list[Logger]:
    """The user's loggers, or the default one; in a `fast_dev_run` one that stores nothing for each.

    Raises:
        ConfigurationError: an object that is not a logger.
        UnknownNameError: a name that no logger has.
        MissingPackageError: a logger whose package is not installed.
    """
    if given is False:
        return []
    if trainer.fast_dev_run:
        from trainkit.loggers.base import DummyLogger

        return [DummyLogger() for _ in _listed(given)]
    from trainkit.loggers.base import Logger
    from trainkit.loggers.logger_setup import attach, default_logger, make_logger

    if given is None or given is True:
        loggers = [default_logger()]
    else:
        loggers = [make_logger(one) if isinstance(one, str) else one for one in _listed(given)]
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise ConfigurationError(
                f"logger must be True, False, a Logger, its name or a list of them, not {logger!r}. For example: CSVLogger()"
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
    if run.several and run.loggers:
        from trainkit.loggers.logger_setup import share_folders

        share_folders(run.loggers, run.strategy.world, saved)


def start_loggers(run: Run) -> None:
    """Give the loggers their folders, for new logs unless they continue one, and the hyper-parameters.

    Raises:
        ConfigurationError: the data module and the module contradict each other, or a folder cannot be written.
    """
    owners = [o for o in (run.datamodule, run.module) if o is not None and o._log_hyperparams]
    given = [entry for owner in owners for entry in without_omegaconf(owner.hparams).items()]
    values = dict(given)
    differing = [str(name) for name, value in given if repr(value) != repr(values[name])]
    if differing:
        raise ConfigurationError(
            f"the data module and the module have different hyper-parameters of the same name: {', '.join(differing)}. "
            "Rename one, or do not log those of the module or the data module: save_hyperparameters(logger=False)"
        )
    _make_log_folders(run.loggers)
    if values and run.loggers:
        kept = {name: value for owner in owners for name, value in logged(owner).items()}
        for logger in run.loggers:
            with logger._surviving("write the hyper-parameters"):
                logger.log_hyperparams(kept)


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
