"""Supervisors and their events, by themselves; with the launcher they are tried in test_agent.py."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.agents import alive, wait_until
from helpers.patience import PATIENCE, within

from trainkit.launch import workers
from trainkit.launch.workers import PLAN, Event, Events, deadline

pytestmark = [pytest.mark.prompt, pytest.mark.skipif(os.name != "posix", reason="sessions and signals of POSIX")]

INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)
LIMITS = {"grace": 30.0, "patience": 4.0, "shutdown": 5.0}


# The kinds, numbers, codes and times of events; until when a worker may end by itself.
@pytest.mark.parametrize("events, expected", [
    ([], math.inf),
    ([("started", 0, 0, 1.0), ("ended", 0, 0, 2.0)], math.inf),
    ([("ended", 0, 3, 2.0), ("ended", 1, 0, 3.0)], 6.0),
    ([("ended", 0, 1, 2.0), ("ended", 1, 143, 3.0)], 33.0),
    ([("signal", TERM, 0, 1.0)], 31.0),
    ([("signal", TERM, 0, 1.0), ("ended", 0, 143, 2.0)], 32.0),
    ([("signal", TERM, 0, 1.0), ("ended", 0, 1, 2.0)], 31.0),
    ([("signal", INT, 0, 1.0)], math.inf),
    ([("signal", INT, 0, 1.0), ("ended", 0, 0, 2.0)], 32.0),
    ([("signal", INT, 0, 1.0), ("signal", INT, 0, 3.0)], 8.0),
    ([("signal", int(signal.SIGSTOP), 1, 1.0), ("signal", int(signal.SIGCONT), 1, 2.0)], math.inf),
])  # fmt: skip
def test_deadlines(events: list[tuple[str, int, int, float]], expected: float) -> None:
    assert deadline([Event(*event) for event in events], **LIMITS) == expected


class Group:
    """Supervisors of workers that run a shell script, started as elastic does."""

    def __init__(self, script: str, folder: Path, count: int = 2, **limits: float) -> None:
        self.events = Events(str(folder / "events"))
        self.events.add("start", count)
        environments = [{**os.environ, "RANK": str(rank)} for rank in range(count)]
        self._plan = {"launcher": os.getpid(), "workers": count, "events": self.events.file, "limits": LIMITS | limits}
        self._plan |= {"command": ["/bin/sh", "-c", script], "environments": environments, "outputs": None}
        (folder / "plan").write_text(json.dumps(self._plan))
        command = [sys.executable, "-I", "-S", workers.__file__]
        own = [{**os.environ, PLAN: str(folder / "plan"), "LOCAL_RANK": str(rank)} for rank in range(count)]
        self.processes = [subprocess.Popen(command, env=env, start_new_session=True) for env in own]

    def codes(self) -> list[int]:
        """The exit codes of the supervisors."""
        return [process.wait(PATIENCE) for process in self.processes]

    def said(self, *kinds: str) -> list[tuple[str, int, int]]:
        """The events of these kinds."""
        return [event[:3] for event in self.events.read() if event.kind in kinds]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    groups: list[Group] = []

    def started(script: str, count: int = 2, **limits: float) -> Group:
        groups.append(Group(script, tmp_path, count, **limits))
        return groups[-1]

    yield started
    for process in [process for group in groups for process in group.processes]:
        process.kill()
        process.wait()


Start = Callable[..., Group]


def pid(file: Path) -> int:
    """The process id that a script has written."""
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_supervisors_end_together(start: Start) -> None:
    """The first one waits for the last worker: elastic ends the others as soon as one supervisor is gone."""
    group = start('if [ "$RANK" = 0 ]; then exit 3; fi; sleep 1; exit 4')
    wait_until(lambda: bool(group.said("ended")))
    assert [process.poll() for process in group.processes] == [None, None]
    assert group.codes() == [1, 1]
    assert group.said("ended") == [("ended", 0, 3), ("ended", 1, 4)]


def test_all_went_well(start: Start) -> None:
    group = start("exit 0")
    assert group.codes() == [0, 0]
    assert sorted(group.said("started", "ended")) == [(kind, rank, 0) for kind in ("ended", "started") for rank in (0, 1)]


def test_each_worker_has_a_session_of_its_own(start: Start, tmp_path: Path) -> None:
    group = start(f"echo $$ > {tmp_path}/$RANK; exec sleep 100")
    pids = [pid(tmp_path / str(rank)) for rank in (0, 1)]
    assert [os.getsid(process) for process in pids] == pids
    group.events.add("signal", signal.SIGKILL)
    assert group.codes() == [1, 1]
    assert sorted(group.said("ended")) == [("ended", 0, -9), ("ended", 1, -9)]


def test_who_does_not_end_is_killed_with_all_that_it_has_started(start: Start, tmp_path: Path) -> None:
    group = start(
        f'if [ "$RANK" = 0 ]; then exit 3; fi; trap "" TERM; sleep 100 & echo $! > {tmp_path}/child; wait; sleep 100',
        patience=0.3,
        shutdown=0.3,
    )
    child = pid(tmp_path / "child")
    assert group.codes() == [1, 1]
    assert group.said("ended", "killed") == [("ended", 0, 3), ("killed", 1, -9)]
    wait_until(lambda: not alive(child), within(2.0))


def test_elastic_asks_for_an_end(start: Start) -> None:
    """It signals the supervisors when another node has joined: that is no failure of a worker."""
    group = start("exec sleep 100")
    wait_until(lambda: len(group.said("started")) == 2)
    for process in group.processes:
        process.terminate()
    assert group.codes() == [1, 1]
    assert sorted(group.said("ended", "killed", "stopped")) == [("stopped", 0, -15), ("stopped", 1, -15)]


def test_a_killed_supervisor_takes_its_worker_along(start: Start, tmp_path: Path) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("Linux only")
    group = start(f"echo $$ > {tmp_path}/worker; exec sleep 100", 1)
    worker = pid(tmp_path / "worker")
    group.processes[0].kill()
    wait_until(lambda: not alive(worker), within(5.0))


def test_stopping_and_going_on(start: Start, tmp_path: Path) -> None:
    group = start(f"(while true; do echo >> {tmp_path}/tick; sleep 0.01; done)", 1)
    tick = tmp_path / "tick"
    wait_until(tick.exists)
    group.events.add("signal", signal.SIGSTOP, 1)
    wait_until(lambda: state(tick) == state(tick, 0.3))
    before = state(tick)
    group.events.add("signal", signal.SIGCONT, 1)
    wait_until(lambda: state(tick) > before)
    group.events.add("signal", signal.SIGKILL, 1)
    assert group.codes() == [1]


def state(file: Path, after: float = 0.0) -> int:
    """Its size after some seconds."""
    if after:
        signal.sigtimedwait([], after)
    return file.stat().st_size
