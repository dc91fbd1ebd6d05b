"""Becoming one of the processes of a run: those that the user has made, those that a launcher has started, or our own."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainkit.console import counted, notice, speak
from trainkit.distributed.channel import Channel
from trainkit.distributed.failure_report import FailureReport
from trainkit.distributed.process_exit import release_groups
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.restart_store import RestartStore, restarts
from trainkit.distributed.stores import connected
from trainkit.distributed.watchdog import Watchdog
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch.arguments import placed
from trainkit.launch.devices import check_wanted, device_of, processes_of_a_machine
from trainkit.launch.environment import Place, read_place
from trainkit.launch.interface import lead_gloo_out
from trainkit.launch.place import is_local
from trainkit.launch.self_start import become_agent, command_again

__all__ = ["alone", "device_of", "join", "joined", "note_alone", "processes"]

_MEETING = timedelta(minutes=10)  # within which all processes must have come
_LATE = 5.0  # seconds after which torch's own message about that is not waited for


@dataclass(frozen=True)
class _Joined:
    """The world of this process, and the process group under it; ``ours``: we have made the group."""

    world: World
    group: Any
    ours: bool
    endings: FailureReport | None = None

    def close(self) -> None:
        """Let go of the other processes."""
        if self.endings is not None:
            self.endings.close()
        if self.world.channel is not None:
            self.world.channel.announce_end()
            self.world.channel.close()
        if self.world.watchdog is not None:
            self.world.watchdog.close()


_joined: _Joined | None = None  # all runs of the process share it
_alone: Any = None  # the process group of a process that is none of several
_before: set[int | None] = set()  # devices that runs of this process have asked for, all of which are one process

# The store that the groups of this process are made with, and how many were: the user may destroy one, and what it has left in
# the store must not be read by the next.
_met: tuple[tuple[str, int, int, int], Any] | None = None
_groups = 0


def processes(wanted: RequestedDevices) -> int:
    """The number of processes that a run of these wishes has, be they started already or not.

    Raises:
        ConfigurationError: the variables of a launcher, or its ``--local_rank``, contradict each other.
    """
    if _group() is not None:
        return dist.get_world_size()
    place = _place()
    return processes_of_a_machine(wanted) * (wanted.nodes or 1) if place is None else place.size


def note_alone(devices: int | None) -> None:
    """A run is one process, whether so many devices were asked for or not: told if a later one needs several processes."""
    if _place() is None:
        _before.add(devices)


def join(wanted: RequestedDevices, *, backend: str | None = None, timeout: timedelta, place: Place | None = None) -> World:
    """The processes of the run, of which this is one; their process groups are made at the first call.

    In order: a process group that the user has initialised is used, and not destroyed; else what a launcher has started; else,
    if more than one process is wanted, this process becomes the agent that starts them, and this call does not return.

    Args:
        wanted: what the user asked for.
        backend: of the group for tensors; default: nccl for CUDA, gloo for the CPU.
        timeout: how long a process waits for the others in a collective.
        place: which of them this one is, where it is known better than a launcher says.

    Raises:
        ConfigurationError: what is wanted contradicts what was started, or cannot be started here; or the processes do not
            find each other.
    """
    global _joined
    if _joined is not None and _joined.group is not _group():  # the user has destroyed his group, and perhaps made another
        _joined.close()
        _joined = None
        speak()
    if _joined is None:
        place = None if _group() is not None else place or _place()
        if place is not None:
            check_wanted(wanted, place.size, place.local_size, place.nodes, place.launcher)
        elif _group() is None and processes(wanted) == 1:
            note_alone(wanted.per_node)
            return World()
        elif _group() is None:
            _start(wanted)
        _joined = _enter(wanted, place, backend, timeout)
    world = _joined.world
    check_wanted(wanted, world.size, world.local_size, world.nodes, world.launcher)
    return world


def joined() -> World:
    """The processes that a run of this process has joined; one alone, if there is no other.

    Raises:
        ConfigurationError: there are others, and nothing has joined them yet.
    """
    if _joined is not None and _joined.group is _group():
        return _joined.world
    place = _place()
    if _group() is not None or (place is not None and place.size > 1):
        raise ConfigurationError(
            "this process is one of several, and has not joined them yet: make the Accelerator (or Trainer) before."
        )
    return World()


def _place() -> Place | None:
    """What a launcher has said of this process, by variables and on its command line."""
    return placed(read_place(os.environ), sys.argv[1:])


def _group() -> Any:
    """The default process group, ``None`` if there is none that matters."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if group is _alone else group


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """Within it a process that is alone has a process group, for a library that needs one; runs take no notice of it."""
    global _alone
    from torch.distributed import HashStore  # not in every build of torch

    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    _alone = dist.group.WORLD
    try:
        yield
    finally:
        if dist.is_initialized() and dist.group.WORLD is _alone:
            dist.destroy_process_group()
        _alone = None


