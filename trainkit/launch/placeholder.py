"""A placeholder: the process that torch elastic starts in place of a worker, run by the path of this file.

Elastic ends all its processes when one has failed or exited with 143. So it numbers and watches placeholders, and the launcher
starts the workers. A placeholder reports its variables and waits for the launcher. If the launcher was killed, it kills the
workers and what they have started. It is a file of its own, which imports only the standard library: that takes 10 ms and
10 MB for each worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time

__all__ = ["DONE", "LOCK_PREFIX", "WORKERS", "variables_file", "wait_for_launcher"]

WORKERS = "workers"  # A file in the launcher's folder with the process IDs of the workers, until all of them have ended.
LOCK_PREFIX = "placeholder-"  # the beginning of the name of a file that a placeholder keeps locked while it runs
DONE = "done"  # the file's name when all workers have succeeded
_STEP_S = 0.05
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)


def variables_file(local_rank: int) -> str:
    """The name of the file with the variables that elastic sets for a worker."""
    return f"place-{local_rank}.json"


def wait_for_launcher(folder: str, launcher: int) -> int:
    """Wait until the launcher with this process ID has removed or renamed the file of its workers; returns the exit code."""
    workers = f"{folder}/{WORKERS}"
    lock = open(f"{folder}/{LOCK_PREFIX}{os.getpid()}", "w")  # noqa: SIM115 - open until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX)
    with open(f"{folder}/new-{os.getpid()}", "w") as file:
        json.dump({name: os.environ[name] for name in _VARIABLES}, file)
    os.rename(file.name, f"{folder}/{variables_file(int(os.environ['LOCAL_RANK']))}")
    while os.path.exists(workers) and os.getppid() == launcher:
        time.sleep(_STEP_S)
    if os.getppid() != launcher:
        with contextlib.suppress(OSError), open(workers) as pids:
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    return int(not os.path.exists(f"{folder}/{DONE}"))


if __name__ == "__main__":
    sys.exit(wait_for_launcher(sys.argv[1], int(sys.argv[2])))
