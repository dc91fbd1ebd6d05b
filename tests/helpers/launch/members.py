"""Processes of a process group with the failure handling of a run, for tests in which they end in different ways."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.process
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.patience import PATIENCE, VAIN, within
from helpers.support import without_gloo
from helpers.worlds.worlds import start_world

from trainkit.distributed.channel import Channel
from trainkit.distributed.failure_handling import FailureReport, Watchdog, report_failure
from trainkit.distributed.world import World

__all__ = ["GRACE", "LIMIT", "Ended", "Member", "as_script", "end_of", "now", "terminal"]

LIMIT = within(10)  # seconds in which all processes must have exited
GRACE = 0.5  # seconds until the watchdog ends a process that does not leave a run by itself, in tests of that


class Member:
    """One process of a job with torchrun's environment variables, with its process group, channel, watchdog and failure report.

    Args:
        timeout: Timeout of collectives in seconds.
        folder: Folder for files with stacks.
        grace: Seconds that a process has to leave a run after another one has failed; by default longer than a test takes.
    """

    def __init__(self, timeout: float = PATIENCE, folder: str = "out", grace: float = VAIN) -> None:
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", timeout=limit)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.world = World(self.rank, self.size, control=dist.new_group(backend="gloo", timeout=limit))
        self.channel = Channel.open(self.rank, self.size, os.environ["MASTER_ADDR"], self.world.from_main)
        self.world.channel = self.channel
        self.watchdog = Watchdog(self.channel, grace=grace)
        self.watchdog.folder = folder
        self.endings = FailureReport(self.channel)

    def run(self, work: Callable[[], Any], tear_down: Callable[[], Any] = lambda: None) -> Any:
        """Call `work` like a run of the Trainer, with its handling of failures."""
        self.watchdog.enter()
        try:
            return work()
        except BaseException as error:
            ending = report_failure(self.channel, error)
            if ending is error:
                raise
            raise ending from error
        finally:
            try:
                tear_down()
            finally:
                self.watchdog.leave()

    def step(self) -> float:
        """An all-reduce, which blocks until all processes take part; returns their number."""
        total = torch.ones(1)
        dist.all_reduce(total, group=self.world.control)
        return float(total)

    def close(self) -> None:
        """Close everything that the constructor has opened, except the process group."""
        self.endings.close()
        self.channel.announce_end()
        self.channel.close()
        self.watchdog.close()


def as_script(body: Callable[..., Any], *given: Any) -> None:
    """Run a function like a script, then exit this process; output goes to `terminal.txt` in the working directory.

    For a process from the fork server of the tests: signal handlers, exception output, `atexit` and the exit code are those of
    a script.
    """
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    file = os.open("terminal.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any = 0
    try:
        body(*given)
    except SystemExit as ending:
        code = ending.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if code is None else code if isinstance(code, int) else 1)


@dataclass
class Ended:
    """How processes have ended.

    Attributes:
        codes: Exit codes by rank; the negative signal number if a signal ended the process.
        seconds: Seconds from the call of `now` to the exit of each process.
        output: The output of all processes, in the order in which it was printed.
    """

    codes: list[int]
    seconds: list[float]
    output: str


def end_of(
    size: int, function: Callable[..., Any], *given: Any, env: dict[str, str] | None = None, limit: float = LIMIT
) -> Ended:
    """Start a function, which must call `as_script`, in `size` processes, and wait until all have exited.

    Raises:
        AssertionError: A process has not exited `limit` seconds after one of them has called `now`.
    """
    world = start_world(size, function, *given)
    ends: dict[int, float] = {}
    ready: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(world.processes)}
    end = time.time() + PATIENCE
    try:
        while ready and time.time() < end:
            for sentinel in wait(list(ready), 0.2):
                ends[ready.pop(sentinel)] = time.time()
            if Path("now").exists():
                end = min(end, float(Path("now").read_text() or "inf") + limit)
        assert not ready, f"ranks {sorted(ready.values())} have not ended within {limit} s:\n{terminal()}"
        for process in world.processes:
            process.join()
        codes = [process.exitcode for process in world.processes]
    finally:
        world.kill()
    began = float(Path("now").read_text()) if Path("now").exists() else 0.0
    return Ended([-99 if code is None else code for code in codes], [ends[rank] - began for rank in range(size)], terminal())


def now() -> None:
    """Called by a process right before the failure of the test: `end_of` counts seconds from here."""
    new = Path(f"now {os.getpid()}")  # several processes may call this
    new.write_text(repr(time.time()))
    new.replace("now")


def terminal() -> str:
    """The output of the processes, without messages of gloo."""
    path = Path("terminal.txt")
    return without_gloo(path.read_text()) if path.exists() else ""
