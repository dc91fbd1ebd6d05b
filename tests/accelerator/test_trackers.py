"""`init_trackers`, `log`, `get_tracker` and `end_training`."""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs.trackers import (  # noqa: F401  fixtures
    PLAIN,
    comet_offline,
    comet_records,
    history,
    local_mlflow,
    mlflow_records,
    needs,
    no_open_wandb_runs,
    run_files,
    wandb_service,
)

from trainkit import Accelerator, ProjectConfiguration
from trainkit.console import TrainkitWarning
from trainkit.errors import (
    ConfigurationError,
    MetricError,
    MissingPackageError,
    UnknownNameError,
    UnsupportedArgumentError,
)
from trainkit.loggers import CSVLogger, Logger
from trainkit.loggers.run_files import read_metrics
from trainkit.tracking import GeneralTracker, on_main_process

STEP = "trainer/global_step"


def only(path: Path) -> Any:
    """Move a file to a folder of its own, and read its metrics; `read_metrics` reads all files of a folder."""
    alone = path.parent.parent / f"only-{path.name}"
    alone.mkdir()
    return read_metrics(path.rename(alone / path.name).parent)


def make(log_with: Any = None, project_dir: Any = None, logging_dir: Any = None) -> Accelerator:
    """An accelerator with these trackers."""
    return Accelerator(log_with=log_with, project_config=ProjectConfiguration(project_dir, logging_dir))


class LoggerType(enum.Enum):
    """An enum like Accelerate's `LoggerType`, which scripts pass to `log_with`."""

    TENSORBOARD = "tensorboard"
    CSV = "csv"


class Mine(GeneralTracker):
    """A custom tracker, as in Accelerate's documentation."""

    name = "mine"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run
        self.seen: list[Any] = []

    @property
    def tracker(self) -> str:
        return self.run

    @on_main_process
    def start(self) -> None:
        self.seen.append("start")

    @on_main_process
    def store_init_configuration(self, values: Any) -> None:
        self.seen.append(values)

    @on_main_process
    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.seen.append((values, step, kwargs))

    @on_main_process
    def finish(self) -> None:
        self.seen.append("finish")


def test_values_reach_all_trackers(run_dir: Path) -> None:
    accelerator = make(["tensorboard", LoggerType.CSV, "csv"], project_dir="runs")
    accelerator.init_trackers("digits", config=argparse.Namespace(lr=0.1), init_kwargs={"tensorboard": {"flush_secs": 60}})
    assert [tracker.name for tracker in accelerator.trackers] == ["tensorboard", "csv"]
    accelerator.log({"loss": torch.tensor(0.5, dtype=torch.bfloat16), "acc": np.float32(0.25)}, step=3)
    accelerator.log({"loss": 0.25, "val": {"acc": 1}}, step=torch.tensor(4))  # type: ignore[arg-type]
    accelerator.log({"loss": 0.125})  # the last step plus one
    folder = run_dir / "runs" / "digits" / "version_0"
    expected = {"loss": [(3, 0.5), (4, 0.25), (5, 0.125)], "acc": [(3, 0.25)], "val/acc": [(4, 1.0)]}
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    assert type(writer).__name__ == "SummaryWriter"
    assert accelerator.get_tracker(LoggerType.TENSORBOARD).writer is writer
    accelerator.end_training()
    accelerator.end_training()
    assert accelerator.trackers == []
    assert only(folder / "metrics.csv") == expected
    found = read_metrics(folder)
    assert {name: found[name] for name in expected} == expected
    assert (folder / "hparams.yaml").read_text() == "lr: 0.1\n"

    accelerator.init_trackers("digits")  # a second training
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()
    assert (run_dir / "runs" / "digits" / "version_1" / "metrics.csv").read_text() == "step,loss\n0,1.0\n"


def test_what_is_none_is_not_logged(run_dir: Path) -> None:
    accelerator = make(["tensorboard", "csv"], project_dir="runs")
    accelerator.init_trackers("digits")
    accelerator.log({"a": 0.5, "b": None, "val": {"c": None, "d": 2.0}}, step=1)
    accelerator.log({"b": None}, step=2)
    accelerator.end_training()
    folder = run_dir / "runs" / "digits" / "version_0"
    assert only(folder / "metrics.csv") == {"a": [(1, 0.5)], "val/d": [(1, 2.0)]}
    assert {name: value for name, value in read_metrics(folder).items() if value} == {"a": [(1, 0.5)], "val/d": [(1, 2.0)]}


