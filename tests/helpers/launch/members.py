"""Processes that end in all the ways in which a process can end."""

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
from trainkit.distributed.failure_report import FailureReport, report_failure
from trainkit.distributed.watchdog import Watchdog
from trainkit.distributed.world import World

__all__ = ["GRACE", "LIMIT", "Ended", "Member", "as_script", "end_of", "now", "terminal"]

LIMIT = within(10)  # seconds in which all processes must have ended
GRACE = 0.5  # seconds that a process has to leave a run, in tests where it does not


class Member:
    """One of the processes that torchrun's variables speak of, with all that belongs to it.

    Args:
        timeout: seconds that a collective waits.
        folder: where stacks go.
        grace: seconds that a process has to leave a run when another one has failed: for ever, unless a test is about that.
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
        """As a run of the Trainer."""
        self.watchdog.entered()
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
                self.watchdog.left()

    def step(self) -> float:
        """What needs all processes, and blocks until they come; returns their number."""
        total = torch.ones(1)
        dist.all_reduce(total, group=self.world.control)
        return float(total)

    def close(self) -> None:
        """Leave the process as it was."""
        self.endings.close()
        self.channel.announce_end()
        self.channel.close()
        self.watchdog.close()


def as_script(body: Callable[..., Any], *given: Any) -> None:
    """Run a function as the interpreter runs a script, to its end; output goes to `terminal.txt` in the working directory.

    For a child of the test's fork server, which then differs from a bare process in nothing that matters here.
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
        codes: exit codes by rank; minus the signal that killed it.
        seconds: when each ended, counted from `now`.
        output: all that was printed, in the order in which it was.
    """

    codes: list[int]
    seconds: list[float]
    output: str


def end_of(
    size: int, function: Callable[..., Any], *given: Any, env: dict[str, str] | None = None, limit: float = LIMIT
) -> Ended:
    """Start a function, which calls `as_script`, in `size` processes, and wait for them to end.

    Raises:
        AssertionError: one has not ended `limit` seconds after `now` was called in one of them.
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
    """Here the trouble begins."""
    new = Path(f"now {os.getpid()}")  # several may call it
    new.write_text(repr(time.time()))
    new.replace("now")


def terminal() -> str:
    """What the processes have printed."""
    path = Path("terminal.txt")
    return without_gloo(path.read_text()) if path.exists() else ""
