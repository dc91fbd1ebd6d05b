"""Which callbacks and loggers a `Trainer` has: the user's, and those that its arguments stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.console import with_article
from trainkit.errors import ConfigurationError
from trainkit.hooks.hook_checks import check_callback
from trainkit.module.overridable_hooks import is_overridden
from trainkit.module.train_module import TrainModule
from trainkit.registry import load_callback
from trainkit.state.hyper import logged
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
    """The user's callbacks, then those that the Trainer's arguments ask for; `None` asks for one.

    Raises:
        HookError: something that is no callback, or has a hook that cannot be called.
        ConfigurationError: the same callback twice, or one that contradicts an argument.
    """
    callbacks: list[Callback] = [] if given is None else _listed(given)
    for callback in callbacks:
        check_callback(callback)
    if len({id(callback) for callback in callbacks}) < len(callbacks):
        raise ConfigurationError("callbacks holds the same object twice. Give each callback once.")
    arguments = trainer._arguments
    progress_bar, summary, checkpoints = (asked is None or bool(asked) for asked in (progress_bar, summary, checkpoints))

    def attach(name: str, wanted: bool, argument: str, *values: Any) -> None:
        kind = load_callback(name) if wanted or argument in ("gradient_clip_val", "max_time") else None
        if not wanted or kind is None:
            return
        if any(isinstance(callback, kind) for callback in callbacks):
            if argument in ("gradient_clip_val", "max_time"):
                raise ConfigurationError(
                    f"{argument} and {with_article(kind.__name__)} in callbacks say the same thing. Give one of them."
                )
            return
        callbacks.append(kind(*values))

    progress_bar = progress_bar and not any(getattr(callback, "is_progress_bar", False) for callback in callbacks)
    attach("progress_bar", progress_bar, "enable_progress_bar")  # on every process: it shows nothing on others
    attach("model_summary", summary, "enable_model_summary")
    attach("timer", arguments.max_time is not None, "max_time", arguments.max_time)
    clip = arguments.gradient_clip_val
    algorithm = arguments.gradient_clip_algorithm or "norm"
    attach("gradient_clipping", clip is not None, "gradient_clip_val", clip, algorithm)
    if not checkpoints and any(isinstance(callback, load_callback("model_checkpoint")) for callback in callbacks):
        raise ConfigurationError(
            "enable_checkpointing=False and a ModelCheckpoint in callbacks contradict each other. Give one."
        )
    attach("model_checkpoint", checkpoints and not trainer.fast_dev_run, "enable_checkpointing")
    return callbacks


def merge_module_callbacks(trainer: Trainer, module: TrainModule) -> None:
    """Add what `configure_callbacks` returns; a callback replaces those of its class that the trainer has.

    What the module of an earlier run brought is removed, and what it displaced is restored.
    """
    own = [c for c in trainer.callbacks if not _contains(trainer._brought_callbacks, c)]
    own += [c for c in trainer._displaced_callbacks if not _contains(own, c)]
    brought = _brought_by(module)
    kinds = {type(callback) for callback in brought}
    trainer._displaced_callbacks = [callback for callback in own if type(callback) in kinds]
    kept = [callback for callback in own if type(callback) not in kinds]
    clipping = load_callback("gradient_clipping")
    clips = module.automatic_optimization and is_overridden(module, "configure_gradient_clipping", TrainModule)
    if clips and not any(isinstance(callback, clipping) for callback in kept + brought):
        brought.append(clipping(None))  # so that the module's own clipping is called
    trainer._brought_callbacks = brought
    trainer._run.callbacks = kept + brought
    for callback in trainer.callbacks:
        callback._module = module


def _contains(callbacks: list[Callback], callback: Callback) -> bool:
    """Whether it is one of these objects; a user's class may have an equality of its own."""
    return any(callback is other for other in callbacks)


def _brought_by(module: TrainModule) -> list[Callback]:
    """What `configure_callbacks` returns, checked."""
    brought = module.configure_callbacks() if is_overridden(module, "configure_callbacks", TrainModule) else None
    callbacks = [] if brought is None else _listed(brought)
    for callback in callbacks:
        check_callback(callback)
    return callbacks


def _listed(given: Any) -> list[Any]:
    """One object or several, as a list; a string or a class is one, and refused later as what it is."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | type) else [given]


def attach_loggers(trainer: Trainer, given: bool | str | Logger | Sequence[str | Logger] | None) -> list[Logger]:
    """The user's loggers, or the default one; none in a `fast_dev_run`.

    Raises:
        ConfigurationError: something that is no logger.
        UnknownNameError: a name that no logger has.
        MissingPackageError: a logger whose package is not installed.
    """
    if given is False or trainer.fast_dev_run:
        return []
    from trainkit.loggers.attach import attach, default_logger
    from trainkit.loggers.base import Logger
    from trainkit.loggers.known_loggers import make_logger

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
    """Another fit of the same Trainer gets a log version of its own, unless it continues a run."""
    if trainer.loggers:
        from trainkit.loggers.attach import attach_again

        attach_again(trainer.loggers, trainer.default_root_dir, trainer.strategy.rank)


def share_log_folders(run: Run, saved: Sequence[Mapping[str, Any]] = ()) -> None:
    """Let `trainer.log_dir` be the main process's on all of them, before the first hook of a run can ask. Collective.

    Args:
        run: the run.
        saved: the states of the loggers in the checkpoint, if the run continues in their files.

    Raises:
        ConfigurationError: a folder cannot be made.
    """
    if run.several and run.loggers:
        from trainkit.loggers.attach import share_folders

        share_folders(run.loggers, run.strategy.world, saved)


def start_loggers(run: Run) -> None:
    """Give the loggers their folders and the hyper-parameters.

    Raises:
        ConfigurationError: the data module and the module contradict each other, or a folder cannot be written.
    """
    owners = [o for o in (run.datamodule, run.module) if o is not None and o._log_hyperparams]
    values = {name: value for owner in owners for name, value in owner.hparams.items()}
    differing = [str(n) for owner in owners for n, value in owner.hparams.items() if repr(value) != repr(values[n])]
    if differing:
        raise ConfigurationError(
            f"the data module and the module have different hyper-parameters of the same name: {', '.join(differing)}. "
            "Rename one, or leave it out: save_hyperparameters(logger=False)"
        )
    _make_log_folders(run.loggers)
    if values and run.loggers:
        kept = {name: value for owner in owners for name, value in logged(owner).items()}
        for logger in run.loggers:
            logger.log_hyperparams(kept)


def _make_log_folders(loggers: list[Logger]) -> None:
    """Make the folders now: one that cannot be written must stop a run before training, not where it first logs."""
    for logger in loggers:
        if not logger.is_main_process or not opens_files(logger):
            continue
        folder = logger.log_dir
        try:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)  # log_dir makes none whose version was given
        except OSError as error:
            raise ConfigurationError(
                f"{type(logger).__name__}: expected a log folder that can be written, got {folder}: {error}. "
                "Fix: save_dir='runs' or Trainer(default_root_dir='runs')"
            ) from error
