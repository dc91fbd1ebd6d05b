"""What a launcher has told this process, in environment variables and on the command line: `read_place` and `read_nodes`."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import re
import socket
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from trainkit.console import notice
from trainkit.errors import ConfigurationError

__all__ = [
    "DEVICE",
    "GLOO",
    "LAUNCHER",
    "REPLICA",
    "SCRIPT",
    "Nodes",
    "RankInfo",
    "grace",
    "hosts",
    "is_local",
    "join_timeout",
    "local_rank",
    "node_range",
    "option",
    "options",
    "place_in_slice",
    "placed",
    "quietly",
    "read_nodes",
    "read_place",
    "runtime_is_loaded",
    "set_gloo_interface",
    "stable_port",
    "tasks_of_nodes",
    "tpu_is_chosen",
    "tpu_is_here",
]

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

_FIRST_PORT, _PORTS = 12000, 16000  # below the ports that Linux gives to outgoing connections

# The smallest of SLURM's own step ids: batch scripts, interactive shells.
_OWN_STEPS = 0xFFFFFFF0

# Launcher, rank, size, local rank, local size.
_MPI = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPI (Hydra)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# The type of a TPU among torch's devices.
DEVICE = "xla"

# Set while XLA's runtime starts replicas, and in them.
REPLICA = "TRAINKIT_XLA_REPLICA"

# The PCI ids of Google and of its TPU chips, as in torch_xla/_internal/tpu.py.
_VENDOR = "0x1ae0"
_CHIPS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")

GLOO = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_OUTSIDE = "192.0.2.1"  # an address for documentation: nothing is sent there


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


# ----------------------------------------------------------------------------------------------------------------- the ranks


@dataclass(frozen=True)
class RankInfo:
    """What a launcher has set for the process that it started; `None`: not set.

    Attributes:
        rank: rank of the process.
        size: number of processes (world size).
        local_rank: rank among the processes of its node.
        local_size: number of processes of its node.
        node: rank of its node.
        nodes: number of nodes.
        master_addr: name or address of the node of rank 0; "" for a single process.
        master_port: port on that node; 0 for a single process.
        launcher: what started the process, for messages: "torchrun", "SLURM", …
        reason: how the launcher was recognized, for messages.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    nodes: int | None
    master_addr: str
    master_port: int
    launcher: str
    reason: str


