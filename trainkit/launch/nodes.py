"""What the environment says of the machines of a job to ``trainkit launch``, which starts the workers of one of them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from trainkit.errors import ConfigurationError
from trainkit.launch.clusters import jsrun_place, mpi_place, slurm_place
from trainkit.launch.place import number, port_number

__all__ = ["Nodes", "grace", "join_timeout", "node_range", "quietly", "read_nodes"]


@dataclass(frozen=True)
class Nodes:
    """The machines of a job, as far as they are known; ``None`` is what was not said.

    Attributes:
        least: machines that are needed.
        most: machines that are taken.
        rank: the number of this one.
        master_addr: where they meet.
        master_port: the port there.
        per_node: the processes of each: a number, "auto" or "gpu".
        max_restarts: how often the processes may be started anew.
        source: who said it, for messages.
    """

    least: int | None = None
    most: int | None = None
    rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    per_node: str | None = None
    max_restarts: int | None = None
    source: str = "nobody"


def read_nodes(env: Mapping[str, str]) -> Nodes:
    """What the environment variables say: those of Kubernetes' training operators, or of a batch system that has started
    one process on each machine.

    Raises:
        ConfigurationError: they contradict each other, or several processes were started on a machine.
    """
    if env.get("LOCAL_RANK") and env.get("TORCHELASTIC_RUN_ID"):
        return Nodes()  # inside of a worker: what is set is about that worker
    if env.get("PET_NNODES"):
        return _kubernetes(env)
    place = jsrun_place(env) or mpi_place(env) or slurm_place(env)
    if place is not None and place.size > 1:
        if place.local_size not in (None, 1) or (place.nodes is not None and place.nodes != place.size):
            raise ConfigurationError(
                f"{place.launcher} has started {place.size} processes, several on a machine, and each would start workers "
                "of its own. Start one on each machine (srun --ntasks-per-node=1 trainkit launch …), or leave trainkit launch "
                f"out: {place.launcher} starts the script itself, once for each GPU."
            )
        return Nodes(place.size, place.size, place.rank, place.master_addr, place.master_port, source=place.launcher)
    return _numbered(env)


def node_range(text: str, name: str) -> tuple[int, int]:
    """``"2"`` or ``"1:4"`` as the smallest and the largest number of machines."""
    low, between, high = text.strip().partition(":")
    high = high if between else low
    if not low.isdigit() or not high.isdigit() or not 1 <= int(low) <= int(high):
        raise ConfigurationError(f"{name} must be a number of machines, or the smallest and the largest as 2:4, not {text!r}.")
    return int(low), int(high)


def grace(env: Mapping[str, str]) -> float:
    """The seconds that workers have to save and end after a signal: ``TRAINKIT_GRACE``, else 30."""
    return _seconds(env, "TRAINKIT_GRACE", 30.0)


def join_timeout(env: Mapping[str, str]) -> float:
    """The seconds that machines wait for each other: ``TRAINKIT_JOIN_TIMEOUT``, else 600."""
    return _seconds(env, "TRAINKIT_JOIN_TIMEOUT", 600.0)


def quietly(env: MutableMapping[str, str]) -> dict[str, str]:
    """Keep torch's own C++ log out of what the agent prints; before torch is imported. Returns the variables of the workers."""
    before = dict(env)
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return before


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{name} must be a number of seconds, not {text!r}.")
    return value


def _kubernetes(env: Mapping[str, str]) -> Nodes:
    least, most = node_range(env["PET_NNODES"], "PET_NNODES")
    host, _, port = env.get("PET_RDZV_ENDPOINT", "").partition(":")
    return Nodes(
        least,
        most,
        number(env, "PET_NODE_RANK"),
        env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR") or host or None,
        port_number(env, "PET_MASTER_PORT") or port_number(env, "MASTER_PORT") or (int(port) if port.isdigit() else None),
        env.get("PET_NPROC_PER_NODE") or env.get("PET_N_PROC_PER_NODE") or None,
        number(env, "PET_MAX_RESTARTS"),
        "Kubernetes",
    )


def _numbered(env: Mapping[str, str]) -> Nodes:
    """RANK and WORLD_SIZE of pods: the first operator for PyTorch had nothing else."""
    rank, size = number(env, "RANK"), number(env, "WORLD_SIZE")
    if "KUBERNETES_SERVICE_HOST" not in env or rank is None or size is None or size < 2:
        return Nodes()
    return Nodes(size, size, rank, env.get("MASTER_ADDR"), port_number(env, "MASTER_PORT"), source="Kubernetes")
