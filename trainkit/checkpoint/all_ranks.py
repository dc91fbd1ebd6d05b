"""Runs work on all ranks so that it succeeds on all or on none: if it fails on one rank, all ranks raise the same error."""

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
    "All processes of a run must see the same checkpoint folder. Fix: use a folder on a file system that all nodes share: "
    "ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)."
)
"""The fix for a rank that does not see what another rank has written."""

_VISIBLE_WITHIN = 5.0  # seconds until one node must see what another has written


class Group(Protocol):
    """Ranks that can exchange values: a `World` or a `ThreadExchange`."""

    rank: int
    size: int

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; JSON."""


def run_on_all_ranks(group: Group, work: Callable[[], Any], otherwise: type[CheckpointError] = CheckpointError) -> list[Any]:
    """Call `work` on every rank of a group. Collective.

    Args:
        group: the ranks.
        work: returns JSON.
        otherwise: the class of the error to raise if the error is not one of trainkit's.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        TrainkitError: it failed on a rank. All ranks raise an error of the same class that names the rank, unless all failed
            with the same error. An interrupt is raised unchanged on the rank where it occurred.
    """
    if group.size == 1:
        return [work()]
    value, error = None, None
    try:
        value = work()
    except BaseException as caught:
        error = caught
    reports = group.exchange([value, None if error is None else [type(error).__name__, str(error) or type(error).__name__]])
    if error is not None and not isinstance(error, Exception):
        raise error
    failures = {rank: failure for rank, (_, failure) in enumerate(reports) if failure is not None}
    if len(failures) == group.size and error is not None and all(own == failures[group.rank] for own in failures.values()):
        raise error
    if failures:
        raise _first_error(failures, otherwise) from error
    return [result for result, _ in reports]


def _first_error(failures: dict[int, list[str]], otherwise: type[CheckpointError]) -> TrainkitError:
    """The error of the first rank that failed."""
    rank, (name, text) = next(iter(failures.items()))
    where = f"rank {rank}" + (f" (and {len(failures) - 1} more)" if len(failures) > 1 else "")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TrainkitError):
        return kind(f"{where}: {text}")
    return otherwise(f"{where}: {name}: {text}")


def wait_for_path(path: Path) -> bool:
    """Whether `path`, created by another process, is visible within a few seconds, which NFS may need."""
    end = time.monotonic() + _VISIBLE_WITHIN
    while not os.path.lexists(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system refresh its cache
    return True
