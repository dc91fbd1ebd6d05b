"""`read_place`: which launcher started this process, from environment variables: torchrun, DeepSpeed, SLURM, MPI, LSF, …"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainkit.errors import ConfigurationError
from trainkit.launch.clusters import jsrun_place, mpi_place, slurm_place
from trainkit.launch.rank_info import RankInfo, checked, is_local, number, port_number

__all__ = ["LAUNCHER", "SCRIPT", "RankInfo", "read_place"]

# Processes of this node, its rank, number of nodes: the variables of torchrun and of DeepSpeed's launcher.
_TORCHRUN = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_DEEPSPEED = ("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")

# Set by trainkit's launcher: what started it, for messages.
LAUNCHER = "TRAINKIT_LAUNCHER"
SCRIPT = "this script"

_FIX = (
    "Start the processes with: trainkit launch --nproc-per-node N script.py   (or torchrun), which sets RANK, WORLD_SIZE, "
    "LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Or unset these variables."
)


def read_place(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks of this process, if a launcher started it.

    Args:
        env: the environment variables, as in `os.environ`.

    Returns:
        The ranks; `None` if no launcher started several processes: in a shell, a notebook, the script of a batch job, an
        interactive shell in an allocation, a single task.

    Raises:
        ConfigurationError: the variables contradict each other, or a required one is missing.
    """
    plain = _plain(env)
    if plain is not None and env.get("LOCAL_RANK", "") != "":
        return plain  # a complete set; other variables belong to what started that launcher
    outer = _cluster(env)
    if plain is None or outer is None:
        return plain or outer or _kubernetes(env)
    if (plain.rank, plain.size) != (outer.rank, outer.size):
        raise ConfigurationError(
            f"two launchers disagree: RANK={plain.rank} and WORLD_SIZE={plain.size}, but this is process {outer.rank} of "
            f"{outer.size} for {outer.launcher} ({outer.reason}). Unset RANK and WORLD_SIZE; or, if they are right, also set "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
        )
    return outer


