"""Scripts written for Lightning run here with their imports renamed, and compute the same losses, bit for bit.

`make test-lightning` installs Lightning in a folder of its own. The scripts do not shuffle and use no dropout: order and random
numbers are keyed here and global in Lightning.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.lightning import listing
from helpers.support import ROOT

from trainkit.names.doors import variables

pytestmark = pytest.mark.lightning

SCRIPTS = Path(__file__).with_name("scripts")
MEANS = ("metrics", "test", "accuracy", "best")
LIGHTNING = os.environ.get("TRAINKIT_LIGHTNING", "")
RENAMED = [  # all that a script needs
    (r"^import lightning(\.pytorch)?( as \w+)", r"import trainkit\2"),
    (r"^from lightning(\.pytorch)? import", "from trainkit import"),
    (r"^from lightning\.pytorch\.", "from trainkit."),
    (r"_target_: lightning\.pytorch\.", "_target_: trainkit."),
]


@pytest.fixture(autouse=True, scope="module")
def _lightning() -> None:
    if not Path(LIGHTNING, "lightning").is_dir() or not LIGHTNING:
        pytest.skip("Lightning is not there: make test-lightning installs it")


def printed(script: str, folder: Path, package: Path | str, *arguments: str, door: bool = False) -> dict[str, Any]:
    """Run a script in its folder; returns the JSON that it prints last."""
    environment = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    if door:
        environment |= variables("lightning", environment)
    path = folder / script
    command = [sys.executable, "-W", "ignore", path.name, *arguments]
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rename(folder: Path) -> None:
    """Rename the imports of all scripts and the `_target_` of all configurations in a folder."""
    for path in [*folder.rglob("*.py"), *folder.rglob("*.yaml")]:
        text = path.read_text("utf-8")
        for pattern, replacement in RENAMED:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        path.write_text(text, "utf-8")


def assert_equal(script: str, folder: Path, *arguments: str, door: bool = False) -> None:
    """A script computes the same losses under both, bit for bit, and the same means to the precision of float32."""
    for name in ("theirs", "ours"):
        shutil.copytree(SCRIPTS, folder / name)
    if not door:
        rename(folder / "ours")
    theirs = printed(script, folder / "theirs", LIGHTNING, *arguments)
    ours = printed(script, folder / "ours", ROOT, *arguments, door=door)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == (pytest.approx(value, rel=1e-6) if name in MEANS else value), name
    assert len(theirs["losses"]) >= 20


@pytest.mark.parametrize("script", ["autoencoder", "fine_tuning", "gan", "language_model", "dqn", "ppo"])
def test_a_script(script: str, tmp_path: Path) -> None:
    assert_equal(f"{script}.py", tmp_path)


def test_a_project_with_a_command_line(tmp_path: Path) -> None:
    """`class_path: lightning.pytorch.…` in its file stays as it is."""
    arguments = ("fit", "--config", "config.yaml", "--trainer.max_epochs=3", "--model.hidden", "20")
    assert_equal("cli_project/main.py", tmp_path, *arguments)
    (saved,) = (tmp_path / "ours").rglob("logs/**/config.yaml")
    assert "hidden: 20" in saved.read_text("utf-8")


@pytest.mark.parametrize("door", [False, True])
def test_a_project_like_the_hydra_template(door: bool, tmp_path: Path) -> None:
    """Behind the door, `_target_: lightning.pytorch.…` stays as it is."""
    assert_equal("hydra_template/train.py", tmp_path, door=door)


def test_the_list_of_names_is_that_of_the_installed_lightning(tmp_path: Path) -> None:
    """From this list `tests/unsupported` takes the names that can be imported, or whose error says what to use."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", listing.__file__],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": LIGHTNING},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == listing.NAMES.read_text("utf-8")
