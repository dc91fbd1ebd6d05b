"""One verdict for all processes: what one of them could not do, none of them has done, and all raise the same error."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainkit import errors
from trainkit.errors import CheckpointError, TrainkitError

__all__ = ["SHARED_FOLDER_ADVICE", "Group", "run_on_all_ranks", "wait_for_path"]

SHARED_FOLDER_ADVICE = (
    "All processes of a run must see the same folder of checkpoints. Fix: choose one on a file system that all machines share, "
    "ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)."
)
"""What to say to a process that does not see what another has written."""

_PATIENCE = 5.0  # seconds until what one machine has written is seen by another


class Group(Protocol):
    """Processes that can tell each other something: a :class:`~trainkit.distributed.world.World`, or a ``Team`` of one."""

    rank: int
    size: int

    def exchange(self, value: Any) -> list[Any]:
        """What every process gave, in the order of their ranks; JSON."""


def run_on_all_ranks(group: Group, work: Callable[[], Any], otherwise: type[CheckpointError] = CheckpointError) -> list[Any]:
    """Do something on every process of a group, each its part.

    Args:
        group: the processes; all of them call this.
        work: returns something that JSON can hold.
        otherwise: the class of the error for those that are none of trainkit's own.

    Returns:
        What it returned on each process, by rank.

    Raises:
        TrainkitError: it failed on some process. On all of them it is of the class that it has there, and names the rank,
            unless all failed alike. An interrupt is raised as it is where it came.
    """
    if group.size == 1:
        return [work()]
    value, error = None, None
    try:
        value = work()
    except BaseException as caught:
        error = caught
    said = group.exchange([value, None if error is None else [type(error).__name__, str(error) or type(error).__name__]])
    if error is not None and not isinstance(error, Exception):
        raise error
    bad = {rank: problem for rank, (_, problem) in enumerate(said) if problem is not None}
    if len(bad) == group.size and error is not None and all(problem == bad[group.rank] for problem in bad.values()):
        raise error
    if bad:
        raise _first_error(bad, otherwise) from error
    return [given for given, _ in said]


def _first_error(bad: dict[int, list[str]], otherwise: type[CheckpointError]) -> TrainkitError:
    """What the first process that failed says."""
    rank, (name, text) = next(iter(bad.items()))
    where = f"rank {rank}" + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TrainkitError):
        return kind(f"{where}: {text}")
    return otherwise(f"{where}: {name}: {text}")


def wait_for_path(path: Path) -> bool:
    """Whether something is at ``path``, which another process has made, within a few seconds: NFS takes its time."""
    end = time.monotonic() + _PATIENCE
    while not os.path.lexists(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system look anew
    return True
