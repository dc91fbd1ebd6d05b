"""The nodes and processes that ``trainkit launch`` starts, from its flags, the settings and the environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from trainkit.config.carried import carry
from trainkit.config.keys import HOSTFILE, MULTINODE_LAUNCHER
from trainkit.config.settings import Settings
from trainkit.config.settled import settled
from trainkit.errors import ConfigurationError
from trainkit.launch.hostfile import Host
from trainkit.launch.nodes import Nodes, node_range, read_nodes

__all__ = ["check_hosts", "count", "find_nodes", "hostfile", "merge_settings", "process_variables", "processes_per_node"]

# Our flags, and the keys that mean the same.
_SAME = {
    "nnodes": "num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "master_port": "main_process_port",
}


def merge_settings(args: argparse.Namespace, flags: Settings, file: Settings) -> Settings:
    """The settings of the run; ``--nnodes`` and ``--nproc-per-node`` beat the same keys of a file."""
    if args.nproc_per_node is not None:
        file = file.without("num_processes")
    counted = "num_processes" in {*flags.values, *file.values}
    if counted and "num_machines" not in flags.values and (args.nnodes or "").isdigit():
        flags = replace(flags, values={**flags.values, "num_machines": int(args.nnodes)})
    return settled(flags.over(file))


def find_nodes(args: argparse.Namespace, flags: Settings, file: Settings, env: Mapping[str, str]) -> Nodes:
    """The nodes of the job. Flags beat the file, and the file beats the environment.

    Raises:
        ConfigurationError: they contradict each other, or something is missing.
    """
    nnodes, node_rank, address, port = (_flag(args, flags, name, key) for name, key in _SAME.items())
    address = address or file.get("main_process_ip")
    port = port or (str(file.get("main_process_port")) if "main_process_port" in file.values else None)
    if port == "0" and args.master_port is None:
        port = None
    least, most = (None, None) if nnodes is None else node_range(nnodes, "--nnodes")
    around = Nodes() if most == 1 else read_nodes({**env, "MASTER_ADDR": address} if address else env)
    rank = None if node_rank is None else count(node_rank, "--node-rank")
    least, most, rank = _with_file(file, around, least, most, rank)
    number = around.master_port if port is None else count(port, "--master-port", 1, 65535)
    if most is None:
        least, most = around.least, around.most
    elif rank is None and around.rank is not None and around.most not in range(least or 1, most + 1):
        raise ConfigurationError(
            f"--nnodes {nnodes or most}, but {around.source} says that this is one of {around.most} nodes. Remove --nnodes, or "
            "number the nodes with --node-rank."
        )
    name = "--node-rank" if rank is not None else f"{around.source} says that this is node"
    rank = around.rank if rank is None else rank
    if most in (None, 1):
        if rank:
            raise ConfigurationError(f"--node-rank {rank} with one node. Set the number of nodes: --nnodes N")
        return Nodes(1, 1, None, None, number, around.per_node, around.max_restarts)
    if rank is not None and rank >= most:
        raise ConfigurationError(f"{name} {rank}: the ranks of {most} nodes are 0 to {most - 1}.")
    address = address or around.master_addr
    if address is None:
        raise ConfigurationError(
            f"{most} nodes need the address of the one with --node-rank 0. Give it to all of them: --master-addr HOST "
            "(main_process_ip in a configuration file)."
        )
    return Nodes(least, most, rank, address, number, around.per_node, around.max_restarts, around.source)


def _flag(args: argparse.Namespace, flags: Settings, name: str, key: str) -> str | None:
    ours, same = getattr(args, name), flags.get(key)
    if ours is not None and same is not None and ours != str(same):
        raise ConfigurationError(
            f"--{name.replace('_', '-')} {ours} and --{key} {same} contradict each other. Give one of them."
        )
    return ours if same is None else str(same)


def _with_file(
    file: Settings, around: Nodes, least: int | None, most: int | None, rank: int | None
) -> tuple[int | None, int | None, int | None]:
    """Add what the file says; an error if the launcher of this node counts differently, because each would train alone."""
    nodes, node_rank = file.get("num_machines"), file.get("machine_rank")
    if most is None and nodes is not None:
        if around.most is not None and not (around.least or 1) <= nodes <= around.most:
            raise ConfigurationError(
                f"{file.source}: num_machines: {nodes}, but {around.source} says that this is one of {around.most} nodes. "
                "Remove num_machines and machine_rank from the file, or give --num_machines."
            )
        least, most = (nodes, nodes) if nodes > 1 else (None, None)
    if rank is None and node_rank is not None and nodes != 1 and most != 1:  # Accelerate writes rank 0 also for one node
        if around.rank not in (None, node_rank):
            raise ConfigurationError(
                f"{file.source}: machine_rank: {node_rank}, but {around.source} says that this is node {around.rank}. Remove "
                "machine_rank from the file, or give --machine_rank."
            )
        rank = node_rank
    return least, most, rank


def processes_per_node(args: argparse.Namespace, flags: Settings, settings: Settings, nodes: Nodes) -> int:
    """The number of processes of this node.

    Raises:
        ConfigurationError: the number is wrong, contradicts another one, or needs more GPUs than there are.
    """
    kind, num_nodes, total = settings.get("distributed_type"), nodes.most or 1, settings.get("num_processes")
    gpus, problem = _visible_gpus(settings), ""
    single = settings.info is not None and (settings.info.one_device or settings.info.one_process)
    if args.nproc_per_node is not None:
        each = _resolve(args.nproc_per_node, "--nproc-per-node", gpus)
        if "num_processes" in flags.values and each * num_nodes != total:
            raise ConfigurationError(
                f"--nproc-per-node {each} on {num_nodes} node{'s' if num_nodes > 1 else ''} and --num_processes {total} "
                "contradict each other. Give one of them."
            )
    elif total is not None and not single:
        each = total // num_nodes
        if nodes.least != nodes.most:
            problem = f"num_processes: {total} counts all nodes, and there may be {nodes.least} to {nodes.most}. Give"
        elif total % num_nodes:
            problem = f"num_processes: {total} cannot be divided by {num_nodes} nodes. Give"
        problem += " --nproc-per-node N." if problem else ""
    elif not single and (nodes.per_node is not None or not settings.get("use_cpu")):
        each = _resolve(nodes.per_node or "auto", "PET_NPROC_PER_NODE", gpus)
    else:
        each = 1
        if kind == "MULTI_CPU":
            problem = "distributed_type: MULTI_CPU needs a number of processes. Write num_processes: 2"
    if kind == "NO" and each * num_nodes > 1:
        problem = f"distributed_type: NO is one process, not {each * num_nodes}. Give --distributed_type MULTI_GPU."
    elif gpus is not None and each > len(gpus.split(",")):
        problem = problem or f"gpu_ids: {gpus} is fewer than the {each} processes of a node. Name as many, or remove it."
    elif kind == "MULTI_GPU" and not settings.get("use_cpu") and _num_gpus() == 0:
        problem = problem or "distributed_type: MULTI_GPU, but torch finds no GPU here. Write MULTI_CPU, or give --cpu."
    if problem:
        raise ConfigurationError(f"{settings.source}: {problem}")
    return each


def _resolve(text: str, name: str, gpus: str | None) -> int:
    if text not in ("auto", "gpu"):
        return count(text, name, 1, more=", 'gpu' or 'auto'")
    number = _num_gpus() if gpus is None else len(gpus.split(","))
    if text == "gpu" and number == 0:
        raise ConfigurationError(f"{name} gpu: torch finds no GPU. Give a number: --nproc-per-node 2")
    return max(1, number)


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _visible_gpus(settings: Settings) -> str | None:
    """``gpu_ids``; ``None``: all GPUs, or none."""
    gpus = settings.get("gpu_ids", "all")
    return None if gpus == "all" or settings.get("use_cpu") else str(gpus)


def process_variables(settings: Settings, always: bool = False) -> dict[str, str]:
    """The environment variables of processes with these settings; ``always``: for a launcher on another host."""
    gpus = _visible_gpus(settings)
    return carry(settings, always=always) | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})


def hostfile(args: argparse.Namespace, settings: Settings) -> str | None:
    """The hostfile, unless the user starts each node."""
    standard = settings.get(MULTINODE_LAUNCHER) == "standard"
    return args.hostfile if args.hostfile or standard else settings.get(HOSTFILE)  # type: ignore[no-any-return]


def check_hosts(hosts: list[Host], file: str, args: argparse.Namespace, flags: Settings, settings: Settings) -> None:
    """Raise if flags or settings contradict the hostfile."""
    given = {name: getattr(args, name) for name in ("nproc_per_node", "nnodes", "node_rank")}
    given["machine_rank"] = flags.get("machine_rank")
    for name, value in given.items():
        if value is not None:
            flag = name if name == "machine_rank" else name.replace("_", "-")
            raise ConfigurationError(f"--{flag} cannot be combined with --hostfile, whose lines say that. Remove it.")
    for key, number in {"num_machines": len(hosts), "num_processes": sum(host.slots for host in hosts)}.items():
        if settings.get(key, number) != number:
            raise ConfigurationError(
                f"{settings.source}: {key}: {settings.get(key)}, but {file} has {number}. Write {key}: {number}, or remove it."
            )


def count(text: str, name: str, least: int = 0, most: int = 2**31, more: str = "") -> int:
    """An argument as an integer within bounds."""
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        bounds = f"from {least} on" if most == 2**31 else f"from {least} to {most}"
        raise ConfigurationError(f"{name} must be a whole number {bounds}{more}, not {text!r}.")
    return int(text)
