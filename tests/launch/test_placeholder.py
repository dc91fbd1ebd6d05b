"""Placeholder processes, started like torch elastic starts them. Tests with the launcher are in test_agent.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.launch.agents import alive, wait_until
from helpers.patience import PATIENCE, within

from trainkit.launch import placeholder
from trainkit.launch.placeholder import DONE, WORKERS, variables_file

pytestmark = [pytest.mark.prompt, pytest.mark.skipif(os.name != "posix", reason="process groups of POSIX")]

PLACE = dict.fromkeys(placeholder._VARIABLES, "x") | {"LOCAL_RANK": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / WORKERS).touch()
    return folder


@pytest.fixture
def started(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-S", placeholder.__file__, str(folder), str(os.getpid())]
    with subprocess.Popen(command, env=PLACE) as process:
        wait_until((folder / variables_file(1)).exists)
        yield process
        process.kill()


def test_a_placeholder_reports_its_place(folder: Path, started: subprocess.Popen[bytes]) -> None:
    """A placeholder writes the variables of its rank to a file, and keeps running."""
    assert json.loads((folder / variables_file(1)).read_text()) == PLACE
    assert started.poll() is None


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_placeholder_exits_as_the_launcher_says(folder: Path, started: subprocess.Popen[bytes], succeeded: bool) -> None:
    file = folder / WORKERS
    file.rename(folder / DONE) if succeeded else file.unlink()
    assert started.wait(PATIENCE) == int(not succeeded)


def test_a_placeholder_without_a_launcher_kills_the_workers(folder: Path) -> None:
    worker = subprocess.Popen(["/bin/sh", "-c", "sleep 100 & wait"], start_new_session=True)
    (folder / WORKERS).write_text(f"{worker.pid}\n")
    command = [sys.executable, "-I", "-S", placeholder.__file__, str(folder), "0"]
    assert subprocess.run(command, env=PLACE, timeout=PATIENCE).returncode == 1
    assert worker.wait(PATIENCE) == -9
    wait_until(lambda: not alive(worker.pid), within(2.0))
    assert not folder.exists()
