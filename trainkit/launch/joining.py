"""`join`: make this process one of the processes of a run, which the user, a launcher or this script has started.

It is the last of the modules that `trainkit.launch.environment` lists. `join` takes the user's process group, or the ranks that
`read_ranks` finds; or it makes this process the launcher of those that it lacks (`starting.become_agent`) and does not return.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainkit.console import notice, quantity, set_printing
from trainkit.distributed.channel import Channel
from trainkit.distributed.failure_handling import FailureReport, Watchdog, release_groups
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.stores import RestartStore, connect_in_time, restarts
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import RankInfo, is_local, read_ranks, set_gloo_interface, with_local_rank
from trainkit.launch.starting import become_agent, in_notebook, start_command

__all__ = [
    "device_of",
    "join",
    "joined_world",
    "nodes",
    "note_single_process",
    "processes",
    "single_process_group",
    "single_world",
    "tell_rank",
]

# Launcher → the command that starts the requested number of processes.
_HOW = {
    "torchrun": "torchrun --nproc-per-node {each} script.py",
    "deepspeed": "deepspeed --num_gpus {each} script.py",
    "SLURM": "srun --ntasks-per-node={each} python script.py",
    **dict.fromkeys(("Open MPI", "MPI (Hydra)", "MVAPICH"), "mpirun -n {all} python script.py"),
    "notebook_launcher": "notebook_launcher(function, num_processes={each})",
    "LSF": "jsrun -n {all} python script.py",
}

_CONNECT_TIMEOUT = timedelta(minutes=10)
_LATE_S = 5.0  # seconds that torch's own message about a timeout may take

_single_group: Any = None  # the process group of a process that is the only one
# The store, and the number of groups so far: the next group must not read what a destroyed group has left in the store.
_store: tuple[tuple[str, int, int, int], Any] | None = None
_groups = 0


@dataclass(frozen=True)
class _Joined:
    """The world of this process, and its default process group; `ours`: whether `join` has created the group."""

    world: World
    group: Any
    ours: bool
    failure_report: FailureReport | None = None

    def close(self) -> None:
        """Disconnect from the other processes."""
        if self.failure_report is not None:
            self.failure_report.close()
        if self.world.channel is not None:
            self.world.channel.announce_end()
            self.world.channel.close()
        if self.world.watchdog is not None:
            self.world.watchdog.close()


_joined: _Joined | None = None  # shared by all runs of the process
_earlier: set[int | None] = set()  # `devices` of earlier runs of this process with one process


def processes(requested: RequestedDevices) -> int:
    """The number of processes of a run on these devices, whether or not they have been started."""
    if default_group() is not None:
        return dist.get_world_size()
    place = _place()
    return processes_per_node(requested) * (requested.nodes or 1) if place is None else place.size


def nodes(requested: RequestedDevices) -> int | None:
    """The number of nodes of a run on these devices; `None`: unknown."""
    place = _place()
    if place is None:
        return requested.nodes or (1 if default_group() is None else None)
    return place.nodes or (place.size // place.local_size if place.local_size else requested.nodes)


def note_single_process(devices: int | None) -> None:
    """Remember that a run uses a single process, for the message if a later one needs several."""
    if _place() is None:
        _earlier.add(devices)


def join(wanted: RequestedDevices, *, backend: str | None = None, timeout: timedelta, place: RankInfo | None = None) -> World:
    """Join the processes of the run. The first call makes their process groups.

    A process group that the user has initialized is used, and not destroyed. Otherwise the processes are those that a
    launcher has started. Otherwise, if several are requested, this process becomes their launcher, and this call does not
    return.

    Args:
        wanted: What the user requested.
        backend: Backend of the group for tensors. Default: nccl for CUDA, gloo for the CPU.
        timeout: Timeout of collectives.
        place: Rank, world size and so on, if the caller knows more than the launcher says.

    Raises:
        ConfigurationError: The request contradicts the existing processes, they cannot be started here, or they do not find
            each other.
    """
    global _joined
    if _joined is not None and _joined.group is not default_group():  # the user has destroyed the group
        _joined.close()
        _joined = None
        set_printing()
    if _joined is None:
        place = None if default_group() is not None else place or _place()
        if place is not None:
            check_devices(wanted, place.size, place.local_size, place.nodes, place.launcher)
        elif default_group() is None and processes(wanted) == 1:
            note_single_process(wanted.per_node)
            return World()
        elif default_group() is None:
            _start(wanted)
        _joined = _enter(wanted, place, backend, timeout)
    world = _joined.world
    check_devices(wanted, world.size, world.local_size, world.nodes, world.launcher)
    return world


def tell_rank(rank: int, overwrite: bool = True) -> None:
    """Set the rank of `rank_zero_only` of lightning_utilities, if that is installed: without it, decorated functions raise.

    Args:
        rank: The rank of this process.
        overwrite: Also if it is set already.
    """
    with suppress(ImportError):
        from lightning_utilities.core import rank_zero

        function: Any = rank_zero.rank_zero_only
        if overwrite or not hasattr(function, "rank"):
            function.rank = rank


def joined_world() -> World:
    """The processes that a run has joined, or a world of one process; an error if there are others, not joined yet."""
    if _joined is not None and _joined.group is default_group():
        return _joined.world
    place = _place()
    if default_group() is not None or (place is not None and place.size > 1):
        raise ConfigurationError(
            "this process is one of several, but has not joined them yet. Create the Accelerator (or Trainer) first."
        )
    return World()


def single_world() -> World:
    """The world of a run on one process. If a launcher restarts that process, the run resumes as on several."""
    place = _place()
    if place is None or place.size > 1:
        return World()
    return World(launcher=place.launcher, restarts=restarts(os.environ), memory=RestartStore.of(os.environ))


def _place() -> RankInfo | None:
    """The ranks of this process that a launcher has set, in environment variables and on the command line."""
    return with_local_rank(read_ranks(os.environ), sys.argv[1:])


def _start(requested: RequestedDevices) -> None:
    """Start the processes; does not return."""
    each, nodes = processes_per_node(requested), requested.nodes or 1
    if nodes > 1:
        raise ConfigurationError(
            f"num_nodes={nodes}: a script can start processes on its own node only. Start it on each node: "
            f"trainkit launch --nnodes {nodes} --node-rank R --master-addr HOST --nproc-per-node {each} script.py   (R: 0 "
            "on HOST, then 1, …), or let the batch system start it: "
            f"srun --nodes={nodes} --ntasks-per-node={each} python script.py"
        )
    if not dist.is_available():
        raise ConfigurationError(
            "this build of torch has no torch.distributed, so it supports a single process. Use devices=1."
        )
    if multiprocessing.parent_process() is not None:
        raise ConfigurationError(
            f"devices={each} in a multiprocessing child, which cannot start other processes. If it is one of several processes "
            "that train together, call this before you create the Trainer: torch.distributed.init_process_group('gloo', "
            "rank=rank, world_size=N, init_method='tcp://127.0.0.1:29500')   ('nccl' for GPUs). Otherwise use devices=1."
        )
    if requested.accelerator == "cuda" or (requested.accelerator == "auto" and torch.cuda.is_available()):
        gpus = _gpus()
        if each > gpus:
            raise ConfigurationError(
                f"devices={each}, but torch sees {quantity(gpus, 'GPU')}. Use devices={max(1, gpus)}, or accelerator='cpu', "
                f"devices={each}."
            )
    start_command(each)  # The error of this call comes before the message about earlier runs.
    _mention_earlier_runs(each)
    become_agent(each)


def _mention_earlier_runs(each: int) -> None:
    """Mention that the processes run the script from its first line, if that repeats earlier runs, or refuse it."""
    again = f"devices={each} needs {each} processes, and each of them runs this script from its first line"
    if 1 in _earlier:
        raise ConfigurationError(
            f"{again}. An earlier Trainer in the script has devices=1 or strategy='single', which is for one process. Use "
            f"devices={each} for all Trainers of the script, or move the part for one process to a separate script and load "
            "its checkpoint here."
        )
    if _earlier:
        notice(
            f"{again}: the runs that it has finished with one process are repeated with {each}. To run them once, create the "
            f"first Trainer with devices={each} too, or move that part to a separate script and load its checkpoint."
        )


def _enter(requested: RequestedDevices, place: RankInfo | None, backend: str | None, timeout: timedelta) -> _Joined:
    if place is not None and place.size == 1:
        return _Joined(single_world(), None, ours=False)
    ours = place is not None
    if place is not None:
        make_default_group(place, backend or _backend(requested), timeout)
    elif dist.get_world_size() == 1:
        return _Joined(World(launcher="your own process group"), default_group(), ours=False)
    control = dist.new_group(backend="gloo", timeout=timeout)
    world = _world(place or _place_in_group(), control)
    atexit.register(_destroy_groups, os.getpid())
    set_printing(main=world.is_main, rank=world.rank)
    _write_whole_lines()
    nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
    reason = "of the process group that you initialized"
    if place is not None:
        reason = f"started by {place.launcher} ({place.reason})"
    notice(f"{quantity(world.size, 'process')}{nodes}, {reason}.")
    assert world.channel is not None
    return _Joined(world, default_group(), ours, FailureReport(world.channel))


def _write_whole_lines() -> None:
    """Write whole lines if a launcher has turned buffering off (python -u), so that lines of several processes do not mix."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            with suppress(OSError):  # it also flushes
                stream.reconfigure(line_buffering=True, write_through=False)


