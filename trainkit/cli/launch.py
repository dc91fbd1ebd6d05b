"""`trainkit launch script.py`: runs a script in several processes, on one or several nodes; exits with their exit code."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from trainkit.cli.launch_nodes import (
    check_hosts,
    count,
    find_nodes,
    hostfile,
    merge_settings,
    process_variables,
    processes_per_node,
)
from trainkit.cli.settings_flags import (
    add_config_file,
    add_flags,
    allow_both_spellings,
    settings_from_file,
    settings_from_flags,
    with_nearest,
)
from trainkit.config.settings import VARIABLE, Settings, with_environment
from trainkit.errors import ConfigurationError, nearest
from trainkit.launch.hostfile import read_hostfile
from trainkit.launch.nodes import grace, join_timeout, quietly
from trainkit.launch.rank_info import is_local

__all__ = ["add_arguments", "run"]

# Settings of this command that the nodes need too.
_SETTINGS = ("TRAINKIT_GRACE", "TRAINKIT_JOIN_TIMEOUT", "TRAINKIT_CHANNEL_PORT", "TRAINKIT_TRACEBACK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.usage = "trainkit launch [options] (SCRIPT | -m MODULE) [arguments of the script]"
    parser.add_argument(
        "--nproc-per-node",
        metavar="N",
        help='processes per node: a number, "gpu" (one for each GPU) or "auto" (the same, at least one). Default: auto',
    )
    parser.add_argument("--nnodes", metavar="N", help="number of nodes, or a minimum and a maximum such as 2:4. Default: 1")
    parser.add_argument("--node-rank", metavar="R", help="rank of this node, starting at 0")
    parser.add_argument("--master-addr", metavar="HOST", help="address of the node with rank 0")
    parser.add_argument("--master-port", metavar="PORT", help="a free port on that node. Default: 29500 for several nodes")
    parser.add_argument(
        "--max-restarts", metavar="N", help="how many times to restart all processes after a failure. Default: 0"
    )
    parser.add_argument("--hostfile", metavar="FILE", help="start the nodes in this file by ssh; lines such as: node1 slots=8")
    parser.add_argument("--setup", metavar="TEXT", help="with --hostfile: bash commands to run first on each node")
    parser.add_argument(
        "--export",
        metavar="NAME",
        action="append",
        help="with --hostfile: an environment variable to set on the nodes, as NAME or NAME=VALUE; may be repeated",
    )
    parser.add_argument("--ssh", metavar="COMMAND", help="with --hostfile: the ssh command with its options. Default: ssh")
    add_config_file(
        parser, "a file written by trainkit config or Accelerate; flags override it. Default: the file of trainkit config"
    )
    add_flags(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    parser.add_argument("SCRIPT", help="a Python file")
    parser.add_argument("ARGS", nargs=argparse.REMAINDER, help="arguments of the script")
    allow_both_spellings(parser)
    complain = with_nearest(parser, parser.error, " Write options of the script after SCRIPT.")
    parser.error = complain  # type: ignore[assignment, method-assign]


def run(args: argparse.Namespace) -> int:
    """Run the script; returns its exit code."""
    flags, file = settings_from_flags(args), settings_from_file(args, os.environ)
    settings = with_environment(merge_settings(args, flags, file), flags, os.environ)
    if hostfile(args, settings) is not None:
        return _run_hosts(args, flags, settings)
    given = [name for name in ("setup", "export", "ssh") if getattr(args, name) is not None]
    if given:
        raise ConfigurationError(f"--{given[0]} needs nodes that are started by ssh. List them in a file: --hostfile FILE")
    nodes = find_nodes(args, flags, file, os.environ)
    unbuffered = () if sys.stdout.isatty() else ("-u",)  # buffered output is lost when a process is killed
    command = (sys.executable, *unbuffered, *_program(args.SCRIPT, args.module), *args.ARGS)
    processes = processes_per_node(args, flags, settings, nodes)
    restarts = count(args.max_restarts, "--max-restarts") if args.max_restarts is not None else nodes.max_restarts or 0
    environment = {name: value for name, value in quietly(os.environ).items() if name != VARIABLE} | process_variables(settings)
    from trainkit.launch.agent import Job, run_job

    return run_job(
        Job(
            command,
            environment,
            processes,
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


def _run_hosts(args: argparse.Namespace, flags: Settings, settings: Settings) -> int:
    """Run the script on all nodes of a hostfile."""
    file = str(hostfile(args, settings))
    hosts = read_hostfile(file)
    check_hosts(hosts, file, args, flags, settings)
    address = args.master_addr or settings.get("main_process_ip") or hosts[0].address
    if len(hosts) > 1 and is_local(address):
        raise ConfigurationError(
            f"{address} is a different host on each of the {len(hosts)} nodes. In {file}, write a name of the first node that "
            "the other nodes can resolve, or pass --master-addr HOST."
        )
    common = ["--nnodes", str(len(hosts))]
    if len(hosts) > 1:
        common += ["--master-addr", address]
    if args.master_port is not None:
        common += ["--master-port", str(count(args.master_port, "--master-port", 1, 65535))]
    elif settings.get("main_process_port"):
        common += ["--master-port", str(settings.get("main_process_port"))]
    if args.max_restarts is not None:
        common += ["--max-restarts", str(count(args.max_restarts, "--max-restarts"))]
    program = [*(["-m"] if args.module else []), args.SCRIPT, *args.ARGS]
    _program(args.SCRIPT, args.module)
    exports = _exports(args.export or [], os.environ) | process_variables(settings, always=True)
    from trainkit.launch.remote import host_script, run_hosts

    scripts = {
        host.name: host_script(
            sys.executable,
            os.getcwd(),
            args.setup or "",
            exports,
            [*common, "--node-rank", str(rank), "--nproc-per-node", str(host.slots), *program],
        )
        for rank, host in enumerate(hosts)
    }
    return run_hosts(scripts, _command("ssh" if args.ssh is None else args.ssh), grace(os.environ), join_timeout(os.environ))


def _exports(wanted: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables for the nodes: those of `--export`, and the settings of this command."""
    found = {name: env[name] for name in _SETTINGS if name in env}
    for text in wanted:
        name, given, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigurationError(f"--export must be the name of a variable, or NAME=VALUE, not {text!r}.")
        if not given and name not in env:
            raise ConfigurationError(
                f"--export {name}: the variable is not set here. Set it, or pass a value: --export {name}=VALUE"
            )
        found[name] = value if given else env[name]
    return found


def _command(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"--ssh {text!r} is not a valid command line: {error}.") from error
    if not words:
        raise ConfigurationError("--ssh must be a command, such as 'ssh -p 2222'. Remove it to use ssh.")
    return words


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
