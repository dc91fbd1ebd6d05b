"""The launcher's agent with real workers: exit codes, signals, restarts, and no process left running."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from helpers.launch.agents import Agent, alive, start_agent, wait_until
from helpers.patience import within
from helpers.worlds.worlds import free_port

from trainkit.errors import ConfigurationError
from trainkit.launch import workers
from trainkit.launch.agent import Job, run_job
from trainkit.launch.rendezvous import Rendezvous

pytestmark = [pytest.mark.prompt, pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")]

FOREVER = "ready()\ntime.sleep(1000)\n"
WITH_CHILD = 'child = subprocess.Popen(["sleep", "1000"])\nready(child.pid)\n'
SAVING = """
def leave(number, frame):
    say(f"rank {rank} saves after {signal.Signals(number).name}")
    time.sleep(0.3)
    sys.exit(143)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, leave)
"""


def gone(pids: list[list[int]]) -> bool:
    return not any(alive(pid) for each in pids for pid in each)


def test_workers_know_their_ranks(tmp_path: Path) -> None:
    script = """
import json
names = [name for name in os.environ if name.startswith(("RANK", "WORLD", "LOCAL", "GROUP", "ROLE", "MASTER", "TORCHELASTIC"))]
names += ["TRAINKIT_LAUNCHER", "TRAINKIT_RESTART_STORE", "OMP_NUM_THREADS"]
json.dump({name: os.environ[name] for name in names}, open(f"{folder}/env-{rank}", "w"))
"""
    agent = start_agent(script, tmp_path, 2, launcher="a test")
    assert (agent.code(), agent.output) == (0, "")
    first, second = (json.loads((tmp_path / f"env-{rank}").read_text()) for rank in range(2))
    assert {**first, "RANK": "1", "LOCAL_RANK": "1", "ROLE_RANK": "1"} == second
    expected = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TRAINKIT_LAUNCHER": "a test",
    }
    assert {name: first[name] for name in expected} == expected
    assert int(first["OMP_NUM_THREADS"]) >= 1


def test_the_exit_code_is_that_of_the_first_failed_worker(tmp_path: Path) -> None:
    script = """
ready()
if rank == "1":
    sys.exit(7)
while not os.path.exists(f"{folder}/ready-0-1"):
    time.sleep(0.01)
first = int(open(f"{folder}/ready-0-1").read())
while os.path.exists(f"/proc/{first}"):  # until the agent has waited for it
    time.sleep(0.01)
sys.exit(9)
"""
    agent = start_agent(script, tmp_path)
    assert (agent.code(), agent.output) == (7, "")


def test_all_have_ended_ten_seconds_after_a_failure() -> None:
    assert workers._FAILURE_TIMEOUT_S + workers._SHUTDOWN_S < 9.5


def test_other_workers_are_ended_after_a_failure(tmp_path: Path) -> None:
    """After a failure, other workers have time to print their errors. Then they get SIGTERM, and SIGKILL if they ignore it."""
    script = WITH_CHILD + (
        'if rank == "1":\n    time.sleep(0.2)\n    raise SystemExit("the first traceback")\n'
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)\n"
    )
    agent = start_agent(script, tmp_path, limits={"_FAILURE_TIMEOUT_S": 0.5, "_SHUTDOWN_S": 0.5})
    pids = agent.ready()
    assert agent.code() == 1
    assert agent.output == "the first traceback\n"  # and nothing after it
    wait_until(lambda: gone(pids), within(1.0))


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    agent = start_agent(WITH_CHILD + "time.sleep(1000)\n", tmp_path, 3)
    pids = agent.ready()
    start = time.monotonic()
    os.kill(pids[1][0], signal.SIGKILL)
    assert agent.code() == 137
    assert time.monotonic() - start < within(10)
    assert agent.output == "trainkit: rank 1 was ended by SIGKILL (possibly out of memory).\n"
    wait_until(lambda: gone(pids), within(1.0))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_agent_goes_to_the_workers(tmp_path: Path, number: signal.Signals) -> None:
    agent = start_agent(SAVING + WITH_CHILD + "time.sleep(1000)\n", tmp_path, max_restarts=3)
    pids = agent.ready()
    agent.signal(number)
    assert agent.code() == 143
    name = "SIGTERM" if number == signal.SIGHUP else number.name
    assert sorted(agent.output.splitlines()) == [f"rank {rank} saves after {name}" for rank in range(2)]
    wait_until(lambda: gone(pids), within(1.0))
    assert not list(tmp_path.glob("ready-1-*"))  # workers that were stopped by a signal are not restarted


CLOSING = """
def leave(number, frame):
    say(f"rank {rank} saves after {signal.Signals(number).name}")
    while not os.path.exists(f"{folder}/enough"):
        time.sleep(0.01)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
