"""How many processes a machine is to have, and which device each of them takes."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.console import counted
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch.self_start import in_notebook

__all__ = ["device_of", "processes_of_a_machine"]


def processes_of_a_machine(wanted: RequestedDevices) -> int:
    """The processes that a machine is to have where no launcher has started any: those asked for, else one for each GPU."""
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


def device_of(wanted: RequestedDevices, world: World) -> torch.device:
    """The device of this process; collective.

    Args:
        wanted: what the user asked for.
        world: the processes of the run.

    Raises:
        ConfigurationError: there is none for this process or another one of the run; on all of them.
    """
    cuda = wanted.accelerator == "cuda" or (wanted.accelerator == "auto" and torch.cuda.is_available())
    if not cuda:
        if wanted.accelerator == "mps" and world.local_size > 1:
            raise ConfigurationError(
                f"accelerator='mps': there is one such device, and this machine has {world.local_size} processes. Use "
                "accelerator='cpu', or one process."
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
    """The number of this process's GPU, and what is wrong with it."""
    if not torch.cuda.is_available():
        return 0, "torch sees no GPU. Use accelerator='cpu', or install a build of torch for CUDA."
    count = torch.cuda.device_count()
    if wanted.indices is not None:
        if world.local_rank >= len(wanted.indices):
            return 0, (
                f"devices={list(wanted.indices)} names {counted(len(wanted.indices), 'GPU')}, but this machine has "
                f"{world.local_size} "
                "processes. Name one for each."
            )
        index = wanted.indices[world.local_rank]
        if index >= count:
            return 0, f"devices={list(wanted.indices)}: there is no GPU number {index}; torch sees {count}, from 0."
        return index, None
    if count == 1:  # a batch system shows each process its own; whether it does is seen below
        return 0, None
    if world.local_rank >= count:
        return 0, (
            f"this machine has {world.local_size} processes, but torch sees {counted(count, 'GPU')}. Start one "
            f"process for each GPU "
            f"(--nproc-per-node {count}), or use accelerator='cpu'."
        )
    return world.local_rank, None


def _identity(index: int) -> str:
    """What tells a GPU from all others; "" where that is not known."""
    properties: Any = torch.cuda.get_device_properties(index)
    return str(getattr(properties, "uuid", ""))


def _refuse_sharing(gpus: list[str]) -> None:
    known: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu and gpu in known:
            raise ConfigurationError(
                f"ranks {known[gpu]} and {rank} have the same GPU, and each process needs one of its own. Start as many "
                "processes as there are GPUs, and let the batch system show each process all GPUs of the machine, or its own."
            )
        known[gpu] = rank
