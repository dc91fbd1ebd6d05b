"""`trainkit merge-weights`: `trainkit checkpoint export` with the arguments of `accelerate merge-weights`.

A module of its own, because `trainkit.cli.main` finds a subcommand by its module.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trainkit.errors import ConfigurationError, UnsupportedArgumentError

__all__ = ["add_arguments", "run"]

_ONE_FILE = 2**62  # bytes: more than any model has


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit merge-weights`, which are Accelerate's."""
    parser.epilog = "The same as: trainkit checkpoint export --format safetensors, with all weights in one file."
    parser.add_argument("checkpoint_directory", metavar="CHECKPOINT", help="a checkpoint, saved under any strategy")
    parser.add_argument("output_path", metavar="OUT", help="the folder to write model.safetensors to")
    parser.add_argument("--unsafe_serialization", action="store_true", help="not supported: a pickle can run code")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="not supported: remove the folder yourself")


def run(args: argparse.Namespace) -> int:
    """Export the weights; print what was written."""
    source, out = args.checkpoint_directory, args.output_path
    if args.unsafe_serialization:
        raise UnsupportedArgumentError("--unsafe_serialization is not supported: a pickle can run code. Fix: leave it out")
    if args.remove_checkpoint_dir:
        raise UnsupportedArgumentError(
            "--remove_checkpoint_dir is not supported, since a run resumes from the checkpoint. Fix: leave it out, then: "
            f"rm -r {source}"
        )
    if any(Path(source).glob("*.distcp")) or any(Path(source).glob("*/*.distcp")):
        raise ConfigurationError(
            f"{source} has shards of Accelerate's FSDP, and a checkpoint of trainkit has none. Fix: accelerate merge-weights "
            f"{source} {out}, then trainkit checkpoint import {out}/model.safetensors NEW"
        )
    from trainkit.cli.checkpoint import export

    return export.run(
        argparse.Namespace(
            path=source, out=out, attribute=None, format="safetensors", dtype=None, max_shard_size=_ONE_FILE, overwrite=False
        )
    )
