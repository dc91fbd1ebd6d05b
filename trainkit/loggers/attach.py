"""What a Trainer does with its loggers: choose one, and tell several of them where to log."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainkit.errors import ConfigurationError, MissingPackageError
from trainkit.loggers.base import Logger
from trainkit.loggers.csv_logs import CSVLogger
from trainkit.loggers.tensorboard import TensorBoardLogger

__all__ = ["attach", "default_logger"]


def attach(loggers: Sequence[Logger], default_root: str | os.PathLike[str], rank: int = 0) -> None:
    """Tell the loggers of one Trainer where to log and which process this is; may be called again.

    Loggers of different kinds that would each choose the next version of the same folder share one, so that the
    TensorBoard and CSV files of a run lie together.

    Raises:
        ConfigurationError: Two loggers of the same kind that were told to write the same files.
    """
    for logger in loggers:
        logger.set_default_root(default_root)
        logger.set_rank(rank)
    placed: list[Logger] = []
    for logger in loggers:
        if not logger._in_run_folder:
            continue
        folder = logger._run_folder()
        same_kind = [other for other in placed if type(other) is type(logger)]
        chosen = [other.log_dir for other in same_kind if other._run_folder().path is not None]
        if folder.path is not None and logger.log_dir in chosen:
            raise ConfigurationError(
                f"Expected loggers that write different files, got two {type(logger).__name__} for {logger.log_dir}. "
                f"Fix: give one of them another name, {type(logger).__name__}(name='other')"
            )
        if folder.version is None:
            taken = [other._run_folder() for other in same_kind]
            shared = [other._run_folder() for other in placed if other._run_folder() not in taken]
            logger._folder = next((other for other in shared if other.root == folder.root), folder)
        placed.append(logger)


def default_logger() -> Logger:
    """What ``Trainer(logger=True)`` uses: a ``TensorBoardLogger`` if tensorboard is installed, else a ``CSVLogger``."""
    try:
        return TensorBoardLogger()
    except MissingPackageError:
        return CSVLogger()
