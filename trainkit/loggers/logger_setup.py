"""Create loggers by name (`"tensorboard"`, `"wandb"`, `"mlflow"`, …), and set the folders of those of one run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, MissingPackageError, UnknownNameError, missing_package, nearest
from trainkit.loggers.base import Logger, is_installed
from trainkit.loggers.log_folder import find_folder, has_folder

__all__ = [
    "LOGGERS",
    "Kind",
    "NotLoggedInError",
    "attach",
    "attach_again",
    "check_logger",
    "default_logger",
    "load_logger",
    "make_logger",
    "share_folders",
    "states_of",
]


class NotLoggedInError(ConfigurationError):
    """A service needs an API key, but none is set; `log_with="all"` skips the service."""


class Kind(NamedTuple):
    """A logger that has a name: the path of its class, the package that it needs, and the extra that installs it.

    `project` is the argument that names the project; empty for a logger of files, whose `name` is a folder.
    """

    path: str
    package: str = ""
    extra: str = ""
    project: str = ""


LOGGERS: dict[str, Kind] = {
    "comet_ml": Kind("trainkit.loggers.comet_logs:CometLogger", "comet_ml", "comet", "project"),
    "csv": Kind("trainkit.loggers.csv_logs:CSVLogger"),
    "jsonl": Kind("trainkit.loggers.csv_logs:JSONLLogger"),
    "mlflow": Kind("trainkit.loggers.mlflow_logs:MLFlowLogger", "mlflow", "mlflow", "experiment_name"),
    "tensorboard": Kind("trainkit.loggers.tensorboard:TensorBoardLogger", "tensorboard", "tensorboard"),
    "wandb": Kind("trainkit.loggers.wandb_logs:WandbLogger", "wandb", "wandb", "project"),
}


def check_logger(name: str, argument: str = "logger", also: Sequence[str] = ()) -> None:
    """Raise if no logger has this name, or its package is not installed.

    Args:
        name: The value of `argument`.
        argument: The name of the argument, for the message.
        also: Further allowed values.

    Raises:
        MissingPackageError: Its package is not installed.
    """
    if name not in LOGGERS:
        raise UnknownNameError(
            f"{argument}: expected {''.join(f'{one!r} or ' for one in also)}one of {', '.join(LOGGERS)}, got {name!r}."
            f"{nearest(name, [*LOGGERS, *also])} Fix: {argument}='tensorboard'"
        )
    kind = LOGGERS[name]
    if kind.package and not is_installed(kind.package):
        raise missing_package(kind.package, kind.extra, kind.path.partition(":")[2])


def load_logger(name: str) -> type[Logger]:
    """The class of that name; raises like `check_logger`."""
    check_logger(name)
    module, _, attribute = LOGGERS[name].path.partition(":")
    loaded: type[Logger] = getattr(import_module(module), attribute)
    return loaded


def make_logger(name: str, /, **options: Any) -> Logger:
    """A logger of that name.

    Raises:
        MissingPackageError: Its package is not installed.
    """
    kind = load_logger(name)
    parameters = inspect.signature(kind).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for option in options:
            if option not in parameters:
                raise UnknownNameError(
                    f"{kind.__name__} has no argument {option!r}.{nearest(option, parameters)} "
                    f"It has: {', '.join(parameters)}. Fix: remove it"
                )
    return kind(**options)


# ------------------------------------------------------------------------------------------------- the loggers of a run


def attach(loggers: Sequence[Logger], default_root: str | os.PathLike[str], rank: int = 0) -> None:
    """Set the default folder and the rank of the loggers of one Trainer; may be called again.

    Loggers of different classes that choose a new version in the same folder use the same one: the TensorBoard and CSV files
    of a run are in one folder.

    Raises:
        ConfigurationError: Two loggers of one class would write the same files.
    """
    for logger in loggers:
        logger.set_default_root(default_root)
        logger.set_rank(rank)
        logger._attached = True
    placed: list[Logger] = []
    for logger in filter(has_folder, loggers):
        same_kind = [other for other in placed if type(other) is type(logger)]
        folder = logger._run_folder()
        if folder.path is not None:
            _check_files(logger, same_kind)
        else:
            taken = [other._run_folder() for other in same_kind]
            others = [other._run_folder() for other in placed]
            logger._folder = next((other for other in others if other.root == folder.root and other not in taken), folder)
        placed.append(logger)
        path = logger._run_folder().path if logger.is_main_process and logger._experiment is None else None
        logger._had_log = path is not None and bool(logger._log_files(path))


def _check_files(logger: Logger, same_kind: Sequence[Logger]) -> None:
    kind = type(logger).__name__
    if logger.log_dir in [other.log_dir for other in same_kind if other._run_folder().path is not None]:
        raise ConfigurationError(
            f"Expected loggers that write different files, got two {kind} for {logger.log_dir}. "
            f"Fix: set another name for one of them, {kind}(name='other')"
        )


def attach_again(loggers: Sequence[Logger], default_root: str | os.PathLike[str], rank: int = 0) -> None:
    """`attach` for another run of the same Trainer: loggers without a given version choose a new one."""
    for logger in loggers:
        if has_folder(logger) and logger._version is None:
            logger._new_version()
    attach(loggers, default_root, rank)


def default_logger() -> Logger:
    """What `Trainer(logger=True)` uses: a `TensorBoardLogger` if tensorboard is installed, else a `CSVLogger`."""
    try:
        return make_logger("tensorboard")
    except MissingPackageError:
        return make_logger("csv")


def states_of(loggers: Sequence[Logger], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
    """For each logger its state in a checkpoint, `{"kind": …, "state": …}`, in the order of those of its class there."""
    left = list(saved)
    states: list[Mapping[str, Any] | None] = []
    for logger in loggers:
        match = next((entry for entry in left if entry["kind"] == type(logger).__name__), None)
        if match is not None:
            left.remove(match)
        states.append(None if match is None else match["state"])
    return states


def share_folders(loggers: Sequence[Logger], world: World, saved: Sequence[Mapping[str, Any]] = ()) -> None:
    """Choose the folders of the loggers on the main process and broadcast them. Collective.

    Does nothing with one process, whose loggers choose their folders when they need them.

    Args:
        loggers: The same on all processes.
        saved: States of the loggers in the checkpoint that the run resumes from; their folders are reused.
    """
    if world.size == 1 or not loggers:
        return
    states = states_of(loggers, saved)
    chosen: dict[str, Any] = {}
    if world.is_main:
        try:
            for logger, state in zip(loggers, states, strict=True):
                if state is not None and "folder" in state:
                    logger._found = state, find_folder(logger, state)
            chosen = {"folders": [logger._folder_values() for logger in loggers]}
        except ConfigurationError as error:
            chosen = {"error": str(error)}
    chosen = world.from_main(chosen)
    if "error" in chosen:
        raise ConfigurationError(chosen["error"])
    if world.is_main:
        return
    for logger, folder, state in zip(loggers, chosen["folders"], states, strict=True):
        logger._found = None if state is None else (state, None)  # the main process has searched for the folder
        if folder is not None:
            logger._use_folder(folder)