ready()
time.sleep(1000)
"""


def test_a_terminal_that_closes_is_one_stop_request(tmp_path: Path) -> None:
    """SIGHUP may come more than once, and SIGTERM after it: the workers get one signal, and have the time to save."""
    agent = start_agent(CLOSING, tmp_path, 1, limits={"_REPEAT_S": 0.0, "_SHUTDOWN_S": 0.2})
    agent.ready()
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        agent.signal(number)
        time.sleep(0.3)  # longer than a worker would have after a second request
    (tmp_path / "enough").touch()
    assert agent.code() == 143
    assert agent.output == "rank 0 saves after SIGTERM\n"


def test_a_signal_after_a_closed_terminal_is_the_second_at_its_second_time(tmp_path: Path) -> None:
    agent = start_agent(CLOSING, tmp_path, 1, limits={"_REPEAT_S": 0.0, "_SHUTDOWN_S": 0.2})
    agent.ready()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
        agent.signal(number)
        time.sleep(0.3)
    assert agent.code() == 137


def test_a_stop_request_to_one_worker_ends_all(tmp_path: Path) -> None:
    """If one worker gets a stop request, all workers agree to exit with code 143, and are not restarted."""
    script = SAVING + "ready()\nwhile not os.path.exists(f'{folder}/agreed'):\n    time.sleep(0.01)\n"
    script += "time.sleep(0.5 * int(rank))\nsys.exit(143)\n"
    agent = start_agent(script, tmp_path, max_restarts=3)
    agent.ready()
    (tmp_path / "agreed").touch()
    assert (agent.code(), agent.output) == (143, "")
    assert not list(tmp_path.glob("ready-1-*"))


def test_a_worker_that_does_not_end_in_time_is_killed(tmp_path: Path) -> None:
    script = 'if rank == "1":\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n' + FOREVER
    agent = start_agent(script, tmp_path, grace=0.5, limits={"_SHUTDOWN_S": 0.5})
    pids = agent.ready()
    agent.signal(signal.SIGTERM)
    assert agent.code() == 143
    assert agent.output == "trainkit: rank 1 did not end within 0 s after SIGTERM, and was killed.\n"
    assert gone(pids)


def test_a_repeated_sigterm_counts_once(tmp_path: Path) -> None:
    """Workers get SIGTERM once, although a batch system sends it to every process of the job."""
    script = """
count = 0
def count_them(number, frame):
    global count
    count += 1
signal.signal(signal.SIGTERM, count_them)
ready()
while not count:
    time.sleep(0.01)
time.sleep(0.5)
say(count)
sys.exit(143)
"""
    agent = start_agent(script, tmp_path, 1)
    agent.ready()
    agent.signal(signal.SIGTERM)
    time.sleep(0.1)
    agent.signal(signal.SIGTERM)
    assert (agent.code(), agent.output) == (143, "1\n")


INTERRUPTED = """
import threading
times = 0
def interrupted(number, frame):
    global times
    times += 1
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupted)
try:
    ready()
    time.sleep(1000)
