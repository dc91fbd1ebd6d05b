"""Callbacks and loggers that derive from the installed Lightning's classes run in a Trainer of trainkit as in Lightning's.

`make test-lightning` installs Lightning in a folder of its own. The program is a process of its own, because Lightning stays
imported in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.support import ROOT

import trainkit.callbacks

pytestmark = pytest.mark.lightning

LIGHTNING = os.environ.get("TRAINKIT_LIGHTNING", "")
PROGRAM = ROOT / "tests" / "helpers" / "lightning" / "real_objects.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not LIGHTNING or not Path(LIGHTNING, "lightning").is_dir():
        pytest.skip("Lightning is not there: make test-lightning installs it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), LIGHTNING]), "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("objects")
    done = subprocess.run([sys.executable, PROGRAM], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_callback_gets_the_same_calls_in_the_same_order(found: Any) -> None:
    assert found["ours"]["calls"] == found["theirs"]["calls"]
    assert len(found["ours"]["calls"]) > 70
    assert ["setup", {"stage": "fit"}] in found["ours"]["calls"]


def test_loggers_get_the_same(found: Any) -> None:
    ours, theirs = found["ours"], found["theirs"]
    assert ours["losses"].keys() == theirs["losses"].keys()
    for name, values in theirs["losses"].items():
        assert [float(value) for value in ours["losses"][name]] == pytest.approx([float(value) for value in values], rel=1e-6)
    parameters = {"width": 4}  # Lightning passes them again for each evaluation.
    assert ours["tracked"][0] == theirs["tracked"][0] == parameters
    assert ours["tracked"][1:] == [call for call in theirs["tracked"] if call != parameters]
    assert ours["events"] > 0


def test_loggers_in_a_loop_of_ones_own(found: Any) -> None:
    """`Accelerator(log_with=)` and `Fabric(loggers=)` take loggers of Lightning's Trainer and of its Fabric."""
    (calls, shown, *files), (of_fabric, is_theirs, rows) = found["own loop"]
    assert calls == [{"lr": 0.1}, ["loss", "text"], ["loss", "text"], "success"]
    assert shown == "ExperimentWriter"
    assert [[(row["loss"], row["step"], row["text"]) for row in each] for each in files] == [
        [("0.5", "0", "a"), ("0.5", "1", "a")]
    ] * 2
    assert of_fabric == [["loss"], ["loss"]]
    assert is_theirs
    assert [(row["loss"], row["step"]) for row in rows] == [("0.5", "0"), ("0.5", "1")]


def test_each_callback_of_lightnings_own_is_refused_with_ours(found: Any) -> None:
    for name, message in found["refused"].items():
        start = f"HookError: {name}: this is lightning.pytorch's class, not trainkit's."
        assert message.startswith(start), message
        assert hasattr(trainkit.callbacks, name)
        assert f"Fix: from trainkit.callbacks import {name}; or" in message
    assert len(found["refused"]) > 20


def test_modules_and_data_are_refused(found: Any) -> None:
    assert found["module"].startswith("ModuleError: Regression: its base class LightningModule is lightning.pytorch's, not")
    assert found["data"].startswith("DataError: LightningDataModule: this is lightning.pytorch's class, not trainkit's.")
