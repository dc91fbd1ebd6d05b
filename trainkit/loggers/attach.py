"""What a Trainer does with its loggers: create the default one, and set their folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, MissingPackageError
from trainkit.loggers.base import Logger
from trainkit.loggers.csv_logs import CSVLogger
from trainkit.loggers.log_folder import LogFolder, claimed, has_folder
from trainkit.loggers.resumed_logs import find_folder
from trainkit.loggers.tensorboard import TensorBoardLogger

__all__ = ["attach", "attach_again", "default_logger", "share_folders", "states_of"]


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
        return TensorBoardLogger()
    except MissingPackageError:
        return CSVLogger()


def states_of(loggers: Sequence[Logger], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
    """For each logger its state in a checkpoint, `{"kind": …, "state": …}`, in the order of those of its class there."""
    left = list(saved)
    found: list[Mapping[str, Any] | None] = []
    for logger in loggers:
        match = next((entry for entry in left if entry["kind"] == type(logger).__name__), None)
        if match is not None:
            left.remove(match)
        found.append(None if match is None else match["state"])
    return found


def share_folders(loggers: Sequence[Logger], world: World, saved: Sequence[Mapping[str, Any]] = ()) -> None:
    """Choose the folders of the loggers on the main process and broadcast them. Collective.

    Does nothing with one process, whose loggers choose their folders when they need them.

    Args:
        loggers: the same on all processes.
        world: the processes.
        saved: states of the loggers in the checkpoint that the run resumes from; their folders are reused.

    Raises:
        ConfigurationError: a folder cannot be created; on all processes.
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
            chosen = {"folders": [_folder_values(logger) for logger in loggers]}
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
            logger._folder = LogFolder(Path(folder[0]), folder[1])


def _folder_values(logger: Logger) -> list[Any] | None:
    """The folder of a logger in plain values; None if the backend has its own layout."""
    if not has_folder(logger):
        return None
    folder = logger._run_folder()
    claimed(folder)
    return [str(folder.root), folder.version]
