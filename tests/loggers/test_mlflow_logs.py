"""`MLFlowLogger` with real databases."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.runs.trackers import mlflow_records, needs

from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, MetricError, MissingPackageError, UnsupportedArgumentError
from trainkit.loggers import CSVLogger, MLFlowLogger
from trainkit.loggers.logger_setup import attach

pytestmark = [needs("mlflow"), pytest.mark.usefixtures("local_mlflow")]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database for all tests that need none of their own, since creating its tables takes a second."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow').as_posix()}/runs.db"


def run_of_id(database: str, run_id: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(database).get_run(run_id)


def run_of(logger: MLFlowLogger) -> Any:
    return logger.experiment.get_run(logger.run_id)


def test_a_run_in_the_folder_of_the_logs(tmp_path: Path) -> None:
    logger = MLFlowLogger("demo", "first", save_dir=tmp_path / "a b%c", tags={"stage": 1}, prefix="p")
    assert (logger.name, logger.version, logger.log_dir) == ("demo", None, str(tmp_path / "a b%c"))
    assert logger.state_dict() == {"last_step": -1}
    assert list(tmp_path.iterdir()) == []
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 8, "act": None}, "layers": [1, 2]})
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=10)
    logger.log_metrics({"val": float("nan"), "epoch": 0}, step=10)
    logger.log_metrics({"loss": 0.25}, step=5)  # steps may decrease
    run_id = logger.version
    assert run_of(logger).info.status == "RUNNING"
    logger.finalize("success")
    logger.finalize("failed")  # no run is open, so this does nothing

    run = run_of(logger)  # using the logger again reopens its run
    assert (run.info.run_id, run.info.run_name, run.info.status) == (run_id, "first", "RUNNING")
    assert run.data.params == {"lr": "0.1", "model/width": "8", "model/act": "None", "layers": "[1, 2]"}
    assert run.data.tags["stage"] == "1"
    assert run.data.tags["mlflow.source.type"] == "LOCAL"
    assert Path(run.info.artifact_uri).is_relative_to(tmp_path / "a b%c" / "mlruns")
    records = mlflow_records(logger.tracking_uri, str(run_id))
    assert records["p-loss"] == [(10, 0.5), (5, 0.25)]
    assert records["epoch"] == [(10, 0), (10, 0)]
    assert [step for step, _ in records["p-val"]] == [10]
    client = logger.experiment
    logger.finalize("failed")
    assert client.get_run(run_id).info.status == "FAILED"
    assert [path.name for path in (tmp_path / "a b%c").iterdir()] == ["mlflow.db"]  # no artifacts, so no folder for them


def test_images_and_texts_are_artifacts(database: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    logger = MLFlowLogger("media", tracking_uri=database, artifact_location=str(tmp_path / "artifacts"))
    gradient = np.linspace(0, 1, 12).reshape(1, 3, 4)
    logger.log_metrics({"loss": 1.0}, 7)
    logger.log_image("val/sample", [gradient, 1 - gradient[0]])
    logger.log_text("note", "to be", 8)
    logger.log_text("note", "or not", 8)  # as after a resume: replaces the file
    folder = tmp_path / "artifacts" / str(logger.run_id) / "artifacts"
    logger.finalize()
    assert (folder / "text" / "note" / "step_00000008.txt").read_text() == "or not"
    drawn = [np.asarray(image.open(folder / "images/val/sample" / f"step_00000007_{i}.png")).ravel().tolist() for i in (0, 1)]
    expected = np.round(gradient[0] * 255).ravel().astype(int).tolist()
    assert drawn == [expected, expected[::-1]]
    assert logger.log_dir is None  # with tracking_uri=, it has no local folder
    with pytest.raises(ConfigurationError, match="MLFlowLogger cannot store histograms"):
        logger.log_histogram("w", gradient)


def test_names_that_mlflow_does_not_take(database: str) -> None:
    logger = MLFlowLogger("names", tracking_uri=database)
    logger.log_metrics({"acc@5": 1.0, "/a//b/../c": 2.0, "µ": 3.0}, 0)
    assert set(mlflow_records(database, str(logger.run_id))) == {"acc_5", "a/b/c", "µ"}
    with pytest.raises(MetricError, match="'acc@5' and 'acc:5' are both 'acc_5' in MLflow"):
        logger.log_metrics({"acc:5": 1.0}, 1)
    with pytest.raises(MetricError, match="letters"):
        logger.log_metrics({"..": 1.0}, 1)
    logger.finalize()


def test_parameters_that_mlflow_does_not_keep(database: str, tmp_path: Path) -> None:
    logger = MLFlowLogger("parameters", tracking_uri=database, artifact_location=str(tmp_path))
    with pytest.warns(TrainkitWarning, match=r"written to the artifacts hparams/<name>.txt: prompt"):
        logger.log_hyperparams({"lr": 0.1, "prompt": "x" * 7000})
    with pytest.warns(TrainkitWarning, match="keeps the first value of a parameter. Tags have the new values of: lr"):
        logger.log_hyperparams({"lr": 0.2, "more": {str(index): index for index in range(150)}})
    run = run_of(logger)
    assert len(run.data.params) == 151
    assert (run.data.params["lr"], run.data.tags["lr"]) == ("0.1", "0.2")
    assert (tmp_path / str(logger.run_id) / "artifacts/hparams/prompt.txt").read_text() == "x" * 7000
    logger.finalize()


def test_records_that_are_alike_are_all_kept(database: str) -> None:
    """MLflow itself stores records with the same value, step and millisecond only once."""
    logger = MLFlowLogger("alike", tracking_uri=database)
    for _ in range(20):
        logger.log_metrics({"a": 1.0}, 3)
    assert mlflow_records(database, str(logger.run_id)) == {"a": [(3, 1.0)] * 20}
    assert logger.state_dict()["counts"] == {"a": 20}
    logger.finalize()


def test_more_metrics_than_mlflow_takes_at_once(database: str) -> None:
    logger = MLFlowLogger("many", tracking_uri=database)
    logger.log_metrics({f"m{index}": index for index in range(1001)}, 0)
    assert len(run_of(logger).data.metrics) == 1001
    logger.finalize()


def train(logger: MLFlowLogger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        logger.log_metrics({"loss": step / 8}, step)
        if step % 2 == 0:
            logger.log_metrics({"val": step * 2.0}, step)


def whole(last: int) -> dict[str, list[tuple[int, float]]]:
    return {
        "loss": [(step, step / 8) for step in range(1, last + 1)],
        "val": [(step, step * 2.0) for step in range(2, last + 1, 2)],
    }


@pytest.mark.parametrize("at, killed", [(0, 3), (4, 4), (4, 5), (4, 9)])
def test_records_that_the_run_has_already_are_not_logged_again(at: int, killed: int, database: str) -> None:
    first = MLFlowLogger("resumed", tracking_uri=database)
    assert first.run_id
    train(first, 1, at)
    state = first.state_dict()
    train(first, at + 1, killed)
    second = MLFlowLogger("resumed", tracking_uri=database)
    second.load_state_dict(state)
    train(second, at + 1, 8)
    middle = second.state_dict()
    train(second, 9, 11)
    assert second.version == first.version
    third = MLFlowLogger("resumed", tracking_uri=database)
    third.load_state_dict(middle)
    train(third, 9, 12)
    third.load_state_dict(middle)  # a resume in the same process
    train(third, 9, 13)
    assert mlflow_records(database, str(first.run_id)) == whole(13)
    for logger in (first, second, third):
        logger.finalize()


def test_a_run_that_the_user_names_continues_after_what_it_has(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = MLFlowLogger("named", tracking_uri=database)
    train(first, 1, 4)
    first.finalize()
    monkeypatch.setenv("MLFLOW_RUN_ID", str(first.version))
    second = MLFlowLogger(tracking_uri=database)
    train(second, 1, 2)  # another training in the same run: none of its records is skipped
    state = second.state_dict()
    train(second, 3, 4)
    third = MLFlowLogger(tracking_uri=database)
    third.load_state_dict(state)
    train(third, 3, 5)
    found = mlflow_records(database, str(first.version))
    assert found == {key: whole(4)[key] + whole(5)[key] for key in ("loss", "val")}
    for logger in (first, second, third):
        logger.finalize()


def test_a_resume_whose_run_is_another_or_gone(database: str, caplog: Any) -> None:
    caplog.set_level("INFO", "trainkit")
    state = {"last_step": 4, "run_id": "f" * 32, "counts": {"loss": 4}}
    logger = MLFlowLogger("gone", tracking_uri=database)
    logger.load_state_dict(state)
    with pytest.warns(TrainkitWarning, match=f"the run {'f' * 32} of the resumed run is not in {database}"):
        logger.log_metrics({"loss": 1.0})
    assert mlflow_records(database, str(logger.run_id)) == {"loss": [(5, 1.0)]}
    logger.load_state_dict(state)
    assert caplog.messages[-1] == (
        f"MLFlowLogger logs to the run {logger.version}, not to {'f' * 32}, the run of the checkpoint."
    )
    logger.finalize()


def test_a_logger_that_is_dropped_ends_its_run(database: str) -> None:
    logger = MLFlowLogger("dropped", tracking_uri=database)
    run_id, client = logger.run_id, logger.experiment
    del logger
    assert client.get_run(run_id).info.status == "FINISHED"


def test_a_program_that_ends_by_an_exception(database: str) -> None:
    program = """
