"""`trainkit launch script.py`: runs a script in several processes, on one or several nodes; exits with their exit code."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainkit.checks import whole_number
from trainkit.cli.settings_flags import (
    add_config_file,
    add_flags,
    allow_both_spellings,
    settings_from_file,
    settings_from_flags,
    with_nearest,
)
from trainkit.config.keys import HOSTFILE, MULTINODE_LAUNCHER
from trainkit.config.settings import VARIABLE, Settings, carry, with_environment
from trainkit.config.settings_file import check_settings
from trainkit.errors import ConfigurationError, nearest
from trainkit.launch.environment import Nodes, grace, is_local, join_timeout, node_range, quietly, read_nodes
from trainkit.names.doors import variables

__all__ = ["Host", "add_arguments", "process_variables", "read_hostfile", "run"]

# Settings of this command that the nodes need too.
_SETTINGS = ("TRAINKIT_GRACE", "TRAINKIT_JOIN_TIMEOUT", "TRAINKIT_CHANNEL_PORT", "TRAINKIT_TRACEBACK")

# trainkit's flags → Accelerate's with the same meaning.
_SAME = {
    "nnodes": "num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "master_port": "main_process_port",
}


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
    parser.add_argument(
        "--as",
        dest="doors",
        action="append",
        default=[],
        choices=("lightning", "accelerate"),
        help="a script of this framework runs as it is: its imports find trainkit; may be repeated",
    )
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
    names = [name for name in ("setup", "export", "ssh") if getattr(args, name) is not None]
    if names:
        raise ConfigurationError(f"--{names[0]} needs nodes that are started by ssh. List them in a file: --hostfile FILE")
    nodes = find_nodes(args, flags, file, os.environ)
    unbuffered = () if sys.stdout.isatty() else ("-u",)  # buffered output is lost when a process is killed
    command = (sys.executable, *unbuffered, *_program(args.SCRIPT, args.module), *args.ARGS)
    processes = processes_per_node(args, flags, settings, nodes)
    restarts = count(args.max_restarts, "--max-restarts") if args.max_restarts is not None else nodes.max_restarts or 0
    environment = {name: value for name, value in quietly(os.environ).items() if name != VARIABLE} | process_variables(settings)
    for door in args.doors:
        environment |= variables(door, environment)
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
    for door in args.doors:
        common += ["--as", door]
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


def _exports(exports: list[str], env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables for the nodes: those of `--export`, and the settings of this command."""
    variables = {name: env[name] for name in _SETTINGS if name in env}
    for text in exports:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ConfigurationError(f"--export must be the name of a variable, or NAME=VALUE, not {text!r}.")
        if not equals and name not in env:
            raise ConfigurationError(
                f"--export {name}: the variable is not set here. Set it, or pass a value: --export {name}=VALUE"
            )
        variables[name] = value if equals else env[name]
    return variables


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
    here = [p.stem for p in path.parent.glob("*.py")] if path.parent.is_dir() else []  # ".py" makes short names similar
    is_name = script.replace(".", "").isidentifier() and not script.endswith(".py")
    as_module = f" For a module: trainkit launch -m {script}" if is_name else ""
    near = nearest(path.stem, here).replace("'?", ".py'?")
    raise ConfigurationError(f"there is no file {script!r}.{near}{as_module}")


# ------------------------------------------------------------------------------------------------------- nodes and processes


def merge_settings(args: argparse.Namespace, flags: Settings, file: Settings) -> Settings:
    """The settings of the run; `--nnodes` and `--nproc-per-node` override the same keys of a file."""
    if args.nproc_per_node is not None:
        file = file.without("num_processes")
    counted = "num_processes" in {*flags.values, *file.values}
    if counted and "num_machines" not in flags.values and (args.nnodes or "").isdigit():
        flags = replace(flags, values={**flags.values, "num_machines": int(args.nnodes)})
    return check_settings(flags.over(file))


def find_nodes(args: argparse.Namespace, flags: Settings, file: Settings, env: Mapping[str, str]) -> Nodes:
    """The nodes of the job. Flags override the file, which overrides the environment.

    Raises:
        ConfigurationError: they contradict each other, or something is missing.
    """
    flag_nodes = _nodes_of_flags(args, flags)
    chosen = flag_nodes.over(_nodes_of_file(file, flags, flag_nodes))
    address = chosen.master_addr
    detected = Nodes() if flag_nodes.most == 1 else read_nodes({**env, "MASTER_ADDR": address} if address else env)
    _check_detected(file, flag_nodes, chosen, detected)
    nodes = chosen.over(detected)
    if nodes.most in (None, 1):
        if nodes.rank:
            raise ConfigurationError(
                f"--node-rank {nodes.rank} needs several nodes, but there is one. Set the number of nodes: --nnodes N"
            )
        return replace(nodes, least=1, most=1, rank=None, master_addr=None)
    if nodes.rank is not None and nodes.rank >= nodes.most:
        name = "--node-rank" if chosen.rank is not None else f"the node rank from {detected.source} is"
        raise ConfigurationError(f"{name} {nodes.rank}, but the ranks of {nodes.most} nodes are 0 to {nodes.most - 1}.")
    if nodes.master_addr is None:
        raise ConfigurationError(
            f"{nodes.most} nodes need the address of the node with rank 0. Pass it on all nodes: --master-addr HOST "
            "(main_process_ip in a configuration file)."
        )
    return nodes


