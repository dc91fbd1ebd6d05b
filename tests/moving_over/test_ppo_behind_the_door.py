"""A loop in the shape of TRL's PPOTrainer runs behind the door, unedited: as under Accelerate, and the same on two processes.

Each run is a fresh Python, because the name `accelerate` means one package in a process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("accelerate_scripts") / "ppo.py"
DOOR = ("-m", "trainkit", "launch", "--as", "accelerate", "--cpu", "--num_processes")


def computed(folder: Path, *launcher: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *launcher, str(SCRIPT)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_ppo_computes_the_same(tmp_path: Path) -> None:
    ours = computed(tmp_path, *DOOR, "1")
    assert ours == computed(tmp_path)
    assert ours["steps"] == 18
    on_two = computed(tmp_path, *DOOR, "2")
    for name, values in ours.items():
        assert on_two[name] == pytest.approx(values, rel=1e-4), name  # another order of sums
