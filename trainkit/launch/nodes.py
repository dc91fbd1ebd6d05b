"""The nodes of a job, from environment variables, for `trainkit launch`, which starts the workers of one node."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import astuple, dataclass

from trainkit.errors import ConfigurationError
from trainkit.launch.clusters import jsrun_place, mpi_place, slurm_place
from trainkit.launch.rank_info import number, port_number

__all__ = ["Nodes", "grace", "join_timeout", "node_range", "quietly", "read_nodes"]


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job; `None`: not set.

    Attributes:
        least: smallest number of nodes that the job runs on.
        most: largest number.
        rank: rank of this node.
        master_addr: address of the first node.
        master_port: port on the first node.
        per_node: processes of each node: a number, "auto" or "gpu".
        max_restarts: how many times to restart all processes after a failure.
        source: what set these values, for messages.
    """

    least: int | None = None
    most: int | None = None
    rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    per_node: str | None = None
    max_restarts: int | None = None
    source: str | None = None

    def over(self, other: Nodes) -> Nodes:
        """These values, and those of `other` for what is not set."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Nodes(*(theirs if ours is None else ours for ours, theirs in pairs))


def read_nodes(env: Mapping[str, str]) -> Nodes:
    """The nodes in the variables of Kubernetes' training operators, or of a batch system with one process on each node.

    Raises:
        ConfigurationError: the variables contradict each other, or several processes were started on a node.
    """
    if env.get("LOCAL_RANK") and env.get("TORCHELASTIC_RUN_ID"):
        return Nodes()  # inside a worker: the variables contain its own ranks
    if env.get("PET_NNODES"):
        return _kubernetes(env)
    place = jsrun_place(env) or mpi_place(env) or slurm_place(env)
    if place is not None and place.size > 1:
        if place.local_size not in (None, 1) or (place.nodes is not None and place.nodes != place.size):
            raise ConfigurationError(
                f"{place.launcher} has started {place.size} processes, several on a node, and each would start its own "
                "workers. Start one on each node: srun --ntasks-per-node=1 trainkit launch …   Or remove trainkit launch: "
                f"{place.launcher} then starts the script itself, once for each GPU."
            )
        return Nodes(place.size, place.size, place.rank, place.master_addr, place.master_port, source=place.launcher)
    return _pods(env)


def node_range(text: str, name: str) -> tuple[int, int]:
    """`"2"` or `"1:4"` as the smallest and the largest number of nodes."""
    low, between, high = text.strip().partition(":")
    high = high if between else low
    if not low.isdigit() or not high.isdigit() or not 1 <= int(low) <= int(high):
        raise ConfigurationError(f"{name} must be a number of nodes, or a range such as 2:4, not {text!r}.")
    return int(low), int(high)


def grace(env: Mapping[str, str]) -> float:
    """Seconds for workers to save and end after a signal: `TRAINKIT_GRACE`, default 30."""
    return _seconds(env, "TRAINKIT_GRACE", 30.0)


def join_timeout(env: Mapping[str, str]) -> float:
    """Seconds that nodes wait for each other: `TRAINKIT_JOIN_TIMEOUT`, default 600."""
    return _seconds(env, "TRAINKIT_JOIN_TIMEOUT", 600.0)


def quietly(env: MutableMapping[str, str]) -> dict[str, str]:
    """Before torch is imported: keep its C++ log out of the agent's output. Returns the variables for the workers."""
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


def _pods(env: Mapping[str, str]) -> Nodes:
    """Pods numbered by RANK and WORLD_SIZE: the first operator for PyTorch sets nothing else."""
    rank, size = number(env, "RANK"), number(env, "WORLD_SIZE")
    if "KUBERNETES_SERVICE_HOST" not in env or rank is None or size is None or size < 2:
        return Nodes()
    return Nodes(size, size, rank, env.get("MASTER_ADDR"), port_number(env, "MASTER_PORT"), source="Kubernetes")