def number(env: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is set, as an integer ≥ 0; `None` if none is set.

    Raises:
        ConfigurationError: it is not such a number.
    """
    name = next((name for name in names if env.get(name, "") != ""), None)
    if name is None:
        return None
    text = env[name].strip()
    if not text.isascii() or not text.isdigit():
        raise ConfigurationError(f"{name} must be an integer ≥ 0, not {env[name]!r}. Correct it, or unset it: unset {name}")
    return int(text)


def port_number(env: Mapping[str, str], name: str) -> int | None:
    """The variable as a port; `None` if it is not set."""
    port = number(env, name)
    if port is not None and not 0 < port < 2**16:
        raise ConfigurationError(f"{name} must be a port from 1 to 65535, not {port}.")
    return port


def stable_port(*job: str | None) -> int:
    """A port that is the same for all processes of a job, and most likely different for another job."""
    text = ".".join(part or "" for part in job)
    return _FIRST_PORT + zlib.crc32(text.encode()) % _PORTS


def is_local(address: str) -> bool:
    """Whether an address is a loopback address, which no other node can reach."""
    return address in ("localhost", "::1") or address.startswith("127.")


def checked(place: RankInfo, rank: str, size: str, local_rank: str = "", local_size: str = "") -> RankInfo:
    """The ranks, if they are consistent.

    Args:
        place: the numbers that were read.
        rank: the name of the variable of the rank, for messages.
        size: the name of the variable of the number of processes.
        local_rank: the name of the variable of the local rank.
        local_size: the name of the variable of the number of local processes.

    Raises:
        ConfigurationError: the numbers contradict each other.
    """
    pairs = [
        (rank, place.rank, size, place.size),
        (local_rank, place.local_rank, local_size, place.local_size),
        (local_rank, place.local_rank, size, place.size),
        ("the rank of the node", place.node, "the number of nodes", place.nodes),
    ]
    for low, lower, high, higher in pairs:
        if lower is not None and higher is not None and lower >= higher:
            raise ConfigurationError(
                f"{low}={lower}, but {high}={higher}, which allows 0 to {higher - 1}. {place.launcher} sets these variables. "
                "If you set them yourself, set all of them, or unset them and use: trainkit launch --nproc-per-node N script.py"
            )
    if place.local_size is not None and place.local_size > place.size:
        raise ConfigurationError(
            f"{local_size}={place.local_size}, but {size}={place.size}: a node cannot have more processes than there are in "
            "all. Set both, or unset them and use: trainkit launch --nproc-per-node N script.py"
        )
    return place


# ------------------------------------------------------------------------------------------------------------- batch systems


def slurm_place(env: Mapping[str, str]) -> RankInfo | None:
    """A task of `srun`; `None` in the script of a batch job, the shell of `salloc` and that of `srun --pty`."""
    step, rank = number(env, "SLURM_STEP_ID", "SLURM_STEPID"), number(env, "SLURM_PROCID")
    if step is None or step >= _OWN_STEPS or rank is None or env.get("SLURM_PTY_PORT"):
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = number(env, tasks)
    if size is None:
        raise ConfigurationError(
            "SLURM_PROCID and SLURM_STEP_ID are set, but SLURM_NTASKS is not. Start the script with the whole environment: "
            "srun --export=ALL python script.py"
        )
    if size == 1:
        return None
    node = number(env, "SLURM_NODEID")
    counts = _tasks(env, size)
    nodes = len(counts) or number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    place = RankInfo(
        rank,
        size,
        number(env, "SLURM_LOCALID"),
        counts[node] if node is not None and node < len(counts) else None,
        node,
        nodes,
        *_slurm_address(env, nodes),
        "SLURM",
        "srun has set SLURM_PROCID",
    )
    return checked(place, "SLURM_PROCID", tasks, "SLURM_LOCALID", "the tasks of the node")


def _tasks(env: Mapping[str, str], size: int) -> list[int]:
    """The number of tasks of each node; empty if unknown."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        text = env.get(name)
        if text:
            counts = tasks_of_nodes(text)
            nodes = number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
            if len(counts) == 1 and nodes is not None:  # --ntasks-per-node: one number for all
                counts *= nodes
            if sum(counts) == size:
                return counts
    return []


def _slurm_address(env: Mapping[str, str], nodes: int | None) -> tuple[str, int]:
    job, step = env.get("SLURM_JOB_ID", env.get("SLURM_JOBID")), env.get("SLURM_STEP_ID")
    address = env.get("MASTER_ADDR", "").strip()
    names = next((env[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if env.get(n)), "")
    if not address and names:
        address = next(hosts(names))
    if not address and nodes == 1:
        address = "127.0.0.1"
    if not address:
        raise ConfigurationError(
            "SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set, so the node of rank 0 is unknown. Set its address: "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    return address, port_number(env, "MASTER_PORT") or stable_port(job, step)


def tasks_of_nodes(text: str) -> list[int]:
    """SLURM's `"2(x3),1"` as a list: `[2, 2, 2, 1]`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise ConfigurationError(f"expected SLURM's number of tasks of each node, such as '2(x3),1', not {text!r}.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def hosts(text: str) -> Iterator[str]:
    """The names in SLURM's list of nodes: `"node[03-05,9],gpu7"` is node03, node04, node05, node9, gpu7.

    Raises:
        ConfigurationError: it is not such a list.
    """
    for part in re.split(r",(?![^\[]*\])", text):  # at commas outside brackets
        yield from _expanded(part.strip(), text)


def _expanded(part: str, text: str) -> Iterator[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", part)
    if match is None:
        if not part or "[" in part or "]" in part:
            raise ConfigurationError(f"expected SLURM's list of nodes, such as 'node[03-05,9],gpu7', not {text!r}.")
        yield part
        return
    for piece in match[2].split(","):
        span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", piece)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ConfigurationError(f"expected SLURM's list of nodes, such as 'node[03-05,9],gpu7', not {text!r}.")
        for index in range(int(span[1]), int(span[2] or span[1]) + 1):
            for rest in _expanded(match[3], text) if match[3] else [""]:
                yield f"{match[1]}{index:0{len(span[1])}d}{rest}"


# ------------------------------------------------------------------------------------------------------------------- MPI


def mpi_place(env: Mapping[str, str]) -> RankInfo | None:
    """A process of `mpirun`: Open MPI, MVAPICH, MPICH or Intel MPI."""
    found = [(names, pair) for names in _MPI if (pair := _rank_and_size(env, names[1], names[2])) is not None]
    if not found:
        return None
    (launcher, rank, size, local_rank, local_size), (index, count) = found[0]
    for names, (other_index, other_count) in found[1:]:
        if (other_index, other_count) != (index, count):
            raise ConfigurationError(
                f"two launchers disagree: this is process {index} of {count} for {launcher} ({rank}, {size}), but process "
                f"{other_index} of {other_count} for {names[0]} ({names[1]}, {names[2]}). Before mpirun, unset the variables "
                f"of the launcher that you do not use: unset {names[1]} {names[2]}"
            )
    hydra = rank == "PMI_RANK"
    here = number(env, local_size, "PMI_LOCAL_SIZE") if hydra else number(env, local_size)
    together = here == count
    place = RankInfo(
        index,
        count,
        number(env, local_rank, "PMI_LOCAL_RANK") if hydra else number(env, local_rank),
        here,
        0 if together else None,
        1 if together else None,
        *_mpi_address(env, count, here),
        launcher,
        f"mpirun has set {rank}",
    )
    return checked(place, rank, size, local_rank, local_size)


def _rank_and_size(env: Mapping[str, str], rank: str, size: str) -> tuple[int, int] | None:
    index, count = number(env, rank), number(env, size)
    if index is None:
        return None
    if count is None:
        raise ConfigurationError(f"{rank} is set, but {size} is not. Start the script with mpirun, or unset {rank}.")
    return index, count


def _mpi_address(env: Mapping[str, str], size: int, local_size: int | None) -> tuple[str, int]:
    if size <= 1:
        return "", 0
    job = next((env[n] for n in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") if env.get(n)), "")
    job = env.get("SLURM_JOB_ID") or env.get("LSB_JOBID") or job
    port = port_number(env, "MASTER_PORT") or stable_port("mpi", job)
    address = env.get("MASTER_ADDR", "").strip()
    if not address and local_size == size:
        address = "127.0.0.1"
    if not address:
        address = _first_of_batch(env)
    if not address:
        raise ConfigurationError(
            "mpirun has started processes on several nodes, but the node of rank 0 is unknown. Set its address, on the first "
            "node: mpirun -x MASTER_ADDR=$(hostname) …   (Open MPI), or mpirun -genv MASTER_ADDR $(hostname) …   (MPICH, "
            "Intel MPI)"
        )
    return address, port


def _first_of_batch(env: Mapping[str, str]) -> str:
    """The first node of the batch job that mpirun runs in; "" if none is known."""
    names = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if names:
        return next(hosts(names))
    listed = env.get("LSB_MCPU_HOSTS", "").split()
    return listed[0] if listed else ""


# ------------------------------------------------------------------------------------------------------------------- LSF


def jsrun_place(env: Mapping[str, str]) -> RankInfo | None:
    """A process of `jsrun`, under LSF."""
    rank, size = number(env, "JSM_NAMESPACE_RANK"), number(env, "JSM_NAMESPACE_SIZE")
    if rank is None:
        return None
    if size is None:
        raise ConfigurationError("JSM_NAMESPACE_RANK is set, but JSM_NAMESPACE_SIZE is not. Start the script with jsrun.")
    listed = env.get("LSB_MCPU_HOSTS", "").split()
    names, slots = listed[::2], listed[1::2]
    if len(names) > 1 and slots[:1] == ["1"]:  # the node of the batch script, where jsrun starts nothing
        names = names[1:]
    address = env.get("MASTER_ADDR", "").strip() or (names[0] if names else "")
    if not address and size > 1:
        raise ConfigurationError(
            "jsrun has started this process, but LSB_MCPU_HOSTS, which names the nodes, is not set. Set the node of rank 0: "
            "jsrun -E MASTER_ADDR=host …"
        )
    port = port_number(env, "MASTER_PORT") or stable_port("lsf", env.get("LSB_JOBID"))
    local_rank, local_size = number(env, "JSM_NAMESPACE_LOCAL_RANK"), number(env, "JSM_NAMESPACE_LOCAL_SIZE")
    place = RankInfo(rank, size, local_rank, local_size, None, None, address, port, "LSF", "jsrun has set JSM_NAMESPACE_RANK")
    return checked(place, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")


# -------------------------------------------------------------------------------------------------------- the nodes of a job


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
        return _pods_of_torchrun(env)
    place = jsrun_place(env) or mpi_place(env) or slurm_place(env)
    if place is not None and place.size > 1:
        if place.local_size not in (None, 1) or (place.nodes is not None and place.nodes != place.size):
            raise ConfigurationError(
                f"{place.launcher} has started {place.size} processes, several on a node, and each would start its own "
                "workers. Start one on each node: srun --ntasks-per-node=1 trainkit launch …   Or remove trainkit launch: "
                f"{place.launcher} then starts the script itself, once for each GPU."
            )
        return Nodes(place.size, place.size, place.rank, place.master_addr, place.master_port, source=place.launcher)
    return _numbered_pods(env)


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


def _pods_of_torchrun(env: Mapping[str, str]) -> Nodes:
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


def _numbered_pods(env: Mapping[str, str]) -> Nodes:
    """Pods numbered by RANK and WORLD_SIZE: the first operator for PyTorch sets nothing else."""
    rank, size = number(env, "RANK"), number(env, "WORLD_SIZE")
    if "KUBERNETES_SERVICE_HOST" not in env or rank is None or size is None or size < 2:
        return Nodes()
    return Nodes(size, size, rank, env.get("MASTER_ADDR"), port_number(env, "MASTER_PORT"), source="Kubernetes")


# ---------------------------------------------------------------------------------------------------------- the command line


def local_rank(argv: Sequence[str]) -> int | None:
    """The local rank by `--local_rank N` or `--local_rank=N`, also with a hyphen.

    Returns:
        The local rank; `None` if it is not given, is negative, which by custom means a single process, or is not a number,
        which the script's own parser will refuse.
    """
    text = option(argv, "local_rank") or ""
    return int(text) if text.isascii() and text.isdigit() else None


def option(argv: Sequence[str], name: str) -> str | None:
    """The value of the option `--name VALUE` or `--name=VALUE`, also with hyphens.

    Returns:
        The value, the last of several, as in argparse; `""` if no value follows; `None` if the option is not given.
    """
    return next(iter(reversed(options(argv, name))), None)


def options(argv: Sequence[str], name: str) -> list[str]:
    """The values of an option that may be given several times."""
    names = {f"--{name}", f"--{name.replace('_', '-')}"}
    values: list[str] = []
    for at, argument in enumerate(argv):
        if argument == "--":  # the rest are not options
            break
        option, equals, given = argument.partition("=")
        if option in names:
            following = argv[at + 1] if at + 1 < len(argv) else ""
            values.append(given if equals else "" if following.startswith("--") else following)
    return values


def placed(place: RankInfo | None, argv: Sequence[str]) -> RankInfo | None:
    """The ranks of this process, checked against the `--local_rank` on its command line.

    DeepSpeed's launcher and `torch.distributed.launch` pass it in addition to environment variables.

    Args:
        place: the ranks in environment variables; `None`: this is a single process.
        argv: the arguments of the script.

    Returns:
        The ranks, with the local rank from the argument if no variable sets it.

    Raises:
        ConfigurationError: the argument contradicts the variables, or is not 0 and there are no variables.
    """
    given = local_rank(argv)
    if given is None:
        return place
    if place is None:
        if given == 0:  # a single process has this local rank too
            return None
        raise ConfigurationError(
            f"--local_rank={given} means that this is one of several processes, but RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT are not set, so it would train alone. Start the script with a launcher, which sets them: trainkit "
            "launch --nproc-per-node N script.py   (or deepspeed, or torchrun). For a single process, remove --local_rank."
        )
    if place.local_rank is None:
        return replace(place, local_rank=given)
    if place.local_rank != given:
        raise ConfigurationError(
            f"--local_rank={given}, but the local rank of this process is {place.local_rank} according to {place.launcher} "
            f"({place.reason}). Remove --local_rank: the launcher passes it if necessary."
        )
    return place


# ---------------------------------------------------------------------------------------------------------------------- TPUs


def tpu_is_here(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether this host has a TPU."""
    for device in devices.glob("*"):
        try:
            vendor, chip = (device / "vendor").read_text().strip(), (device / "device").read_text().strip()
        except OSError:
            continue
        if vendor == _VENDOR and chip in _CHIPS:
            return True
    return False


def tpu_is_chosen(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a run with automatic choice of the device uses a TPU: there is one, and torch_xla is installed.

    A replica that XLA's runtime has started uses that runtime, on any device.
    """
    if REPLICA in env:
        return True
    chosen = env.get("PJRT_DEVICE", "").upper()
    if chosen:
        return chosen == "TPU"
    if not tpu_is_here():
        return False
    if importlib.util.find_spec("torch_xla") is None:
        notice(
            "this host has a TPU, but torch_xla is not installed; not using the TPU. To use it: pip install "
            "'trainkit-torch[xla]'"
        )
        return False
    return True


def runtime_is_loaded() -> bool:
    """Whether this process has loaded XLA's runtime, whose replicas may be threads instead of processes."""
    return "torch_xla" in sys.modules


def place_in_slice(
    rank: int, size: int, local_rank: int, local_size: int, env: Mapping[str, str], parent: int
) -> RankInfo | None:
    """The ranks of this process on a TPU slice; `None` if it is the only one.

    Args:
        rank: rank of the process in XLA's runtime.
        size: number of processes in XLA's runtime.
        local_rank: rank among the processes of its host.
        local_size: number of processes of a host.
        env: the environment variables; those of Cloud TPU name the hosts.
        parent: id of the process that started those of this host, so that two runs on it use different ports.

    Raises:
        ConfigurationError: a launcher has started a different number of processes, or the first host's address is not set.
    """
    started = read_place(env)
    if started is not None and started.size not in (1, size):
        raise ConfigurationError(
            f"{started.launcher} has started {started.size} processes ({started.reason}), but XLA's runtime has {size}: "
            "each would train alone. Start the script once on each host; with mode='spmd' it uses all devices of the host, "
            "with mode='replicas' it starts its processes: XLAStrategy.launch(main)"
        )
    if size == 1:
        return None
    hosts = [name.strip() for name in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip()]
    nodes = size // local_size
    address = env.get("MASTER_ADDR", "").strip() or ("127.0.0.1" if nodes == 1 else hosts[0] if hosts else "")
    if not address:
        raise ConfigurationError(
            f"XLA's runtime has {size} processes on {nodes} hosts, but the address of the first host is unknown. Set it on all "
            "hosts: export MASTER_ADDR=host0"
        )
    job = str(parent) if nodes == 1 else ",".join(hosts) or address
    port = port_number(env, "MASTER_PORT") or stable_port("xla", job)
    node = rank // local_size
    return RankInfo(rank, size, local_rank, local_size, node, nodes, address, port, "XLA's runtime", f"it reports {size}")


# ----------------------------------------------------------------------------------------------------- the network interface


def set_gloo_interface(env: MutableMapping[str, str], master_addr: str) -> None:
    """Set `GLOO_SOCKET_IFNAME` if it is not set and gloo would use the loopback interface; Linux only.

    Args:
        env: the environment variables of the processes.
        master_addr: the node of rank 0, which must be reachable through the interface.
    """
    if GLOO in env or not _own_name_is_loopback():
        return
    for target in (master_addr, _OUTSIDE):
        name = _interface(_source(target))
        if name is not None:
            env[GLOO] = name
            return


def _own_name_is_loopback() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # then gloo uses the loopback interface, too
        return True
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in found)


def _source(target: str) -> str | None:
    """The address from which this node reaches another one; `None` for a loopback address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # sends nothing
        address = str(probe.getsockname()[0])
        return None if ipaddress.ip_address(address).is_loopback else address
    return None


def _interface(address: str | None) -> str | None:
    return None if address is None else next((name for name, own in _addresses() if own == address), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """Pairs of a network interface and its IPv4 address."""
    try:
        import fcntl
    except ImportError:
        return
    if os.uname().sysname != "Linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