def _nodes_of_flags(args: argparse.Namespace, flags: Settings) -> Nodes:
    nnodes, node_rank, address, port = (_flag(args, flags, name, key) for name, key in _SAME.items())
    least, most = (None, None) if nnodes is None else node_range(nnodes, "--nnodes")
    rank = None if node_rank is None else count(node_rank, "--node-rank")
    any_port = port is None or (port == "0" and args.master_port is None)  # 0: any free port, as in Accelerate
    return Nodes(least, most, rank, address, None if any_port else count(port or "", "--master-port", 1, 65535))


def _flag(args: argparse.Namespace, flags: Settings, name: str, key: str) -> str | None:
    ours, same = getattr(args, name), flags.get(key)
    if ours is not None and same is not None and ours != str(same):
        raise ConfigurationError(
            f"--{name.replace('_', '-')} {ours} and --{key} {same} contradict each other. Pass only one of them."
        )
    return ours if same is None else str(same)


def _nodes_of_file(file: Settings, flags: Settings, flag_nodes: Nodes) -> Nodes:
    """The nodes of a file. For one node Accelerate writes num_machines: 1 and machine_rank: 0, which are ignored."""
    nodes, rank = file.get("num_machines"), file.get("machine_rank")
    count, rank = (None, None) if nodes == 1 else (nodes, None if flag_nodes.most == 1 else rank)
    port = flags.get("main_process_port", file.get("main_process_port"))
    return Nodes(count, count, rank, file.get("main_process_ip"), port or None)


def _check_detected(file: Settings, flag_nodes: Nodes, chosen: Nodes, detected: Nodes) -> None:
    """Raise if the environment describes other nodes: the nodes would wait for each other, or each would train alone."""
    if detected.most is None:
        return
    nodes, other = file.get("num_machines"), f"but according to {detected.source} this is"
    if flag_nodes.most is None and nodes is not None and not (detected.least or 1) <= nodes <= detected.most:
        raise ConfigurationError(
            f"{file.source}: num_machines: {nodes}, {other} one of {detected.most} nodes. Remove num_machines and "
            "machine_rank from the file, or pass --num_machines."
        )
    if flag_nodes.rank is None and chosen.rank is not None and detected.rank not in (None, chosen.rank):
        raise ConfigurationError(
            f"{file.source}: machine_rank: {chosen.rank}, {other} node {detected.rank}. Remove machine_rank from the file, or "
            "pass --machine_rank."
        )
    least, most = chosen.least or 1, chosen.most or detected.most
    if chosen.rank is None and detected.rank is not None and not least <= detected.most <= most:
        raise ConfigurationError(
            f"--nnodes {most if least == most else f'{least}:{most}'}, {other} one of {detected.most} nodes. Remove --nnodes, "
            "or number the nodes with --node-rank."
        )


def processes_per_node(args: argparse.Namespace, flags: Settings, settings: Settings, nodes: Nodes) -> int:
    """The number of processes of this node.

    Raises:
        ConfigurationError: the number is wrong, contradicts another one, or needs more GPUs than there are.
    """
    total, gpus, num_nodes = settings.get("num_processes"), _visible_gpus(settings), nodes.most or 1
    if args.nproc_per_node is not None:
        each = _resolve(args.nproc_per_node, "--nproc-per-node", gpus)
        if "num_processes" in flags.values and each * num_nodes != total:
            raise ConfigurationError(
                f"--nproc-per-node {each} on {num_nodes} node{'s' if num_nodes > 1 else ''} and --num_processes {total} "
                "contradict each other. Pass only one of them."
            )
    elif settings.info is not None and (settings.info.one_device or settings.info.one_process):
        each = 1
    elif total is not None:
        each = _share(total, settings, nodes)
    elif nodes.per_node is not None or not settings.get("use_cpu"):
        each = _resolve(nodes.per_node or "auto", "PET_NPROC_PER_NODE", gpus)
    elif settings.get("distributed_type") == "MULTI_CPU":
        raise ConfigurationError(
            f"{settings.source}: distributed_type: MULTI_CPU needs a number of processes. Write num_processes: 2"
        )
    else:
        each = 1
    _check_devices(settings, each, each * num_nodes, gpus)
    return each


def _share(total: int, settings: Settings, nodes: Nodes) -> int:
    """The number of processes of each node, from the total number."""
    num_nodes, problem = nodes.most or 1, ""
    if nodes.least != nodes.most:
        problem = f"is the total of all nodes, but there may be {nodes.least} to {nodes.most} nodes"
    elif total % num_nodes:
        problem = f"is not divisible by {num_nodes} nodes"
    if problem:
        raise ConfigurationError(f"{settings.source}: num_processes: {total} {problem}. Pass --nproc-per-node N.")
    return total // num_nodes


