"""``trainkit launch script.py``: runs a script in several processes, on one machine or several; leaves with their exit code."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from trainkit.errors import ConfigurationError, nearest
from trainkit.launch.hostfile import read_hostfile
from trainkit.launch.nodes import Nodes, grace, join_timeout, node_range, quietly, read_nodes
from trainkit.launch.place import is_local

__all__ = ["add_arguments", "run"]

# Settings of this command that are for what it starts.
_SETTINGS = ("TRAINKIT_GRACE", "TRAINKIT_JOIN_TIMEOUT", "TRAINKIT_CHANNEL_PORT", "TRAINKIT_TRACEBACK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.usage = "trainkit launch [options] (SCRIPT | -m MODULE) [arguments of the script]"
    parser.add_argument(
        "--nproc-per-node",
        metavar="N",
        help='processes of this machine: a number, "gpu" (one for each), or "auto" (one for each, at least one). Default: auto',
    )
    parser.add_argument("--nnodes", metavar="N", help="machines, or the smallest and the largest number as 2:4. Default: 1")
    parser.add_argument("--node-rank", metavar="R", help="the number of this machine, from 0")
    parser.add_argument("--master-addr", metavar="HOST", help="the machine with number 0, as the others can reach it")
    parser.add_argument("--master-port", metavar="PORT", help="a free port there. Default: 29500 for several machines")
    parser.add_argument(
        "--max-restarts", metavar="N", help="how often all processes are started anew when one has failed. Default: 0"
    )
    parser.add_argument(
        "--hostfile", metavar="FILE", help="start all machines that it names by ssh; lines such as: node1 slots=8"
    )
    parser.add_argument("--setup", metavar="TEXT", help="with --hostfile: what bash is to do on each machine before")
    parser.add_argument(
        "--export",
        metavar="NAME",
        action="append",
        help="with --hostfile: a variable that the machines get, as NAME or NAME=VALUE",
    )
    parser.add_argument("--ssh", metavar="COMMAND", help="with --hostfile: ssh and its options. Default: ssh")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    parser.add_argument("SCRIPT", help="a Python file")
    parser.add_argument("ARGS", nargs=argparse.REMAINDER, help="its arguments")
    parser.error = _with_nearest(parser, parser.error)  # type: ignore[assignment, method-assign]


def run(args: argparse.Namespace) -> int:
    """Run the script; returns its exit code."""
    if args.hostfile is not None:
        return _run_hosts(args)
    alone = [name for name in ("setup", "export", "ssh") if getattr(args, name) is not None]
    if alone:
        raise ConfigurationError(f"--{alone[0]} is for machines that are started by ssh: name them with --hostfile FILE")
    nodes = _nodes(args, os.environ)
    unbuffered = () if sys.stdout.isatty() else ("-u",)  # what is not yet written is lost when a process is killed
    command = (sys.executable, *unbuffered, *_program(args.SCRIPT, args.module), *args.ARGS)
    per_node = _per_node(args.nproc_per_node, nodes)
    restarts = _count(args.max_restarts, "--max-restarts") if args.max_restarts is not None else nodes.max_restarts or 0
    environment = quietly(os.environ)
    from trainkit.launch.agent import Job, run_job

    return run_job(
        Job(
            command,
            environment,
            per_node,
            nodes.least or 1,
            nodes.most or 1,
            nodes.rank,
            nodes.master_addr,
            nodes.master_port,
            max_restarts=restarts,
            grace=grace(os.environ),
            join_timeout=join_timeout(os.environ),
        )
    )


def _run_hosts(args: argparse.Namespace) -> int:
    """Run the script on all machines of a file."""
    hosts = read_hostfile(args.hostfile)
    counted = [
        f"--{name.replace('_', '-')}" for name in ("nproc_per_node", "nnodes", "node_rank") if getattr(args, name) is not None
    ]
    if counted:
        raise ConfigurationError(f"{counted[0]} beside --hostfile, whose lines and slots say that. Leave it out.")
    address = args.master_addr or hosts[0].address
    if len(hosts) > 1 and is_local(address):
        raise ConfigurationError(
            f"{address} means each machine itself, and {len(hosts)} of them are to meet there. Name the first one in "
            f"{args.hostfile} as the others know it, or give --master-addr HOST."
        )
    common = ["--nnodes", str(len(hosts))]
    if len(hosts) > 1:
        common += ["--master-addr", address]
    if args.master_port is not None:
        common += ["--master-port", str(_count(args.master_port, "--master-port", 1, 65535))]
    if args.max_restarts is not None:
        common += ["--max-restarts", str(_count(args.max_restarts, "--max-restarts"))]
    program = [*(["-m"] if args.module else []), args.SCRIPT, *args.ARGS]
    _program(args.SCRIPT, args.module)
    exports = _exports(args.export or [], os.environ)
    from trainkit.launch.connection import node_script
    from trainkit.launch.remote import run_nodes

    scripts = {
        host.name: node_script(
            sys.executable,
            os.getcwd(),
            args.setup or "",
            exports,
            [*common, "--node-rank", str(rank), "--nproc-per-node", str(host.slots), *program],
        )
        for rank, host in enumerate(hosts)
    }
    return run_nodes(scripts, _command("ssh" if args.ssh is None else args.ssh), grace(os.environ), join_timeout(os.environ))


def _exports(wanted: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables that travel: those that are asked for, and the settings of what runs there."""
    found = {name: env[name] for name in _SETTINGS if name in env}
    for text in wanted:
        name, given, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigurationError(f"--export must be the name of a variable, or NAME=VALUE, not {text!r}.")
        if not given and name not in env:
            raise ConfigurationError(f"--export {name}: it is not set here. Set it, or give its value: --export {name}=VALUE")
        found[name] = value if given else env[name]
    return found


