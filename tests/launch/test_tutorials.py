"""PyTorch's two DDP tutorials with trainkit's Trainer: each sample is used once per epoch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.worlds.worlds import free_port

SCRIPT = str(Path(__file__).with_name("tutorial_script.py"))


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_each_sample_once(launcher: str, run_dir: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT] if launcher == "torchrun" else [SCRIPT]
    environment = dict(os.environ)
    if launcher == "spawn":
        environment["MASTER_PORT"] = str(free_port())
    done = subprocess.run(
        [sys.executable, *command, launcher, str(run_dir)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((run_dir / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    for epoch in (0, 1):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == list(range(53))
    assert ranks[0][0] != ranks[0][1], "the second epoch has another order"
    assert "Traceback" not in done.stderr