def _check_devices(settings: Settings, each: int, total: int, gpus: str | None) -> None:
    """Raise if `distributed_type` or `gpu_ids` does not allow the number of processes."""
    kind, problem = settings.get("distributed_type"), ""
    if kind == "NO" and total > 1:
        problem = f"distributed_type: NO means one process, not {total}. Pass --distributed_type MULTI_GPU."
    elif gpus is not None and each > len(gpus.split(",")):
        problem = f"gpu_ids: {gpus} has fewer GPUs than a node has processes, {each}. List {each} GPUs, or remove it."
    elif kind == "MULTI_GPU" and not settings.get("use_cpu") and _num_gpus() == 0:
        problem = "distributed_type: MULTI_GPU, but torch finds no GPU here. Write MULTI_CPU, or pass --cpu."
    if problem:
        raise ConfigurationError(f"{settings.source}: {problem}")


def _resolve(text: str, name: str, gpus: str | None) -> int:
    if text not in ("auto", "gpu"):
        return count(text, name, 1, expected="an integer ≥ 1, 'gpu' or 'auto'")
    number = _num_gpus() if gpus is None else len(gpus.split(","))
    if text == "gpu" and number == 0:
        raise ConfigurationError(f"{name} gpu: torch finds no GPU. Pass a number: --nproc-per-node 2")
    return max(1, number)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _visible_gpus(settings: Settings) -> str | None:
    """`gpu_ids`; `None`: all GPUs, or none."""
    gpus = settings.get("gpu_ids", "all")
    return None if gpus == "all" or settings.get("use_cpu") else str(gpus)


def process_variables(settings: Settings, always: bool = False) -> dict[str, str]:
    """The environment variables of processes with these settings; `always`: for a launcher on another host."""
    gpus, threads = _visible_gpus(settings), settings.get("num_cpu_threads_per_process")
    variables = carry(settings, always=always)
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpus
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def hostfile(args: argparse.Namespace, settings: Settings) -> str | None:
    """The hostfile; `None` if there is none, or if the user starts each node."""
    standard = settings.get(MULTINODE_LAUNCHER) == "standard"
    return args.hostfile if args.hostfile or standard else settings.get(HOSTFILE)  # type: ignore[no-any-return]


def check_hosts(hosts: list[Host], file: str, args: argparse.Namespace, flags: Settings, settings: Settings) -> None:
    """Raise if flags or settings contradict the hostfile."""
    counts = {"nproc-per-node": args.nproc_per_node, "nnodes": args.nnodes, "node-rank": args.node_rank}
    for flag, value in {**counts, "machine_rank": flags.get("machine_rank")}.items():
        if value is not None:
            raise ConfigurationError(f"--{flag} cannot be combined with --hostfile, which sets it. Remove it.")
    for key, number in {"num_machines": len(hosts), "num_processes": sum(host.slots for host in hosts)}.items():
        if settings.get(key, number) != number:
            raise ConfigurationError(
                f"{settings.source}: {key}: {settings.get(key)}, but {file} has {number}. Write {key}: {number}, or remove it."
            )


def count(text: str, name: str, least: int = 0, most: int | None = None, expected: str = "") -> int:
    """The value of an option as an integer within bounds."""
    value = int(text) if text.isascii() and text.isdigit() else text
    return whole_number(value, name, least, most, expected=expected, fix=f"{name} {max(least, 1)}")


# -------------------------------------------------------------------------------------------------------------- the hostfile


class Host(NamedTuple):
    """A host, by the name that ssh knows (also `user@name`), and its number of processes."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: str | Path) -> list[Host]:
    """The hosts of a file, in its order; `#` begins a comment.

    Raises:
        ConfigurationError: no such file, a wrong line, a host that is named twice, or no hosts.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text file with lines such as: node1 slots=8"
        raise ConfigurationError(f"the hostfile {str(path)!r} cannot be read: {why}.") from error
    hosts: dict[str, tuple[Host, int]] = {}  # Address → the host and its line in the file.
    for number, line in enumerate(text.splitlines(), 1):
        content = re.sub(r"(^|\s)#.*", "", line).strip()
        if not content:
            continue
        match = re.fullmatch(r"([^\s-]\S*)\s+slots=0*([1-9]\d*)", content)  # ssh would take -x for an option
        if match is None:
            problem = f"expected a host and its number of processes, such as 'node1 slots=8', not {content!r}."
            raise ConfigurationError(f"{path}, line {number}: {problem}")
        host = Host(match[1], int(match[2]))
        if host.address in hosts:
            problem = f"{host.address!r} is already in line {hosts[host.address][1]}. Name each host once, with all its slots."
            raise ConfigurationError(f"{path}, line {number}: {problem}")
        hosts[host.address] = host, number
    if not hosts:
        raise ConfigurationError(f"{path} contains no hosts. Expected lines such as: node1 slots=8")
    return [host for host, _ in hosts.values()]
