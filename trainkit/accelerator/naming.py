"""`NumberedCheckpoints`: the folders `project_dir/checkpoints/checkpoint_0`, `checkpoint_1`, …"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.checkpoint.folder import remove
from trainkit.checkpoint.manifest import Manifest, is_checkpoint
from trainkit.checkpoint.ranks import run_on_all_ranks
from trainkit.checkpoint.reader import inspect_checkpoint
from trainkit.config.kwargs_handlers import ProjectConfiguration
from trainkit.console import notice
from trainkit.distributed.world import World
from trainkit.errors import CheckpointError, ConfigurationError

__all__ = ["NumberedCheckpoints", "number_of", "rotate"]

_NAME = re.compile(r"checkpoint_(0|[1-9][0-9]*)")


class NumberedCheckpoints:
    """The checkpoints of a project that are named by their number, as `automatic_checkpoint_naming` does.

    The main process looks at the folder, and all processes get what it has found.

    Args:
        project: has the folder, and in `iteration` the number of the next checkpoint.
        world: the processes.
    """

    def __init__(self, project: ProjectConfiguration, world: World) -> None:
        self.project, self._world = project, world

    @property
    def active(self) -> bool:
        """Whether `save_state` names checkpoints by their number."""
        return self.project.automatic_checkpoint_naming

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints.

        Raises:
            ConfigurationError: the project has none.
        """
        if self.project.project_dir is None:
            raise ConfigurationError(
                "ProjectConfiguration(automatic_checkpoint_naming=True) needs a folder: Accelerator(project_dir='runs/first', "
                "project_config=...), or ProjectConfiguration(project_dir='runs/first', ...)"
            )
        return Path(os.path.abspath(self.project.project_dir), "checkpoints")

    def next_path(self) -> Path:
        """The folder of the next checkpoint. Collective.

        Raises:
            ConfigurationError: the folder contains checkpoints of an earlier start, which this run has not resumed.
        """
        return Path(run_on_all_ranks(self._world, lambda: str(self._free_path()) if self._world.is_main else None)[0])

    def check(self) -> None:
        """On the main process, raise what `next_path` would raise; before hours of training are spent.

        Raises:
            ConfigurationError: as `next_path`.
        """
        if self.active and self._world.is_main:
            self._free_path()

    def _free_path(self) -> Path:
        folder, number = self.folder, self.project.iteration
        taken = sorted(number for number, _ in _numbered(folder))
        if taken and taken[-1] >= number:
            shown = f"checkpoint_{taken[0]}" + (f" to checkpoint_{taken[-1]}" if len(taken) > 1 else "")
            raise ConfigurationError(
                f"{folder} contains {shown} of an earlier start, and the next one would be checkpoint_{number}. To continue "
                "from the newest: accelerator.load_state() before the loop; to start a new series next to them: "
                f"accelerator.project_configuration.iteration = {taken[-1] + 1}, or another project_dir."
            )
        return folder / f"checkpoint_{number}"

    def newest_first(self) -> list[tuple[Path, str | None, bool]]:
        """Each checkpoint, what is wrong with it, or `None`, and whether its parameters are finite. Collective.

        Those whose parameters are not finite come last. The files of a killed save have other names and are not listed.
        """

        def find() -> list[list[Any]] | None:
            if not self._world.is_main:
                return None
            found = sorted(_numbered(self.folder), reverse=True)
            rows = [(str(path), *inspect_checkpoint(path)) for _, path in found if is_checkpoint(path)]
            marked = [[path, problem, about is None or about.finite is not False] for path, about, problem in rows]
            return sorted(marked, key=lambda row: not row[-1])

        return [(Path(path), problem, finite) for path, problem, finite in run_on_all_ranks(self._world, find)[0]]

    def continue_after(self, loaded: Path) -> None:
        """Number the next checkpoint after all that there are, if the loaded one is one of them. Collective."""

        def count() -> int | None:
            if not self._world.is_main:
                return None
            folder = self.folder
            if Path(os.path.realpath(loaded)).parent != Path(os.path.realpath(folder)):
                return self.project.iteration
            return max((number for number, _ in _numbered(folder)), default=-1) + 1

        self.project.iteration = run_on_all_ranks(self._world, count)[0]


def rotate(folder: Path, limit: int | None, manifest: Manifest | None) -> None:
    """Remove the oldest checkpoints after a save; on the process that has the manifest of the new one.

    Only complete checkpoints of the same run are counted and removed: first those whose parameters are not finite. A new one
    whose parameters are not finite never removes the newest of the others.

    Args:
        folder: the folder of the checkpoints.
        limit: number of checkpoints to keep; `None`: all.
        manifest: of the new checkpoint; `None`: another process removes.
    """
    if manifest is None:
        return
    try:
        for left in folder.glob(".checkpoint_*.del-*"):  # a process was killed while it removed this
            shutil.rmtree(left, ignore_errors=True)
        if limit is not None:
            new, *others = sorted(_complete(folder, manifest.run_id), key=lambda one: one[0], reverse=True)
            others.sort(key=lambda one: (one[2], one[0]))
            outdated = others[: max(0, len(others) + 1 - limit)]
            if not new[2] and outdated and outdated[-1] == others[-1] and others[-1][2]:
                outdated.pop()
            for _, old, _ in outdated:
                remove(old)
    except (CheckpointError, OSError) as error:  # the next save tries again
        notice(f"save_state: the new checkpoint is complete, but old ones could not be removed: {error}")


def _complete(folder: Path, run_id: str) -> list[tuple[int, Path, bool]]:
    """The complete checkpoints of a run: number, path, and whether its parameters are finite."""
    found = []
    for number, path in _numbered(folder):
        manifest, problem = inspect_checkpoint(path) if is_checkpoint(path) else (None, None)
        if problem is None and manifest is not None and manifest.run_id == run_id:
            found.append((number, path, manifest.finite is not False))
    return found


def number_of(path: Path) -> int:
    """The number in the name of a numbered checkpoint."""
    return int(path.name.rpartition("_")[2])


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """The number and path of everything that is named like a checkpoint."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. Use another project_dir.") from error
    for name in names:
        if match := _NAME.fullmatch(name):
            yield int(match[1]), folder / name