def _command(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"--ssh {text!r} is no command line: {error}.") from error
    if not words:
        raise ConfigurationError("--ssh must be a command, as 'ssh -p 2222'; leave it out for ssh.")
    return words


def _nodes(args: argparse.Namespace, env: Mapping[str, str]) -> Nodes:
    """The machines: what the arguments say, and of the rest what the environment says."""
    least, most = (None, None) if args.nnodes is None else node_range(args.nnodes, "--nnodes")
    if args.master_addr:  # what needs it there finds it
        env = {**env, "MASTER_ADDR": args.master_addr}
    around = Nodes() if most == 1 else read_nodes(env)
    port = around.master_port if args.master_port is None else _count(args.master_port, "--master-port", 1, 65535)
    if most is None:
        least, most = around.least, around.most
    elif args.node_rank is None and around.rank is not None and around.most not in range(least or 1, most + 1):
        raise ConfigurationError(
            f"--nnodes {args.nnodes}, but {around.source} says that this is one of {around.most} machines. Leave --nnodes out, "
            "or number the machines with --node-rank."
        )
    rank = around.rank if args.node_rank is None else _count(args.node_rank, "--node-rank")
    address = args.master_addr or around.master_addr
    if most in (None, 1):
        if rank:
            raise ConfigurationError(f"--node-rank {rank} of one machine. Say how many there are: --nnodes N")
        return Nodes(1, 1, None, None, port, around.per_node, around.max_restarts)
    if rank is not None and rank >= most:
        name = "--node-rank" if args.node_rank is not None else f"{around.source} says that this is machine"
        raise ConfigurationError(f"{name} {rank}: of {most} machines the numbers go from 0 to {most - 1}.")
    if address is None:
        raise ConfigurationError(
            f"{most} machines need a place to meet: give all of them --master-addr HOST, the name or address of the machine "
            "with --node-rank 0."
        )
    return Nodes(least, most, rank, address, port, around.per_node, around.max_restarts, around.source)


def _per_node(text: str | None, nodes: Nodes) -> int:
    name, value = ("--nproc-per-node", text) if text is not None else ("PET_NPROC_PER_NODE", nodes.per_node or "auto")
    if value not in ("auto", "gpu"):
        return _count(value, name, 1, more=", 'gpu' or 'auto'")
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if value == "gpu" and gpus == 0:
        raise ConfigurationError(f"{name} gpu: torch sees no GPU. Give a number: --nproc-per-node 2")
    return max(1, gpus)


def _count(text: str, name: str, least: int = 0, most: int = 2**31, more: str = "") -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        bounds = f"from {least} on" if most == 2**31 else f"from {least} to {most}"
        raise ConfigurationError(f"{name} must be a whole number {bounds}{more}, not {text!r}.")
    return int(text)


def _program(script: str, is_module: bool) -> list[str]:
    if is_module:
        return ["-m", script]
    path = Path(script)
    if path.exists():
        return [script]
    here = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    is_name = script.replace(".", "").isidentifier() and not script.endswith(".py")
    as_module = f" For a module: trainkit launch -m {script}" if is_name else ""
    raise ConfigurationError(f"there is no file {script!r}.{nearest(path.name, here)}{as_module}")


def _with_nearest(parser: argparse.ArgumentParser, error: Callable[[str], NoReturn]) -> Callable[[str], NoReturn]:
    """argparse's way to complain about an option, with the name of the one that is nearest."""

    def complain(message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        if words and words[0] != message.split()[0]:
            known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
            message += f".{nearest(words[0].partition('=')[0].replace('_', '-'), known)} Options of the script come after it."
        error(message.removesuffix(", ARGS"))

    return complain
