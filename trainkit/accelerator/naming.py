"""Checkpoints that name themselves: ``project_dir/checkpoints/checkpoint_0``, ``checkpoint_1``, …"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainkit.checkpoint.all_ranks import run_on_all_ranks
from trainkit.checkpoint.folder import remove
from trainkit.checkpoint.identify import is_checkpoint
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.reader import inspect_checkpoint
from trainkit.console import notice
from trainkit.distributed.world import World
from trainkit.errors import CheckpointError, ConfigurationError
from trainkit.utils.configurations import ProjectConfiguration

__all__ = ["check_place", "folder_of", "newest_first", "next_place", "number_after", "rotate"]

_NAME = re.compile(r"checkpoint_(0|[1-9][0-9]*)")


def folder_of(project: ProjectConfiguration) -> Path:
    """Where they are.

    Raises:
        ConfigurationError: the project has no folder.
    """
    if project.project_dir is None:
        raise ConfigurationError(
            "ProjectConfiguration(automatic_checkpoint_naming=True) needs a folder: Accelerator(project_dir='runs/first', "
            "project_config=...), or ProjectConfiguration(project_dir='runs/first', ...)"
        )
    return Path(os.path.abspath(project.project_dir), "checkpoints")


def next_place(project: ProjectConfiguration, world: World) -> Path:
    """Where the next one goes; the main process's word counts.

    Raises:
        ConfigurationError: there are some of that number, or later ones, which the loop has not gone on from.
    """

    def choose() -> str | None:
        return str(_free_place(project)) if world.is_main else None

    return Path(run_on_all_ranks(world, choose)[0])


def check_place(project: ProjectConfiguration, world: World) -> None:
    """See to it that there will be a place for the next one, before hours of training are spent; the main process does so.

    Raises:
        ConfigurationError: as of :func:`next_place`.
    """
    if project.automatic_checkpoint_naming and world.is_main:
        _free_place(project)


def _free_place(project: ProjectConfiguration) -> Path:
    folder = folder_of(project)
    taken = sorted(number for number, _ in _numbered(folder))
    if taken and taken[-1] >= project.iteration:
        shown = f"checkpoint_{taken[0]}" + (f" to checkpoint_{taken[-1]}" if len(taken) > 1 else "")
        raise ConfigurationError(
            f"{folder} holds {shown} of an earlier start, and the next would be checkpoint_{project.iteration}. To go on from "
            "the newest: accelerator.load_state() before the loop; to begin anew beside them: "
            f"accelerator.project_configuration.iteration = {taken[-1] + 1}, or another project_dir."
        )
    return folder / f"checkpoint_{project.iteration}"


def newest_first(project: ProjectConfiguration, world: World) -> list[tuple[Path, str | None]]:
    """Those that there are, with what is wrong with each if anything is; as the main process sees them.

    What a kill has left of one has another name, and is not among them.
    """

    def look() -> list[list[str | None]] | None:
        if not world.is_main:
            return None
        found = sorted(_numbered(folder_of(project)), reverse=True)
        return [[str(path), inspect_checkpoint(path)[1]] for _, path in found if is_checkpoint(path)]

    return [(Path(path), problem) for path, problem in run_on_all_ranks(world, look)[0]]


def number_after(project: ProjectConfiguration, loaded: Path, world: World) -> int:
    """The number of the next one when the loop goes on from a checkpoint: after all that there are, if it is one of them."""

    def count() -> int | None:
        if not world.is_main:
            return None
        folder = folder_of(project)
        if Path(os.path.realpath(loaded)).parent != Path(os.path.realpath(folder)):
            return project.iteration
        return max((number for number, _ in _numbered(folder)), default=-1) + 1

    number: int = run_on_all_ranks(world, count)[0]
    return number


def rotate(folder: Path, limit: int | None, manifest: Manifest | None) -> None:
    """Remove what is too old, when a new one is complete; on the process that has its manifest.

    Only complete ones of the same run count, and only those are removed.

    Args:
        folder: where they are.
        limit: so many stay; ``None``: all.
        manifest: of the new one.
    """
    if manifest is None:
        return
    try:
        for left in folder.glob(".checkpoint_*.del-*"):  # by a kill in the midst of a removal
            shutil.rmtree(left, ignore_errors=True)
        if limit is not None:
            for old in _complete(folder, manifest.run_id)[:-limit]:
                remove(old)
    except (CheckpointError, OSError) as error:  # the new one is there; the next save tries again
        notice(f"save_state: the new checkpoint is complete, but: {error}")


def _complete(folder: Path, run_id: str) -> list[Path]:
    """Those of a run that are complete, the oldest first."""
    found = []
    for _, path in sorted(_numbered(folder)):
        manifest, problem = inspect_checkpoint(path) if is_checkpoint(path) else (None, None)
        if problem is None and manifest is not None and manifest.run_id == run_id:
            found.append(path)
    return found


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """Whatever has the name of one, with its number."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. Use another project_dir.") from error
    for name in names:
        if match := _NAME.fullmatch(name):
            yield int(match[1]), folder / name
