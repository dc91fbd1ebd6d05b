"""What a launcher has told this process: the one table of its environment variables, and `read_ranks`, which reads them.

A run uses four modules, in this order: `environment` reads the ranks that a launcher has set, `strategy_choice` resolves the
arguments to a strategy (for "auto" it asks `joining.processes` how many there are), whose `join` calls `joining.join`, which
takes those ranks or makes a script that lacks processes their launcher (`starting.become_agent`).
"""

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
from typing import NamedTuple

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
    "quietly",
    "read_nodes",
    "read_ranks",
    "runtime_is_loaded",
    "set_gloo_interface",
    "stable_port",
    "tasks_of_nodes",
    "tpu_is_chosen",
    "tpu_is_here",
    "with_local_rank",
]

LAUNCHER = "TRAINKIT_LAUNCHER"  # set by trainkit's launcher: what started it, for messages
SCRIPT = "this script"

_FIRST_PORT, _PORTS = 12000, 16000  # below the ports that Linux gives to outgoing connections
_FIRST_OWN_STEP = 0xFFFFFFF0  # SLURM's step ids from this one on are batch scripts and interactive shells

_FIX = (
    "Start the processes with: trainkit launch --nproc-per-node N script.py   (or torchrun), which sets RANK, WORLD_SIZE, "
    "LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Or unset these variables."
)


class _Variables(NamedTuple):
    """The variables that a launcher sets for a process. Of several in one text the first that is set counts."""

    launcher: str
    command: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str = ""
    nodes: str = ""
    fix: str = "Start the script with mpirun, or unset {rank}."
    job: str = ""  # tells apart the jobs of a node
    no_address: str = ""  # the error if the node of rank 0 is unknown


_NO_MPI_ADDRESS = (
    "mpirun has started processes on several nodes, but the node of rank 0 is unknown. Set its address, on the first node: "
    "mpirun -x MASTER_ADDR=$(hostname) …   (Open MPI), or mpirun -genv MASTER_ADDR $(hostname) …   (MPICH, Intel MPI)"
)


def _mpi(launcher: str, prefix: str, local_rank: str, local_size: str) -> _Variables:
    job = "SLURM_JOB_ID LSB_JOBID PMIX_NAMESPACE OMPI_MCA_ess_base_jobid"
    names = (f"{prefix}_RANK", f"{prefix}_SIZE", local_rank, local_size)
    return _Variables(launcher, "mpirun", *names, job=job, no_address=_NO_MPI_ADDRESS)


