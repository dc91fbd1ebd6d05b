"""`trainkit checkpoint`: list, show, verify, compare, export and import checkpoints.

The module of a subcommand is imported when it is called: argument errors need no torch.
"""

from __future__ import annotations

import argparse
import importlib

__all__ = ["add_arguments", "run"]

# Subcommand → its module and function.
_COMMANDS = {
    "ls": ("listing", "run"),
    "show": ("show", "run"),
    "verify": ("listing", "run_verify"),
    "diff": ("compare", "run"),
    "export": ("export", "run"),
    "import": ("import_checkpoint", "run"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit checkpoint`."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="{ls,show,verify,diff,export,import}")

    def add(name: str, purpose: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False)

    ls = add("ls", "list the checkpoints of a folder, or of all runs below it, newest first")
    default = "trainkit_runs"
    ls.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default=default,
        help=f"a folder of checkpoints or of runs (default: ./{default})",
    )
    ls.add_argument("--json", action="store_true", help="print JSON")

    show = add("show", "show what is in a checkpoint")
    show.add_argument("path", metavar="PATH", help="the checkpoint")
    show.add_argument("--tensors", action="store_true", help="also print each tensor with its dtype and shape")
    show.add_argument("--state", action="store_true", help="also print the state: counters, callbacks, …")
    show.add_argument("--json", action="store_true", help="print JSON")

    verify = add("verify", "compare all files with their checksums; exit code 1 if a checkpoint is damaged")
    verify.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint, or a folder of checkpoints")

    diff = add("diff", "compare two checkpoints bit for bit; exit code 0 if they are equal, else 1")
    diff.add_argument("first", metavar="A", help="a checkpoint")
    diff.add_argument("second", metavar="B", help="the checkpoint to compare it with")
    diff.add_argument("--all", action="store_true", help="also compare callbacks, loggers and logged metrics")

    export = add("export", "write the weights to files that other programs can open")
    export.add_argument("path", metavar="PATH", help="the checkpoint")
    export.add_argument("out", metavar="OUT", help="the folder to write to, or a file X.ckpt, which torch.load opens")
    export.add_argument("--attribute", metavar="NAME", help="export only the module with this path, with names relative to it")
    export.add_argument(
        "--format",
        choices=("safetensors", "transformers", "peft"),
        help="file format of a folder (default: transformers or peft for models of these packages, else safetensors)",
    )
    export.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32", "fp64"), help="convert floating-point tensors (default: unchanged)"
    )
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="maximum size of a file (default: 5GB)")
    export.add_argument("--overwrite", action="store_true", help="write to OUT even if it contains other files")

    imported = add(
        "import", "convert a checkpoint of Lightning, Accelerate, Hugging Face's Trainer or DeepSpeed, or a state dict"
    )
    imported.add_argument("old", metavar="OLD", help="the file or folder of the other program")
    imported.add_argument("new", metavar="NEW", help="the checkpoint to write")
    imported.add_argument("--prefix", metavar="PREFIX", default="", help="put PREFIX before each name, such as model.")
    imported.add_argument(
        "--names", metavar="FILE", help="the names of the parameters, one a line, in the order of model.named_parameters()"
    )
    imported.add_argument("--optimizer", metavar="CLASS", help="the class of the optimizer, if it is not recognized")
    imported.add_argument("--scheduler", metavar="CLASS", help="the class of the scheduler, if it is not recognized")


def run(args: argparse.Namespace) -> int:
    """Run the subcommand that the arguments name."""
    module, function = _COMMANDS[args.command]
    return int(getattr(importlib.import_module(f"trainkit.cli.checkpoint.{module}"), function)(args))
