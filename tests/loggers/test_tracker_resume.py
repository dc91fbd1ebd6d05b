"""A Trainer's run that is killed and resumed, with trackers that cannot delete records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.disturbed import wait_until
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trackers import PLAIN, comet_records, mlflow_records, needs

from trainkit import Trainer
from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger
from trainkit.loggers.run_files import read_metrics

pytestmark = [needs("mlflow"), needs("comet_ml"), pytest.mark.usefixtures("local_mlflow", "comet_offline")]


class KillsItself(TinyModule):
    """Kills its own process in the middle of a step if `killed` is set."""

    killed = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.killed and self.trainer.global_step == 7:
            saved = Path(self.trainer.checkpoint_callback.dirpath) / "step-00000006"
            wait_until(saved.exists, lambda: f"{saved} was not written")  # saved in the background, and needed for the resume
            for logger in self.trainer.loggers:
                logger.save()  # stores the records that were logged after the checkpoint
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


def train(root: Path, loggers: list[Logger], killed: bool = False) -> None:
    """Twelve optimizer steps in three epochs; validates and saves every two. Resumes if there is a checkpoint."""
    torch.manual_seed(0)
    module = KillsItself()
    module.killed = killed
    trainer = Trainer(
        max_epochs=3, log_every_n_steps=1, logger=loggers, default_root_dir=root, seed=1, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)],
    )  # fmt: skip
    trainer.fit(module, tiny_loader(shuffle=True), tiny_loader(8), ckpt_path="auto")
    trainer.test(module, tiny_loader(8))
    for logger in loggers:
        Logger.finalize(logger, "success")  # CometLogger.finalize would keep the experiment open for further fits


def trackers() -> list[Logger]:
    return [MLFlowLogger(), CometLogger(online=False, **PLAIN)]


def test_each_record_is_there_once(run_dir: Path) -> None:
    program = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[1:3]\n"
        "from test_tracker_resume import train, trackers; train(Path('killed'), trackers(), killed=True)"
    )
    here = Path(__file__).parent
    ended = subprocess.run([sys.executable, "-c", program, str(here), str(here.parent)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    mlflow, comet = trackers()
    train(run_dir / "killed", [mlflow, comet])
    train(run_dir / "whole", [CSVLogger()])

    logs = run_dir / "killed" / "logs"
    keys = {path.name.partition("-")[0] for path in logs.glob("*.zip")}
    assert len(keys) == 2  # the archive of the killed process is empty
    assert comet.version in keys
    assert isinstance(mlflow, MLFlowLogger)
    expected = read_metrics(run_dir / "whole")
    assert [step for step, _ in expected["train_loss"]] == list(range(1, 13))
    assert set(expected) == {"epoch", "test_loss", "train_loss", "val_loss"}
    found = mlflow_records(mlflow.tracking_uri, str(mlflow.version))
    assert {name: sorted(rows) for name, rows in found.items()} == {name: sorted(rows) for name, rows in expected.items()}
    del expected["epoch"]  # Comet stores the epoch with each metric
    resumed = {name: [(step, value) for step, value in rows if step > 6] for name, rows in expected.items()}
    assert comet_records(logs) == resumed
