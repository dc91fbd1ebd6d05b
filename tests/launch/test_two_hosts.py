"""Jobs on two simulated hosts: they train, and they end or resume when a network cable is cut or a host is killed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.hosts import ADDRESSES, Hosts, Program
from helpers.launch.two_hosts import CASE, Task
from helpers.patience import ALONE, PATIENCE, within
from helpers.resume.elastic import journal
from helpers.runs.parity import trained

pytestmark = pytest.mark.prompt

TESTS = Path(__file__).parents[1]
LIMIT = within(10)  # seconds in which all processes must have ended
SILENCE = 30.0  # seconds without a heartbeat after which a host counts as lost

# `trainkit launch` with shorter limits. A host is lost when it misses three heartbeats.
HEARTBEAT = 1 if ALONE else 4
IMPATIENT = f"""
import sys
from trainkit.cli.main import main
from trainkit.launch import rendezvous
from trainkit.distributed import stores
for module, name, value in ((stores, "_SILENCE_S", 3.0), (rendezvous, "_HEARTBEAT_S", {HEARTBEAT})):
    assert hasattr(module, name), name
    setattr(module, name, value)
sys.exit(main())
"""


class Job:
    """A job on two hosts.

    Attributes:
        hosts: the simulated hosts.
        programs: the running agents, by host.
    """

    def __init__(self, hosts: Hosts, folder: Path, *, restarts: int = 0, patient: bool = False, **task: Any) -> None:
        self.hosts, self.folder = hosts, folder
        self.folder.mkdir(exist_ok=True)
        self.programs: dict[int, Program] = {}
        self._task = Task(str(folder), **task)
        self._restarts = restarts
        self._call = ["-m", "trainkit"] if patient else ["-c", IMPATIENT]

    def start(self, host: int, per_node: int = 1, instead: tuple[Path, Path] | None = None, **task: Any) -> None:
        """Start the agent of one host."""
        machines = ["--nnodes", "2", "--node-rank", str(host), "--master-addr", ADDRESSES[0], "--master-port", "29500"]
        processes = ["--nproc-per-node", str(per_node), "--max-restarts", str(self._restarts)]
        script = [str(TESTS / "helpers/launch/two_hosts.py"), json.dumps({**asdict(self._task), **task})]
        settings = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "NCCL_", "TRAINKIT_"))}
        settings["PYTHONPATH"] = os.pathsep.join([str(TESTS), settings["PYTHONPATH"]])
        command = [sys.executable, *self._call, "launch", *machines, *processes, *script]
        self.programs[host] = self.hosts.start(host, command, settings, instead)

    def start_both(self, **options: Any) -> Job:
        """Start the agents of both hosts; returns this job."""
        for host in (0, 1):
            self.start(host, **options)
        return self

    def codes(self) -> list[int]:
        """Wait for both agents, and return their exit codes."""
        return [self.programs[host].code() for host in (0, 1)]

    def at_the_gate(self) -> None:
        """Wait until both processes have reached the optimizer step before which they stop (`gate`)."""
        self.wait_for(lambda: all((self.folder / f"gate-{self._task.start}-{rank}").exists() for rank in (0, 1)))

    def open_the_gate(self) -> None:
        """Let the processes continue."""
        (self.folder / "open").touch()

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> float:
        """Wait for a condition while both agents run; return how long it took."""
        begin = time.monotonic()
        while not condition():
            took = time.monotonic() - begin
            ended = [host for host, program in self.programs.items() if program.process.poll() is not None]
            assert took < seconds, f"not within {seconds} s:\n{self}"
            assert not ended, f"host {ended} has ended:\n{self}"
            time.sleep(0.02)
        return time.monotonic() - begin

    def worlds(self, attempt: int) -> list[dict[str, Any]]:
        """What each process of an attempt has written about its world."""
        files = sorted(self.folder.glob(f"world-{attempt}-*"), key=lambda file: int(file.name.rpartition("-")[2]))
        return [json.loads(file.read_text()) for file in files]

    def __repr__(self) -> str:
        return "\n".join(f"--- host {host}:\n{program.output}" for host, program in self.programs.items())


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], str]:
    """The loss of each micro-batch in a training with two processes on one host."""
    return {where: loss.hex() for where, loss in trained(CASE, 2).losses.items()}


def losses(folder: Path) -> dict[tuple[int, int], str]:
    return {(step, m % 10**6): entry["loss"] for (step, m), entry in journal(folder).items()}


def went_on(job: Job) -> bool:
    """Whether both hosts resumed after one restart from the same checkpoint, of step 3 or earlier."""
    first, second = job.worlds(1)
    return first["restarts"] == second["restarts"] == 1 and 0 < first["step"] == second["step"] <= 3


def test_two_hosts_compute_the_losses_of_one(hosts: Hosts, tmp_path: Path, expected: dict[tuple[int, int], str]) -> None:
    """No network settings are needed, although the host names do not resolve to addresses."""
    job = Job(hosts, tmp_path / "run", patient=True).start_both()
    assert job.codes() == [0, 0], job
    facts = {"size": 2, "local_rank": 0, "local_size": 1, "nodes": 2, "restarts": 0, "step": 0}
    assert job.worlds(0) == [{**facts, "rank": host, "node": host, "host": f"host-{host}"} for host in (0, 1)]
    assert losses(job.folder) == expected
    assert "2 processes on 2 nodes" in job.programs[0].output


@pytest.mark.slow
def test_two_processes_on_each(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path / "run", patient=True).start_both(per_node=2)
    assert job.codes() == [0, 0], job
    places = [(world["rank"], world["node"], world["local_rank"], world["local_size"]) for world in job.worlds(0)]
    assert places == [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 2), (3, 1, 1, 2)]
    assert losses(job.folder) == {where: loss.hex() for where, loss in trained(CASE, 4).losses.items()}


# ---------------------------------------------------------------------------------------------------------- a cut cable


def lost(job: Job) -> bool:
    """Whether each host has reported that it lost the connection to the other."""
    return all(f"the connection to rank {1 - host} is lost" in job.programs[host].output for host in (0, 1))


@pytest.mark.slow
def test_a_cut_and_mended_cable(hosts: Hosts, tmp_path: Path, expected: dict[tuple[int, int], str]) -> None:
    """Packets are lost silently for a while: both hosts notice it, reconnect, and resume from the newest checkpoint."""
    job = Job(hosts, tmp_path / "run", restarts=1, gate=3).start_both()
    job.at_the_gate()
    hosts.cut()
    job.open_the_gate()
    job.wait_for(lambda: lost(job), 2 * LIMIT)
    hosts.mend()
    assert job.codes() == [0, 0], job
    assert went_on(job)
    assert losses(job.folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_a_cable_that_stays_cut(hosts: Hosts, tmp_path: Path, told: bool, expected: dict[tuple[int, int], str]) -> None:
    """With default limits, both jobs end when the cable stays cut, and starting them again resumes.

    If `told` is set, the network interface of host 1 is down. Otherwise packets are lost silently.
    """
    job = Job(hosts, tmp_path / "run", patient=True, gate=3, patience=SILENCE).start_both()
    job.at_the_gate()
    begin = time.monotonic()
    if told:
        hosts.unplug(1)
    else:
        hosts.cut()
    job.open_the_gate()
    assert job.codes() == [1, 1], job
    assert time.monotonic() - begin < within(SILENCE + 15)
    assert lost(job), job
    assert hosts.processes(0) + hosts.processes(1) == 0
    if told:
        hosts.plug_in(1)
    else:
        hosts.mend()
    job.start_both(start=1)
    assert job.codes() == [0, 0], job
    assert losses(job.folder) == expected


@pytest.mark.slow
def test_a_short_interruption_does_no_harm(hosts: Hosts, tmp_path: Path, expected: dict[tuple[int, int], str]) -> None:
    """With default limits, the training survives an interruption of the network for twelve seconds without a restart."""
    job = Job(hosts, tmp_path / "run", patient=True, gate=3, patience=SILENCE).start_both()
    job.at_the_gate()
    hosts.cut()
    job.open_the_gate()
    time.sleep(12)
    hosts.mend()
    assert job.codes() == [0, 0], job
    assert losses(job.folder) == expected
    assert not job.worlds(1)


# -------------------------------------------------------------------------------------------------------- a killed host


@pytest.mark.parametrize("host", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_host_comes_back(hosts: Hosts, tmp_path: Path, host: int, expected: dict[tuple[int, int], str]) -> None:
    """The other agent waits for a killed host to start again, even for the first host, which hosts the agents' store."""
    job = Job(hosts, tmp_path / "run", restarts=1, gate=3).start_both()
    job.at_the_gate()
    hosts.kill(host)
    assert job.programs.pop(host).code() == -9
    job.open_the_gate()
    other = job.programs[1 - host]
    job.wait_for(lambda: f"rank {host} has died" in other.output and "restart 1 of 1" in other.output, LIMIT)
    if host == 0:
        job.wait_for(lambda: f"the connection to the first node, {ADDRESSES[0]}:29500, is lost" in other.output, LIMIT)
    job.start(host)
    assert job.codes() == [0, 0], job
    assert went_on(job)
    assert losses(job.folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_killed_host_ends_the_other(hosts: Hosts, tmp_path: Path, host: int, expected: dict[tuple[int, int], str]) -> None:
    job = Job(hosts, tmp_path / "run", patient=True, gate=3).start_both()
    job.at_the_gate()
    hosts.kill(host)
    job.open_the_gate()
    begin = time.monotonic()
    assert job.codes()[1 - host] == 1, job
    assert time.monotonic() - begin < LIMIT
    assert f"rank {host} has died" in job.programs[1 - host].output
    assert hosts.processes(1 - host) == 0
    job.start_both(start=1)
    assert job.codes() == [0, 0], job
    assert losses(job.folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_without_power(hosts: Hosts, tmp_path: Path, host: int, expected: dict[tuple[int, int], str]) -> None:
    """A host without power does not even close its connections; the other host ends with an error within the limit."""
    job = Job(hosts, tmp_path / "run", gate=3).start_both()
    job.at_the_gate()
    hosts.cut()
    hosts.kill(host)
    job.open_the_gate()
    begin = time.monotonic()
    assert job.codes()[1 - host] == 1, job
    assert time.monotonic() - begin < 2 * LIMIT
    assert f"the connection to rank {host} is lost" in job.programs[1 - host].output
    hosts.mend()
    job.start_both(start=1)
    assert job.codes() == [0, 0], job
    assert losses(job.folder) == expected


# -------------------------------------------------------------------------------------- different folders on the hosts


@pytest.mark.slow
def test_a_folder_that_is_another_one_there(hosts: Hosts, tmp_path: Path) -> None:
    """If the folder of a run is not the same on both hosts, both end with an error before the training."""
    job = Job(hosts, tmp_path / "run")
    other = tmp_path / "other"
    other.mkdir()
    job.start(0)
    job.start(1, instead=(other, job.folder))
    assert job.codes() == [1, 1], job
    words = "a file that rank 0 on host-0 wrote there is not visible to rank 1 on host-1"
    assert words in job.programs[0].output
    assert not list(other.rglob("step-*"))
    assert not job.worlds(0)
