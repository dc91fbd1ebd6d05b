"""`trainkit checkpoint ls` and `verify`: list the checkpoints of a folder or of all runs, and compare their bytes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainkit.checkpoint.checksum import CHECKSUMS
from trainkit.checkpoint.folder import ListedCheckpoint, candidates, folders_below, list_checkpoints
from trainkit.checkpoint.manifest import is_checkpoint
from trainkit.checkpoint.reader import inspect_checkpoint, open_checkpoint
from trainkit.checkpoint.urls import remote_at, remote_sync
from trainkit.cli.checkpoint.text import (
    about_manifest,
    as_json,
    bytes_text,
    contents_text,
    good_text,
    on_one_line,
    print_lines,
    table,
    tensor_headers,
)
from trainkit.errors import CheckpointError, CheckpointNotFoundError
from trainkit.paths import local_path

__all__ = ["checkpoints_at", "run", "run_verify", "verify"]


_HEADER = ("NAME", "STEP", "EPOCHS", "RUN", "SAVED AT", "SIZE", "CONTAINS", "METRICS", "STATE")
_RUN_SHOWN = 8  # characters of the run's id


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON. A damaged checkpoint is listed with its problem."""
    folder = local_path(args.folder, "FOLDER")
    checkpoints = checkpoints_at(folder)
    if args.json:
        print(as_json([_describe(one) for one in checkpoints]))
    elif not checkpoints:
        print_lines(f"{args.folder} contains no checkpoints.")
    else:
        has_folders = len({one.path.parent for one in checkpoints}) > 1
        names = [str(one.path.relative_to(folder)) if has_folders else one.path.name for one in checkpoints]
        print_lines(*table(_HEADER, map(_row, checkpoints, names), right="STEP EPOCHS SIZE"))
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
    checkpoints = list_checkpoints(path) or candidates(*folders_below(path))
    return sorted(checkpoints, key=lambda one: one.problem is not None)


def _row(one: ListedCheckpoint, name: str) -> tuple[str, ...]:
    manifest = one.manifest
    state = good_text(manifest) if one.problem is None else on_one_line(one.problem, one.path)
    if manifest is None:
        return (name, *["?"] * 6, "", state)
    metrics = ", ".join(f"{name}={value:.4g}" for name, value in manifest.metrics.items())
    size = bytes_text(manifest.total_size)
    saved = manifest.saved_at[:19].replace("T", " ")
    about = (str(manifest.step), str(manifest.epoch), manifest.run_id[:_RUN_SHOWN], saved, size, contents_text(manifest))
    return (name, *about, metrics, state)


def _describe(one: ListedCheckpoint) -> dict[str, Any]:
    about = {} if one.manifest is None else about_manifest(one.manifest)
    return {"name": one.path.name, "path": str(one.path), "problem": one.problem, **about}


def run_verify(args: argparse.Namespace) -> int:
    """Print one line for each checkpoint; 1 if one of them is damaged."""
    paths: list[Path] = []
    for place in (local_path(path, "PATH") for path in args.paths):
        remote_sync.fetch(place)
        checkpoints = [one.path for one in checkpoints_at(place)]
        if not checkpoints:
            raise CheckpointNotFoundError(
                f"Expected a checkpoint or a folder of checkpoints, got {str(place)!r}, which contains none. "
                "Fix: pass the folder that the run saved to: trainkit checkpoint verify <default_root_dir>"
            )
        paths += [path for path in checkpoints if path not in paths]
    bad = 0
    for path in paths:
        problem, size = verify(path)
        bad += problem is not None
        if problem is not None:
            print_lines(f"BAD   {path}: {on_one_line(problem, path)}")
        else:
            manifest = inspect_checkpoint(path)[0]
            mark = "" if good_text(manifest) == "good" else ", its parameters are not finite"
            checked = "?" if manifest is None else CHECKSUMS[manifest.checksum].title
            print_lines(f"good  {path}  ({bytes_text(size)}, {checked}){mark}")
    return 1 if bad else 0


def verify(path: Path) -> tuple[str | None, int]:
    """The problem of a checkpoint, or `None`, and the bytes of its files."""
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        for name in checkpoint.manifest.files:
            if name.endswith(".safetensors"):
                tensor_headers(path / name)
        checkpoint.read({"state"}, unregistered=True)
    except CheckpointError as error:
        return str(error), 0
    return None, checkpoint.manifest.total_size
