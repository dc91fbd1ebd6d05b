"""Joining the processes of a run, with real processes: which settings are used, refused, or left unchanged."""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from helpers.worlds.worlds import WorldError, free_port, run_world, start_world

from trainkit import console
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.launch import joining
from trainkit.launch.environment import RankInfo
from trainkit.launch.joining import join, processes

SHORT = timedelta(seconds=30)
CPU = RequestedDevices("cpu")
NOT_STARTED = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without a launcher and without GPUs. The test fails if the process is replaced by an agent."""

    def refuse(*args: object) -> None:
        raise AssertionError(f"{args} would have replaced this process")

    monkeypatch.setattr(os, "execv", refuse)
    for name in [
        name for name in os.environ if name.startswith(("SLURM", "OMPI", "PMI", "LSB", "PET_")) or name in NOT_STARTED
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def said() -> list[str]:
    """Collect the notices of this process from now on."""
    lines: list[str] = []
    joining.notice = lambda text: lines.append(text) if console._main else None  # type: ignore[assignment]
    return lines


# ---------------------------------------------------------------------------------------------------- one process


def test_one_process_costs_nothing(env: pytest.MonkeyPatch) -> None:
    """A single process creates no process group."""
    world = join(CPU, timeout=SHORT)
    assert (world.rank, world.size, world.control, world.channel, world.restarts) == (0, 1, None, None, 0)
    assert not dist.is_initialized()


def test_explicit_arguments_beat_hints(env: pytest.MonkeyPatch) -> None:
    """`devices=1` is one process, even inside a SLURM allocation of four tasks."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2"}.items():
        env.setenv(name, value)
    assert join(RequestedDevices("cpu", 1), timeout=SHORT).size == 1
    assert processes(CPU) == 1


@pytest.mark.parametrize("wanted, count, notebook, expected", [
    (RequestedDevices(), 0, False, 1),
    (RequestedDevices(), 4, False, 4),
    (RequestedDevices(), 4, True, 1),
    (RequestedDevices("cuda"), 4, False, 4),
    (RequestedDevices("cpu"), 4, False, 1),
    (RequestedDevices("cpu", 3), 4, False, 3),
    (RequestedDevices("auto", 2), 4, False, 2),
    (RequestedDevices("auto", -1), 4, False, 4),
    (RequestedDevices("auto", -1), 4, True, 4),
    (RequestedDevices("cpu", -1), 4, False, 1),
    (RequestedDevices("auto", 2, (1, 3)), 4, False, 2),
    (RequestedDevices("auto", None, (1, 3)), 4, True, 2),
    (RequestedDevices("auto", 2, None, 3), 4, False, 6),
    (RequestedDevices("auto", None, None, 2), 4, False, 8),
])  # fmt: skip
def test_processes_before_any_is_started(
    env: pytest.MonkeyPatch, wanted: RequestedDevices, count: int, notebook: bool, expected: int
) -> None:
    gpus(env, count)
    env.setattr("trainkit.launch.joining.in_notebook", lambda: notebook)
    assert processes(wanted) == expected