def test_a_text_alone_counts_as_a_step(run_dir: Path) -> None:
    accelerator = make("jsonl", project_dir="runs")
    accelerator.init_trackers("digits")
    for values in ({"note": "first"}, {"loss": 1.0}, {"note": "second"}):
        accelerator.log(values)
    accelerator.end_training()
    folder = run_dir / "runs" / "digits" / "version_0"
    texts = [json.loads(line) for line in (folder / "text.jsonl").read_text().splitlines()]
    assert [(text["step"], text["text"]) for text in texts] == [(0, "first"), (2, "second")]
    assert only(folder / "metrics.jsonl") == {"loss": [(1, 1.0)]}


def test_texts_and_images_of_tensorboard(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = make("tensorboard", project_dir="p", logging_dir="logs")
    accelerator.init_trackers("x")
    tracker = accelerator.get_tracker("tensorboard")
    accelerator.log({"note": "hello", "loss": 1.0, "step": 7}, step=3)  # a metric called "step", in addition to the argument
    accelerator.log({"step": 4}, step=4)
    tracker.log_images({"pictures": np.zeros((2, 4, 4, 3))}, step=3)
    tracker.writer.add_images("raw", np.zeros((2, 4, 4, 3), dtype=np.uint8), 3, dataformats="NHWC")
    accelerator.end_training()
    events = EventAccumulator(str(run_dir / "logs" / "x" / "version_0")).Reload()
    assert [(e.step, e.tensor_proto.string_val) for e in events.Tensors("note/text_summary")] == [(3, [b"hello"])]
    assert {tag: [e.step for e in events.Images(tag)] for tag in events.Tags()["images"]} == {
        "pictures/0": [3], "pictures/1": [3], "raw": [3],
    }  # fmt: skip
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert scalars == {"loss": [(3, 1.0)], "step": [(3, 7.0)]}


def test_what_a_kill_leaves(run_dir: Path) -> None:
    """After SIGKILL the files contain all metrics that were logged before."""
    program = """
import os, signal, sys
sys.path[:0] = sys.argv[1:3]
from test_trackers import make
accelerator = make(["csv", "jsonl", "tensorboard"], project_dir="runs")
accelerator.init_trackers("x", init_kwargs={"tensorboard": {"max_queue": 1}})
for step in range(20):
    accelerator.log({"loss": step}, step=step)
accelerator.get_tracker("tensorboard").logger.save()
os.kill(os.getpid(), signal.SIGKILL)
"""
    here = Path(__file__).parent
    ended = subprocess.run([sys.executable, "-c", program, str(here), str(here.parent)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    folder, expected = run_dir / "runs" / "x" / "version_0", [(step, float(step)) for step in range(20)]
    for name in ("metrics.csv", "metrics.jsonl"):
        assert only(folder / name)["loss"] == expected
    assert read_metrics(folder)["loss"] == expected


@pytest.mark.slow
@pytest.mark.usefixtures("wandb_service", "no_open_wandb_runs")
def test_wandb_offline(run_dir: Path) -> None:
    import wandb

    accelerator = make("wandb", project_dir="runs")
    accelerator.init_trackers("demo", {"lr": 0.1}, {"wandb": {"name": "first", "tags": ["a"]}, "tensorboard": {"x": 1}})
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert run is wandb.run is accelerator.get_tracker("wandb").run
    assert (run.project, run.name, run.tags, dict(run.config)) == ("demo", "first", ("a",), {"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5), "step": 9, "note": "hi", "v": {"a": 1}}, 3, {"wandb": {"commit": True}})
    accelerator.log({"loss": 0.25})
    tracker = accelerator.get_tracker("wandb")
    tracker.log({"validation": [wandb.Image(np.zeros((4, 4, 3), dtype=np.uint8))]}, step=5)
    tracker.log_images({"pictures": [np.zeros((4, 4, 3)), np.ones((3, 4, 4))]}, step=6)
    tracker.log_table("table", columns=["a", "b"], data=[(1, 2)], step=7)
    accelerator.log({"p": torch.ones(())}, step=8)
    with pytest.raises(UnsupportedArgumentError, match=r"commit=False\..*accelerator.log\({...}, step=step\)"):
        accelerator.log({"loss": 0}, 9, {"wandb": {"commit": False}})
    with pytest.raises(
        UnsupportedArgumentError, match=r"wandb has no argument sync, got sync=.*get_tracker\('wandb', unwrap=True\)"
    ):
        accelerator.log({"loss": 0}, 9, {"wandb": {"sync": True}})
    accelerator.end_training()
    assert wandb.run is None
    rows = history(run_files(run_dir / "runs")[0])
    assert "none" not in rows[0]
    assert rows[:2] == [{"loss": 0.5, "step": 9, "note": "hi", "v/a": 1, STEP: 3}, {"loss": 0.25, STEP: 4}]
    assert [row[STEP] for row in rows] == [3, 4, 5, 6, 7, 8]


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of trackio's databases, which it reads from the environment when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path / "trackio"


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed: pip install trackio")
def test_trackio_in_a_local_database(trackio_folder: Path) -> None:
    accelerator = make("trackio")
    accelerator.init_trackers("demo", {"lr": 0.1, "deep": {"a": [1]}}, {"trackio": {"name": "first", "group": "g"}})
    import trackio

    run = accelerator.get_tracker("trackio", unwrap=True)
    assert isinstance(run, trackio.Run)
    assert (accelerator.get_tracker("trackio").run, run.project, run.name) == (run, "demo", "first")
    accelerator.log({"loss": torch.tensor(0.5), "none": None, "note": "hi", "v": {"a": np.float32(2.0)}}, step=3)
    accelerator.log({"loss": 0.25})
    accelerator.log({"none": None})
    with pytest.raises(ConfigurationError, match="step: expected a whole number"):
        accelerator.log({"a": 1}, step=1.5)  # type: ignore[arg-type]
    accelerator.end_training()

    [database] = trackio_folder.glob("demo*.db")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT step, run_name, metrics FROM metrics ORDER BY step").fetchall()
        [(config,)] = connection.execute("SELECT config FROM configs").fetchall()
    assert [(step, name) for step, name, _ in rows] == [(3, "first"), (4, "first")]
    assert [json.loads(row) for _, _, row in rows] == [{"loss": 0.5, "note": "hi", "v": {"a": 2.0}}, {"loss": 0.25}]
    known = json.loads(config)
    assert (known["lr"], known["deep"], known["_Group"]) == (0.1, {"a": [1]}, "g")
    assert "allow_val_change" not in known


class Trackio(types.ModuleType):
    """Stands for the package trackio where it is not installed; records its calls."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = importlib.machinery.ModuleSpec("trackio", None, origin="here")
        self.config: dict[str, Any] = {}
        self.seen: list[Any] = []

    def init(self, **arguments: Any) -> Trackio:
        self.seen.append(arguments)
        return self

    def log(self, values: Any, **options: Any) -> None:
        self.seen.append((values, options))

    def finish(self) -> None:
        self.seen.append("finish")


def test_what_trackio_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", module := Trackio())
    accelerator = make(["trackio", "trackio"])
    accelerator.init_trackers("demo", argparse.Namespace(lr=0.1), {"trackio": {"name": "first"}})
    assert [tracker.name for tracker in accelerator.trackers] == ["trackio"]
    assert accelerator.get_tracker("trackio", unwrap=True) is module
    accelerator.log({"loss": torch.tensor(0.5), "none": None}, step=3, log_kwargs={"trackio": {"more": 1}})
    accelerator.log({"loss": 0.25})
    accelerator.log({"none": None})
    accelerator.end_training()
    assert module.config == {"lr": 0.1}
    assert module.seen == [
        {"project": "demo", "name": "first"},
        ({"loss": 0.5}, {"step": 3, "more": 1}),
        ({"loss": 0.25}, {"step": None}),
        "finish",
    ]


@pytest.mark.slow
@needs("mlflow")
@needs("comet_ml")
@pytest.mark.usefixtures("wandb_service", "no_open_wandb_runs", "local_mlflow", "comet_offline")
def test_all_are_those_that_work_here(run_dir: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`log_with='all'` uses every tracker that is installed and configured; notices say why others are skipped."""
    caplog.set_level("INFO", "trainkit")
    monkeypatch.setenv("NETRC", str(run_dir / "no-netrc"))
    accelerator = make("all", project_dir="runs")
    accelerator.init_trackers("demo", {"lr": 0.1}, {"wandb": {"mode": "online"}})
    assert [tracker.name for tracker in accelerator.trackers] == ["mlflow", "tensorboard"]
    skips = [message for message in caplog.messages if "skips" in message]
    assert [message.split(". Fix")[0] for message in skips] == [
        "log_with='all' skips comet_ml: CometLogger: there is no API key",
        "log_with='all' skips wandb: you are not logged in",
    ]
    assert accelerator.get_tracker("wandb").run.log_artifact("x") is not None  # a placeholder, which does nothing
    accelerator.end_training()

    mine = Mine("x")
    accelerator = make([mine, "all"], project_dir="runs")
    accelerator.init_trackers("demo", init_kwargs={"comet_ml": {"online": False, **PLAIN}, "mlflow": {"run_name": "r"}})
    assert [tracker.name for tracker in accelerator.trackers] == ["mine", "comet_ml", "mlflow", "tensorboard", "wandb"]
    accelerator.log({"loss": 0.5}, step=1)
    run = accelerator.get_tracker("mlflow", unwrap=True)
    assert run.info.run_name == "r"
    (run_dir / "file.txt").write_text("content")
    accelerator.get_tracker("mlflow").log_artifact("file.txt", "here")
    assert not hasattr(accelerator.get_tracker("mlflow"), "log_artefact")
    assert accelerator.get_tracker("comet_ml", unwrap=True) is accelerator.get_tracker("comet_ml").writer
    uri = accelerator.get_tracker("mlflow").logger.tracking_uri
    accelerator.end_training()
    assert uri == f"sqlite:///{(run_dir / 'runs' / 'mlflow.db').as_posix()}"
    assert mlflow_records(uri, run.info.run_id) == {"loss": [(1, 0.5)]}
    assert (Path(run.info.artifact_uri) / "here" / "file.txt").read_text() == "content"
    assert comet_records(run_dir / "runs") == {"loss": [(1, 0.5)]}
    assert read_metrics(run_dir / "runs" / "demo")["loss"] == [(1, 0.5)]
    assert [row["loss"] for row in history(run_files(run_dir / "runs")[-1])] == [0.5]
    assert mine.seen == ["start", ({"loss": 0.5}, 1, {}), "finish"]


def test_all_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """`log_with='all'` without any installed tracker warns, and logs nothing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    accelerator = make("all")
    with pytest.warns(TrainkitWarning, match="no tracker is available, so nothing will be logged"):
        accelerator.init_trackers("demo")
    accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()


def test_trackers_of_the_users(run_dir: Path) -> None:
    """Users can pass trackers and loggers as objects."""

    class Kept(Logger):
        rows: list[Any] = []  # noqa: RUF012

        def write_metrics(self, metrics: Any, step: int) -> None:
            self.rows.append((step, dict(metrics)))

    mine, kept, table = Mine("run"), Kept(), CSVLogger("elsewhere", "name")
    accelerator = make([mine, kept, table])
    accelerator.init_trackers("demo", {"lr": 1})
    value = torch.tensor(2.0)
    accelerator.log({"a": value}, step=1, log_kwargs={"mine": {"more": True}})
    assert accelerator.get_tracker("mine") is mine
    assert accelerator.get_tracker("mine", unwrap=True) == "run"
    assert accelerator.get_tracker("Kept").logger is kept
    accelerator.end_training()
    assert mine.seen == ["start", {"lr": 1}, ({"a": value}, 1, {"more": True}), "finish"]
    assert kept.rows == [(1, {"a": 2.0})]
    assert read_metrics("elsewhere") == {"a": [(1, 2.0)]}

    class Old:
        """A tracker without `start` and `finish`, and without a base class of trainkit."""

        name, tracker, requires_logging_directory = "old", None, True
        store_init_configuration = log = lambda self, values, step=None: None

    with pytest.raises(ConfigurationError, match="log_with='old' writes files"):
        make(Old())
    accelerator = make(Old(), project_dir="x")
    accelerator.init_trackers("demo", {})
    accelerator.log({"a": 1})
    accelerator.end_training()


def test_a_tracker_that_lacks_something() -> None:
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(ConfigurationError, match="has no tracker"):
        make(Half(_blank=True))


def test_without_trackers_a_script_runs_the_same() -> None:
    accelerator = make()
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.get_tracker("wandb").log({"x": 1})
    accelerator.init_trackers("demo", {"lr": 1}, {"wandb": {"name": "x"}})
    accelerator.log({"loss": 1.0}, step=1, log_kwargs={"wandb": {"commit": True}})
    assert accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("x", 1, 2) is not None
    assert accelerator.trackers == []
    accelerator.end_training()


@pytest.mark.parametrize("log_with, error, words", [
    ("tensorbord", UnknownNameError, "expected 'all' or 'trackio' or one of comet_ml, .* Did you mean 'tensorboard'"),
    ("aim", UnsupportedArgumentError, "is a tracker of Accelerate's that trainkit does not have. Fix: use one of comet_ml"),
    ("tensorboard", ConfigurationError, r"writes files.*Accelerator\(log_with='tensorboard', project_dir='runs'\)"),
    ("all", ConfigurationError, "writes files"),
    (["jsonl"], ConfigurationError, "writes files"),
    (CSVLogger, ConfigurationError, r"got the class CSVLogger. Fix: log_with=CSVLogger\(\)"),
    (3, ConfigurationError, "got 3, which has no name, tracker, store_init_configuration, log"),
])  # fmt: skip
def test_what_is_no_tracker(log_with: Any, error: type[Exception], words: str) -> None:
    """Values of `log_with` that are not a tracker are errors with a fix."""
    with pytest.raises(error, match=words):
        make(log_with)


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in [("wandb", "wandb"), ("mlflow", "mlflow"), ("comet_ml", "comet_ml"), ("tensorboard", "tensorboard")]:
        with pytest.raises(MissingPackageError, match=f"pip install {package} "):
            make(name, project_dir="x")
    with pytest.raises(MissingPackageError, match="log_with='trackio' needs .* pip install trackio"):
        make("trackio")


def test_verbs_at_the_wrong_time(run_dir: Path) -> None:
    accelerator = make("csv", project_dir="runs")
    for verb in (lambda: accelerator.log({"a": 1}), lambda: accelerator.get_tracker("csv")):
        with pytest.raises(ConfigurationError, match=r"trackers \(csv\) are not running. Fix: call accelerator.init_trackers"):
            verb()
    accelerator.init_trackers("x")
    with pytest.raises(ConfigurationError, match=r"trackers are running already. Fix: call accelerator.end_training\(\)"):
        accelerator.init_trackers("y")
    with pytest.raises(UnknownNameError, match="expected one of csv, got 'cvs'. Did you mean 'csv'"):
        accelerator.get_tracker("cvs")
    accelerator.end_training()
    with pytest.raises(ConfigurationError, match="not running"):
        accelerator.log({"a": 1})


@pytest.mark.parametrize("name, config, init_kwargs, error, words", [
    ("", None, None, ConfigurationError, "project_name: expected a name"),
    ("x", None, {"csw": {}}, UnknownNameError, "init_kwargs: .* got 'csw'. Did you mean 'csv'"),
    ("x", None, {"csv": ["a"]}, ConfigurationError, "expected a dict of arguments"),
    ("x", None, {"csv": {"flush": 1}}, UnknownNameError, r"CSVLogger has no argument 'flush'.* It has: save_dir, name"),
    ("x", None, {"mine": {"a": 1}}, ConfigurationError, "'mine' was given as an object"),
    ("../x", None, None, ConfigurationError, "without '..'"),
    ("x", 3, None, ConfigurationError, "expected a dict, an argparse.Namespace"),
])  # fmt: skip
def test_arguments_of_init_trackers(
    name: str, config: Any, init_kwargs: Any, error: type[Exception], words: str, run_dir: Path
) -> None:
    accelerator = make(["csv", Mine("x")], project_dir="runs")
    with pytest.raises(error, match=words):
        accelerator.init_trackers(name, config, init_kwargs)
    accelerator.init_trackers("after")  # after an error the trackers can still be started
    accelerator.end_training()


@pytest.mark.parametrize("values, step, options, error, words", [
    ({3: "x"}, 0, {}, MetricError, "expected a name, got 3"),
    ({"a": "text"}, 0, {}, ConfigurationError, "CSVLogger cannot store text"),
    ({"step": 3}, 4, {}, ConfigurationError, "csv already has a column 'step'"),
    ({"a": 1}, 1.5, {}, ConfigurationError, "step: expected a whole number"),
    ({"a": 1}, 0, {"csv": {"epoch": 1}}, UnsupportedArgumentError, "csv has no argument epoch, got epoch=1"),
    ({"a": 1}, 0, {"csx": {}}, UnknownNameError, "log_kwargs: .*Did you mean 'csv'"),
])  # fmt: skip
def test_what_cannot_be_logged(values: Any, step: Any, options: Any, error: type[Exception], words: str, run_dir: Path) -> None:
    accelerator = make("csv", project_dir="runs")
    accelerator.init_trackers("x")
    with pytest.raises(error, match=words):
        accelerator.log(values, step, options)
    accelerator.end_training()
    assert (run_dir / "runs/x/version_0/metrics.csv").read_text() == ""


@pytest.mark.parametrize("value, kind", [
    ([1.0, 2.0], "a list"),
    ([None], "a list"),
    ((1,), "a tuple"),
    (torch.ones(2), r"a Tensor of shape \(2,\)"),
    (np.zeros((2, 2)), r"a ndarray of shape \(2, 2\)"),
    (1j, "a complex"),
    (object(), "an object"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["csv", "jsonl", "tensorboard"])
def test_what_is_no_number_is_skipped_with_one_notice(
    name: str, value: Any, kind: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Accelerate, whose TensorBoard tracker skips it silently: a run must not end because of it."""
    accelerator = make([name, mine := Mine("x")], project_dir="runs")
    accelerator.init_trackers("x")
    for step in range(3):
        accelerator.log({"a": value, "deep": {"b": value}, "loss": step}, step=step)
    accelerator.end_training()
    assert read_metrics("runs/x/version_0") == {"loss": [(0, 0.0), (1, 1.0), (2, 2.0)]}
    assert len(mine.seen) == 5  # a tracker of the user's gets everything
    said = [text for text in caplog.messages if "accelerator.log" in text]
    assert len(said) == 2
    for text, key in zip(said, ("a", "deep/b"), strict=True):
        assert re.match(f"accelerator.log: {name} skips '{key}', which is {kind}. Expected: .*accelerator.log\\(", text)


def test_all_are_ended_though_one_fails(run_dir: Path) -> None:
    class Bad(Mine):
        name = "bad"

        def finish(self) -> None:
            raise OSError("full")

    good = Mine("x")
    accelerator = make([Bad("x"), good])
    accelerator.init_trackers("demo")
    with pytest.raises(OSError, match="full"):
        accelerator.end_training()
    assert good.seen == ["start", "finish"]
    accelerator.end_training()


@pytest.mark.world_size(2)
def test_the_main_process_logs_and_the_others_go_along() -> None:
    """Only the main process logs; on the other processes the same calls do nothing."""
    mine = Mine("x")
    accelerator = make(["tensorboard", "csv", mine], project_dir="runs")
    accelerator.init_trackers("demo", {"lr": 0.1}, {"csv": {"name": "table"}})
    main = accelerator.is_main_process
    accelerator.log({"rank": int(os.environ["RANK"])}, step=0)
    tracker = accelerator.get_tracker("tensorboard")
    tracker.log_images({"x": np.zeros((1, 4, 4, 3))}, step=0)
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("raw", 1, 0)
    assert [one.name for one in accelerator.trackers] == (["tensorboard", "csv", "mine"] if main else [])
    with pytest.raises(UnknownNameError):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    assert getattr(mine, "seen", None) == (["start", {"lr": 0.1}, ({"rank": 0}, 0, {}), "finish"] if main else None)
    accelerator.world.barrier()
    if main:  # as many scripts do
        accelerator.init_trackers("alone")
    accelerator.log({"rank": int(os.environ["RANK"])}, step=0)
    accelerator.get_tracker("csv").logger.log_metrics({"more": 1}, 1)
    accelerator.end_training()
    accelerator.world.barrier()
    assert Path("runs/alone/version_0/metrics.csv").read_text() == "step,rank,more\n0,0,\n1,,1\n"
    assert sorted(path.as_posix() for path in Path("runs").glob("*/*")) == [
        "runs/alone/version_0", "runs/demo/version_0", "runs/table/version_0",
    ]  # fmt: skip
    assert (Path("runs") / "table/version_0/metrics.csv").read_text() == "step,rank\n0,0\n"