def _start(wanted: RequestedDevices) -> None:
    """Start the processes that are wanted; does not return."""
    each, machines = processes_of_a_machine(wanted), wanted.nodes or 1
    if machines > 1:
        raise ConfigurationError(
            f"num_nodes={machines}: a process can start others on its own machine only. Start the script on each machine: "
            f"trainkit launch --nnodes {machines} --node-rank R --master-addr HOST --nproc-per-node {each} script.py   (R: 0 "
            "on HOST, then 1, …), or let the batch system start it: "
            f"srun --nodes={machines} --ntasks-per-node={each} python script.py"
        )
    if not dist.is_available():
        raise ConfigurationError("this build of torch has no torch.distributed, so there can be one process only: devices=1.")
    if multiprocessing.parent_process() is not None:
        raise ConfigurationError(
            f"devices={each} in a process of multiprocessing, which starts no others. If it is one of those that are to train "
            "together, say so before the Trainer is made: torch.distributed.init_process_group('gloo', rank=rank, "
            "world_size=N, init_method='tcp://127.0.0.1:29500')   ('nccl' for GPUs); else use devices=1."
        )
    if wanted.accelerator == "cuda" or (wanted.accelerator == "auto" and torch.cuda.is_available()):
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if each > gpus:
            raise ConfigurationError(
                f"devices={each}, but torch sees {gpus} GPU{'' if gpus == 1 else 's'}. Use devices={max(1, gpus)}, or "
                f"accelerator='cpu', devices={each}."
            )
    command_again(each)  # else there is another way to start them, and nothing is run again
    _tell_of_earlier_runs(each)
    become_agent(each)


def _tell_of_earlier_runs(each: int) -> None:
    """The processes run the script from its first line: say so where there has been more in it than what leads here.

    Raises:
        ConfigurationError: what has been there cannot be made in one of several processes.
    """
    again = f"devices={each} needs {each} processes, and each of them runs this script from its first line"
    if 1 in _before:
        raise ConfigurationError(
            f"{again}. There has been a Trainer with devices=1 or strategy='single' in it before, which is for one process, so "
            f"nothing has been run again. Use devices={each} for all Trainers of a script, or put the part for one process "
            "into a script of its own and load its checkpoint here."
        )
    if _before:
        notice(
            f"{again}: what it has done up to here, with one process, is done again there, with {each}. To do it once, make "
            f"the first Trainer with devices={each} too, or put that part into a script of its own and load its checkpoint."
        )


def _enter(wanted: RequestedDevices, place: Place | None, backend: str | None, timeout: timedelta) -> _Joined:
    if place is not None and place.size == 1:
        return _Joined(
            World(launcher=place.launcher, restarts=restarts(os.environ), memory=RestartStore.of(os.environ)), None, ours=False
        )
    ours = place is not None
    if place is not None:
        _init(place, backend or _backend(wanted), timeout)
    elif dist.get_world_size() == 1:
        return _Joined(World(launcher="your own process group"), _group(), ours=False)
    control = dist.new_group(backend="gloo", timeout=timeout)
    world = _world(place or _place_in_group(), control)
    atexit.register(_leave, os.getpid())
    speak(main=world.is_main, rank=world.rank)
    _write_whole_lines()
    machines = f" on {world.nodes} machines" if world.nodes > 1 else ""
    reason = (
        f"started by {place.launcher} ({place.reason})" if place is not None else "of the process group that you initialised"
    )
    notice(f"{counted(world.size, 'process')}{machines}, {reason}.")
    assert world.channel is not None
    return _Joined(world, _group(), ours, FailureReport(world.channel))