def _cluster(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks set by a batch system or MPI. In a SLURM job mpirun counts, not its daemons, which srun started."""
    jsrun, mpi, slurm = jsrun_place(env), mpi_place(env), slurm_place(env)
    if mpi is not None and slurm is not None and (mpi.rank, mpi.size) == (slurm.rank, slurm.size):
        return slurm  # srun --mpi=pmi2 sets both, and SLURM's variables contain more
    place = jsrun or mpi or slurm
    if place is None or place.size == 1:
        return None
    apart = (place.nodes or 1) > 1 or (place.local_size or place.size) < place.size
    if apart and is_local(place.master_addr):
        raise ConfigurationError(
            f"MASTER_ADDR={place.master_addr} is a loopback address, but {place.launcher} has started the processes on several "
            "nodes. Set it to the name of the node of rank 0, or unset it: unset MASTER_ADDR"
        )
    return place


def _plain(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks in RANK and WORLD_SIZE, which torchrun, the Kubernetes operators or the user set."""
    rank, size = number(env, "RANK"), number(env, "WORLD_SIZE")
    if rank is None:
        _check_lone_size(env, size)
        return None
    if size is None:
        raise ConfigurationError(f"RANK={rank} is set, but WORLD_SIZE is not. {_FIX}")
    if size == 0:
        raise ConfigurationError(f"WORLD_SIZE=0: it must be at least 1. {_FIX}")
    by_hand = env.get("LOCAL_RANK", "") == ""
    if by_hand and size == 1 and rank == 0:
        return None  # the same as without a launcher
    if by_hand and _cluster(env) is not None:  # the cluster knows the address of the main process
        return RankInfo(rank, size, None, None, None, None, "", 0, "RANK and WORLD_SIZE", "")
    launcher, reason = _started_by(env)
    local_size, node, nodes = _DEEPSPEED if launcher == "deepspeed" else _TORCHRUN
    place = RankInfo(
        rank,
        size,
        number(env, "LOCAL_RANK"),
        number(env, local_size),
        number(env, node),
        number(env, nodes),
        *_address(env, size),
        launcher,
        reason,
    )
    place = checked(place, "RANK", "WORLD_SIZE", "LOCAL_RANK", local_size)
    return _one_in_each_pod(env, place) if by_hand and _in_kubernetes(env) else _with_nodes(place)


def _check_lone_size(env: Mapping[str, str], size: int | None) -> None:
    """Refuse a WORLD_SIZE > 1 without RANK, unless the batch system has started the same number of processes."""
    if size is None or size <= 1:
        return
    outer = _cluster(env)
    if outer is None:
        raise ConfigurationError(f"WORLD_SIZE={size} is set, but RANK is not. {_FIX}")
    if outer.size != size:
        raise ConfigurationError(
            f"WORLD_SIZE={size} is set, but {outer.launcher} has started {outer.size} processes ({outer.reason}). Unset "
            "WORLD_SIZE."
        )


def _started_by(env: Mapping[str, str]) -> tuple[str, str]:
    if LAUNCHER in env:
        return env[LAUNCHER], "it requests them" if env[LAUNCHER] == SCRIPT else f"{LAUNCHER} is set"
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun", "TORCHELASTIC_RUN_ID is set"
    if all(env.get(name, "") != "" for name in _DEEPSPEED):
        return "deepspeed", "LOCAL_SIZE, CROSS_RANK and CROSS_SIZE are set"
    if _in_kubernetes(env):
        return "Kubernetes", "RANK, WORLD_SIZE and KUBERNETES_SERVICE_HOST are set"
    return "a launcher", "RANK and WORLD_SIZE are set"


def _address(env: Mapping[str, str], size: int) -> tuple[str, int]:
    address, port = env.get("MASTER_ADDR", "").strip(), port_number(env, "MASTER_PORT")
    if size == 1:
        return address, port or 0
    if not address or port is None:
        missing = " and ".join(name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value)
        raise ConfigurationError(f"WORLD_SIZE={size}, but {missing} {'are' if ' ' in missing else 'is'} not set. {_FIX}")
    return address, port


def _with_nodes(place: RankInfo) -> RankInfo:
    """Add the node of the process if the launcher has not set it and it follows from the rest."""
    if place.local_rank is None and is_local(place.master_addr):  # all are on this node, or could not connect
        return replace(place, local_rank=place.rank, local_size=place.size, node=0, nodes=1)
    local_size = place.local_size
    if local_size is None and place.local_rank is not None and is_local(place.master_addr):
        local_size = place.size
    node, nodes = place.node, place.nodes
    if local_size is not None and place.size % local_size == 0 and nodes is None:
        nodes = place.size // local_size
        node = place.rank // local_size if node is None else node
    return replace(place, local_size=local_size, node=node, nodes=nodes)


# ------------------------------------------------------------------------------------------------------------ Kubernetes


def _in_kubernetes(env: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in env or "PET_NNODES" in env


def _one_in_each_pod(env: Mapping[str, str], place: RankInfo) -> RankInfo:
    """The training operator numbers its pods. Each pod runs the processes that its command starts, in this case one."""
    each = env.get("PET_NPROC_PER_NODE", "1")
    if each.isdigit() and int(each) > 1:
        raise ConfigurationError(
            f"PET_NPROC_PER_NODE={each}: each pod should run {each} processes, but this script was started as one. Set the "
            "command of the pods to: trainkit launch script.py   (or torchrun), which reads these variables."
        )
    return replace(place, local_rank=0, local_size=1, node=place.rank, nodes=place.size)


def _kubernetes(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks in the PET_ variables, which are for torchrun, in a pod whose command is the script itself."""
    text = env.get("PET_NNODES", "1").strip()
    if text in ("", "1", "1:1"):
        return None
    nodes, rank = number({"PET_NNODES": text} if ":" not in text else {}, "PET_NNODES"), number(env, "PET_NODE_RANK")
    address, port = env.get("PET_MASTER_ADDR", "").strip(), port_number(env, "PET_MASTER_PORT")
    if nodes is None or rank is None or not address or port is None:
        raise ConfigurationError(
            f"PET_NNODES={text}: this pod is one of several, but its rank or the address of the first pod is not set. Set "
            "the command of the pods to: trainkit launch script.py   (or torchrun). To run this process alone: unset "
            "PET_NNODES"
        )
    place = RankInfo(rank, nodes, 0, 1, rank, nodes, address, port, "Kubernetes", "PET_NNODES and PET_NODE_RANK are set")
    return _one_in_each_pod(env, checked(place, "PET_NODE_RANK", "PET_NNODES"))
