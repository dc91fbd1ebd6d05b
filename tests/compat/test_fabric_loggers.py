"""Loggers of `lightning.fabric.loggers`: the folder is called `root_dir`, and a `Fabric` logs as with ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.compat.fabric_loggers import CSVLogger, TensorBoardLogger
from trainkit.fabric import Fabric


@pytest.mark.parametrize("options", [{}, {"name": "csv", "version": "first", "flush_logs_every_n_steps": 2}])
def test_a_run_of_fabric_is_logged(options: dict[str, object], tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", loggers=[CSVLogger(root_dir=tmp_path, **options)])
    fabric.log_dict({"loss": 0.5, "step": 3}, step=3)
    fabric.logger.finalize("success")
    folder = tmp_path / str(options.get("name", "lightning_logs")) / str(options.get("version", "version_0"))
    assert (folder / "metrics.csv").read_text("utf-8").splitlines() == ["step,loss", "3,0.5"]


def test_hyper_parameters_go_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fabric = Fabric(accelerator="cpu", loggers=TensorBoardLogger(root_dir=tmp_path, name="tensorboard"))
    fabric.logger.log_hyperparams({"lr": 0.1, "train": {"max_norm": 1.0}})
    fabric.log("loss", 0.5, step=1)
    fabric.logger.finalize("success")
    assert [path.parent.name for path in (tmp_path / "tensorboard").rglob("events*")]