except KeyboardInterrupt:
    threading.Event().wait(0.3)
    say("interrupted", times)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c(tmp_path: Path) -> None:
    """Workers get SIGINT once, from the agent: they are not in the process group to which the terminal sends it."""
    agent = start_agent(INTERRUPTED, tmp_path, max_restarts=3)
    agent.ready()
    os.killpg(agent.process, signal.SIGINT)
    assert agent.code() == 130
    assert agent.output == "interrupted 1\n" * 2
    assert not list(tmp_path.glob("ready-1-*"))


class Starting:
    """An agent that starts its workers only after it has received a signal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> int:
        (self.folder / "starting").touch()
        wait_until((self.folder / "signalled").exists)
        return 2


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_just_before_the_workers_are_started(tmp_path: Path, number: signal.Signals, code: int) -> None:
    agent = start_agent(FOREVER, tmp_path, limits={"_cores": Starting(tmp_path)})
    wait_until((tmp_path / "starting").exists)
    agent.signal(number)
    (tmp_path / "signalled").touch()
    assert (agent.code(), agent.output) == (code, "")
    assert not list(tmp_path.glob("ready-*"))


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    script = "signal.signal(signal.SIGINT, lambda number, frame: None)\n" + FOREVER
    agent = start_agent(script, tmp_path, limits={"_SHUTDOWN_S": 0.3})
    pids = agent.ready()
    agent.signal(signal.SIGINT)
    time.sleep(0.5)
    assert all(alive(pid) for (pid,) in pids)
    agent.signal(signal.SIGINT)
    assert agent.code() == 130
    assert gone(pids)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_a_lost_placeholder_is_a_failure(tmp_path: Path) -> None:
    """If a placeholder process is killed, torch elastic ends and restarts all workers, up to `max_restarts` times."""
    agent = start_agent(WITH_CHILD + "time.sleep(1000)\n", tmp_path, max_restarts=1)
    for restart in (0, 1):
        pids = agent.ready(restart)
        os.kill(placeholders(agent.process)[1], signal.SIGKILL)
        wait_until(lambda started=pids: gone(started))
    assert agent.code() == 1
    assert agent.output == (
        "trainkit: torch elastic has stopped the processes; restarting all processes (restart 1 of 1).\n"
        "trainkit: torch elastic has stopped the processes.\n"
    )


def placeholders(launcher: int) -> list[int]:
    """The process IDs of a launcher's placeholders."""
    children = Path(f"/proc/{launcher}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if "placeholder.py" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="death signals")
def test_a_killed_agent_whose_placeholders_are_killed_too_leaves_nothing(tmp_path: Path) -> None:
    """Workers end even if the agent and its placeholders are killed together, for example by `pkill -9 -f trainkit`."""
    agent = start_agent(FOREVER, tmp_path)
    pids = agent.ready()
    for pid in [*placeholders(agent.process), agent.process]:
        os.kill(pid, signal.SIGKILL)
    assert agent.killed() == "ended with -9"
    wait_until(lambda: gone(pids), within(3.0))


def fail_when_all_are_ready(folder: Path, *_: object) -> float:
    """Replace `deadline`, which the agent calls repeatedly, and raise an error once both workers have started."""
    if len([*folder.glob("ready-*")]) == 2:
        raise RuntimeError("cannot start new thread")
    return math.inf


def test_an_error_of_the_agent_leaves_nothing(tmp_path: Path) -> None:
    """An unexpected error in the agent ends all workers."""
    agent = start_agent(FOREVER, tmp_path, limits={"deadline": partial(fail_when_all_are_ready, tmp_path)})
    pids = agent.ready()
    assert "cannot start new thread" in agent.killed()
    assert gone(pids)


def test_a_killed_agent_leaves_nothing(tmp_path: Path) -> None:
    """If the agent is killed, its placeholders end the workers and their child processes."""
    agent = start_agent(WITH_CHILD + "time.sleep(1000)\n", tmp_path)
    pids = agent.ready()
    agent.signal(signal.SIGKILL)
    assert agent.killed() == "ended with -9"
    wait_until(lambda: gone(pids), within(3.0))


def test_what_a_worker_has_started_lives_on_when_all_went_well(tmp_path: Path) -> None:
    """A child process of a worker continues to run if the worker has succeeded."""
    agent = start_agent(WITH_CHILD, tmp_path, 1)
    ((_, child),) = agent.ready()
    assert agent.code() == 0
    assert alive(child)
    os.kill(child, signal.SIGKILL)


def test_ctrl_z_stops_the_workers_too(tmp_path: Path) -> None:
    script = 'ready()\nwhile True:\n    open(f"{folder}/tick-{rank}", "a").write(".")\n    time.sleep(0.01)\n'
    agent = start_agent(script, tmp_path)
    agent.ready()
    ticks = [tmp_path / f"tick-{rank}" for rank in range(2)]

    def sizes() -> list[int]:
        return [tick.stat().st_size for tick in ticks]

    wait_until(lambda: all(tick.exists() for tick in ticks))
    agent.signal(signal.SIGTSTP)
    wait_until(lambda: Path(f"/proc/{agent.process}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    before = sizes()
    time.sleep(0.2)
    assert sizes() == before
    agent.signal(signal.SIGCONT)
    wait_until(lambda: min(new - old for new, old in zip(sizes(), before, strict=True)) > 0)
    agent.signal(signal.SIGTERM)
    assert agent.code() == 143


# -------------------------------------------------------------------------------------------------------------- restarts

FAILS_TWICE = """
ready()
while len([f for f in os.listdir(folder) if f.startswith(f"ready-{restart}")]) < 2:
    time.sleep(0.01)
if restart < 2 and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL) if restart == 0 else sys.exit(5)
time.sleep(0.3)
say(f"rank {rank} done after {restart}")
sys.exit(1 if restart < 2 else 0)
"""


def test_restarts(tmp_path: Path) -> None:
    agent = start_agent(FAILS_TWICE, tmp_path, max_restarts=2)
    assert agent.code() == 0
    lines = agent.output.splitlines()
    assert [line for line in lines if line.startswith("trainkit")] == [
        "trainkit: rank 1 was ended by SIGKILL (possibly out of memory); restarting all processes (restart 1 of 2).",
        "trainkit: rank 1 ended with exit code 5; restarting all processes (restart 2 of 2).",
    ]
    assert sorted(lines[-2:]) == ["rank 0 done after 2", "rank 1 done after 2"]


def test_the_number_of_restarts_is_limited(tmp_path: Path) -> None:
    agent = start_agent(FAILS_TWICE, tmp_path, max_restarts=1)
    assert agent.code() == 5
    assert agent.output.count("trainkit") == 1


def test_each_start_has_a_new_store_and_one_restart_store(tmp_path: Path) -> None:
    """Each restart gets a new store, so workers cannot read old addresses. The restart store keeps its values."""
    script = """
from torch.distributed import TCPStore
from trainkit.distributed.stores import RestartStore, restarts
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
memory = RestartStore.of(os.environ)
say(restarts(os.environ), store.check(["key"]), memory.get("run"))
store.set("key", "value")
memory.set("run", f"abc{restart}")
sys.exit(restart < 1)
"""
    agent = start_agent(script, tmp_path, 1, max_restarts=1)
    assert agent.code() == 0
    lines = [line for line in agent.output.splitlines() if not line.startswith("trainkit")]
    assert lines == ["0 False None", "1 False abc0"]


def test_the_requested_port_is_used(tmp_path: Path) -> None:
    port = free_port()
    agent = start_agent(
        'say(os.environ["MASTER_PORT"])\nsys.exit(restart < 1)\n', tmp_path, 1, master_port=port, max_restarts=1
    )
    assert agent.code() == 0
    assert [line for line in agent.output.splitlines() if line.isdigit()] == [str(port)] * 2


def test_a_signal_between_two_starts_ends_the_agent(tmp_path: Path) -> None:
    """If SIGTERM arrives after a worker has failed, the workers are not restarted."""
    script = 'ready()\ntime.sleep(0.3)\nif rank == "0":\n    sys.exit(1)\ntime.sleep(1000)\n'
    agent = start_agent(script, tmp_path, max_restarts=5)
    agent.ready()
    time.sleep(0.8)  # rank 0 has failed, and the agent waits for rank 1
    agent.signal(signal.SIGTERM)
    assert agent.code() == 1
    assert not list(tmp_path.glob("ready-1-*"))


# ----------------------------------------------------------------------------------------------------------- several nodes


def start_both(script: str, folder: Path, **options: object) -> list[Agent]:
    port = free_port()
    shared = {"least": 2, "most": 2, "master_addr": "127.0.0.1", "master_port": port, "join_timeout": 20.0, **options}
    return [start_agent(script, folder, 1, number, node_rank=1 - number, **shared) for number in (0, 1)]


def test_two_machines(tmp_path: Path) -> None:
    script = """
say(rank, os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"])
open(f"{folder}/meet-{rank}", "w").write(os.environ["MASTER_PORT"])
time.sleep(0.5 * int(rank))
"""
    second, first = start_both(script, tmp_path)
    assert (first.code(), second.code()) == (0, 0)
    assert (tmp_path / "output").read_text() == "1 2 1 0\n"  # node rank 1, which was started first
    assert (tmp_path / "output1").read_text() == "0 2 0 0\n"
    assert (tmp_path / "meet-0").read_text() == (tmp_path / "meet-1").read_text()


def test_a_failure_on_one_of_two_machines_restarts_both(tmp_path: Path) -> None:
    script = """
ready()
other = f"{folder}/ready-{restart}-{1 - int(rank)}"
while not os.path.exists(other):
    time.sleep(0.01)
say(rank, restart)
if restart == 0 and rank == "1":
    sys.exit(3)
if restart == 0:
    time.sleep(0.5)
    sys.exit(1)
"""
    second, first = start_both(script, tmp_path, max_restarts=1)
    assert (first.code(), second.code()) == (0, 0)
    lines = (tmp_path / "output").read_text().splitlines()
    assert [lines[0], lines[-1]] == ["1 0", "1 1"]
    assert lines[1] == "trainkit: rank 1 ended with exit code 3; restarting all processes (restart 1 of 1)."


@pytest.mark.parametrize("options, words", [
    ({"node_rank": 1, "join_timeout": 1.0}, ["no answer from 127.0.0.1:", "within 1 s", "--node-rank 0"]),
    ({"node_rank": 0, "join_timeout": 1.0}, ["fewer than 2 nodes connected to 127.0.0.1:", "within 1 s", "TRAINKIT_JOIN_TI"]),
    ({"node_rank": 0, "master_addr": None}, ["2 nodes need the address of the first node", "--master-addr"]),
])  # fmt: skip
def test_nodes_that_do_not_connect(options: dict[str, object], words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    given = {"least": 2, "most": 2, "master_addr": "127.0.0.1", "master_port": free_port(), **options}
    start = time.monotonic()
    try:
        assert run_job(Job((sys.executable,), {}, 1, **given)) == 1  # type: ignore[arg-type]
        text = caplog.text
    except ConfigurationError as error:
        text = str(error)
    assert [word for word in words if word not in text] == [], text
    assert time.monotonic() - start < within(15)


def test_another_program_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another program listens at the address of the first node, the error says so."""
    monkeypatch.setattr("trainkit.launch.rendezvous._ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"the program that answers at 127.0.0.1:{port} is not a launcher of this job"
        ):
            Rendezvous((2, 2), ("127.0.0.1", port), 1, 1.0).next_rendezvous()


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"cannot use port {port} of this node.*--master-port PORT"):
            Rendezvous((2, 2), ("127.0.0.1", port), 0, 1.0).next_rendezvous()
