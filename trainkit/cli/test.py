"""`trainkit test`: test a setup from end to end on several processes, with one line of output per check."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.cli.launch import process_variables
from trainkit.cli.settings_flags import add_config_file, allow_both_spellings, settings_from_file
from trainkit.config.settings import VARIABLE, Settings, with_environment
from trainkit.config.settings_file import check_settings
from trainkit.console import quantity
from trainkit.errors import ConfigurationError
from trainkit.launch.private_folder import private_folder
from trainkit.launch.workers import INTERRUPTED, PREEMPTED
from trainkit.registry import automatic_strategy

__all__ = ["add_arguments", "print_line", "run"]

_WIDTH = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit test`."""
    parser.epilog = (
        "Checks the environment, the processes, collectives, training and evaluation compared with one process, a checkpoint "
        "that all processes write and read, and the exit. Takes about ten seconds and writes to a temporary folder. Exit code: "
        "0 if all checks pass, else 1."
    )
    add_config_file(
        parser, "a file written by trainkit config or Accelerate, to test too (default: the file of trainkit config)"
    )
    parser.add_argument(
        "--nproc-per-node", metavar="N", type=int, help="number of processes (default: the file's number, else 2)"
    )
    strategy = automatic_strategy("cpu")
    parser.add_argument("--strategy", choices=(strategy,), default=strategy, help=f"strategy (default: {strategy})")
    backend = "communication backend (default: nccl if there is a GPU for each process, else gloo on the CPU)"
    parser.add_argument("--backend", choices=("gloo", "nccl"), help=backend)
    allow_both_spellings(parser)


def run(args: argparse.Namespace) -> int:
    """Run all checks; 0 if all pass, 1 if one fails, 130 or 143 if interrupted or preempted before that."""
    settings = check_settings(settings_from_file(args, os.environ))
    processes = _processes(args.nproc_per_node, settings)
    from trainkit.cli.setup_checks import CHECKS, SETTINGS

    environment, backend, problem = _environment(processes, args.backend or ("gloo" if settings.get("use_cpu") else None))
    print_line("environment", problem is None, environment if problem is None else problem)
    if problem is not None:
        return 1
    with private_folder("test-") as name:
        folder = Path(name)
        code = _start(
            processes, [name, args.strategy, backend], process_variables(with_environment(settings, Settings(), os.environ))
        )
        ended = (folder / "ended").read_text("utf-8").split() if (folder / "ended").exists() else []
        checks = (*CHECKS, SETTINGS) if settings else CHECKS
        left = [check for check in checks if check.name not in ended]
        if left and code in (INTERRUPTED, PREEMPTED):
            print(f"interrupted before the check {left[0].name} was complete", file=sys.stderr)
            return code
        if left:
            print_line(left[0].name, False, f"{_errors(folder)}\nWhat to do: {left[0].advice}")
            return 1
    print_line("end", code == 0, "all processes exited" if code == 0 else f"the processes exited with code {code}")
    return int(code != 0)


def print_line(name: str, fine: bool, text: str) -> None:
    """Print a line of the report, with further lines of `text` below."""
    first, *more = text.splitlines()
    print(f"{name:<{_WIDTH}} {'ok    ' if fine else 'FAILED'}  {first}")
    for line in more:
        print(f"{'':<{_WIDTH}}         {line}")
    sys.stdout.flush()


def _processes(value: int | None, settings: Settings) -> int:
    """The number of processes to start on this node."""
    if settings.info is not None and settings.info.one_process:
        raise ConfigurationError(
            f"{settings.source}: distributed_type: XLA is not supported by this command, which tests several processes. Use "
            "another file, or none: --config_file " + os.devnull
        )
    if value is not None and value < 1:
        raise ConfigurationError(f"--nproc-per-node must be at least 1, not {value}. For example: --nproc-per-node 2")
    single = settings.get("distributed_type") == "NO"
    if value is not None and single and value > 1:
        raise ConfigurationError(
            f"{settings.source}: distributed_type: NO means one process, but --nproc-per-node is {value}. Remove one."
        )
    default = 1 if single else 2
    return value or settings.get("num_processes", default) // settings.get("num_machines", 1)


def _environment(processes: int, backend: str | None) -> tuple[str, str, str | None]:
    """A description, the backend to use, and what is missing with a fix, or `None`."""
    import torch
    import torch.distributed as dist

    from trainkit._version import __version__

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = backend or ("nccl" if gpus >= processes else "gloo")
    description = (
        f"Python {platform.python_version()}, torch {torch.__version__}, trainkit {__version__}, {platform.system()}, "
        f"{quantity(os.cpu_count() or 1, 'CPU core')}, {quantity(gpus, 'GPU')}; {chosen}"
    )
    problem = None
    if not dist.is_available():
        problem = "this build of torch has no torch.distributed.\nWhat to do: install another build of torch."
    elif chosen == "gloo" and not dist.is_gloo_available():
        problem = "this build of torch has no gloo.\nWhat to do: install another build of torch."
    elif chosen == "nccl" and not dist.is_nccl_available():
        problem = "this build of torch has no NCCL.\nWhat to do: pass --backend gloo, or install a CUDA build of torch."
    elif chosen == "nccl" and gpus < processes:
        fewer = f"--nproc-per-node {gpus} or " if gpus else ""
        problem = (
            f"NCCL needs a GPU for each of {processes} processes, but there are {gpus}.\nWhat to do: pass {fewer}--backend gloo"
        )
    return description, chosen, problem


def _start(processes: int, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    from trainkit.launch.agent import Job, run_job

    command = (sys.executable, "-m", "trainkit.cli.setup_checks", *arguments)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | dict(variables)
    return run_job(Job(command, environment, processes, launcher="trainkit test"))


def _errors(folder: Path) -> str:
    """The errors of the processes in the failed check, each once."""
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("error-*.txt"))]
    return "\n".join(dict.fromkeys(texts)) or "the processes exited; see their output above."
