"""Optuna's studies run the scripts of the how-to page, and prune trials, in one process and in two."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.docs.running import run_files_of

pytest.importorskip("optuna_integration", reason="optuna-integration is not installed")
PAGE = "optuna-hydra-dvclive.md"


def check(printed: str, trials: int) -> None:
    line = next(line for line in printed.splitlines() if line.startswith("['COMPLETE'"))
    states = line.partition("]")[0]
    assert states.count("'COMPLETE'") + states.count("'PRUNED'") == trials
    assert states.count("'PRUNED'") >= 2


def test_the_pruning_callback(tmp_path: Path) -> None:
    check(run_files_of(PAGE, tmp_path, "sweep.py"), 8)


def test_trials_on_two_processes(tmp_path: Path) -> None:
    launch = ("-m", "trainkit", "launch", "--cpu", "--nproc-per-node", "2")
    check(run_files_of(PAGE, tmp_path, *launch, "sweep_ddp.py"), 6)
