"""The workers of one start, and how long they may take to exit. Tests with the launcher are in test_agent.py."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.agents import alive, wait_until
from helpers.patience import PATIENCE, within

from trainkit.errors import ConfigurationError
from trainkit.launch import workers as module
from trainkit.launch.workers import End, Workers, deadline

pytestmark = [pytest.mark.prompt, pytest.mark.skipif(os.name != "posix", reason="sessions and signals of POSIX")]

INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)


# Signals as (signal, time), workers that exited as (rank, exit code, time), and the time until which the others may exit.
@pytest.mark.parametrize("signals, ended, expected", [
    ([], [], math.inf),
    ([], [(0, 0, 2.0)], math.inf),
    ([], [(0, 3, 2.0), (1, 0, 3.0)], 6.0),
    ([], [(0, 1, 2.0), (1, 143, 3.0)], 33.0),
    ([(TERM, 1.0)], [], 31.0),
    ([(TERM, 1.0)], [(0, 143, 2.0)], 32.0),
    ([(TERM, 1.0)], [(0, 1, 2.0)], 31.0),
    ([(INT, 1.0)], [], math.inf),
    ([(INT, 1.0)], [(0, 0, 2.0)], 32.0),
    ([(INT, 1.0), (INT, 3.0)], [(0, 0, 2.0)], 8.0),
])  # fmt: skip
def test_deadlines(signals: list[tuple[int, float]], ended: list[tuple[int, int, float]], expected: float) -> None:
    assert deadline(signals, [End(*end) for end in ended], 30.0) == expected


Start = Callable[..., Workers]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("exit $RANK")` starts two workers, ranks 4 and 5, that run a shell script."""
    started: list[Workers] = []

    def start(script: str, grace: float = 30.0, command: str = "/bin/sh") -> Workers:
        environments = [{**os.environ, "RANK": str(rank)} for rank in (4, 5)]
        started.append(Workers([command, "-c", script], environments, tmp_path / "pids", grace))
        return started[-1]

    yield start
    for workers in started:
        workers.signal_all(signal.SIGKILL)
        wait_until(workers.is_over)


def ends(workers: Workers) -> list[tuple[int, int]]:
    """Wait for all workers, and return their ranks and exit codes in the order in which they exited."""
    last = time.monotonic() + PATIENCE
    while not workers.is_over():
        workers.check()
        assert time.monotonic() < last
        time.sleep(0.01)
    workers.kill_leftovers()
    return [(end.rank, end.code) for end in workers.ended]


def pid(file: Path) -> int:
    """The process ID that a script has written to a file."""
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_exit_codes_come_in_order(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 4 waits until rank 5 has exited: it starts first, and on a busy machine much earlier.
    monkeypatch.setattr(module, "_FAILURE_TIMEOUT_S", PATIENCE)
    workers = start(f'if [ "$RANK" = 5 ]; then exit 3; fi; until [ -e {tmp_path}/next ]; do sleep 0.01; done; exit 4')
    wait_until(lambda: workers.ended)
    (tmp_path / "next").touch()
    assert ends(workers) == [(5, 3), (4, 4)]
    assert not workers.terminated


def test_an_error_in_the_start_leaves_no_worker(tmp_path: Path) -> None:
    """If starting a worker fails, as at a limit on threads, the workers that have started are killed."""
    started: list[int] = []

    def fail(local_rank: int, rank: int, process: Any) -> None:
        started.append(process.pid)
        for pipe in (process.stdout, process.stderr):
            pipe.close()
        if local_rank == 1:
            raise RuntimeError("cannot start new thread")

    environments = [{**os.environ, "RANK": str(rank)} for rank in (0, 1)]
    with pytest.raises(RuntimeError, match="cannot start new thread"):
        Workers(["/bin/sleep", "100"], environments, tmp_path / "pids", 30.0, fail)
    assert len(started) == 2
    wait_until(lambda: not any(map(alive, started)))


def test_a_folder_without_space_leaves_no_worker(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process IDs cannot be written, as on a full disk, the worker that has started is killed."""
    started: list[int] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    (tmp_path / "pids").mkdir()
    with pytest.raises(ConfigurationError, match="cannot write '.*/pids': Is a directory. Free some space there"):
        start("sleep 100")
    assert len(started) == 1
    wait_until(lambda: not any(map(alive, started)))


def test_workers_have_the_default_signals(start: Start, tmp_path: Path) -> None:
    """Workers handle SIGHUP and SIGINT by default, even if the launcher ignores them (under nohup, or started with `&`)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        workers = start(f"grep SigIgn /proc/self/status > {tmp_path}/$RANK")
        assert sorted(ends(workers)) == [(4, 0), (5, 0)]
    finally:
        signal.signal(signal.SIGHUP, before[0]), signal.signal(signal.SIGINT, before[1])
    ignored = int((tmp_path / "4").read_text().split()[1], 16)
    assert not ignored & (1 << signal.SIGHUP - 1 | 1 << signal.SIGINT - 1 | 1 << signal.SIGTERM - 1)


def test_each_worker_has_a_session_of_its_own(start: Start, tmp_path: Path) -> None:
    workers = start(f"echo $$ > {tmp_path}/$RANK; exec sleep 100")
    pids = [pid(tmp_path / str(rank)) for rank in (4, 5)]
    assert [os.getsid(process) for process in pids] == pids
    assert [int(line) for line in (tmp_path / "pids").read_text().splitlines()] == pids
    workers.signal(signal.SIGTERM)
    assert sorted(ends(workers)) == [(4, -15), (5, -15)]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_that_ignores_sigterm_is_killed(
    start: Start, tmp_path: Path, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ignores SIGTERM is killed together with its child processes.

    This holds after a failure of another worker, and when torch elastic stops the workers.
    """
    failure = "sleep 100" if stopped else "exit 3"
    script = f'if [ "$RANK" = 4 ]; then {failure}; fi; trap "" TERM; sleep 100 & echo $! > {tmp_path}/child; wait; sleep 100'
    for name in ("_FAILURE_TIMEOUT_S", "_SHUTDOWN_S"):
        monkeypatch.setattr(module, name, 0.3)
    workers = start(script, grace=0.3)
    child = pid(tmp_path / "child")
    workers.stopped = stopped
    assert ends(workers) == [(4, -15 if stopped else 3), (5, -9)]
    assert workers.terminated == ({4, 5} if stopped else {5})
    wait_until(lambda: not alive(child), within(2.0))


def test_a_command_that_does_not_exist(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    assert ends(start("", command="/nowhere")) == [(4, 1), (5, 1)]
    assert "cannot start rank 4: [Errno 2] No such file or directory: '/nowhere'." in caplog.text
