"""Loggers that are created by name, also by a `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.runs.tiny import TinyModule, tiny_loader

from trainkit import Trainer
from trainkit.errors import MissingPackageError, UnknownNameError
from trainkit.loggers import CSVLogger, JSONLLogger, TensorBoardLogger
from trainkit.loggers.logger_setup import LOGGERS, load_logger, make_logger


@pytest.mark.parametrize("name", LOGGERS)
def test_names_lead_to_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: type("Spec", (), {"origin": "there"}))
    assert load_logger(name).__name__ == LOGGERS[name].path.partition(":")[2]
    if LOGGERS[name].package:
        monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
        with pytest.raises(MissingPackageError, match=f"pip install 'trainkit-torch.{LOGGERS[name].extra}.'"):
            load_logger(name)


def test_a_logger_with_options(tmp_path: Path) -> None:
    logger = make_logger("csv", save_dir=tmp_path, name="mine")
    assert isinstance(logger, CSVLogger)
    assert logger.root_dir == str(tmp_path / "mine")
    with pytest.raises(UnknownNameError, match="CSVLogger has no argument 'sav_dir'. Did you mean 'save_dir'"):
        make_logger("csv", sav_dir=tmp_path)
    with pytest.raises(UnknownNameError, match="got 'tensorborad'. Did you mean 'tensorboard'?"):
        make_logger("tensorborad")


@pytest.mark.parametrize("given, kinds", [
    ("csv", [CSVLogger]),
    (["jsonl", "tensorboard", CSVLogger("own")], [JSONLLogger, TensorBoardLogger, CSVLogger]),
])  # fmt: skip
def test_a_trainer_takes_names(given: Any, kinds: list[type], run_dir: Path) -> None:
    trainer = Trainer(
        max_steps=2, logger=given, log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(TinyModule(), tiny_loader())
    assert [type(logger) for logger in trainer.loggers] == kinds
    folder = run_dir / (Path("own/default") if len(kinds) > 1 else Path("trainkit_runs/logs/default")) / "version_0"
    assert len((folder / "metrics.csv").read_text().splitlines()) == 3