def test_processes_that_a_launcher_has_started(env: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        env.setenv(name, value)
    assert processes(RequestedDevices("cpu", 5)) == 2


@pytest.mark.parametrize("wanted, count, words", [
    (RequestedDevices("cpu", 2, None, 2), 0, ["num_nodes=2", "--nnodes 2 --node-rank R --master-addr HOST", "srun --nodes=2"]),
    (RequestedDevices("cuda", 4), 2, ["devices=4, but torch sees 2 GPUs", "devices=2", "accelerator='cpu', devices=4"]),
    (RequestedDevices("auto", 4), 2, ["devices=4, but torch sees 2 GPUs"]),
    (RequestedDevices("cuda", 2), 0, ["devices=2, but torch sees 0 GPUs"]),
    (RequestedDevices("cpu", 2), 0,
     ["devices=2 needs 2 processes", "trainkit launch --nproc-per-node 2 script.py", "devices=1"]),
])  # fmt: skip
def test_what_cannot_be_started_from_a_test(
    env: pytest.MonkeyPatch, wanted: RequestedDevices, count: int, words: list[str]
) -> None:
    gpus(env, count)
    with pytest.raises(ConfigurationError) as caught:
        join(wanted, timeout=SHORT)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert not dist.is_initialized()


def test_one_process_of_a_launcher() -> None:
    assert run_world(1, one_of_one, env={"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}) == [
        (1, "torchrun", 2, False)
    ]


def one_of_one() -> tuple[int, str, int, bool]:
    world = join(CPU, timeout=SHORT)
    assert join(CPU, timeout=SHORT) is world
    return world.size, world.launcher, world.restarts, dist.is_initialized()


# ------------------------------------------------------------------------------------------------- several processes


@pytest.mark.world_size(3)
def test_a_launcher() -> None:
    lines = said()
    world = join(CPU, timeout=SHORT)
    rank = int(os.environ["RANK"])
    assert (world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes) == (rank, 3, rank, 3, 0, 1)
    assert dist.get_backend() == "gloo"
    assert join(RequestedDevices("cpu", 3, None, 1), timeout=SHORT) is world
    assert join(RequestedDevices("cpu", -1), timeout=SHORT) is world
    assert processes(CPU) == 3
    assert lines == (["3 processes, started by a launcher (RANK and WORLD_SIZE are set)."] if rank == 0 else [])
    assert world.channel is not None
    assert world.thread_exchange("x").exchange(rank) == [0, 1, 2]


@pytest.mark.world_size(2)
def test_arguments_that_contradict_the_launcher() -> None:
    for wanted, words in (
        (
            RequestedDevices("cpu", 4),
            ["devices=4 contradicts", "2 processes on 1 node, by a launcher", "--nproc-per-node 4 script.py"],
        ),
        (RequestedDevices("cpu", 1), ["devices=1 contradicts", "--nproc-per-node 1 script.py"]),
        (RequestedDevices("cpu", None, None, 2), ["num_nodes=2 contradicts"]),
        (RequestedDevices("cpu", 1, None, 2), ["devices=1, num_nodes=2 contradicts", "Remove devices=1, num_nodes=2"]),
    ):
        with pytest.raises(ConfigurationError) as caught:
            join(wanted, timeout=SHORT)
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
        assert not dist.is_initialized()  # no process group was created
    world = join(RequestedDevices("cpu", 2), timeout=SHORT)
    with pytest.raises(
        ConfigurationError, match="devices=4 contradicts the processes that were started: 2 processes on 1 node"
    ):
        join(RequestedDevices("cpu", 4), timeout=SHORT)
    assert join(CPU, timeout=SHORT) is world


def test_the_fix_is_that_of_the_launcher() -> None:
    env = {"TORCHELASTIC_RUN_ID": "x"}
    with pytest.raises(WorldError, match="devices=4 contradicts.*by torchrun.*: torchrun --nproc-per-node 4 script.py"):
        run_world(2, contradict, env=env)


def contradict() -> None:
    join(RequestedDevices("cpu", 4), timeout=SHORT)


@pytest.mark.world_size(2)
def test_a_group_of_the_user() -> None:
    """A process group that the user has initialized is used and never destroyed."""
    lines = said()
    dist.init_process_group("gloo", timeout=SHORT)
    group = dist.group.WORLD
    assert processes(RequestedDevices("cpu", 1)) == 2
    world = join(CPU, timeout=SHORT)
    assert dist.group.WORLD is group
    assert (world.rank, world.local_rank, world.local_size, world.nodes) == (dist.get_rank(), dist.get_rank(), 2, 1)
    assert lines == (["2 processes, of the process group that you initialized."] if world.rank == 0 else [])
    with pytest.raises(
        ConfigurationError, match="devices=3 contradicts the processes that were .*: 2 processes on 1 node, by your"
    ):
        join(RequestedDevices("cpu", 3), timeout=SHORT)
    assert world.sums([1]) == [2]
    dist.barrier()
    dist.destroy_process_group()

    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("gloo", timeout=SHORT)  # the user creates another group
    again = join(CPU, timeout=SHORT)
    assert again is not world
    assert again.sums([1]) == [2]
    group = dist.group.WORLD
    joining._destroy_groups(os.getpid())
    assert again.control is None
    assert dist.group.WORLD is group  # the group belongs to the user
    dist.barrier()


def test_a_group_of_the_user_without_a_launcher() -> None:
    """With `mp.spawn`, no launcher variables are set, and ranks come from the process group that the user initialized."""
    method = f"tcp://127.0.0.1:{free_port()}"
    worlds = [start_world(1, spawned, method, rank, env=NOT_STARTED) for rank in range(2)]
    found = [world.results()[0] for world in worlds]
    assert found == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]


def spawned(method: str, rank: int) -> tuple[int, ...]:
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2, timeout=SHORT)
    world = join(CPU, timeout=SHORT)
    dist.barrier()
    return world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes


def test_a_process_of_multiprocessing_without_a_group() -> None:
    with pytest.raises(WorldError, match=r"devices=2 in a multiprocessing child.*torch.distributed.init_process_group\('gloo'"):
        run_world(1, wants_two, env=NOT_STARTED)


def wants_two() -> None:
    join(RequestedDevices("cpu", 2), timeout=SHORT)


@pytest.mark.world_size(3)
def test_nodes_are_distinguished_by_their_host_names() -> None:
    """If no launcher gives the nodes, host names do: here ranks 0 and 2 are on one node, rank 1 is on another."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=SHORT)
    control = dist.new_group(backend="gloo", timeout=SHORT)
    socket.gethostname = lambda: "ab"[rank % 2]
    unknown = RankInfo(rank, 3, None, None, None, None, "127.0.0.1", 1, "x", "")
    world = joining._world(unknown, control)
    assert (world.local_rank, world.local_size, world.node, world.nodes) == [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 2)][rank]


@pytest.mark.world_size(2)
def test_restarts_and_memory() -> None:
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(3 - rank)  # torchrun's agents on several nodes count separately
    world = join(CPU, timeout=SHORT)
    assert world.restarts == 3
    world.keep_text("run", "text")  # not kept: no launcher can restart these processes
    assert world.load_text("run") is None


def test_torchruns_store_is_the_memory() -> None:
    """Texts that must survive a restart are kept in the store of torchrun's agent."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "job",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
    }
    assert run_world(2, remembers, env=env) == [(None, "text")] * 2