def _write_whole_lines() -> None:
    """Where a launcher has turned buffering off (python -u), write lines as wholes: else those of the processes get mixed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)


def _backend(wanted: RequestedDevices) -> str:
    cuda = wanted.accelerator in ("auto", "cuda") and torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if cuda else "gloo"


def _init(place: Place, backend: str, timeout: timedelta) -> None:
    """Make the default process group."""
    from torch.distributed import PrefixStore, Store  # not in every build of torch

    global _met, _groups
    where = (place.master_addr, place.master_port, place.rank, place.size)
    if _met is None or _met[0] != where:
        _met = where, _meet(place, min(timeout, _MEETING))
    _groups += 1
    store: Store = PrefixStore(f"group{_groups}", _met[1])
    if _hosted() and place.nodes == 1:  # torchrun's agent may keep one store over all starts, with the addresses of the dead
        store = PrefixStore(f"start{restarts(os.environ)}", store)
    if not is_local(place.master_addr):
        lead_gloo_out(os.environ, place.master_addr)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)


def _hosted() -> bool:
    """Whether the agent that has started this process keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meet(place: Place, patience: timedelta) -> Any:
    """The store at which the processes find each other, when all have come to it."""
    from torch.distributed import TCPStore  # not in every build of torch

    hosted = _hosted()
    server = place.rank == 0 and not hosted

    def connect() -> TCPStore:
        return TCPStore(
            place.master_addr,
            place.master_port,
            world_size=place.size,
            is_master=server,
            timeout=patience,
            multi_tenant=not hosted,
            use_libuv=os.name != "nt",
        )

    try:
        return connected(connect, place.master_port, patience.total_seconds() + _LATE)
    except (dist.DistError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"{place.master_addr}:{place.master_port}"
        if server and "address already in use" in str(error).lower():
            raise ConfigurationError(
                f"the processes cannot meet at {where}: the port is in use. Choose another one: export MASTER_PORT=…"
            ) from error
        raise ConfigurationError(
            f"rank {place.rank} of {place.size} has not met the others at {where} within {patience.total_seconds():.0f} s. "
            "Either not all of them were started, or that address (MASTER_ADDR, MASTER_PORT) is not the machine of rank 0, or "
            f"a firewall is between. torch says: {str(error).splitlines()[0]}"
        ) from error


def _place_in_group() -> Place:
    """This process in the user's group; of its machine the launcher knows, if it has made this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    place = Place(rank, size, None, None, None, None, os.environ.get("MASTER_ADDR", ""), 0, "your own process group", "")
    try:
        started = read_place(os.environ)
    except ConfigurationError:  # the group works: what variables say is not needed
        started = None
    if started is None or (started.rank, started.size) != (rank, size):
        return place
    return replace(started, launcher=place.launcher)


def _world(place: Place, control: Any) -> World:
    """The world, with what no launcher has said worked out from the names of the machines."""
    world = World(place.rank, place.size, control=control)
    channel = Channel.open(place.rank, place.size, place.master_addr or None, world.from_main)
    said = world.exchange([socket.gethostname(), restarts(os.environ)])
    names = [name for name, _ in said]
    machines = list(dict.fromkeys(names))
    mine = names[place.rank]
    return World(
        place.rank,
        place.size,
        local_rank=names[: place.rank].count(mine) if place.local_rank is None else place.local_rank,
        local_size=names.count(mine) if place.local_size is None else place.local_size,
        node=machines.index(mine) if place.node is None else place.node,
        nodes=len(machines) if place.nodes is None else place.nodes,
        launcher=place.launcher,
        control=control,
        channel=channel,
        watchdog=Watchdog(channel),
        restarts=max(count for _, count in said),
        memory=RestartStore.of(os.environ),
    )


def _leave(process: int) -> None:
    """Destroy the process groups that we have made, at the end of the process of that number.

    Not after an error: the others may be gone, and to wait for them would keep this process from ending.
    """
    global _joined
    if _joined is None or os.getpid() != process or getattr(sys, "last_value", None) is not None:
        return
    joined, _joined = _joined, None
    groups = [joined.world.control]
    if joined.group is not None and joined.group is _group():  # else the user has destroyed it, and ours with it
        if joined.ours:
            groups.append(joined.group)
            dist.destroy_process_group()
        elif joined.world.control is not None:
            dist.destroy_process_group(joined.world.control)
    joined.world.control = None
    del joined
    release_groups(groups)