def _backend(requested: RequestedDevices) -> str:
    cuda = requested.accelerator in ("auto", "cuda") and torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


def _place_in_group() -> RankInfo:
    """The ranks of this process in the user's group; with its node, if a launcher has started it with the same rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    place = RankInfo(rank, size, None, None, None, None, os.environ.get("MASTER_ADDR", ""), 0, "your own process group", "")
    with suppress(ConfigurationError):  # the group works without these variables
        started = read_ranks(os.environ)
        if started is not None and (started.rank, started.size) == (rank, size):
            return replace(started, launcher=place.launcher)
    return place


def _world(place: RankInfo, control: Any) -> World:
    """The world. Facts about the nodes that no launcher has set are derived from the host names."""
    world = World(place.rank, place.size, control=control)
    channel = Channel.open(place.rank, place.size, place.master_addr or None, world.from_main)
    unknown = None in (place.local_rank, place.local_size, place.node, place.nodes)
    gather, starts = world.largest([unknown, restarts(os.environ)])
    names = world.exchange(socket.gethostname()) if gather else [""] * place.size  # no rank needs them
    nodes, mine = list(dict.fromkeys(names)), names[place.rank]
    return World(
        place.rank,
        place.size,
        local_rank=names[: place.rank].count(mine) if place.local_rank is None else place.local_rank,
        local_size=names.count(mine) if place.local_size is None else place.local_size,
        node=nodes.index(mine) if place.node is None else place.node,
        nodes=len(nodes) if place.nodes is None else place.nodes,
        launcher=place.launcher,
        control=control,
        channel=channel,
        watchdog=Watchdog(channel),
        restarts=starts,
        memory=RestartStore.of(os.environ),
    )


def _destroy_groups(process: int) -> None:
    """Destroy the process groups that `join` has created, when the process with this ID exits.

    Not after an error: the other ranks may have exited, and waiting for them would keep this process from exiting.
    """
    global _joined
    if _joined is None or os.getpid() != process or getattr(sys, "last_value", None) is not None:
        return
    joined, _joined = _joined, None
    groups = [joined.world.control]
    if joined.group is not None and joined.group is default_group():  # otherwise the user has destroyed all groups
        if joined.ours:
            groups.append(joined.group)
            dist.destroy_process_group()
        elif joined.world.control is not None:
            dist.destroy_process_group(joined.world.control)
    joined.world.control = None
    del joined
    release_groups(groups)


# --------------------------------------------------------------------------------------------------------------- the devices


def processes_per_node(requested: RequestedDevices) -> int:
    """Number of processes of a node if no launcher has started any: the requested number, else one for each GPU."""
    if requested.per_node is not None and requested.per_node >= 0:
        return requested.per_node
    if requested.indices is not None:
        return len(requested.indices)
    if requested.as_started or (requested.per_node is None and in_notebook()):
        return 1
    return max(1, _gpus() if requested.accelerator in ("auto", "cuda") else 0)


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_devices(requested: RequestedDevices, size: int, local_size: int | None, nodes: int | None, launcher: str) -> None:
    """Refuse `devices` and `num_nodes` that contradict the processes that were started; numbers that are unknown are `None`.

    Raises:
        ConfigurationError: They contradict each other; the message has the command for the requested number of processes.
    """
    each = None if requested.per_node == -1 else requested.per_node
    machines = requested.nodes
    if _fits(each, machines, size, local_size, nodes):
        return
    flags = ", ".join(f"{name}={n}" for name, n in (("devices", each), ("num_nodes", machines)) if n is not None)
    there = quantity(size, "process") + (f" on {quantity(nodes, 'node')}" if nodes else "")
    how = _HOW.get(launcher, "trainkit launch --nproc-per-node {each} script.py")
    number = each or max(1, size // (nodes or 1))
    raise ConfigurationError(
        f"{flags} contradicts the processes that were started: {there}, by {launcher}. Remove {flags}, or start the requested "
        f"number of processes: {how.format(each=number, all=number * (machines or nodes or 1))}"
    )


def _fits(each: int | None, machines: int | None, size: int, local_size: int | None, nodes: int | None) -> bool:
    known = machines if nodes is None else nodes
    total = None if each is None or known is None else each * known
    pairs = (machines, nodes), (total, size), (each if nodes is None else None, local_size)
    return all(None in (requested, there) or requested == there for requested, there in pairs)


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
                f"accelerator='mps': there is only one MPS device, but this node has {world.local_size} processes. Use "
                "accelerator='cpu', or one process: devices=1"
            )
        return torch.device("mps" if wanted.accelerator == "mps" else "cpu")
    index, problem = _gpu(wanted, world)
    # A GPU without a unique id has "".
    gpu = "" if problem else str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    ranks = world.exchange({"problem": problem, "gpu": gpu})
    for rank, report in enumerate(ranks):
        if report["problem"]:
            raise ConfigurationError(f"rank {rank}: {report['problem']}")
    known: dict[str, int] = {}
    for rank, identity in enumerate(report["gpu"] for report in ranks):
        if identity and known.setdefault(identity, rank) != rank:
            raise ConfigurationError(
                f"ranks {known[identity]} and {rank} have the same GPU, but each process needs its own. Start one process per "
                "GPU, and let the batch system show each process all GPUs of the node, or only its own."
            )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _gpu(requested: RequestedDevices, world: World) -> tuple[int, str | None]:
    """The index of this process's GPU, and what is wrong with it."""
    if not torch.cuda.is_available():
        return 0, "torch sees no GPU. Use accelerator='cpu', or install a CUDA build of torch."
    count = torch.cuda.device_count()
    if requested.indices is not None:
        if world.local_rank >= len(requested.indices):
            return 0, (
                f"devices={list(requested.indices)} names {quantity(len(requested.indices), 'GPU')}, but this node has "
                f"{world.local_size} processes. Name one GPU for each process."
            )
        index = requested.indices[world.local_rank]
        if index >= count:
            seen = f"torch sees {quantity(count, 'GPU')}, numbered from 0"
            return 0, f"devices={list(requested.indices)}: GPU {index} does not exist: {seen}. Use smaller numbers."
        return index, None
    if count == 1:  # a batch system may show each process its own GPU; `device_of` finds shared ones
        return 0, None
    if world.local_rank >= count:
        return 0, (
            f"this node has {world.local_size} processes, but torch sees {quantity(count, 'GPU')}. Start one process for each "
            f"GPU: --nproc-per-node {count}, or use accelerator='cpu'."
        )
    return world.local_rank, None


