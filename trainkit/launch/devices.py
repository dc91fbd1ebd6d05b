"""The number of processes per node, the check against what was started, and the device of each process."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.console import counted
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch.self_start import in_notebook

__all__ = ["check_wanted", "device_of", "processes_of_a_machine"]

# The command that starts another number of processes, by launcher.
_HOW = {
    "torchrun": "torchrun --nproc-per-node {each} script.py",
    "deepspeed": "deepspeed --num_gpus {each} script.py",
    "SLURM": "srun --ntasks-per-node={each} python script.py",
    "Open MPI": "mpirun -n {all} python script.py",
    "MPI (Hydra)": "mpirun -n {all} python script.py",
    "MVAPICH": "mpirun -n {all} python script.py",
    "notebook_launcher": "notebook_launcher(function, num_processes={each})",
    "LSF": "jsrun -n {all} python script.py",
}


def processes_of_a_machine(wanted: RequestedDevices) -> int:
    """Number of processes of a node if no launcher has started any: the requested number, else one for each GPU."""
    if wanted.per_node is not None and wanted.per_node >= 0:
        return wanted.per_node
    if wanted.indices is not None:
        return len(wanted.indices)
    if wanted.as_started:
        return 1
    gpus = torch.cuda.device_count() if wanted.accelerator in ("auto", "cuda") and torch.cuda.is_available() else 0
    if wanted.per_node is None and in_notebook():
        return 1
    return max(1, gpus)


def check_wanted(wanted: RequestedDevices, size: int, local_size: int | None, nodes: int | None, launcher: str) -> None:
    """Check that `devices` and `num_nodes` do not contradict the processes that were started.

    Args:
        wanted: What the user requested.
        size: Number of processes.
        local_size: Number of processes of this node; `None`: unknown.
        nodes: Number of nodes; `None`: unknown.
        launcher: What started the processes, for the message.

    Raises:
        ConfigurationError: They do; the message has the command that starts the requested number of processes.
    """
    each = None if wanted.per_node == -1 else wanted.per_node
    machines = wanted.nodes
    if not _contradict(each, machines, size, local_size, nodes):
        return
    asked = ", ".join(f"{name}={n}" for name, n in (("devices", each), ("num_nodes", machines)) if n is not None)
    there = counted(size, "process") + (f" on {counted(nodes, 'node')}" if nodes else "")
    how = _HOW.get(launcher, "trainkit launch --nproc-per-node {each} script.py")
    number = each or max(1, size // (nodes or 1))
    raise ConfigurationError(
        f"{asked} contradicts what was started: {there}, by {launcher}. Leave {'it' if ',' not in asked else 'them'} out, or "
        f"start as many processes: {how.format(each=number, all=number * (machines or nodes or 1))}"
    )


def _contradict(each: int | None, machines: int | None, size: int, local_size: int | None, nodes: int | None) -> bool:
    """Whether `devices=each` and `num_nodes=machines` contradict the processes; numbers that are unknown are `None`."""
    if machines is not None and nodes is not None and machines != nodes:
        return True
    if each is None:
        return False
    if any(number is not None and each * number != size for number in (nodes, machines)):
        return True
    return nodes is None and local_size is not None and each != local_size


def device_of(wanted: RequestedDevices, world: World) -> torch.device:
    """Return the device of this process. Collective.

    Args:
        wanted: What the user requested.
        world: The processes of the run.

    Raises:
        ConfigurationError: A process has no device; raised on all ranks.
    """
    cuda = wanted.accelerator == "cuda" or (wanted.accelerator == "auto" and torch.cuda.is_available())
    if not cuda:
        if wanted.accelerator == "mps" and world.local_size > 1:
            raise ConfigurationError(
                f"accelerator='mps': there is one such device, but this node has {world.local_size} processes. Use "
                "accelerator='cpu', or one process: devices=1"
            )
        return torch.device("mps" if wanted.accelerator == "mps" else "cpu")
    index, problem = _gpu(wanted, world)
    ranks = world.exchange({"problem": problem, "gpu": None if problem else _identity(index)})
    for rank, said in enumerate(ranks):
        if said["problem"]:
            raise ConfigurationError(f"rank {rank}: {said['problem']}")
    _refuse_sharing([said["gpu"] for said in ranks])
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _gpu(wanted: RequestedDevices, world: World) -> tuple[int, str | None]:
    """The index of this process's GPU, and what is wrong with it."""
    if not torch.cuda.is_available():
        return 0, "torch sees no GPU. Use accelerator='cpu', or install a build of torch for CUDA."
    count = torch.cuda.device_count()
    if wanted.indices is not None:
        if world.local_rank >= len(wanted.indices):
            return 0, (
                f"devices={list(wanted.indices)} names {counted(len(wanted.indices), 'GPU')}, but this node has "
                f"{world.local_size} processes. Name one for each."
            )
        index = wanted.indices[world.local_rank]
        if index >= count:
            return 0, f"devices={list(wanted.indices)}: there is no GPU number {index}; torch sees {count}, from 0."
        return index, None
    if count == 1:  # a batch system may show each process its own; a shared one is found below
        return 0, None
    if world.local_rank >= count:
        return 0, (
            f"this node has {world.local_size} processes, but torch sees {counted(count, 'GPU')}. Start one process for each "
            f"GPU: --nproc-per-node {count}, or use accelerator='cpu'."
        )
    return world.local_rank, None


def _identity(index: int) -> str:
    """A unique id of a GPU; "" if it has none."""
    properties: Any = torch.cuda.get_device_properties(index)
    return str(getattr(properties, "uuid", ""))


def _refuse_sharing(gpus: list[str]) -> None:
    known: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu and gpu in known:
            raise ConfigurationError(
                f"ranks {known[gpu]} and {rank} have the same GPU, but each process needs its own. Start as many processes as "
                "there are GPUs, and let the batch system show each process all GPUs of the node, or its own one."
            )
        known[gpu] = rank
