"""`CometLogger` with real offline experiments, whose archives are read back, or with a fake server."""

from __future__ import annotations

import copy
import gc
import json
import os
import random
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from helpers.runs.trackers import PLAIN, comet_records, needs

from trainkit.errors import ConfigurationError, MissingPackageError, UnknownNameError
from trainkit.loggers import CometLogger, CSVLogger
from trainkit.loggers.logger_setup import attach

pytestmark = [needs("comet_ml"), pytest.mark.usefixtures("comet_offline")]


def offline(folder: Path, **options: Any) -> CometLogger:
    return CometLogger(online=False, save_dir=folder, **PLAIN, **options)


def train(logger: CometLogger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        logger.log_metrics({"loss": step / 8, "epoch": 0}, step)
        if step % 2 == 0:
            logger.log_metrics({"val": step * 2.0, "epoch": 0}, step)


def whole(last: int) -> dict[str, list[tuple[int, float]]]:
    return {
        "loss": [(step, step / 8) for step in range(1, last + 1)],
        "val": [(step, step * 2.0) for step in range(2, last + 1, 2)],
    }


class Server:
    """A fake of Comet's server: it stores records, and returns them in reverse order."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.flushed = 0
        self.ended = False
        self.calls: list[dict[str, Any]] = []

    def start(self, **given: Any) -> Server:
        self.calls.append(given)
        self.ended = False
        return self

    def get_key(self) -> str:
        return "key"

    def log_metrics(self, values: dict[str, Any], step: int, epoch: int | None) -> None:
        for name, value in values.items():
            at = {"timestamp": 1000 + len(self.records) // 2, "offset": len(self.records)}
            self.records.append({"metricName": name, "metricValue": str(value), "step": step, **at})

    def flush(self) -> bool:
        self.flushed += 1
        return True

    def end(self) -> None:
        self.ended = True

    def of_key(self, api_key: str | None) -> Server:
        return self

    def get_experiment_by_key(self, key: str) -> Server:
        return self

    def get_metrics(self) -> list[dict[str, Any]]:
        return self.records[::-1]


@pytest.fixture
def comet_server(monkeypatch: pytest.MonkeyPatch) -> Server:
    import comet_ml

    server = Server()
    monkeypatch.setattr(comet_ml, "start", server.start)
    monkeypatch.setattr(comet_ml, "API", server.of_key)
    return server


def test_metrics_hyperparams_and_media_reach_the_archive(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    logger = offline(tmp_path / "a" / "b", project="demo", name="first", tags=["x"], prefix="p")
    assert (logger.name, logger.version, logger.log_dir) == ("demo", None, str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 8}})
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=10)
    logger.log_metrics({"val": float("nan"), "epoch": 1}, step=10)
    logger.log_image("sample", [np.zeros((1, 3, 4)), np.ones((3, 4, 4))])
    logger.log_text("note", "to be or not", 11)
    logger.log_histogram("weights", np.arange(10.0), 12)
    key, folder = logger.version, Path(logger.save_dir)
    assert key == logger.experiment.get_key()
    assert logger.experiment.get_name() == "first"
    logger.finalize("failed")
    [archive] = folder.iterdir()
    assert archive.name.startswith(f"{key}-")
    assert comet_records(folder) == {"p-loss": [(10, 0.5)], "p-val": [(10, "NaN")]}
    with ZipFile(archive) as file:
        messages = file.read("messages.json").decode()
        assert b"to be or not" in [file.read(name) for name in file.namelist()]
    assert '"paramName":"model/width","paramValue":8' in messages
    assert '"epoch":1,"metricName":"p-val"' in messages
    uploads = [json.loads(line)["payload"] for line in messages.splitlines() if '"file_upload"' in line]
    steps = [(one["upload_type"], one["additional_params"].get("step")) for one in uploads]
    assert steps == [("visualization", 10), ("visualization", 10), ("text-sample", 11), ("histogram3d", 12)]


def test_one_experiment_for_all_fits_of_a_logger(tmp_path: Path) -> None:
    import comet_ml

    logger = offline(tmp_path)
    for fit in range(3):
        attach([logger], tmp_path)
        logger.log_metrics({"loss": fit}, fit)
        logger.finalize("success")
    assert comet_ml.get_running_experiment() is logger.experiment  # still open: your own calls after fit go to it
    comet_ml.end()
    key = logger.version
    logger.log_metrics({"loss": 3}, 3)  # after its end, the logger starts another experiment
    logger.finalize("failed")
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {key, logger.version}
    assert comet_records(tmp_path) == {"loss": [(step, step) for step in range(4)]}


def test_the_next_logger_ends_the_idle_experiment_of_the_last_one(tmp_path: Path) -> None:
    keys: list[Any] = []
    for fold in range(2):
        logger = offline(tmp_path / str(fold))
        logger.log_metrics({"loss": fold}, 0)
        keys.append(logger.version)
        if fold == 0:
            logger.finalize("success")
            del logger
            gc.collect()
    with pytest.raises(ConfigurationError, match="Two CometLoggers at a time"):
        offline(tmp_path).log_metrics({"loss": 2}, 0)
    logger.finalize("failed")
    assert len(set(keys)) == 2
    assert [comet_records(tmp_path / str(fold)) for fold in range(2)] == [{"loss": [(0, 0)]}, {"loss": [(0, 1)]}]


def test_an_experiment_of_the_user_is_used_and_never_ended(tmp_path: Path) -> None:
    import comet_ml

    config = comet_ml.ExperimentConfig(offline_directory=str(tmp_path), **PLAIN)
    mine = comet_ml.start(online=False, experiment_config=config)
    logger = offline(tmp_path / "elsewhere")
    logger.log_metrics({"a": 1}, 0)
    assert logger.experiment is mine
    assert logger.version == mine.get_key()
    logger.state_dict()
    logger.finalize("failed")
    assert not mine.ended
    with pytest.raises(
        ConfigurationError, match=r"has .* open, and it can have only one open experiment. Fix: call comet_ml.end\(\) first"
    ):
        offline(tmp_path, experiment_key="k" * 32).log_metrics({"a": 1}, 0)
    mine.end()
    assert comet_records(tmp_path) == {"a": [(0, 1)]}


def test_a_resumed_offline_run_starts_a_new_experiment_and_says_so(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    first = offline(tmp_path)
    train(first, 1, 4)
    state = first.state_dict()
    train(first, 5, 6)
    first.finalize("failed")
    second = offline(tmp_path)
    second.load_state_dict(copy.deepcopy(state))
    train(second, 5, 8)
    assert [message for message in caplog.messages if "CometLogger" in message] == [
        "CometLogger: an offline experiment is not continued. The resumed run logs to a new one."
    ]
    middle = second.state_dict()
    second.load_state_dict(middle)  # a resume in the same process
    second.log_metrics({"loss": 9 / 8})
    second.finalize("failed")
    keys = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert len(keys) == 3
    assert {first.version, second.version} < keys
    assert [step for step, _ in comet_records(tmp_path)["loss"]] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]


def test_an_online_run_does_not_continue_an_offline_one(comet_server: Server) -> None:
    logger = CometLogger(api_key="secret")
    logger.load_state_dict({"last_step": 4, "key": "offline", "counts": {"loss": 4}, "online": False})
    logger.log_metrics({"loss": 0.5})
    assert comet_server.calls[0]["experiment_key"] is None
    assert logger.state_dict() == {"last_step": 5, "key": "key", "counts": {"loss": 1}, "online": True}


def test_parts_with_the_same_seed_do_not_replace_each_other(tmp_path: Path) -> None:
    """comet_ml draws the letters of an archive's name from the seeded global generator."""
    drawn = []
    for part in range(3):
        random.seed(1)
        logger = offline(tmp_path, experiment_key="k" * 32)
        logger.log_metrics({"loss": part}, part)
        drawn.append(random.random())
        logger.finalize("failed")
    assert len(set(drawn)) == 1  # the logger does not change the user's random numbers
    assert comet_records(tmp_path) == {"loss": [(part, part) for part in range(3)]}


def test_the_key_of_another_experiment_goes_before_that_of_a_checkpoint(comet_server: Server, caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    logger = CometLogger(api_key="secret", experiment_key="k" * 32)
    logger.load_state_dict({"last_step": 4, "key": "other", "counts": {}})
    assert caplog.messages[-1] == (
        f"CometLogger logs to the experiment {'k' * 32}, not to other, the experiment of the checkpoint."
    )
    logger.log_metrics({"a": 1})
    assert comet_server.calls[0]["experiment_key"] == "k" * 32
    assert [(record["metricName"], record["step"]) for record in comet_server.records] == [("a", 5)]


def test_nothing_happens_on_other_processes(tmp_path: Path) -> None:
    logger = offline(tmp_path)
    logger.set_rank(1)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_hyperparams({"lr": 1})
    logger.experiment.log_asset("x")
    logger.load_state_dict({"last_step": 4, "key": "x", "counts": {}})
    assert (logger.version, logger.state_dict()) == (None, {"last_step": 4})
    logger.finalize("failed")
    assert list(tmp_path.iterdir()) == []


def test_online_what_was_sent_before_the_kill_is_not_sent_again(comet_server: Server) -> None:
    server = comet_server
    first = CometLogger(api_key="secret", workspace="me")
    assert first.log_dir is None
    train(first, 1, 4)
    state = first.state_dict()
    assert server.flushed == 1  # the records before a checkpoint have arrived
    train(first, 5, 8)
    server.records = server.records[:-2]  # not sent yet when the process was killed
    server.ended = True
    second = CometLogger(api_key="secret")
    second.load_state_dict(state)
    train(second, 5, 10)
    found = {name: [r["step"] for r in server.records if r["metricName"] == name] for name in ("loss", "val")}
    assert found == {name: [step for step, _ in rows] for name, rows in whole(10).items()}
    second.finalize("failed")
    assert server.ended
    [start, again] = server.calls
    assert {k: v for k, v in start.items() if k != "experiment_config"} == dict(
        api_key="secret", online=True, workspace="me", project_name="trainkit", experiment_key=None, mode=None
    )
    assert again["experiment_key"] == "key"
    assert not start["experiment_config"].auto_metric_logging


def test_an_experiment_that_the_user_names_continues_after_its_records(comet_server: Server) -> None:
    train(CometLogger(api_key="secret"), 1, 4)
    comet_server.ended = True
    second = CometLogger(api_key="secret", experiment_key="key")
    assert second.state_dict() == {"last_step": -1}  # its records are not known yet
    train(second, 1, 2)  # another training: all of its records are logged
    assert second.state_dict()["counts"] == {"loss": 6, "val": 3}


def test_arguments_passed_to_comet(comet_server: Server, tmp_path: Path) -> None:
    where: dict[str, Any] = {
        "api_key": "secret",
        "workspace": "me",
        "experiment_key": "k" * 32,
        "mode": "create",
        "online": True,
    }
    logger = CometLogger(project="mine", offline_directory=tmp_path / "there", auto_metric_logging=True, prefix="p", **where)
    logger.log_metrics({"loss": 1.0}, 3)
    (given,) = comet_server.calls
    config = given.pop("experiment_config")
    assert given == {**where, "project_name": "mine"}
    assert config.auto_metric_logging
    assert str(logger.save_dir) == str(tmp_path / "there")
    assert [(record["metricName"], record["step"]) for record in comet_server.records] == [("p-loss", 3)]


@pytest.mark.parametrize("arguments, error, words", [
    (dict(), ConfigurationError, r"no API key. Fix: run comet login.* CometLogger\(online=False\)"),
    (dict(online=True), ConfigurationError, "no API key"),
    (dict(online=False, nam="x"), UnknownNameError, "Did you mean 'name'"),
    (dict(online=False, project_name="x"), UnknownNameError, "Fix: project='…'"),
    (dict(mode="new"), ConfigurationError, "mode: expected 'get_or_create'"),
    (dict(save_dir="a", offline_directory="b"), ConfigurationError, "mean the same"),
])  # fmt: skip
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        CometLogger(**arguments)


def test_what_comet_is_configured_to_do_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMET_PROJECT_NAME", "from_environment")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    logger = CometLogger()
    assert repr(logger) == "CometLogger(project='from_environment', experiment_key=None, online=False)"
    monkeypatch.delenv("COMET_START_ONLINE")
    monkeypatch.setenv("COMET_API_KEY", "secret")
    assert repr(CometLogger(project="x")) == "CometLogger(project='x', experiment_key=None, online=True)"
    beside = CSVLogger()
    attach([logger, beside], tmp_path)
    assert (logger.root_dir, logger.log_dir) == (str(tmp_path / "logs"), str(tmp_path / "logs"))
    assert beside.log_dir == str(tmp_path / "logs" / "default" / "version_0")
    assert "COMET_DISABLE_AUTO_LOGGING" not in os.environ


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install comet_ml.*trainkit-torch\[comet\]"):
        CometLogger(online=False)
