"""Paths and functions that many tests use: `from helpers.support import run_python`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from helpers.forks import ForkedProcess, can_fork
from helpers.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"  # where `helpers` is imported from
STARTUP = TESTS / "startup"  # on PYTHONPATH of every Python process that a test starts

_OF_GLOO = re.compile(
    r"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : |\s)*"
)


def without_gloo(printed: str) -> str:
    """Remove the lines about connections that gloo of torch 2.9 prints, also where processes printed them into one line."""
    if "[Gloo]" not in printed:
        return printed
    return "".join(line for line in printed.splitlines(keepends=True) if not _OF_GLOO.fullmatch(line))


def examples(number: int) -> int:
    """How many examples of hypothesis a test tries: a quarter, and all in `make test-slow`."""
    return number if "TRAINKIT_ALL_EXAMPLES" in os.environ else number // 4


def run_python(
    *command: str,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    bare: bool = False,
    installed_in: str | Path | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process and wait until it exits, with any exit code.

    The process is forked from one that has imported torch and trainkit, where `can_fork` allows that; see `forks.py`.

    Args:
        command: One string is a program (`python -c`); several are arguments (`"-m", "trainkit", "--help"`).
        cwd: Working directory; None: that of the test.
        env: Variables to add to the environment.
        bare: Start a new interpreter, for a test that asserts what it imports, its memory or its command line.
        installed_in: Folder in which trainkit was installed, to import it from there instead of the checkout; it is bare then.
        timeout: Seconds after which the process is killed and `subprocess.TimeoutExpired` is raised.
    """
    arguments = ["-c", *command] if len(command) == 1 else list(command)
    path = os.pathsep.join([str(installed_in or ROOT), str(TESTS), str(STARTUP)])
    variables = {**os.environ, "PYTHONPATH": path, **(env or {})}
    if not bare and installed_in is None and can_fork(arguments, env or {}):
        return _run_forked(arguments, str(cwd or Path.cwd()), variables, timeout)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=variables,
        timeout=timeout,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def _run_forked(command: list[str], cwd: str, env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        descriptors = {"stdin": nothing.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
        process = ForkedProcess(command, cwd=cwd, env=env, **descriptors)
        try:
            code = process.wait(timeout)
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
            code = None
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, *texts)
    return subprocess.CompletedProcess([sys.executable, *command], code, *texts)