import sys
from trainkit.loggers import MLFlowLogger
logger = MLFlowLogger("end", tracking_uri=sys.argv[1])
print(logger.run_id)
raise ValueError("on purpose")
"""
    ended = subprocess.run([sys.executable, "-c", program, database], capture_output=True, text=True)
    assert "on purpose" in ended.stderr
    assert run_of_id(database, ended.stdout.strip()).info.status == "FAILED"


def test_the_environment_names_what_no_argument_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert MLFlowLogger().name == "trainkit"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from_environment")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nowhere:1")
    logger = MLFlowLogger(run_id="abc")
    assert repr(logger) == ("MLFlowLogger(experiment_name='from_environment', tracking_uri='http://nowhere:1', run_id='abc')")
    assert MLFlowLogger("mine", tracking_uri="sqlite:///x.db").tracking_uri == "sqlite:///x.db"
    beside = CSVLogger()
    attach([logger, beside], tmp_path)
    assert (logger.root_dir, logger.log_dir) == (str(tmp_path / "logs"), None)
    assert beside.log_dir == str(tmp_path / "logs" / "default" / "version_0")


def test_nothing_happens_on_other_processes(tmp_path: Path) -> None:
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.set_rank(1)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_hyperparams({"lr": 1})
    logger.experiment.log_artifact("anything")
    logger.load_state_dict({"last_step": 4, "run_id": "x", "counts": {}})
    assert (logger.run_id, logger.state_dict()) == (None, {"last_step": 4})
    logger.finalize("failed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments, error, words", [
    (dict(log_model="best"), ConfigurationError, "log_model: expected False, True or 'all', got 'best'"),
    (dict(checkpoint_path_prefix="../x"), ConfigurationError, "checkpoint_path_prefix: expected the name of a folder"),
    (dict(synchronous=False), UnsupportedArgumentError, "a kill would lose pending rows"),
    (dict(tags="a"), ConfigurationError, "tags: expected a mapping"),
    (dict(save_dir="s3://x"), ConfigurationError, "expected a local folder"),
])  # fmt: skip
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        MLFlowLogger(**arguments)


def test_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    logger = MLFlowLogger(tracking_uri="nonsense://x")
    with pytest.raises(ConfigurationError, match=r"(?s)cannot open a run of the experiment 'trainkit' in nonsense://x: .*Fix:"):
        logger.log_metrics({"a": 1}, 0)


def test_a_store_that_fails_later_costs_the_rows_and_not_the_run(tmp_path: Path) -> None:
    """It raises an `OSError`, after which a Trainer continues. Only stored records are counted."""
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    database = tmp_path / "mlflow.db"
    content = database.read_bytes()
    database.write_bytes(b"no database" * 1000)
    with pytest.raises(OSError, match="MLflow: "):
        logger.log_metrics({"loss": 2.0}, 1)
    database.write_bytes(content)
    logger.log_metrics({"loss": 3.0}, 2)
    assert mlflow_records(logger.tracking_uri, str(logger.run_id)) == {"loss": [(0, 1.0), (2, 3.0)]}
    assert logger.state_dict()["counts"] == {"loss": 2}
    logger.finalize()


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    for missing, words in [
        ({"mlflow"}, r"pip install mlflow.*trainkit-torch\[mlflow\]"),
        ({"sqlalchemy", "alembic"}, "needs sqlalchemy and alembic .*or log to a server"),
    ]:
        monkeypatch.setattr("importlib.util.find_spec", lambda name, gone=missing: None if name in gone else find(name))
        with pytest.raises(MissingPackageError, match=words):
            MLFlowLogger()
    MLFlowLogger(tracking_uri="http://localhost:5000")
