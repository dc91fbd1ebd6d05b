"""The folder of a run: where it saves its checkpoints by default, and where those of earlier runs are looked for.

Each run has its own folder: that of its first logger that writes files, `<save_dir>/<name>/version_N`, or
`<default_root_dir>/version_N` if no logger has one. Its checkpoints are in the folder `checkpoints` inside it. A resumed
run continues in the folder of the run that it resumes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainkit.checkpoint.folder import CHECKPOINTS, candidates, check_writable, folders_below
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.urls import remote_at
from trainkit.errors import CheckpointWriteError
from trainkit.module.overridable_hooks import is_overridden

if TYPE_CHECKING:
    from trainkit.distributed.world import World
    from trainkit.loggers import Logger
    from trainkit.trainer.run import Run

__all__ = ["SearchFolders", "choose_folder", "folder_of_fit", "folder_of_run", "list_folders", "opens_files", "search_folders"]


class SearchFolders(NamedTuple):
    """Where checkpoints are looked for.

    Attributes:
        dirpaths: the folders that callbacks were given (`dirpath`).
        runs: the checkpoint folders of all runs that `"auto"` and `"last"` may mean.
        below: what `runs` were looked for in, for messages.
        named: the user has named the experiment, so that `runs` are only its own.
    """

    dirpaths: list[Path]
    runs: list[Path]
    below: list[Path]
    named: bool = False

    @property
    def all(self) -> list[Path]:
        """All folders, without duplicates."""
        return list(dict.fromkeys([*self.dirpaths, *self.runs]))

    def __str__(self) -> str:
        return ", ".join(map(str, dict.fromkeys([*self.dirpaths, *self.below])))


def choose_folder(run: Run) -> Path:
    """The folder for the checkpoints of a new run, chosen by the main process. Collective.

    Raises:
        CheckpointWriteError: it cannot be created.
        ConfigurationError: the folder of a logger cannot be created.
    """
    world = run.strategy.world

    def choose() -> str | None:
        if not world.is_main:
            return None
        from trainkit.loggers.log_folder import LogFolder, claim_folder

        logger = _logger_with_folder(run)
        folder = None if logger is None else str(claim_folder(logger._run_folder()))
        if folder is None:
            root = Path(run.root_dir)
            check_writable(root)
            folder = str(LogFolder(root, None).claim())
        return os.path.abspath(os.path.join(folder, CHECKPOINTS))

    return Path(run_on_all_ranks(world, choose, CheckpointWriteError))


def search_folders(run: Run) -> SearchFolders:
    """Where `"auto"`, `"last"` and `"best"` look: where this run saves, and the folders of earlier runs.

    An experiment whose logger was given a name, or a run whose logger was given a version, is looked for under that name only:
    the folds of a cross-validation, for example, must not continue each other. Checkpoints in `<default_root_dir>/checkpoints`,
    which versions of trainkit without run folders wrote, are used if there are no others.
    """
    callbacks: list[Any] = list(run.checkpoint_callbacks)
    dirpaths = [Path(dirpath) for callback in callbacks if (dirpath := callback.user_dirpath) is not None]
    if callbacks and len(dirpaths) == len(callbacks):
        return SearchFolders(list(dict.fromkeys(dirpaths)), [], [])
    root = Path(os.path.abspath(run.root_dir))
    _pull_folders(run, root)
    below, runs = [root], [*folders_below(root)]
    logger, named = _logger_with_folder(run), False
    if logger is not None:
        with_name, versioned = _is_named(logger)
        named = with_name or versioned
        place = Path(os.path.abspath(logger.root_dir))
        _pull_folders(run, place)
        if versioned:
            place = Path(os.path.abspath(logger._run_folder().path or place))
        folders = folders_below(place, deep=False)
        if not named:
            runs += folders
            below = below if place.is_relative_to(root) else [*below, place]
        else:
            below = [place]
            runs = folders if any(map(_has_files, folders)) else [root / CHECKPOINTS]
    return SearchFolders(list(dict.fromkeys(dirpaths)), list(dict.fromkeys(runs)), below, named)


def _pull_folders(run: Run, root: Path) -> None:
    """Create the folders at the URL of a staging folder, on the main process, which looks for checkpoints in them."""
    if run.strategy.world.is_main and (remote := remote_at(root)) is not None:
        remote.pull_folders()


def list_folders(run: Run) -> list[str]:
    """Where the checkpoints of a run go, for messages; no folder is chosen or created."""
    callbacks: list[Any] = list(run.checkpoint_callbacks)
    dirpaths = [callback.user_dirpath for callback in callbacks]
    running = None if run.save_policy is None else run.save_policy.save_folders.of_run
    if running is None:
        logger = _logger_with_folder(run)
        place = run.root_dir if logger is None else logger.root_dir
        version = None if logger is None else logger._run_folder().path
        running = Path(os.path.abspath(version or os.path.join(place, "version_N")), CHECKPOINTS)
    return list(dict.fromkeys(str(running) if folder is None else folder for folder in dirpaths))


def folder_of_fit(run: Run) -> Path | None:
    """The folder of a fit that has begun; `None` if it writes nothing in a folder of its own. Chooses and creates none."""
    chosen = None if run.save_policy is None else run.save_policy.save_folders.of_run
    if chosen is not None:
        return chosen.parent
    logger = _logger_with_folder(run)
    return None if logger is None else logger._run_folder().path


def folder_of_run(world: World, runs: list[Path], run_id: str) -> Path | None:
    """The folder among `runs` that contains checkpoints of a run; collective."""

    def find() -> str | None:
        if not world.is_main:
            return None
        listed = (one for one in candidates(*runs) if one.manifest is not None and one.manifest.run_id == run_id)
        return next((str(one.path.parent) for one in listed), None)

    folder = run_on_all_ranks(world, find)
    return None if folder is None else Path(folder)


def _logger_with_folder(run: Run) -> Logger | None:
    """The first logger that writes files to a folder of the run."""
    if not run.loggers:
        return None
    from trainkit.loggers.log_folder import has_folder

    return next((logger for logger in run.loggers if has_folder(logger) and opens_files(logger)), None)


def opens_files(logger: Logger) -> bool:
    """Whether a logger has something to open; one that does not, such as one that prints, needs no folder."""
    from trainkit.loggers.base import Logger

    return is_overridden(logger, "open_experiment", Logger)


def _is_named(logger: Logger) -> tuple[bool, bool]:
    """Whether the experiment was given a name, and the run a version."""
    return logger.name not in ("", "default"), logger._version is not None


def _has_files(folder: Path) -> bool:
    try:
        return any(not name.startswith(".") for name in os.listdir(folder))
    except OSError:
        return False