# ----------------------------------------------------------------------------------------------------- torch's process group


def default_group() -> Any:
    """The default process group; `None` if there is none, or only that of `single_process_group`."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if group is _single_group else group


@contextmanager
def single_process_group(backend: str) -> Iterator[None]:
    """A process group of this process alone, for a library that needs one. Runs ignore it."""
    global _single_group
    from torch.distributed import HashStore  # Not every build of torch has it.

    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    _single_group = dist.group.WORLD
    try:
        yield
    finally:
        if dist.is_initialized() and dist.group.WORLD is _single_group:
            dist.destroy_process_group()
        _single_group = None


def make_default_group(place: RankInfo, backend: str, timeout: timedelta) -> None:
    """Create the default process group with the other processes."""
    from torch.distributed import PrefixStore, Store  # Not every build of torch has it.

    global _store, _groups
    where = (place.master_addr, place.master_port, place.rank, place.size)
    if _store is None or _store[0] != where:
        _store = where, _connect(place, min(timeout, _CONNECT_TIMEOUT))
    _groups += 1
    store: Store = PrefixStore(f"group{_groups}", _store[1])
    if _launcher_hosts_store() and place.nodes == 1:  # torchrun may keep it over restarts, with addresses of dead processes
        store = PrefixStore(f"start{restarts(os.environ)}", store)
    if not is_local(place.master_addr):
        set_gloo_interface(os.environ, place.master_addr)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)


def _launcher_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(place: RankInfo, timeout: timedelta) -> Any:
    """The store of the processes, after all of them have connected to it."""
    from torch.distributed import TCPStore  # Not every build of torch has it.

    hosted = _launcher_hosts_store()
    server = place.rank == 0 and not hosted
    options: dict[str, Any] = {
        "is_master": server,
        "timeout": timeout,
        "multi_tenant": not hosted,
        "use_libuv": os.name != "nt",
    }
    at = (place.master_addr, place.master_port, place.size)
    try:
        return connect_in_time(lambda: TCPStore(*at, **options), at[1], timeout.total_seconds() + _LATE_S)
    except (RuntimeError, ValueError, TimeoutError) as error:
        where = f"{place.master_addr}:{place.master_port}"
        if server and "address already in use" in str(error).lower():
            raise ConfigurationError(
                f"rank 0 cannot listen at {where}: the port is in use. Choose another port for all processes: export "
                "MASTER_PORT=29501"
            ) from error
        raise ConfigurationError(
            f"rank {place.rank} of {place.size} could not connect to all other ranks at {where} within "
            f"{timeout.total_seconds():.0f} s. Start all processes, set MASTER_ADDR and MASTER_PORT to an address and a free "
            f"port of the node of rank 0, and open that port in the firewall. Error of torch: {str(error).splitlines()[0]}"
        ) from error
