"""`trainkit to-fsdp2`: convert a configuration file from FSDP1 to FSDP2, with the options of Accelerate's command.

trainkit reads both: the new file is for Accelerate. A module of its own, because `trainkit.cli.main` finds a subcommand by it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trainkit.config.settings_file import read_content, shard_with_version_2, write_content
from trainkit.errors import ConfigurationError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit to-fsdp2`, which are Accelerate's."""
    parser.add_argument("--config_file", metavar="FILE", required=True, help="the configuration file")
    parser.add_argument("--overwrite", action="store_true", help="replace the file, or OUT if it exists")
    parser.add_argument("--output_file", metavar="OUT", help="the file to write (default: FILE, with --overwrite)")


def run(args: argparse.Namespace) -> int:
    """Convert the file; print what was written."""
    target = args.output_file or args.config_file
    given = read_content(args.config_file)  # first: without it there is nothing to replace
    if not args.overwrite and (args.output_file is None or Path(target).exists()):
        raise ConfigurationError(f"{target} exists. Fix: --output_file NEW.yaml, or --overwrite to replace it")
    content, notes = shard_with_version_2(given, args.config_file)
    write_content(content, target)
    print("\n".join([f"Wrote {target}", *(f"  {note}" for note in notes)]))
    return 0
