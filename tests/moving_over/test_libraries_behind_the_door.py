"""Libraries that are built on Lightning run here as they are: training, saving, loading and a resume, in as many steps.

So do those that import Accelerate. `make test-slow` installs them, with both packages, in an environment of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.support import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).with_name("libraries")
PYTHON = Path(os.environ.get("TRAINKIT_LIBRARIES", ""), "bin", "python")
MISSING = "the libraries are not there: make test-slow installs them"


def printed(script: str, folder: Path, *launcher: str) -> dict[str, Any]:
    """Run a script in the environment of the libraries; returns the JSON that it prints last."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(PYTHON), *launcher, str(SCRIPTS / script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("script", ["forecast.py", "cells.py"])
def test_a_library(script: str, run_dir: Path) -> None:
    if not PYTHON.is_file():
        pytest.skip(MISSING)
    real = printed(script, run_dir / "lightning")
    ours = printed(script, run_dir / "trainkit", "-m", "trainkit", "launch", "--as", "lightning")
    for key in ("epochs", "steps"):
        assert ours.get(key) == real.get(key)
    assert ours.get("elbo", []) == pytest.approx(real.get("elbo", []), rel=0.02)  # they draw random numbers in a step


def test_libraries_that_import_accelerate(run_dir: Path) -> None:
    """peft, transformers, diffusers and trl are imported, and a LoRA model has the losses that it has with Accelerate."""
    if not PYTHON.is_file():
        pytest.skip(MISSING)
    real = printed("adapters.py", run_dir / "accelerate")
    ours = printed("adapters.py", run_dir / "trainkit", "-m", "trainkit", "launch", "--as", "accelerate")
    assert (real["of"], ours["of"]) == ("accelerate.accelerator", "trainkit.accelerator.accelerator")
    assert ours["losses"] == real["losses"]
    assert ours["losses"][-1] < ours["losses"][0] - 0.05
