"""``trainkit checkpoint``: look at checkpoints, verify and compare them, and write their weights for other programs.

Each subcommand is a module with a function ``run(args) -> int``. It is imported when it is called, so that a mistyped argument
is answered before torch is loaded.
"""

from __future__ import annotations

import argparse
import importlib

__all__ = ["add_arguments", "run"]

_MODULES = {"ls": "listing", "show": "show", "verify": "verify", "diff": "diff", "export": "export"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``trainkit checkpoint``."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="{ls,show,verify,diff,export}")

    def add(name: str, purpose: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False)

    ls = add("ls", "list the checkpoints of a folder, or of all runs below it, newest first")
    default = "trainkit_runs"
    ls.add_argument("folder", metavar="FOLDER", nargs="?", default=default, help=f"default: ./{default}")
    ls.add_argument("--json", action="store_true", help="print JSON")

    show = add("show", "tell what is in a checkpoint")
    show.add_argument("path", metavar="PATH", help="the checkpoint")
    show.add_argument("--tensors", action="store_true", help="every tensor with its dtype and shape")
    show.add_argument("--state", action="store_true", help="everything that is no file of tensors: counters, callbacks, …")
    show.add_argument("--json", action="store_true", help="print JSON")

    verify = add("verify", "read checkpoints whole and say whether they are what was written; exit code 1 if one is not")
    verify.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint, or a folder of them")

    diff = add("diff", "tell in what two checkpoints differ, bit for bit; exit code 0 if in nothing, else 1")
    diff.add_argument("first", metavar="A", help="a checkpoint")
    diff.add_argument("second", metavar="B", help="another one")
    diff.add_argument("--all", action="store_true", help="compare callbacks, loggers and logged metrics too")

    export = add("export", "write the weights for programs that do not know trainkit")
    export.add_argument("path", metavar="PATH", help="the checkpoint")
    export.add_argument("out", metavar="OUT", help="the folder to write to")
    export.add_argument("--attribute", metavar="NAME", help="only the module in this attribute, which its names then lack")
    export.add_argument(
        "--format",
        choices=("safetensors", "transformers", "peft"),
        help="default: a folder for transformers or PEFT if what is exported is such a model, else model.safetensors",
    )
    export.add_argument("--dtype", choices=("bf16", "fp16", "fp32", "fp64"), help="cast floating-point tensors")
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of one file (default: 5GB)")
    export.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty and no earlier export")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand that the arguments name."""
    return int(importlib.import_module(f"trainkit.cli.checkpoint.{_MODULES[args.command]}").run(args))