def test_data_of_killed_processes_in_torchruns_store_is_not_read() -> None:
    """After a restart, ranks ignore what killed processes have left in torchrun's store.

    Otherwise the first rank that starts would connect to the old address of another rank.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for restarts in range(3):
        assert run_world(2, joins_late, env={**env, "TORCHELASTIC_RESTART_COUNT": str(restarts)}) == [restarts] * 2


def joins_late() -> int:
    if os.environ["RANK"] == "0":
        time.sleep(0.3)
    return join(CPU, timeout=SHORT).restarts


@pytest.mark.parametrize("hosted", [True, False], ids=["the agent's store", "rank 0's store"])
def test_a_group_of_ours_that_the_user_has_destroyed_is_created_again(hosted: bool) -> None:
    """If the user destroys trainkit's process group, as scripts for torchrun do at the end, joining creates a new one.

    A rank that joins early must not find the old address of another rank.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    assert run_world(2, joins_again_and_again, env=agent if hosted else {}) == [[3.0] * 5] * 2


def joins_again_and_again() -> list[float]:
    found = []
    for round in range(5):
        world = join(CPU, timeout=timedelta(seconds=10))
        found += world.sums([world.rank + 1])
        dist.barrier()
        if world.rank == round % 2:
            time.sleep(0.3)
        dist.destroy_process_group()
    return found


def remembers() -> tuple[str | None, str | None]:
    world = join(CPU, timeout=SHORT)
    before = world.load_text("run")
    world.keep_text("run", "text")
    world.barrier()
    return before, world.load_text("run")


def test_a_port_that_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(WorldError, match=r"rank 0 cannot listen at 127.0.0.1:\d+: the port is in use. Choose another"):
            run_world(1, joins, env=env)


def test_processes_that_do_not_connect() -> None:
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    with pytest.raises(WorldError, match=r"rank 1 of 2 could not connect to all other ranks at 127.0.0.1:\d+ within 1 s"):
        run_world(1, joins, 1.0, env=env)


def test_another_program_that_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
        with pytest.raises(WorldError, match=rf"1 of 2 could not connect .* ranks at 127.0.0.1:{port} within 1 s.*no answer"):
            run_world(1, joins_impatiently, env=env)


def joins_impatiently() -> None:
    joining._LATE_S = 0.5
    joins(1.0)


def joins(patience: float = 30.0) -> None:
    join(CPU, timeout=timedelta(seconds=patience))


def test_lines_are_written_as_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `python -u`, which torchrun and trainkit launch use, `print` writes each line in one call after joining."""

    class Raw(io.RawIOBase):
        written: ClassVar[list[bytes]] = []

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.written.append(bytes(data))
            return len(data)

    stream = io.TextIOWrapper(Raw(), write_through=True)  # type: ignore[arg-type]
    monkeypatch.setattr("sys.stdout", stream)
    print("a", 1)
    assert Raw.written == [b"a", b" ", b"1", b"\n"]
    Raw.written.clear()
    joining._write_whole_lines()
    print("a", 1)
    assert Raw.written == [b"a 1\n"]


def test_our_group_is_destroyed_at_the_end(env: pytest.MonkeyPatch) -> None:
    """At exit, trainkit destroys its process group.

    It does not if the user made the group, if the group was replaced, in a forked child, or after an error.
    """
    destroyed: list[int] = []
    group = object()
    env.setattr(joining, "default_group", lambda: group)
    env.setattr(dist, "destroy_process_group", lambda: destroyed.append(1))
    for ours, of, process, failed, expected in (
        (True, group, os.getpid(), False, 1),
        (False, group, os.getpid(), False, 0),
        (True, None, os.getpid(), False, 0),
        (True, group, os.getppid(), False, 0),  # in a forked child process
        (True, group, os.getpid(), True, 0),
    ):
        destroyed.clear()
        env.setattr(joining, "_joined", joining._Joined(World(), of, ours))
        if failed:
            env.setattr("sys.last_value", ValueError(), raising=False)
        joining._destroy_groups(process)
        assert len(destroyed) == expected, (ours, process, failed)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.world_size(2)
def test_no_thread_of_gloo_is_left_at_the_end() -> None:
    """Destroying the group ends gloo's threads: one that still released a tensor at exit would abort the process (SIGABRT)."""
    world = join(CPU, timeout=SHORT)
    world.barrier()
    assert "pt_gloo_runloop" in thread_names()
    dist.barrier()
    joining._destroy_groups(os.getpid())
    assert "pt_gloo_runloop" not in thread_names()
    assert not dist.is_initialized()


def thread_names() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
