"""hydra makes trainkit's Trainer of a file that names Lightning's, in a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.docs.running import run_files_of

pytestmark = pytest.mark.vendors


def test_a_sweep(tmp_path: Path) -> None:
    printed = run_files_of("optuna-hydra-dvclive.md", tmp_path, "train_hydra.py", "-m", "lr=0.001,0.01")
    found = [line.split() for line in printed.splitlines() if line.startswith("trainkit.trainer")]
    assert [words[:2] for words in found] == [["trainkit.trainer.trainer", "0.001"], ["trainkit.trainer.trainer", "0.01"]]
    assert float(found[1][2]) < float(found[0][2]) - 0.1
