"""Paths and functions that many tests use: `from helpers.support import run_python`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

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


def covering(*values: Sequence[Any]) -> list[Any]:
    """All combinations of values, for `pytest.mark.parametrize`; every second one is marked slow.

    Without those, each value remains, and of three or more arguments each pair of values.
    """
    found = []
    for places in product(*(range(len(each)) for each in values)):
        marks = [pytest.mark.slow] if sum(places) % 2 else []
        found.append(pytest.param(*(each[place] for each, place in zip(values, places, strict=True)), marks=marks))
    return found


def run_python(
    *command: str,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    installed_in: str | Path | None = None,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process and wait until it exits, with any exit code.

    Args:
        command: One string is a program (`python -c`); several are arguments (`"-m", "trainkit", "--help"`).
        cwd: Working directory; None: that of the test.
        env: Variables to add to the environment.
        installed_in: Folder in which trainkit was installed, to import it from there instead of the checkout.
        timeout: Seconds after which the process is killed and `subprocess.TimeoutExpired` is raised.
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
