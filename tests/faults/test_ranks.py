"""One of several processes fails: all exit soon, its traceback is printed last, and no process remains."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.patience import ALONE, PATIENCE, within
from helpers.worlds.worlds import free_port

pytestmark = pytest.mark.prompt

SCRIPT = str(Path(__file__).with_name("failing_script.py"))
LIMIT = within(10)  # seconds from the failure to the exit of the last process
TIMEOUT = 3 if ALONE else 20  # timeout of collectives in seconds; all processes must have started within it
SLOW = pytest.mark.slow

LAUNCHERS = {
    "script": [SCRIPT],
    "trainkit launch": ["-m", "trainkit", "launch", "--nproc-per-node", "2", SCRIPT],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT],
    "spawn": [SCRIPT],
}


class Job:
    """A training script that was started by one of the launchers."""

    def __init__(self, launcher: str, kind: str, rank: int, folder: Path) -> None:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TIMEOUT": str(TIMEOUT)}
        if launcher != "spawn":
            environment = {name: value for name, value in environment.items() if not name.startswith("MASTER_")}
        more = ["--spawn"] if launcher == "spawn" else []
        self.folder = folder
        with (folder / "output.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *LAUNCHERS[launcher], kind, str(rank), str(folder), *more],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output.log").read_text()

    @property
    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.folder.glob("pid-*")) if path.read_text()]

    def until(self, text: str, patience: float = PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while text not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def ends_within(self, seconds: float) -> float:
        """Wait until the launcher and all its processes have exited; returns how many seconds that took."""
        start = time.monotonic()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.output}")
        while any(alive(pid) for pid in self.pids):
            assert time.monotonic() - start < seconds, f"orphans are left:\n{self.output}"
            time.sleep(0.02)
        return time.monotonic() - start

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@contextlib.contextmanager
def job(launcher: str, kind: str, rank: int, folder: Path) -> Iterator[Job]:
    started = Job(launcher, kind, rank, folder)
    try:
        yield started
    finally:
        started.kill()


def last_error(output: str) -> str:
    """The exception line of the last traceback, without torch's prefix `[rank0]: `."""
    _, _, last = re.sub(r"(?m)^\[rank\d+\]: ", "", output).rpartition("Traceback (most recent call last)")
    lines = [line for line in last.splitlines()[1:] if line and not line.startswith((" ", "trainkit:"))]
    return lines[0] if lines else ""


def with_launchers(others: Iterable[Any], *usual: tuple[str, Any]) -> list[Any]:
    """All pairs of a launcher and one of `others`; pairs that are not in `usual` are slow tests."""
    pairs = itertools.product(LAUNCHERS, others)
    return [pytest.param(*pair, marks=() if pair in usual else SLOW) for pair in pairs]


@pytest.mark.parametrize("launcher, rank", with_launchers([0, 1], ("script", 0), ("trainkit launch", 1)))
def test_one_raises(launcher: str, rank: int, run_dir: Path) -> None:
    with job(launcher, "raise", rank, run_dir) as running:
        running.until(f"failing on rank {rank}")
        running.ends_within(LIMIT)
        assert running.process.returncode != 0
        if launcher != "torchrun":  # torchrun prints its own traceback last
            assert last_error(running.output) == "ValueError: this process fails on purpose", running.output
        assert "ValueError: this process fails on purpose" in running.output


@pytest.mark.parametrize(
    "launcher, kind",
    with_launchers(
        ["kill", "exit", "leave"],
        ("script", "kill"),
        ("trainkit launch", "leave"),
        ("torchrun", "exit"),
    ),
)
def test_one_process_exits_without_traceback(launcher: str, kind: str, run_dir: Path) -> None:
    # one process exits without a traceback: the others exit too, and the output names its rank
    rank = 0 if launcher == "trainkit launch" else 1
    with job(launcher, kind, rank, run_dir) as running:
        running.until(f"failing on rank {rank}")
        running.ends_within(LIMIT)
        assert running.process.returncode != 0
        said = running.output.partition(f"failing on rank {rank}")[2]
        assert re.search(rf"(rank|process) {rank}\b", said), running.output  # mp.spawn calls it process


@SLOW
@pytest.mark.parametrize("launcher, rank", [("trainkit launch", 0), ("script", 1)])
def test_one_hangs(launcher: str, rank: int, run_dir: Path) -> None:
    """When one process hangs, all exit within the timeout, and the run's folder contains the stacks of all processes."""
    with job(launcher, "hang", rank, run_dir) as running:
        running.until(f"failing on rank {rank}")
        running.ends_within(TIMEOUT + LIMIT)
        assert running.process.returncode != 0
        stacks = {path.name: path.read_text() for path in (run_dir / "stacks").glob("*/*")}
        assert sorted(stacks) == ["rank-0.txt", "rank-1.txt"]
        assert "this_line_hangs" in stacks[f"rank-{rank}.txt"]
        assert "train_epoch" in stacks[f"rank-{1 - rank}.txt"]


@SLOW
@pytest.mark.parametrize("kind, words", [("validation", "fails in validation"), ("setup", "fails in setup")])
def test_one_raises_elsewhere(kind: str, words: str, run_dir: Path) -> None:
    # an error in validation or in setup of one process: all exit, and its traceback is printed last
    with job("script", kind, 1, run_dir) as running:
        running.ends_within(PATIENCE)
        assert running.process.returncode != 0
        assert last_error(running.output) == f"ValueError: this process {words}", running.output


@pytest.mark.parametrize(
    "launcher", ["trainkit launch", *(pytest.param(launcher, marks=SLOW) for launcher in ("script", "torchrun", "spawn"))]
)
def test_no_failure(launcher: str, run_dir: Path) -> None:
    """Without a failure, all processes finish with exit code 0 and write no stacks."""
    with job(launcher, "none", 0, run_dir) as running:
        running.ends_within(PATIENCE)
        assert running.process.returncode == 0, running.output
        assert running.output.count("has finished") == 2
        assert not (run_dir / "stacks").exists()
