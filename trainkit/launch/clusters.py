"""The ranks of a process that SLURM, MPI or LSF has started, from the environment variables that they set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from trainkit.errors import ConfigurationError
from trainkit.launch.rank_info import RankInfo, checked, number, port_number, stable_port

__all__ = ["hosts", "jsrun_place", "mpi_place", "slurm_place", "tasks_of_nodes"]

# The smallest of SLURM's own step ids: batch scripts, interactive shells.
_OWN_STEPS = 0xFFFFFFF0

# Launcher, rank, size, local rank, local size.
_MPI = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPI (Hydra)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


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
