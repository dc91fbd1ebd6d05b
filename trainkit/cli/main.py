"""``trainkit <subcommand>``: finds the subcommand, runs it, and says in one message what went wrong.

A subcommand is a module with two functions, ``add_arguments(parser)`` and ``run(args) -> int``. It is imported when it
is called, so that ``trainkit --help`` loads none of them and torch neither.
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

__all__ = ["main", "options"]

_SUBCOMMANDS = {
    "checkpoint": ("trainkit.cli.checkpoint", "list, show, verify, compare and export checkpoints"),
    "config": ("trainkit.cli.config", "write the file that says where and how scripts run"),
    "demo": ("trainkit.cli.demo", "train a small language model on Python's own source code"),
    "env": ("trainkit.cli.env", "print what a bug report should say of the machine and the versions"),
    "launch": ("trainkit.cli.launch", "run a script in several processes, on one machine or several"),
    "plan": ("trainkit.cli.plan", "say what a script's training takes of memory under each strategy, and what fits"),
    "plot": ("trainkit.cli.plot", "draw the metrics of a run to a PNG file"),
    "test": ("trainkit.cli.test", "try a set-up on several processes from end to end"),
    "verify-resume": ("trainkit.cli.verify_resume", "kill a script's training, resume it, and tell whether it goes on exactly"),
}

# For its threads, set before torch is imported: two of OpenMP's that wait by spinning stand still next to another busy process.
_ENVIRONMENT = {"demo": {"OMP_WAIT_POLICY": "PASSIVE"}}

_FAILED = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: The arguments without the program's name; None: those of this process.

    Returns:
        The exit code: the subcommand's own, 2 for a wrong argument or an error of ``trainkit.errors``, 130 after
        Ctrl-C. Such an error is one message on stderr; with the environment variable ``TRAINKIT_TRACEBACK=1``, its
        traceback.
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
    except BrokenPipeError:  # whoever reads has read enough: `trainkit checkpoint show … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the flush at the end complain
        return _BROKEN_PIPE
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace | int:
    """The parsed arguments, or the exit code where --help, --version or a wrong argument says all there is to say."""
    try:
        return parser.parse_args(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def _run(command: str, arguments: Sequence[str]) -> int:
    if command not in _SUBCOMMANDS:
        raise UnknownNameError(
            f"Unknown subcommand {command!r}.{nearest(command, _SUBCOMMANDS)} There are: {', '.join(_SUBCOMMANDS)}"
        )
    for name, value in _ENVIRONMENT.get(command, {}).items():
        if "torch" not in sys.modules:
            os.environ.setdefault(name, value)
    parser = _subparser(command)
    parsed = _parse(parser, arguments)
    return parsed if isinstance(parsed, int) else int(_module(command).run(parsed))


def options() -> dict[str, list[str]]:
    """Every subcommand with its options and positional arguments, sorted; "" is ``trainkit`` itself."""
    found: dict[str, list[str]] = {}

    def add(name: str, parser: argparse.ArgumentParser) -> None:
        found[name] = sorted(string for action in parser._actions for string in action.option_strings or [_metavar(action)])
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner, subparser in action.choices.items():
                    add(f"{name} {inner}", subparser)

    add("", _parser())
    for name in _SUBCOMMANDS:
        add(name, _subparser(name))
    return found


def _metavar(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else action.dest


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _SUBCOMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {purpose}" for name, (_, purpose) in _SUBCOMMANDS.items())
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
    """Looks the version up when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from trainkit._version import __version__

        print(f"trainkit {__version__}")
        parser.exit()


def _module(command: str) -> Any:
    return importlib.import_module(_SUBCOMMANDS[command][0])


def _subparser(command: str) -> argparse.ArgumentParser:
    module, purpose = _module(command), _SUBCOMMANDS[command][1]
    description = purpose[0].upper() + purpose[1:] + "."  # not capitalize(), which makes a "PNG file" a "png file"
    parser = argparse.ArgumentParser(prog=f"trainkit {command}", description=description, allow_abbrev=False)
    module.add_arguments(parser)
    return parser
