"""The processes under an agent, by themselves; how they end with one is tried in test_agent.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.agents import alive, wait_until
from helpers.patience import within
from helpers.support import run_python

from trainkit.launch import workers as workers_module
from trainkit.launch.workers import Ended, Workers, signal_name

pytestmark = [pytest.mark.prompt, pytest.mark.skipif(os.name != "posix", reason="sessions and signals of POSIX")]


def shell(script: str, count: int = 2) -> Workers:
    return Workers(["/bin/sh", "-c", script], [{**os.environ, "RANK": str(rank)} for rank in range(count)])


def finished(workers: Workers) -> None:
    workers.end(0.1)
    workers.leave(sweep=True)


def test_exit_codes() -> None:
    assert Ended(0, 3).exit_code == 3
    assert Ended(0, -9).exit_code == 137


def test_names_of_signals() -> None:
    assert (signal_name(15), signal_name(99)) == ("SIGTERM", "signal 99")


def test_who_was_ended_by_a_signal_comes_first() -> None:
    """When both are seen at once, the others have most likely followed."""
    workers = shell('if [ "$RANK" = 1 ]; then kill -9 $$; fi; exit 4')
    wait_until(lambda: not any(alive(pid) for pid in workers.pids.values()))
    workers.look()
    assert workers.ended == workers.failed == [Ended(1, -9), Ended(0, 4)]
    assert workers.running == 0
    finished(workers)


def test_each_has_a_session_of_its_own() -> None:
    workers = shell("sleep 100")
    pids = list(workers.pids.values())
    assert [os.getsid(pid) for pid in pids] == pids
    assert os.getsid(0) not in pids
    finished(workers)
    assert not any(alive(pid) for pid in pids)


def test_ending_them() -> None:
    workers = shell('if [ "$RANK" = 0 ]; then exit 3; fi; sleep 100')
    wait_until(lambda: workers.look() or bool(workers.ended))
    workers.end(5.0)
    assert workers.ended == [Ended(0, 3)]  # who was ended has not ended by itself
    assert workers.killed == [1]
    finished(workers)


def test_what_they_have_started_is_swept(tmp_path: Path) -> None:
    workers = shell(f"sleep 100 & echo $! > {tmp_path}/$RANK; exit 1")
    wait_until(lambda: workers.look() or not workers.running)
    children = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert all(alive(pid) for pid in children)
    workers.leave(sweep=True)
    wait_until(lambda: not any(alive(pid) for pid in children), within(2.0))


def test_the_guard_goes_with_them() -> None:
    workers = shell("true")
    guard = workers._guard
    assert guard is not None
    wait_until(lambda: workers.look() or not workers.running)
    workers.leave(sweep=False)
    assert guard.returncode == 0


@pytest.mark.parametrize("with_guard", [True, False], ids=["guard", "kernel"])
def test_nothing_outlives_the_process_that_started_them(with_guard: bool, tmp_path: Path) -> None:
    """The guard kills whole sessions; without it the kernel kills the workers."""
    if not with_guard and not sys.platform.startswith("linux"):
        pytest.skip("Linux only")
    program = (
        "import os, sys, time\n"
        "from trainkit.launch import workers\n"
        f"workers._start_guard = workers._start_guard if {with_guard} else lambda groups: None\n"
        f"made = workers.Workers(['/bin/sh', '-c', 'sleep 100 & echo $! > {tmp_path}/child; wait'], [dict(os.environ)])\n"
        "print(made.pids[0], flush=True)\n"
        "time.sleep(100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    wait_until(lambda: (tmp_path / "child").exists() and bool((tmp_path / "child").read_text()))
    child = int((tmp_path / "child").read_text())
    assert alive(worker)
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(worker), within(5.0))
    if with_guard:
        wait_until(lambda: not alive(child), within(5.0))
    elif alive(child):
        os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
def test_workers_that_follow_by_themselves(tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    worker = f"import os, time; from trainkit.launch.workers import follow; follow(os.getppid()); open({there!r}, 'w')"
    program = (
        "import os, sys, time\n"
        "from trainkit.launch import workers\n"
        "workers._start_guard = lambda groups: None\n"
        f"made = workers.Workers([sys.executable, '-c', {f'{worker}; time.sleep(100)'!r}], [dict(os.environ)], follows=True)\n"
        "print(made.pids[0], flush=True)\n"
        "time.sleep(100)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_until((tmp_path / "there").exists)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not alive(pid), within(5.0))
    assert run_python("from trainkit.launch.workers import follow; follow(1)").returncode == 1  # its parent has died already


def test_what_they_write_can_be_taken() -> None:
    taken: list[tuple[int, Any]] = []
    workers = Workers(
        ["/bin/sh", "-c", "echo out $RANK; echo err $RANK >&2"],
        [{**os.environ, "RANK": str(rank)} for rank in range(2)],
        lambda local_rank, process: taken.append((local_rank, process)),
    )
    said = [(local_rank, process.communicate()) for local_rank, process in taken]
    assert said == [(rank, (f"out {rank}\n".encode(), f"err {rank}\n".encode())) for rank in range(2)]
    finished(workers)


def test_a_start_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def limited(*args: Any, **options: Any) -> Any:
        if len(started) == 2:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(workers_module.subprocess, "Popen", limited)
    with pytest.raises(BlockingIOError):
        shell("sleep 100", 3)
    assert [process.poll() is not None for process in started] == [True, True]


def test_stopping_and_going_on(tmp_path: Path) -> None:
    workers = shell(f"while true; do echo >> {tmp_path}/$RANK; sleep 0.01; done", 1)
    file = tmp_path / "0"
    wait_until(file.exists)
    workers.freeze(signal.SIGSTOP)
    time.sleep(0.1)
    before = file.stat().st_size
    time.sleep(0.2)
    assert file.stat().st_size == before
    workers.freeze(signal.SIGCONT)
    wait_until(lambda: file.stat().st_size > before)
    finished(workers)
