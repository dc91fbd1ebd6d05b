"""``trainkit checkpoint ls``: the checkpoints of a folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trainkit.checkpoint.folder import Found, list_checkpoints
from trainkit.checkpoint.reader import is_checkpoint, look_at
from trainkit.cli.checkpoint.text import about_manifest, as_json, bytes_text, holds, on_one_line, say, table
from trainkit.errors import CheckpointNotFoundError

__all__ = ["checkpoints_at", "run"]

_HEADER = ("NAME", "STEP", "EPOCHS", "RUN", "SAVED AT", "SIZE", "HOLDS", "METRICS", "STATE")
_RUN_SHOWN = 8  # characters of the run's id that tell it apart


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON. What is wrong with a checkpoint is said and is no error of the listing."""
    found = checkpoints_at(Path(args.folder))
    if args.json:
        print(as_json([_described(one) for one in found]))
    elif not found:
        say(f"{args.folder} holds no checkpoint.")
    else:
        say(*table(_HEADER, map(_row, found), right="STEP EPOCHS SIZE"))
    return 0


def checkpoints_at(path: Path) -> list[Found]:
    """The checkpoint at ``path``, or those in it, or those in its folder ``checkpoints``; in that order.

    Raises:
        CheckpointNotFoundError: there is no such folder.
    """
    if is_checkpoint(path):
        return [Found(path, *look_at(path))]
    if not path.is_dir():
        raise CheckpointNotFoundError(
            f"Expected a folder of checkpoints, got {str(path)!r}, which is {'a file' if path.exists() else 'not there'}. "
            "Fix: name the folder that the run saved to: trainkit checkpoint ls <default_root_dir>/checkpoints"
        )
    return list_checkpoints(path) or list_checkpoints(path / "checkpoints")


def _row(one: Found) -> tuple[str, ...]:
    manifest = one.manifest
    state = "good" if one.problem is None else on_one_line(one.problem, one.path)
    if manifest is None:
        return (one.path.name, *["?"] * 6, "", state)
    metrics = ", ".join(f"{name}={value:.4g}" for name, value in manifest.metrics.items())
    size = bytes_text(sum(entry.size for entry in manifest.files.values()))
    saved = manifest.saved_at[:19].replace("T", " ")
    about = (str(manifest.step), str(manifest.epoch), manifest.run_id[:_RUN_SHOWN], saved, size, holds(manifest))
    return (one.path.name, *about, metrics, state)


def _described(one: Found) -> dict[str, Any]:
    about = {} if one.manifest is None else about_manifest(one.manifest)
    return {"name": one.path.name, "path": str(one.path), "problem": one.problem, **about}
