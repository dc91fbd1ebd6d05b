"""`trainkit checkpoint verify`: compare every byte of every file with the manifest."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainkit.checkpoint.reader import inspect_checkpoint, open_checkpoint
from trainkit.checkpoint.staging import staging
from trainkit.cli.checkpoint.headers import tensor_headers
from trainkit.cli.checkpoint.listing import checkpoints_at
from trainkit.cli.checkpoint.text import bytes_text, good_text, on_one_line, print_lines
from trainkit.errors import CheckpointError, CheckpointNotFoundError
from trainkit.paths import local_path

__all__ = ["run", "verify"]


def run(args: argparse.Namespace) -> int:
    """Print one line for each checkpoint; 1 if one of them is damaged."""
    paths: list[Path] = []
    for given in (local_path(path, "PATH") for path in args.paths):
        staging.fetch(given)
        found = [one.path for one in checkpoints_at(given)]
        if not found:
            raise CheckpointNotFoundError(
                f"Expected a checkpoint or a folder of checkpoints, got {str(given)!r}, which contains none. "
                "Fix: pass the folder that the run saved to: trainkit checkpoint verify <default_root_dir>"
            )
        paths += [path for path in found if path not in paths]
    bad = 0
    for path in paths:
        problem, size = verify(path)
        bad += problem is not None
        if problem is not None:
            print_lines(f"BAD   {path}: {on_one_line(problem, path)}")
        else:
            mark = "" if good_text(inspect_checkpoint(path)[0]) == "good" else ", its parameters are not finite"
            print_lines(f"good  {path}  ({bytes_text(size)}){mark}")
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
    return None, sum(entry.size for entry in checkpoint.manifest.files.values())
