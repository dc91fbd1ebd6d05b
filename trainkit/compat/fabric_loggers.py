"""The loggers of `lightning.fabric.loggers`: those of trainkit, whose folder is called `root_dir` there."""

from __future__ import annotations

import os
from typing import Any

from trainkit.loggers.csv_logs import CSVLogger as _CSVLogger
from trainkit.loggers.tensorboard import TensorBoardLogger as _TensorBoardLogger

__all__ = ["CSVLogger", "TensorBoardLogger"]


class _RootDir:
    """The arguments that a logger of Fabric has.

    Args:
        root_dir: The folder of all runs.
        name: A folder in it, or `None`.
        version: The folder of this run in that; default: the next free `version_<n>`.
        options: Further arguments of the logger of trainkit.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root_dir, name, version, **options)  # type: ignore[call-arg]


def _with_root_dir(kind: Any) -> Any:
    """A class with the name of trainkit's, by which trackers and checkpoints know it; a command line does not list it."""
    names = {"__module__": __name__, "__qualname__": f"_with_root_dir.<locals>.{kind.__name__}", "__doc__": kind.__doc__}
    return type(kind.__name__, (_RootDir, kind), names)


CSVLogger = _with_root_dir(_CSVLogger)
TensorBoardLogger = _with_root_dir(_TensorBoardLogger)
