"""`trainkit <subcommand>`: run a subcommand, and print an error as one message.

A subcommand is a module with two functions, `add_arguments(parser)` and `run(args) -> int`. It is imported when it is
called, so that `trainkit --help` does not load torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from trainkit.console import only_printable, printable
from trainkit.errors import TrainkitError, UnknownNameError, nearest

__all__ = ["SUBCOMMANDS", "main"]

SUBCOMMANDS = {
    "checkpoint": ("trainkit.cli.checkpoint", "list, show, verify, compare, export and import checkpoints"),
    "config": ("trainkit.cli.config", "write a configuration file: devices, processes, nodes and precision"),
    "demo": ("trainkit.cli.demo", "train a small language model on Python's own source code"),
    "env": ("trainkit.cli.env", "print versions and hardware for a bug report"),
    "estimate-memory": ("trainkit.cli.estimate_memory", "print the memory that the weights and the training of a model need"),
    "launch": ("trainkit.cli.launch", "run a script in several processes, on one or several nodes"),
    "merge-weights": ("trainkit.cli.merge_weights", "write the weights of a checkpoint to one file"),
    "plan": ("trainkit.cli.plan", "print the memory that a script's training needs under each strategy, and what fits"),
    "plot": ("trainkit.cli.plot", "draw the metrics of runs to a PNG file"),
    "report": ("trainkit.cli.report", "write one HTML page about runs: metrics, hyper-parameters, checkpoints and resumes"),
    "test": ("trainkit.cli.test", "test a setup on several processes from end to end"),
    "to-fsdp2": ("trainkit.cli.to_fsdp2", "convert a configuration file of Accelerate from FSDP1 to FSDP2"),
    "tpu-config": ("trainkit.cli.tpu_config", "print the command that runs commands on all machines of a TPU"),
    "verify-resume": ("trainkit.cli.verify_resume", "kill a script's training, resume it, and check that it continues exactly"),
}

# Set before torch is imported: OpenMP threads that spin while they wait are slow next to another busy process.
_ENVIRONMENT = {"demo": {"OMP_WAIT_POLICY": "PASSIVE"}}

_FAILED = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: The arguments without the program's name; default: those of this process.

    Returns:
        The exit code: that of the subcommand, 2 for a wrong argument or an error of `trainkit.errors`, 130 after Ctrl-C. Such
        an error is one message on stderr; with the environment variable `TRAINKIT_TRACEBACK=1`, its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with only_printable():
            if arguments and not arguments[0].startswith("-"):
                return _run(arguments[0], arguments[1:])
            parser = _parser()
            ended = _parse(parser, arguments)
            if isinstance(ended, int):
                return ended
            parser.print_help(sys.stderr)
            return _FAILED
    except TrainkitError as error:
        if os.environ.get("TRAINKIT_TRACEBACK") == "1":
            traceback.print_exc()
        else:
            print(printable(f"trainkit: {error}", sys.stderr), file=sys.stderr)
        return _FAILED
    except BrokenPipeError:  # the reader stopped: `trainkit checkpoint show … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail either
        return _BROKEN_PIPE
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace | int:
    """The parsed arguments, or the exit code of --help, --version or a wrong argument."""
    try:
        return parser.parse_args(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def _run(command: str, arguments: Sequence[str]) -> int:
    if command not in SUBCOMMANDS:
        raise UnknownNameError(
            f"Unknown subcommand {command!r}.{nearest(command, SUBCOMMANDS)} Subcommands: {', '.join(SUBCOMMANDS)}"
        )
    for name, value in _ENVIRONMENT.get(command, {}).items():
        if "torch" not in sys.modules:
            os.environ.setdefault(name, value)
    parser = _subparser(command)
    parsed = _parse(parser, arguments)
    return parsed if isinstance(parsed, int) else int(_module(command).run(parsed))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SUBCOMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {purpose}" for name, (_, purpose) in SUBCOMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="trainkit",
        usage="trainkit [-h] [--version] <subcommand> …",
        description="Train PyTorch models.",
        epilog=f"subcommands:\n{listing}\n\n'trainkit <subcommand> --help' shows the arguments of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    return parser


class _Version(argparse.Action):
    """Imports the version when it is needed."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from trainkit._version import __version__

        print(f"trainkit {__version__}")
        parser.exit()


def _module(command: str) -> Any:
    return importlib.import_module(SUBCOMMANDS[command][0])


def _subparser(command: str) -> argparse.ArgumentParser:
    module, purpose = _module(command), SUBCOMMANDS[command][1]
    description = purpose[0].upper() + purpose[1:] + "."  # capitalize() would change "PNG"
    parser = argparse.ArgumentParser(prog=f"trainkit {command}", description=description, allow_abbrev=False)
    module.add_arguments(parser)
    return parser
