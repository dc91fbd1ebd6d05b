"""`trainkit tpu-config`: the line that runs commands on all machines of a TPU, with the options of `accelerate tpu-config`.

A module of its own, because `trainkit.cli.main` finds a subcommand by its module.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.config.settings_file import read_content
from trainkit.errors import ConfigurationError, UnsupportedArgumentError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit tpu-config`, which are Accelerate's."""
    parser.epilog = "trainkit starts nothing on other machines: it prints the gcloud command that does, and ends with code 2."
    named = "the values that no argument gives: tpu_name, tpu_zone, commands, command_file"
    parser.add_argument("--config_file", metavar="FILE", help=f"a configuration file of Accelerate, for {named}")
    parser.add_argument("--tpu_name", metavar="NAME", help="the TPU")
    parser.add_argument("--tpu_zone", metavar="ZONE", help="its zone")
    parser.add_argument("--use_alpha", action="store_true", help="write gcloud alpha instead of gcloud")
    parser.add_argument("--command_file", metavar="FILE", help="a file with the commands, one a line")
    parser.add_argument("--command", action="append", nargs="+", metavar="TEXT", help="a command; may be given several times")
    parser.add_argument("--install_accelerate", action="store_true", help="install trainkit first")
    parser.add_argument(
        "--accelerate_version", metavar="VERSION", default="latest", help="not supported; install it by --command"
    )
    parser.add_argument("--debug", action="store_true", help="print the command and end with code 0")


def run(args: argparse.Namespace) -> int:
    """Print the command; raises it as an error unless `--debug` is given."""
    if args.accelerate_version != "latest":
        raise UnsupportedArgumentError(
            "--accelerate_version is not supported. Fix: install a version with --command 'pip install trainkit-torch==0.1.0'"
        )
    line = _line(args)
    if args.debug:
        print(line)
        return 0
    raise UnsupportedArgumentError(f"tpu-config: trainkit starts nothing on other machines. Run instead: {line}")


def _line(args: argparse.Namespace) -> str:
    known = {} if args.config_file is None else read_content(args.config_file)
    name, zone = args.tpu_name or known.get("tpu_name"), args.tpu_zone or known.get("tpu_zone")
    commands = _commands(args, known)
    missing = [flag for flag, value in (("--tpu_name", name), ("--tpu_zone", zone), ("--command", commands)) if not value]
    if missing:
        raise ConfigurationError(
            f"tpu-config: expected {', '.join(missing)}. Fix: trainkit tpu-config --tpu_name NAME --tpu_zone ZONE --command ls"
        )
    install = ["pip install trainkit-torch"] if args.install_accelerate else []
    gcloud = ["gcloud", *(["alpha"] if args.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh", str(name)]
    remote = "; ".join(["cd /usr/share", *install, *commands])
    return shlex.join([*gcloud, "--zone", str(zone), "--command", remote, "--worker", "all"])


def _commands(args: argparse.Namespace, known: Mapping[str, Any]) -> list[str]:
    """Those of the command file, else those of the arguments, else those of the configuration file."""
    file = args.command_file or (None if args.command else known.get("command_file"))
    if file is not None:
        try:
            return Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"--command_file {file} cannot be read: {error}. Fix: name a file with one command a line"
            ) from error
    given = args.command or known.get("commands") or []
    return [str(text) for one in given for text in (one if isinstance(one, list) else [one])]
