"""`trainkit checkpoint ls`: the checkpoints of a folder, of a run, or of all runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainkit.checkpoint.folder import ListedCheckpoint, candidates, folders_below, list_checkpoints
from trainkit.checkpoint.identify import is_checkpoint
from trainkit.checkpoint.reader import inspect_checkpoint
from trainkit.checkpoint.remote_folder import remote_at
from trainkit.cli.checkpoint.text import (
    about_manifest,
    as_json,
    bytes_text,
    contents_text,
    good_text,
    on_one_line,
    print_lines,
    table,
)
from trainkit.errors import CheckpointNotFoundError
from trainkit.paths import local_path

__all__ = ["checkpoints_at", "run"]

_HEADER = ("NAME", "STEP", "EPOCHS", "RUN", "SAVED AT", "SIZE", "CONTAINS", "METRICS", "STATE")
_RUN_SHOWN = 8  # characters of the run's id


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON. A damaged checkpoint is listed with its problem."""
    found = checkpoints_at(folder := local_path(args.folder, "FOLDER"))
    if args.json:
        print(as_json([_described(one) for one in found]))
    elif not found:
        print_lines(f"{args.folder} contains no checkpoints.")
    else:
        several = len({one.path.parent for one in found}) > 1
        names = [str(one.path.relative_to(folder)) if several else one.path.name for one in found]
        print_lines(*table(_HEADER, map(_row, found, names), right="STEP EPOCHS SIZE"))
    return 0


def checkpoints_at(path: Path) -> list[ListedCheckpoint]:
    """The checkpoint at a path, or the checkpoints in a folder or of the runs below it.

    Raises:
        CheckpointNotFoundError: The folder does not exist.
    """
    if (remote := remote_at(path)) is not None:
        remote.pull_folders()
    if is_checkpoint(path):
        return [ListedCheckpoint(path, *inspect_checkpoint(path))]
    if not path.is_dir():
        raise CheckpointNotFoundError(
            f"Expected a folder of checkpoints, got {str(path)!r}, which {'is a file' if path.exists() else 'does not exist'}. "
            "Fix: pass the folder that the run saved to: trainkit checkpoint ls <default_root_dir>"
        )
    found = list_checkpoints(path) or candidates(*folders_below(path))
    return sorted(found, key=lambda one: one.problem is not None)


def _row(one: ListedCheckpoint, name: str) -> tuple[str, ...]:
    manifest = one.manifest
    state = good_text(manifest) if one.problem is None else on_one_line(one.problem, one.path)
    if manifest is None:
        return (name, *["?"] * 6, "", state)
    metrics = ", ".join(f"{name}={value:.4g}" for name, value in manifest.metrics.items())
    size = bytes_text(sum(entry.size for entry in manifest.files.values()))
    saved = manifest.saved_at[:19].replace("T", " ")
    about = (str(manifest.step), str(manifest.epoch), manifest.run_id[:_RUN_SHOWN], saved, size, contents_text(manifest))
    return (name, *about, metrics, state)


def _described(one: ListedCheckpoint) -> dict[str, Any]:
    about = {} if one.manifest is None else about_manifest(one.manifest)
    return {"name": one.path.name, "path": str(one.path), "problem": one.problem, **about}
