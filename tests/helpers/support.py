"""What tests share and that is no fixture: `from helpers.support import run_python`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"  # where `helpers` is imported from
STARTUP = TESTS / "startup"  # on the path of every Python that a test starts

_OF_GLOO = re.compile(
    r"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of connected peer ranks is : |\s)*"
)


def without_gloo(printed: str) -> str:
    """What processes have printed, less what gloo of torch 2.9 prints of its connections, perhaps one line within another."""
    if "[Gloo]" not in printed:
        return printed
    return "".join(line for line in printed.splitlines(keepends=True) if not _OF_GLOO.fullmatch(line))


def run_python(
    *command: str,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    installed_in: str | Path | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own and return it when it has ended, whatever its exit code.

    Args:
        command: one string is a program (`python -c`); several are arguments (`"-m", "trainkit", "--help"`).
        cwd: the working directory; the test's own if None.
        env: variables to add to the environment.
        installed_in: a folder that trainkit was installed into: it is imported from there and not from the checkout.
        timeout: seconds after which the process is ended and `subprocess.TimeoutExpired` raised.
    """
    arguments = ["-c", *command] if len(command) == 1 else list(command)
    path = os.pathsep.join([str(installed_in or ROOT), str(TESTS), str(STARTUP)])
    variables = {**os.environ, "PYTHONPATH": path, **(env or {})}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=variables,
        timeout=timeout,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
