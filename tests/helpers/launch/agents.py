"""Launcher agents for tests: `start_agent` runs `run_job` in a new process, with a small script as its worker processes.

The agent's process is forked from the fork server of `worlds.py`, so it starts fast. The workers are plain Python scripts,
which import torch only if the script does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.patience import PATIENCE
from helpers.worlds.worlds import World, start_world

__all__ = ["Agent", "alive", "start_agent", "wait_until"]

# The first lines of each worker's script. `ready` reports that the worker runs, and which processes it has started. `say`
# writes a whole line at once, so that lines of different workers do not mix.
HEAD = """\
import os, signal, subprocess, sys, time
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
rank, restart, folder = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["FOLDER"]
def ready(*pids):
    with open(f"{folder}/new-{restart}-{rank}", "w") as file:
        file.write(" ".join(map(str, (os.getpid(), *pids))))
    os.rename(f"{folder}/new-{restart}-{rank}", f"{folder}/ready-{restart}-{rank}")
"""


class Agent:
    """A running agent.

    Attributes:
        process: Process id of the agent.
        folder: Folder for the files of its workers.
    """

    def __init__(self, world: World, folder: Path, count: int) -> None:
        self._world, self.folder, self._count = world, folder, count
        pid = world.processes[0].pid
        assert pid is not None
        self.process: int = pid

    def ready(self, restart: int = 0) -> list[list[int]]:
        """Wait until all workers have called `ready`; returns for each its process id and the ids that it reported."""
        files = [self.folder / f"ready-{restart}-{rank}" for rank in range(self._count)]
        wait_until(lambda: all(file.exists() for file in files))
        return [[int(pid) for pid in file.read_text().split()] for file in files]

    def signal(self, number: int) -> None:
        """Send the agent a signal."""
        os.kill(self.process, number)

    def code(self) -> int:
        """Wait until the agent exits; returns its exit code."""
        (code,) = self._world.results()
        assert isinstance(code, int)
        return code

    def killed(self) -> str:
        """Wait until the agent is killed; returns how it ended, such as "ended with -9"."""
        ((fine, text),) = self._world.ends()
        assert not fine
        return str(text)

    @property
    def output(self) -> str:
        """The output of the agent and its workers."""
        return (self.folder / "output").read_text()


def start_agent(
    script: str, folder: Path, count: int = 2, number: int = 0, limits: dict[str, Any] | None = None, **options: Any
) -> Agent:
    """Start an agent with `count` workers, each of which runs a script that begins with `HEAD`.

    Args:
        script: Script of the workers, without `HEAD`.
        folder: Folder for the script, the output and the files of the workers.
        count: Number of workers.
        number: A different number for each agent, if several have the same folder.
        limits: New values for constants (in seconds) or functions of the modules `agent` and `workers`, by name.
        options: Arguments of the `Job`.
    """
    (folder / "script.py").write_text(HEAD + script)
    world = start_world(1, _agent, str(folder), count, f"output{number or ''}", limits or {}, options)
    return Agent(world, folder, count)


def _agent(folder: str, count: int, output: str, limits: dict[str, Any], options: dict[str, Any]) -> int:
    from trainkit.launch import agent, workers
    from trainkit.launch.agent import Job, run_job

    for name, value in limits.items():
        setattr(agent if hasattr(agent, name) else workers, name, value)
    os.setsid()  # so that signals to its process group reach no other process
    file = os.open(f"{folder}/{output}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in own} | {"FOLDER": folder}
    options = {"max_restarts": 0, **options}
    return run_job(Job((sys.executable, f"{folder}/script.py"), environment, count, **options))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Wait until the condition holds; fail after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)
