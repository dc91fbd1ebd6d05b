"""Which log a run continues, and that a new log is new: no file has the steps of two runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.saving import Adam
from helpers.runs.tiny import tiny_loader
from helpers.runs.trainers import make_trainer
from helpers.worlds.worlds import run_world

from trainkit.callbacks import ModelCheckpoint
from trainkit.loggers import CSVLogger, JSONLLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from trainkit.loggers.log_folder import is_given_log_of
from trainkit.loggers.tensorboard import event_files, event_times

LOGGERS = [CSVLogger, JSONLLogger, TensorBoardLogger]
LOGS = Path("logs/default")
SAVED = Path("saved/step-00000004")
ELSEWHERE: dict[str, Any] = {"none": {"enable_checkpointing": False}, "other": {"callbacks": "other"}}


def fit(kinds: list[type[Logger]], version: int | None = 0, epochs: int = 2, **arguments: Any) -> Any:
    fits = {name: arguments.pop(name) for name in ("ckpt_path", "restore") if name in arguments}
    folder = arguments.pop("callbacks", None)
    callbacks: list[Any] = [ModelCheckpoint(dirpath=folder, every_n_train_steps=4, save_top_k=-1)] if folder else []
    loggers = [kind("logs", version=version) for kind in kinds]
    arguments = {"enable_checkpointing": bool(callbacks), "max_epochs": epochs, "log_every_n_steps": 1, **arguments}
    trainer = make_trainer(*callbacks, logger=loggers, **arguments)
    trainer.fit(Adam(), tiny_loader(16 * trainer.world_size), **fits)
    return trainer


def steps(version: str) -> list[list[int]]:
    """The steps of each log in a folder, those of event files in the order of their files, without hyper-parameters."""
    folder, found = LOGS / version, []
    if (folder / "metrics.csv").exists():
        with (folder / "metrics.csv").open() as file:
            found.append([int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]])
    if (folder / "metrics.jsonl").exists():
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        found.append([row["step"] for row in rows if "train_loss" in row])
    if events := sorted(event_files(folder), key=lambda name: (folder / name).stat().st_mtime_ns):
        found.append([step for name in events for step in sorted({step for _, step in event_times(folder / name)}) if step])
    return found


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("kind", [*LOGGERS, None], ids=lambda kind: kind.__name__ if kind else "all")
def test_the_log_of_the_checkpoint_is_continued(kind: Any, where: str, caplog: pytest.LogCaptureFixture) -> None:
    kinds = [kind] if kind else LOGGERS
    fit(kinds, callbacks="saved")
    fit(kinds, epochs=3, ckpt_path=SAVED, **ELSEWHERE[where])
    assert steps("version_0") == [list(range(1, 13))] * len(kinds)
    assert [path.name for path in LOGS.iterdir()] == ["version_0"]
    assert "was given its log: it continues that log" in caplog.text


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("kind", [*LOGGERS, None], ids=lambda kind: kind.__name__ if kind else "all")
def test_the_log_of_another_run_is_moved(kind: Any, where: str, caplog: pytest.LogCaptureFixture) -> None:
    kinds = [kind] if kind else LOGGERS
    fit(kinds, callbacks="saved")
    fit(kinds, version=1, epochs=1)
    fit(kinds, version=1, epochs=3, ckpt_path=SAVED, **ELSEWHERE[where])
    assert steps("version_0") == [list(range(1, 9))] * len(kinds)
    assert steps("version_1") == [list(range(5, 13))] * len(kinds)
    assert steps("version_1-v1") == [list(range(1, 5))] * len(kinds)
    assert (LOGS / "version_1-v1/hparams.yaml").exists()
    said = caplog.text
    assert "so it does not continue the log of that run" in said
    assert said.count("contained the log of another run") == 1


@pytest.mark.parametrize("version", [None, 7])
@pytest.mark.parametrize("kind", LOGGERS)
def test_a_version_that_does_not_exist(kind: Any, version: int | None, caplog: pytest.LogCaptureFixture) -> None:
    fit([kind], callbacks="saved")
    fit([kind], version=version, epochs=3, ckpt_path=SAVED, enable_checkpointing=False)
    assert steps("version_0") == [list(range(1, 9))]
    assert steps("version_1" if version is None else "version_7") == [list(range(5, 13))]
    assert "contained the log" not in caplog.text


@pytest.mark.parametrize("restore", [{"model", "loop"}, {"model"}], ids=["loop", "model"])
@pytest.mark.parametrize("kind", LOGGERS)
def test_a_run_without_the_loggers_of_the_checkpoint(kind: Any, restore: set[str]) -> None:
    fit([kind], callbacks="saved")
    fit([kind], epochs=3, ckpt_path=SAVED, restore=restore)
    assert steps("version_0") == [list(range(5 if "loop" in restore else 1, 13))]
    assert steps("version_0-v1") == [list(range(1, 9))]


@pytest.mark.parametrize("kind", LOGGERS)
def test_another_version_in_the_same_checkpoint_folder(kind: Any) -> None:
    fit([kind], callbacks="saved")
    fit([kind], version=1, epochs=1)
    fit([kind], version=1, epochs=3, ckpt_path=SAVED, callbacks="saved")
    assert steps("version_1") == [list(range(5, 13))]
    assert steps("version_1-v1") == [list(range(1, 5))]


@pytest.mark.parametrize("kind", LOGGERS)
def test_new_runs_with_one_version(kind: Any) -> None:
    fit([kind])
    fit([kind], epochs=1)
    trainer = fit([kind], epochs=3)
    trainer.fit(Adam(), tiny_loader())
    assert [steps(f"version_0{end}")[0][-1] for end in ("-v1", "-v2", "-v3", "")] == [8, 4, 12, 12]
    assert all(found[0] == list(range(1, found[0][-1] + 1)) for found in map(steps, ("version_0", "version_0-v2")))


def test_what_the_same_run_has_logged_before_the_fit_stays() -> None:
    logger = CSVLogger("logs", version=0)
    trainer = make_trainer(logger=logger, max_epochs=1, log_every_n_steps=1)
    trainer.validate(Adam(), tiny_loader(8))
    trainer.fit(Adam(), tiny_loader())
    assert len((LOGS / "version_0/metrics.csv").read_text().splitlines()) > 5
    assert [path.name for path in LOGS.iterdir()] == ["version_0"]


@pytest.mark.parametrize("logger, key", [(lambda id: WandbLogger(id=id), "id"), (lambda id: MLFlowLogger(run_id=id), "run_id")])
def test_a_run_of_a_tracker_that_was_given_by_its_id(logger: Any, key: str) -> None:
    assert is_given_log_of(logger("a"), {key: "a"})
    assert not is_given_log_of(logger("a"), {key: "b"})
    assert not is_given_log_of(logger("a"), {})
    assert not is_given_log_of(logger(None), {key: "a"})


def resumed_with(version: int) -> None:
    fit(LOGGERS, callbacks="saved")
    fit(LOGGERS, version=1, epochs=1)
    fit(LOGGERS, version=version, epochs=3, ckpt_path=SAVED, enable_checkpointing=False)


@pytest.mark.parametrize("version", [0, 1])
def test_on_two_ranks(run_dir: Path, version: int) -> None:
    run_world(2, resumed_with, version)
    assert steps("version_0") == [list(range(1, 13 if version == 0 else 9))] * 3
    assert steps("version_1") == [list(range(1, 5) if version == 0 else range(5, 13))] * 3
    assert steps("version_1-v1") == ([] if version == 0 else [list(range(1, 5))] * 3)