# The batch systems and MPIs that start processes: where a process has the variables of several, the first counts.
_LSF = _Variables(
    *("LSF", "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    fix="Start the script with jsrun.",
    job="LSB_JOBID",
    no_address="jsrun has started this process, but LSB_MCPU_HOSTS, which names the nodes, is not set. Set the node of rank 0: "
    "jsrun -E MASTER_ADDR=host …",
)
_MPI = (
    _mpi("Open MPI", "OMPI_COMM_WORLD", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _mpi("MVAPICH", "MV2_COMM_WORLD", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    _mpi("MPI (Hydra)", "PMI", "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE"),
)
_SLURM = _Variables(
    *("SLURM", "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID", ""),
    *("SLURM_NODEID", "SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES"),
    fix="Start the script with the whole environment: srun --export=ALL python script.py",
    no_address="SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set, so the node of rank 0 is unknown. Set its address: "
    'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
)
# What torchrun sets, and Kubernetes' operators, DeepSpeed's launcher and users in part.
_TORCHRUN = _Variables(
    *("torchrun", "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    fix=_FIX,
)
_DEEPSPEED = _TORCHRUN._replace(local_size="LOCAL_SIZE", node="CROSS_RANK", nodes="CROSS_SIZE")

# SLURM's lists of nodes, and of numbers of tasks: those of the step first.
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASK_LISTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")

DEVICE = "xla"  # the type of a TPU among torch's devices
REPLICA = "TRAINKIT_XLA_REPLICA"  # set while XLA's runtime starts replicas, and in them

# The PCI ids of Google and of its TPU chips, as in torch_xla/_internal/tpu.py.
_VENDOR = "0x1ae0"
_CHIPS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")

GLOO = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_OUTSIDE = "192.0.2.1"  # an address for documentation: nothing is sent there


@dataclass(frozen=True)
class RankInfo:
    """What a launcher has set for the process that it started; `None`: not set."""

    rank: int
    size: int  # number of processes (world size)
    local_rank: int | None  # rank among the processes of its node
    local_size: int | None  # number of processes of its node
    node: int | None  # rank of its node
    nodes: int | None  # number of nodes
    master_addr: str  # name or address of the node of rank 0; "" for a single process
    master_port: int  # port on that node; 0 for a single process
    launcher: str  # The name of the launcher for messages: "torchrun", "SLURM", …
    reason: str  # how the launcher was recognized, for messages


def read_ranks(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks of this process; `None` if no launcher started several processes.

    So it is in a shell, a notebook, the script of a batch job, an interactive shell in an allocation, and a single task.

    Raises:
        ConfigurationError: the variables contradict each other, or a required one is missing.
    """
    plain = _read(env, _TORCHRUN)  # torchrun, the Kubernetes operators or the user have set RANK and WORLD_SIZE
    if plain is not None and plain.local_rank is not None:
        return _complete(env, plain)  # other variables belong to what started that launcher
    outer = _cluster(env)
    size = _number(env, "WORLD_SIZE") or 1
    if plain is None and size > 1 and outer is None:
        raise ConfigurationError(f"WORLD_SIZE={size} is set, but RANK is not. {_FIX}")
    if plain is None and outer is not None and size not in (1, outer.size):
        raise ConfigurationError(
            f"WORLD_SIZE={size} is set, but {outer.launcher} has started {outer.size} processes ({outer.reason}). Unset "
            "WORLD_SIZE."
        )
    if plain is None or (plain.rank, plain.size) == (0, 1):
        return outer or _torchrun_pod(env)
    if outer is None:
        return _complete(env, plain)
    if (plain.rank, plain.size) != (outer.rank, outer.size):
        raise ConfigurationError(
            f"two launchers disagree: RANK={plain.rank} and WORLD_SIZE={plain.size}, but this is process {outer.rank} of "
            f"{outer.size} for {outer.launcher} ({outer.reason}). Unset RANK and WORLD_SIZE; or, if they are right, also set "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
        )
    return outer


def _read(env: Mapping[str, str], names: _Variables) -> RankInfo | None:
    """The numbers in the variables of a launcher; `None` if it has not started this process."""
    rank, size, local_rank, local_size, node, nodes = (_number(env, *text.split()) for text in names[2:8])
    if rank is None:
        return None
    if size is None:
        fix = names.fix.format(rank=names.rank)
        raise ConfigurationError(f"{names.rank}={rank} is set, but {names.size.split()[-1]} is not. {fix}")
    reason = f"{names.command} has set {names.rank}"
    return RankInfo(rank, size, local_rank, local_size, node, nodes, "", 0, names.launcher, reason)


def _check(env: Mapping[str, str], ranks: RankInfo, names: _Variables) -> RankInfo:
    """The ranks, if they do not contradict each other."""
    rank, size, local_rank, local_size = (next((n for n in text.split() if env.get(n)), text) for text in names[2:6])
    local_size = local_size or "the tasks of the node"
    pairs = [
        (rank, ranks.rank, size, ranks.size),
        (local_rank, ranks.local_rank, local_size, ranks.local_size),
        (local_rank, ranks.local_rank, size, ranks.size),
        ("the rank of the node", ranks.node, "the number of nodes", ranks.nodes),
    ]
    for low, lower, high, higher in pairs:
        if lower is not None and higher is not None and lower >= higher:
            raise ConfigurationError(
                f"{low}={lower}, but {high}={higher}, which allows 0 to {higher - 1}. {ranks.launcher} sets these variables. "
                "If you set them yourself, set all of them, or unset them and use: trainkit launch --nproc-per-node N script.py"
            )
    if ranks.local_size is not None and ranks.local_size > ranks.size:
        raise ConfigurationError(
            f"{local_size}={ranks.local_size}, but {size}={ranks.size}: a node cannot have more processes than there are in "
            "all. Set both, or unset them and use: trainkit launch --nproc-per-node N script.py"
        )
    return ranks


def _number(env: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is set, as an integer ≥ 0; `None` if none is set."""
    name = next((name for name in names if env.get(name, "") != ""), None)
    if name is None:
        return None
    text = env[name].strip()
    if not text.isascii() or not text.isdigit():
        raise ConfigurationError(f"{name} must be an integer ≥ 0, not {env[name]!r}. Correct it, or unset it: unset {name}")
    return int(text)


def _port_number(env: Mapping[str, str], name: str) -> int | None:
    port = _number(env, name)
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


# -------------------------------------------------------------------------------------------------------- RANK and WORLD_SIZE


def _complete(env: Mapping[str, str], plain: RankInfo) -> RankInfo:
    """The ranks in RANK and WORLD_SIZE with the address of rank 0, the launcher, and the nodes as far as they are known."""
    if plain.size == 0:
        raise ConfigurationError(f"WORLD_SIZE=0: it must be at least 1. {_FIX}")
    launcher, reason = _started_by(env)
    names = _DEEPSPEED if launcher == "deepspeed" else _TORCHRUN
    address, port = _address(env, plain.size)
    ranks = replace(_read(env, names) or plain, launcher=launcher, reason=reason, master_addr=address, master_port=port)
    _check(env, ranks, names)
    if ranks.local_rank is None and _in_kubernetes(env):
        return _one_in_each_pod(env, ranks)
    # Ranks on other nodes could not connect to a local address.
    if is_local(address) and (ranks.local_rank is None or ranks.local_size is None):
        ranks = replace(ranks, local_rank=ranks.rank if ranks.local_rank is None else ranks.local_rank, local_size=ranks.size)
    if ranks.local_size is None or ranks.size % ranks.local_size or ranks.nodes is not None:
        return ranks
    node = ranks.rank // ranks.local_size if ranks.node is None else ranks.node
    return replace(ranks, node=node, nodes=ranks.size // ranks.local_size)


def _address(env: Mapping[str, str], size: int) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, which a single process does not need."""
    address, port = env.get("MASTER_ADDR", "").strip(), _port_number(env, "MASTER_PORT")
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not value]
    if missing and size > 1:
        verb = "are" if len(missing) > 1 else "is"
        raise ConfigurationError(f"WORLD_SIZE={size}, but {' and '.join(missing)} {verb} not set. {_FIX}")
    return address, port or 0


def _started_by(env: Mapping[str, str]) -> tuple[str, str]:
    if LAUNCHER in env:
        return env[LAUNCHER], "it requests them" if env[LAUNCHER] == SCRIPT else f"{LAUNCHER} is set"
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun", "TORCHELASTIC_RUN_ID is set"
    if all(env.get(name, "") != "" for name in _DEEPSPEED[5:8]):
        return "deepspeed", "LOCAL_SIZE, CROSS_RANK and CROSS_SIZE are set"
    if _in_kubernetes(env):
        return "Kubernetes", "RANK, WORLD_SIZE and KUBERNETES_SERVICE_HOST are set"
    return "a launcher", "RANK and WORLD_SIZE are set"


# ------------------------------------------------------------------------------------------------------------- batch systems


def _cluster(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks set by a batch system or MPI that has started several processes."""
    ranks = _batch_system(env)
    if ranks is None or ranks.size == 1:
        return None
    apart = (ranks.nodes or 1) > 1 or (ranks.local_size or ranks.size) < ranks.size
    if apart and is_local(ranks.master_addr):
        raise ConfigurationError(
            f"MASTER_ADDR={ranks.master_addr} is a loopback address, but {ranks.launcher} has started the processes on several "
            "nodes. Set it to the name of the node of rank 0, or unset it: unset MASTER_ADDR"
        )
    return ranks


def _batch_system(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks set by a batch system or MPI. In a SLURM job mpirun counts, not its daemons, which srun started."""
    lsf, slurm = _read(env, _LSF), _read(env, _SLURM) if _is_step(env) else None
    names, mpi = _read_mpi(env)
    if lsf is not None:
        names, ranks = _LSF, lsf
    elif mpi is not None and (slurm is None or (mpi.rank, mpi.size) != (slurm.rank, slurm.size)):
        ranks = mpi if mpi.local_size != mpi.size else replace(mpi, node=0, nodes=1)
    elif slurm is not None and slurm.size > 1:  # srun --mpi=pmi2 sets both, and SLURM's variables contain more
        names, ranks = _SLURM, _with_tasks(env, slurm)
    else:
        return None
    if ranks.size > 1:
        address = env.get("MASTER_ADDR", "").strip() or _first_host(env, names, ranks.nodes == 1)
        if not address:
            raise ConfigurationError(names.no_address)
        ranks = replace(ranks, master_addr=address, master_port=_port_number(env, "MASTER_PORT") or _port_of_job(env, names))
    return _check(env, ranks, names)


def _is_step(env: Mapping[str, str]) -> bool:
    """Whether it is a task of `srun`: not the script of a batch job, the shell of `salloc` or that of `srun --pty`."""
    step = _number(env, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step < _FIRST_OWN_STEP and not env.get("SLURM_PTY_PORT")


def _read_mpi(env: Mapping[str, str]) -> tuple[_Variables, RankInfo | None]:
    """A process of `mpirun`: Open MPI, MVAPICH, MPICH or Intel MPI."""
    started = [(names, ranks) for names in _MPI if (ranks := _read(env, names)) is not None]
    if not started:
        return _MPI[0], None
    (names, ranks), *rest = started
    for other, theirs in rest:
        if (theirs.rank, theirs.size) != (ranks.rank, ranks.size):
            raise ConfigurationError(
                f"two launchers disagree: this is process {ranks.rank} of {ranks.size} for {ranks.launcher} ({names.rank}, "
                f"{names.size}), but process {theirs.rank} of {theirs.size} for {theirs.launcher} ({other.rank}, "
                f"{other.size}). Before mpirun, unset the variables of the launcher that you do not use: unset {other.rank} "
                f"{other.size}"
            )
    return names, ranks


def _first_host(env: Mapping[str, str], names: _Variables, one_node: bool) -> str:
    """The node of rank 0; "" if unknown."""
    batch = env.get("LSB_MCPU_HOSTS", "").split()
    if names is _LSF:  # jsrun starts nothing on the node of the batch script, which has one slot
        return "".join(batch[2:3] if batch[1:2] == ["1"] and len(batch) > 2 else batch[:1])
    if names is not _SLURM and one_node:
        return "127.0.0.1"
    text = _first(env, *(_NODE_LISTS if names is _SLURM else _NODE_LISTS[1:]))  # the step of mpirun is that of its daemons
    if text:
        return next(hosts(text))
    return "".join(batch[:1]) if names is not _SLURM else "127.0.0.1" if one_node else ""


def _port_of_job(env: Mapping[str, str], names: _Variables) -> int:
    if names is _SLURM:
        return stable_port(env.get("SLURM_JOB_ID", env.get("SLURM_JOBID")), env.get("SLURM_STEP_ID"))
    return stable_port("lsf" if names is _LSF else "mpi", _first(env, *names.job.split()))


def _first(env: Mapping[str, str], *names: str) -> str:
    """The first of the variables that is set; "" if none is."""
    return next((env[name] for name in names if env.get(name)), "")


def _with_tasks(env: Mapping[str, str], ranks: RankInfo) -> RankInfo:
    """The ranks with the number of nodes, and of the tasks of this one, as far as SLURM's lists have them."""
    for text in (env[name] for name in _TASK_LISTS if env.get(name)):
        counts, nodes = tasks_of_nodes(text), _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        if len(counts) == 1 and nodes is not None:  # --ntasks-per-node: one number for all
            counts *= nodes
        if sum(counts) == ranks.size:
            each = dict(enumerate(counts))
            return replace(ranks, local_size=None if ranks.node is None else each.get(ranks.node), nodes=len(counts))
    return ranks


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
    for part in re.split(r",(?![^\[]*\])", text):  # Only commas outside brackets separate parts.
        yield from _expand(part.strip(), text)


def _expand(part: str, text: str) -> Iterator[str]:
    wrong = ConfigurationError(f"expected SLURM's list of nodes, such as 'node[03-05,9],gpu7', not {text!r}.")
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", part)
    if match is None:
        if not part or "[" in part or "]" in part:
            raise wrong
        yield part
        return
    for piece in match[2].split(","):
        span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", piece)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise wrong
        for index in range(int(span[1]), int(span[2] or span[1]) + 1):
            for rest in _expand(match[3], text) if match[3] else [""]:
                yield f"{match[1]}{index:0{len(span[1])}d}{rest}"


# ---------------------------------------------------------------------------------------- the nodes of a job, and Kubernetes


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, for `trainkit launch`, which starts the workers of one node; `None`: not set."""

    least: int | None = None  # smallest number of nodes that the job runs on
    most: int | None = None  # largest number
    rank: int | None = None  # rank of this node
    master_addr: str | None = None  # address of the first node
    master_port: int | None = None  # port on the first node
    per_node: str | None = None  # processes of each node: a number, "auto" or "gpu"
    max_restarts: int | None = None  # how many times to restart all processes after a failure
    source: str | None = None  # What has set these values, as named in messages.

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
        return _torchrun_nodes(env)
    ranks = _batch_system(env)
    if ranks is not None and ranks.size > 1:
        if ranks.local_size not in (None, 1) or (ranks.nodes is not None and ranks.nodes != ranks.size):
            raise ConfigurationError(
                f"{ranks.launcher} has started {ranks.size} processes, several on a node, and each would start its own "
                "workers. Start one on each node: srun --ntasks-per-node=1 trainkit launch …   Or remove trainkit launch: "
                f"{ranks.launcher} then starts the script itself, once for each GPU."
            )
        return Nodes(ranks.size, ranks.size, ranks.rank, ranks.master_addr, ranks.master_port, source=ranks.launcher)
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if "KUBERNETES_SERVICE_HOST" not in env or rank is None or size is None or size < 2:
        return Nodes()
    # The first operator for PyTorch numbers its pods by RANK and WORLD_SIZE, and sets nothing else.
    return Nodes(size, size, rank, env.get("MASTER_ADDR"), _port_number(env, "MASTER_PORT"), source="Kubernetes")


def _torchrun_nodes(env: Mapping[str, str]) -> Nodes:
    """The nodes in the PET_ variables, which Kubernetes' training operators set for torchrun."""
    least, most = node_range(env["PET_NNODES"], "PET_NNODES")
    host, _, port = env.get("PET_RDZV_ENDPOINT", "").partition(":")
    return Nodes(
        least,
        most,
        _number(env, "PET_NODE_RANK"),
        env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR") or host or None,
        _port_number(env, "PET_MASTER_PORT") or _port_number(env, "MASTER_PORT") or (int(port) if port.isdigit() else None),
        env.get("PET_NPROC_PER_NODE") or env.get("PET_N_PROC_PER_NODE") or None,
        _number(env, "PET_MAX_RESTARTS"),
        "Kubernetes",
    )


def _torchrun_pod(env: Mapping[str, str]) -> RankInfo | None:
    """The ranks in the PET_ variables, in a pod whose command is the script itself."""
    if not (text := env.get("PET_NNODES", "").strip()):
        return None
    nodes = _torchrun_nodes(env)
    rank, count, address, port = nodes.rank, nodes.most or 1, nodes.master_addr, nodes.master_port
    if count == 1:
        return None
    if nodes.least != count or rank is None or address is None or port is None:
        raise ConfigurationError(
            f"PET_NNODES={text}: this pod is one of several, but its rank or the address of the first pod is not set. Set "
            "the command of the pods to: trainkit launch script.py   (or torchrun). To run this process alone: unset "
            "PET_NNODES"
        )
    reason = "PET_NNODES and PET_NODE_RANK are set"
    ranks = RankInfo(rank, count, 0, 1, rank, count, address, port, "Kubernetes", reason)
    names = _Variables("Kubernetes", "", "PET_NODE_RANK", "PET_NNODES", "", "")
    return _one_in_each_pod(env, _check(env, ranks, names))


def _one_in_each_pod(env: Mapping[str, str], ranks: RankInfo) -> RankInfo:
    """The training operator numbers its pods. Each pod runs the processes that its command starts, in this case one."""
    each = env.get("PET_NPROC_PER_NODE", "1")
    if each.isdigit() and int(each) > 1:
        raise ConfigurationError(
            f"PET_NPROC_PER_NODE={each}: each pod should run {each} processes, but this script was started as one. Set the "
            "command of the pods to: trainkit launch script.py   (or torchrun), which reads these variables."
        )
    return replace(ranks, local_rank=0, local_size=1, node=ranks.rank, nodes=ranks.size)


def _in_kubernetes(env: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in env or "PET_NNODES" in env


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
    with contextlib.suppress(ValueError):
        value = float(text) if text else default
        if 0 < value < float("inf"):
            return value
    raise ConfigurationError(f"{name} must be a number of seconds, not {text!r}.")


# ---------------------------------------------------------------------------------------------------------- the command line


def local_rank(argv: Sequence[str]) -> int | None:
    """The local rank by `--local_rank N` or `--local-rank=N`.

    `None` if it is not given, is negative, which by custom means a single process, or is not a number, which the script's own
    parser will refuse.
    """
    text = option(argv, "local_rank") or ""
    return int(text) if text.isascii() and text.isdigit() else None


def option(argv: Sequence[str], name: str) -> str | None:
    """The last value of the option `--name VALUE` or `--name=VALUE`; `None` if it is not given."""
    return next(iter(reversed(options(argv, name))), None)


def options(argv: Sequence[str], name: str) -> list[str]:
    """The values of an option that may be given several times, also with hyphens; `""` if no value follows."""
    names = (f"--{name}", f"--{name.replace('_', '-')}")
    values: list[str] = []
    for argument, following in zip(argv, [*argv[1:], ""], strict=False):
        if argument == "--":  # the rest are not options
            break
        option, equals, value = argument.partition("=")
        if option in names:
            values.append(value if equals else "" if following.startswith("--") else following)
    return values


def with_local_rank(ranks: RankInfo | None, argv: Sequence[str]) -> RankInfo | None:
    """The ranks, with the local rank of `--local_rank`, which DeepSpeed and `torch.distributed.launch` pass, if they lack it.

    Raises:
        ConfigurationError: the argument contradicts the variables, or is not 0 and there are no variables.
    """
    argument = local_rank(argv)
    if argument is None:
        return ranks
    if ranks is None and argument == 0:  # a single process has this local rank too
        return None
    if ranks is None:
        raise ConfigurationError(
            f"--local_rank={argument} means that this is one of several processes, but RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT are not set, so it would train alone. Start the script with a launcher, which sets them: trainkit "
            "launch --nproc-per-node N script.py   (or deepspeed, or torchrun). For a single process, remove --local_rank."
        )
    if ranks.local_rank is None:
        return replace(ranks, local_rank=argument)
    if ranks.local_rank != argument:
        raise ConfigurationError(
            f"--local_rank={argument}, but the local rank of this process is {ranks.local_rank} according to {ranks.launcher} "
            f"({ranks.reason}). Remove --local_rank: the launcher passes it if necessary."
        )
    return ranks


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
    if env.get("PJRT_DEVICE"):
        return env["PJRT_DEVICE"].upper() == "TPU"
    has_tpu = tpu_is_here()
    installed = not has_tpu or importlib.util.find_spec("torch_xla") is not None
    if not installed:
        notice(
            "this host has a TPU, but torch_xla is not installed; not using the TPU. To use it: pip install "
            "'trainkit-torch[xla]'"
        )
    return has_tpu and installed


def runtime_is_loaded() -> bool:
    """Whether this process has loaded XLA's runtime, whose replicas may be threads instead of processes."""
    return "torch_xla" in sys.modules


def place_in_slice(
    rank: int, size: int, local_rank: int, local_size: int, env: Mapping[str, str], parent: int
) -> RankInfo | None:
    """The ranks of this process on a TPU slice, by the numbers of XLA's runtime; `None` if it is the only one.

    `parent` is the id of the process that started those of this host, so that two runs on it use different ports.

    Raises:
        ConfigurationError: a launcher has started a different number of processes, or the first host's address is not set.
    """
    started = read_ranks(env)
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
    port = _port_number(env, "MASTER_PORT") or stable_port("xla", job)
    node = rank // local_size
    return RankInfo(rank, size, local_rank, local_size, node, nodes, address, port, "XLA's runtime", f"it reports {size}")


# ----------------------------------------------------------------------------------------------------- the network interface


def set_gloo_interface(env: MutableMapping[str, str], master_addr: str) -> None:
    """Set `GLOO_SOCKET_IFNAME` if it is not set and gloo would use the loopback interface; Linux only."""
    if GLOO not in env and _own_name_is_loopback():
        names = (_interface(_source(target)) for target in (master_addr, _OUTSIDE))
        name = next(filter(None, names), None)
        if name:
            env[GLOO] = name


def _own_name_is_loopback() -> bool:
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # then gloo uses the loopback interface, too
        return True
    return all(ipaddress.ip_address(str(one[4][0]).partition("%")[0]).is_loopback for one in addresses)


def _source(target: str) -> str | None:
    """The address from which this node reaches another one; `None` for a loopback address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # sends nothing
        address = str(probe.getsockname()[0])
        return None if ipaddress.ip_address(address).is_loopback else address
    return None


def _interface(address: str | None) -> str | None:
    return None if address is None else next((name for name, own_address in _addresses() if own_address == address), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """Pairs of a network interface and its IPv4 address."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
