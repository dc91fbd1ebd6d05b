"""`trainer.explain()` describes the settings, schedules and hooks of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader
from helpers.runs.trainers import make_trainer
from torch.optim.lr_scheduler import StepLR

from trainkit.callbacks import EarlyStopping
from trainkit.loggers import CSVLogger


def test_explain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    class Scheduled(TinyModule):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": StepLR(optimizer, 1), "interval": "step", "frequency": 3}]

        def on_train_epoch_end(self) -> None: ...

    trainer = make_trainer(
        EarlyStopping("val_loss"),
        logger=CSVLogger(tmp_path),
        default_root_dir=tmp_path,
        enable_checkpointing=True,
        max_epochs=3,
        accumulate_grad_batches=2,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        log_every_n_steps=7,
        check_val_every_n_epoch=2,
        seed=12345,
    )
    trainer.fit(Scheduled(), tiny_loader(20), tiny_loader())
    capsys.readouterr()
    text = trainer.explain()
    assert capsys.readouterr().out == text + "\n"
    for fact in (
        r"strategy\s+Strategy\(device='cpu'",
        r"precision\s+bf16-mixed",
        r"seed\s+12345",
        rf"folder\s+{tmp_path}",
        r"loggers\s+CSVLogger in ",
        rf"checkpoints\s+{tmp_path}/default/version_0/checkpoints",
        r"micro-batches per optimizer step\s+2\b",
        r"micro-batches per epoch\s+5\b",
        r"optimizer steps in the whole fit\s+9\b",
        r"max_epochs\s+3\b",
        r"max_steps\s+no limit",
        r"log\s+every 7 optimizer steps, and at the end of an epoch",
        r"validate\s+at the end of every 2 epochs",
        r"scheduler\s+StepLR every 3 optimizer steps",
        r"on_before_optimizer_step\s+GradientClipping",
        r"on_validation_end\s+EarlyStopping",
        r"on_train_epoch_end\s+.*Scheduled",
    ):
        assert re.search(fact, text), f"{fact} is not in\n{text}"


@pytest.mark.parametrize(
    "arguments, fact",
    [
        ({"val_every_n_steps": 100}, "every 100 optimizer steps"),
        ({"val_check_interval": 10}, "every 10 training batches"),
        ({"val_check_interval": 0.25}, "every 0.25 of an epoch"),
        ({"val_check_interval": {"hours": 2}}, "every 2:00:00"),
        ({}, "at the end of every epoch"),
        ({"log_every_n_steps": 0}, "log            at the end of an epoch"),
        ({"accumulate_grad_batches": 4}, "micro-batches per optimizer step  4"),
        ({"global_batch_size": 64}, "as many as 64 samples need"),
        ({"max_epochs": -1, "max_steps": 1000}, "max_steps                         1000"),
    ],
)
def test_explain_before_a_run(arguments: dict[str, Any], fact: str) -> None:
    trainer = make_trainer(EarlyStopping("x"), **arguments)
    assert fact in trainer.explain()
    assert "Callbacks\n  EarlyStopping" in trainer.explain()
    assert "on_train_epoch_end" in make_trainer(EarlyStopping("x")).explain(TinyModule())
