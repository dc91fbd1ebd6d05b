"""Where ``trainkit launch`` is to start how many processes: its own flags, the settings, and what the environment says."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from trainkit.config.carried import carry
from trainkit.config.keys import HOSTFILE, MULTINODE_LAUNCHER
from trainkit.config.settled import settled
from trainkit.config.values import Settings
from trainkit.errors import ConfigurationError
from trainkit.launch.hostfile import Host
from trainkit.launch.nodes import Nodes, node_range, read_nodes

__all__ = ["at_place", "check_hosts", "combined", "count", "find_nodes", "hostfile", "per_node", "told"]

# Our flags, and the keys that say the same.
_SAME = {
    "nnodes": "num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "master_port": "main_process_port",
}


def combined(args: argparse.Namespace, flags: Settings, file: Settings) -> Settings:
    """The settings of the run; ``--nnodes`` and ``--nproc-per-node`` beat what a file says of the same.

    Raises:
        ConfigurationError: they contradict each other.
    """
    if args.nproc_per_node is not None:
        file = file.without("num_processes")
    counted = "num_processes" in {*flags.values, *file.values}
    if counted and "num_machines" not in flags.values and (args.nnodes or "").isdigit():
        flags = replace(flags, values={**flags.values, "num_machines": int(args.nnodes)})
    return settled(flags.over(file))


def at_place(args: argparse.Namespace, flags: Settings, file: Settings, env: Mapping[str, str]) -> argparse.Namespace:
    """The arguments, with what the settings say of the machines.

    Args:
        args: of ``trainkit launch``.
        flags: those of its settings that are on the command line.
        file: those of the configuration file.
        env: the environment variables.

    Raises:
        ConfigurationError: two of these contradict each other.
    """
    found = argparse.Namespace(**vars(args))
    for ours, key in _SAME.items():
        mine, theirs = getattr(args, ours), flags.get(key)
        if mine is not None and theirs is not None and mine != str(theirs):
            raise ConfigurationError(
                f"--{ours.replace('_', '-')} {mine} and --{key} {theirs} contradict each other. Give one of them."
            )
        if mine is None and theirs is not None:
            setattr(found, ours, str(theirs))
    for ours in ("master_addr", "master_port"):
        if getattr(found, ours) is None and _SAME[ours] in file.values:
            setattr(found, ours, str(file.get(_SAME[ours])))
    if args.master_port is None and found.master_port == "0":
        found.master_port = None
    machines, rank = file.get("num_machines"), file.get("machine_rank")
    if machines == 1 or found.nnodes == "1":
        rank = None  # of one machine Accelerate writes 0 all the same
    if (found.nnodes is None and machines is not None) or (found.node_rank is None and rank is not None):
        _take_machines(found, machines, rank, file.source, _around(found, env))
    return found


def _take_machines(found: argparse.Namespace, machines: int | None, rank: int | None, source: str, around: Nodes) -> None:
    """What the file says of the machines; refused where what has started this one counts otherwise: each would train alone."""
    if found.nnodes is None and machines is not None:
        if around.most is not None and not (around.least or 1) <= machines <= around.most:
            raise ConfigurationError(
                f"{source}: num_machines: {machines}, but {around.source} says that this is one of {around.most} machines. "
                "Leave num_machines and machine_rank out of the file, or give --num_machines."
            )
        if machines > 1:  # of one machine counts what the environment tells
            found.nnodes = str(machines)
    if found.node_rank is None and rank is not None:
        if around.rank is not None and around.rank != rank:
            raise ConfigurationError(
                f"{source}: machine_rank: {rank}, but {around.source} says that this is machine {around.rank}. Leave "
                "machine_rank out of the file, or give --machine_rank."
            )
        found.node_rank = str(rank)


def _around(args: argparse.Namespace, env: Mapping[str, str]) -> Nodes:
    """What the environment says; what needs the place to meet there finds it."""
    return read_nodes({**env, "MASTER_ADDR": args.master_addr} if args.master_addr else env)


def find_nodes(args: argparse.Namespace, env: Mapping[str, str]) -> Nodes:
    """The machines: what the arguments say, and of the rest what the environment says."""
    least, most = (None, None) if args.nnodes is None else node_range(args.nnodes, "--nnodes")
    around = Nodes() if most == 1 else _around(args, env)
    port = around.master_port if args.master_port is None else count(args.master_port, "--master-port", 1, 65535)
    if most is None:
        least, most = around.least, around.most
    elif args.node_rank is None and around.rank is not None and around.most not in range(least or 1, most + 1):
        raise ConfigurationError(
            f"--nnodes {args.nnodes}, but {around.source} says that this is one of {around.most} machines. Leave --nnodes out, "
            "or number the machines with --node-rank."
        )
    rank = around.rank if args.node_rank is None else count(args.node_rank, "--node-rank")
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
            "with --node-rank 0 (main_process_ip in a configuration file)."
        )
    return Nodes(least, most, rank, address, port, around.per_node, around.max_restarts, around.source)


def per_node(args: argparse.Namespace, flags: Settings, settings: Settings, nodes: Nodes) -> int:
    """The processes of this machine.

    Raises:
        ConfigurationError: a number that makes no sense, contradicts another, or cannot be had here.
    """
    machines, total = nodes.most or 1, settings.get("num_processes")
    gpus = _visible_gpus(settings)
    if args.nproc_per_node is not None:
        each = _counted(args.nproc_per_node, "--nproc-per-node", gpus)
        if "num_processes" in flags.values and each * machines != total:
            raise ConfigurationError(
                f"--nproc-per-node {each} on {machines} machine{'s' if machines > 1 else ''} and --num_processes {total} "
                "contradict each other. Give one of them."
            )
    elif settings.info is not None and (settings.info.one_device or settings.info.one_process):
        each = 1
    elif total is not None:
        if nodes.least != nodes.most:
            raise ConfigurationError(
                f"{settings.source}: num_processes: {total} is of all machines together, and there may be {nodes.least} to "
                f"{nodes.most} of them. Give --nproc-per-node N instead."
            )
        if total % machines:
            raise ConfigurationError(
                f"{settings.source}: num_processes: {total} cannot be divided by {machines} machines. Give --nproc-per-node N."
            )
        each = total // machines
    elif nodes.per_node is not None or not settings.get("use_cpu"):
        each = _counted(nodes.per_node or "auto", "PET_NPROC_PER_NODE", gpus)
    elif settings.get("distributed_type") == "MULTI_CPU":
        raise ConfigurationError(
            f"{settings.source}: distributed_type: MULTI_CPU, and not how many processes. Write num_processes: 2"
        )
    else:
        each = 1
    if settings.get("distributed_type") == "NO" and each * machines > 1:
        raise ConfigurationError(
            f"{settings.source}: distributed_type: NO is one process, and {each * machines} are to be started. Give "
            "--distributed_type MULTI_GPU or MULTI_CPU."
        )
    _check_gpus(settings, each, gpus)
    return each


def _counted(text: str, name: str, gpus: str | None) -> int:
    if text not in ("auto", "gpu"):
        return count(text, name, 1, more=", 'gpu' or 'auto'")
    number = _gpus_here() if gpus is None else len(gpus.split(","))
    if text == "gpu" and number == 0:
        raise ConfigurationError(f"{name} gpu: torch sees no GPU. Give a number: --nproc-per-node 2")
    return max(1, number)


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_gpus(settings: Settings, each: int, gpus: str | None) -> None:
    if gpus is not None and each > len(gpus.split(",")):
        raise ConfigurationError(
            f"{settings.source}: gpu_ids: {gpus} is fewer than the {each} processes that there are to be on a machine. Name as "
            "many, or leave it out."
        )
    if settings.get("distributed_type") == "MULTI_GPU" and not settings.get("use_cpu") and _gpus_here() == 0:
        raise ConfigurationError(
            f"{settings.source}: distributed_type: MULTI_GPU, and torch sees no GPU here. Write MULTI_CPU, or give --cpu."
        )


def _visible_gpus(settings: Settings) -> str | None:
    """The numbers of the GPUs that processes may see; ``None``: all of them, or none."""
    gpus = settings.get("gpu_ids", "all")
    return None if gpus == "all" or settings.get("use_cpu") else str(gpus)


def told(settings: Settings, elsewhere: bool = False) -> dict[str, str]:
    """The variables that processes get for settings, or the launchers of other machines, which must not look for a file."""
    gpus = _visible_gpus(settings)
    return carry(settings, always=elsewhere) | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})


def hostfile(args: argparse.Namespace, settings: Settings) -> str | None:
    """The file of the machines that are to be started by ssh."""
    if args.hostfile is not None or settings.get(MULTINODE_LAUNCHER) == "standard":
        return args.hostfile  # type: ignore[no-any-return]
    return settings.get(HOSTFILE)  # type: ignore[no-any-return]


def check_hosts(hosts: list[Host], file: str, args: argparse.Namespace, flags: Settings, settings: Settings) -> None:
    """Hold the machines of a file against what else says how many there are.

    Raises:
        ConfigurationError: a flag says what the file does, or the settings count otherwise.
    """
    for name in ("nproc_per_node", "nnodes", "node_rank"):
        if getattr(args, name) is not None:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} beside --hostfile, whose lines and slots say that. Leave it out."
            )
    if "machine_rank" in flags.values:
        raise ConfigurationError("--machine_rank beside --hostfile, whose lines say that. Leave it out.")
    there = {"num_machines": len(hosts), "num_processes": sum(host.slots for host in hosts)}
    for key, number in there.items():
        if settings.get(key, number) != number:
            raise ConfigurationError(
                f"{settings.source}: {key}: {settings.get(key)}, and {file} has {number}. Write {key}: {number}, or leave it "
                "out."
            )


def count(text: str, name: str, least: int = 0, most: int = 2**31, more: str = "") -> int:
    """A number out of an argument.

    Raises:
        ConfigurationError: it is none, or out of bounds.
    """
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        bounds = f"from {least} on" if most == 2**31 else f"from {least} to {most}"
        raise ConfigurationError(f"{name} must be a whole number {bounds}{more}, not {text!r}.")
    return int(text)
