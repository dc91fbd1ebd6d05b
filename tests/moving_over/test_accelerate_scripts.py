"""Scripts written for Accelerate run here behind the door, unedited, and compute the same losses, bit for bit.

Each run is a fresh Python, because the name `accelerate` means one package in a process. All examples run in one. They do not
shuffle: order and random numbers are keyed here and global in Accelerate.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

SCRIPTS = Path(__file__).with_name("accelerate_scripts")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")


@cache
def computed(*launcher: str, script: str = "by_feature.py") -> dict[str, Any]:
    """What the examples of a script compute, by name."""
    with TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "EXAMPLES_FOLDER": folder}
        command = [sys.executable, "-W", "ignore", *launcher, str(SCRIPTS / script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def behind_the_door(processes: int, script: str = "by_feature.py") -> dict[str, Any]:
    launcher = ("-m", "trainkit", "launch", "--as", "accelerate", "--num_processes", str(processes))
    return computed(*launcher, script=script)


def test_the_examples_of_single_features() -> None:
    theirs, ours = computed(), behind_the_door(1)
    assert ours == theirs
    assert len(ours) == 12
    assert ours["checkpointing"]["resumed"] == [[29, True], [17, True]]
    assert ours["automatic_gradient_accumulation"]["fits"]


def test_the_examples_on_two_processes() -> None:
    """Evaluations have each sample once, a resumed run is the same, and ranks stop together."""
    found = behind_the_door(2)
    for name in ("gradient_accumulation", "early_stopping"):
        assert [samples for samples, _ in found[name]["metrics"]] == [27, 27]
    assert found["multi_process_metrics"] == behind_the_door(1)["multi_process_metrics"]
    assert [equal for _, equal in found["checkpointing"]["resumed"]] == [True, True]
    assert 2 < len(found["early_stopping"]["losses"]) < 16
    assert [step for step, _ in found["tracking"]["logged"][1:]] == [0, 1]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loop_that_reads_ahead_to_count_tokens_has_the_mean_over_all_of_them(processes: int) -> None:
    """The norms of the gradients are those of the mean over the tokens of each global batch, whose last one is short."""
    torch.manual_seed(42)
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 3, (54, 5), generator=generator)
    labels[torch.rand(54, 5, generator=generator) < 0.4] = -100
    model = nn.Linear(6, 15).double()
    inputs = torch.randn(54, 6, generator=generator).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for _ in range(2):
        for start in range(0, 54, 8 * processes):
            part = slice(start, start + 8 * processes)
            nn.functional.cross_entropy(model(inputs[part]).view(-1, 3), labels[part].flatten()).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
    for example in ("autoregressive", "autoregressive_accumulate"):
        assert behind_the_door(processes)[example]["norms"] == pytest.approx(norms, rel=1e-9)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_trainer_of_speech_continues_from_the_file_that_it_has_saved(processes: int) -> None:
    """A run in two halves, with a file of `accelerator.save` that `torch.load` reads, is the whole run, bit for bit."""
    found = behind_the_door(processes, "speech.py")
    first, second = found["first"], found["second"]
    assert first["losses"] + second["losses"] == found["whole"]["losses"]
    assert second["weights"] == found["whole"]["weights"]
    assert len(first["losses"]) == len(second["losses"]) == 16 // processes
    if processes == 1:
        assert found == computed(script="speech.py")
