"""DVCLive's logger, which subclasses Lightning's and Fabric's, writes the metrics and hyper-parameters of a run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from helpers.docs.running import run_files_of

pytestmark = pytest.mark.vendors


def test_a_run(tmp_path: Path) -> None:
    run_files_of("optuna-hydra-dvclive.md", tmp_path, "train_dvclive.py")
    logs = tmp_path / "dvclive"
    metrics = json.loads((logs / "metrics.json").read_text("utf-8"))
    assert metrics["step"] == 58
    with open(logs / "plots" / "metrics" / "train" / "loss.tsv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [int(row["step"]) for row in rows] == [10, 20, 30, 40, 50]
    assert metrics["train"]["loss"] == float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert yaml.safe_load((logs / "params.yaml").read_text("utf-8")) == {"lr": 1e-3}
