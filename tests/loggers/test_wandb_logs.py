"""`WandbLogger` with real offline runs, whose files are read back record by record."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.runs.leaks import held
from helpers.runs.trackers import history, records, run_files

pytest.importorskip("wandb")

from trainkit.console import TrainkitWarning
from trainkit.errors import (
    ConfigurationError,
    MetricError,
    MissingPackageError,
    UnknownNameError,
    UnsupportedArgumentError,
)
from trainkit.loggers import CSVLogger, WandbLogger
from trainkit.loggers.logger_setup import attach

STEP = "trainer/global_step"

pytestmark = pytest.mark.usefixtures("wandb_service", "no_open_wandb_runs")


def test_metrics_hyperparams_and_exit_code_reach_the_file_of_an_offline_run(tmp_path: Path) -> None:
    logger = WandbLogger("first", save_dir=tmp_path, project="demo", tags=["a"], prefix="p")
    assert not (tmp_path / "wandb").exists()
    logger.log_hyperparams({"lr": 0.1, "model": {"width": 8}})
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=10)
    logger.log_metrics({"val": 1.5, "epoch": 0}, step=10)
    logger.log_metrics({"loss": float("nan")}, step=5)  # steps may decrease, since the step is a metric
    run = logger.experiment
    assert (logger.name, logger.version, run.name, run.tags) == ("demo", run.id, "first", ("a",))
    assert dict(run.config) == {"lr": 0.1, "model": {"width": 8}}
    assert logger.log_dir == logger.save_dir == str(tmp_path)
    run.finish()

    [path] = run_files(tmp_path)
    rows = history(path)
    assert rows[:2] == [{"p-loss": 0.5, "epoch": 0, STEP: 10}, {"p-val": 1.5, "epoch": 0, STEP: 10}]
    assert rows[2][STEP] == 5
    assert str(rows[2]["p-loss"]).lower() == "nan"
    metrics = {record.metric.name or record.metric.glob_name: record.metric for record in records(path)}
    assert metrics["*"].step_metric == STEP


def test_images_text_and_histograms(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    logger = WandbLogger(save_dir=tmp_path)
    gradient = np.linspace(0, 1, 12).reshape(1, 3, 4)
    logger.log_metrics({"loss": 1.0}, 7)
    logger.log_image("sample", [gradient, 1 - gradient[0]])
    logger.log_text("note", "to be or not", 8)
    logger.log_histogram("weights", np.arange(100.0), 9)
    folder = Path(logger.experiment.dir)
    logger.experiment.finish()

    pictures = sorted((folder / "media" / "images").glob("*.png"))
    assert len(pictures) == 2
    drawn = sorted(np.asarray(Image.open(picture)).ravel().tolist() for picture in pictures)
    expected = np.round(gradient[0] * 255).ravel().astype(int).tolist()
    assert drawn == [expected, expected[::-1]]
    [table] = (folder / "media" / "table").glob("*.json")
    assert json.loads(table.read_text())["data"] == [[8, "to be or not"]]
    rows = history(run_files(tmp_path)[0])
    assert [row[STEP] for row in rows] == [7, 7, 8, 9]
    assert sum(rows[3]["weights/values"]) == 100


def test_media_with_a_list_of_values_for_each_option(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    clip, picture = tmp_path / "a.gif", tmp_path / "a.png"
    image.new("P", (4, 4), 3).save(clip)
    image.new("L", (4, 4), 7).save(picture)

    logger = WandbLogger(save_dir=tmp_path, prefix="p")
    boxes = [{"truth": {"box_data": [{"position": {"middle": [1, 1], "width": 1, "height": 1}, "class_id": 0}]}}, None]
    masks = [None, {"truth": {"mask_data": np.ones((4, 4), dtype=np.uint8)}}]
    logger.log_metrics({"loss": 1.0}, 3)
    logger.log_image("seen", images=[np.ones((3, 4, 4)), picture], caption=["first", "second"], boxes=boxes, masks=masks)
    logger.log_image("one", image=image.open(picture), step=4)
    logger.log_video("watched", [clip], 5, caption=["clip"])
    folder = Path(logger.experiment.dir)
    logger.experiment.finish()

    rows = history(run_files(tmp_path)[0])
    assert [row[STEP] for row in rows] == [3, 3, 4, 5]
    found = {name: value for row in rows for name, value in row.items()}
    assert found["p-seen/captions"] == ["first", "second"]
    assert (found["p-seen/count"], found["p-seen/all_boxes"][1], found["p-seen/all_masks"][0]) == (2, None, None)
    first, second = (image.open(folder / name) for name in found["p-seen/filenames"])
    assert (first.getpixel((0, 0)), second.getpixel((0, 0))) == ((255, 255, 255), 7)
    assert found["p-one/count"] == 1
    assert [one["caption"] for one in found["p-watched/videos"]] == ["clip"]


def test_recordings_with_a_rate_for_each(tmp_path: Path) -> None:
    pytest.importorskip("soundfile", reason="wandb.Audio needs soundfile: pip install soundfile")
    sound = tmp_path / "a.wav"
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    logger = WandbLogger(save_dir=tmp_path, prefix="p")
    noise = np.zeros(800, dtype=np.float32)
    logger.log_audio("heard", [sound, noise], step=5, caption=["a", "b"], sample_rate=[8000, 4000])
    folder = Path(logger.experiment.dir)
    logger.experiment.finish()
    [row] = history(run_files(tmp_path)[0])
    assert row[STEP] == 5
    heard = row["p-heard/audio"]
    assert [one["caption"] for one in heard] == ["a", "b"]
    with wave.open(str(folder / heard[1]["path"])) as file:
        assert (file.getframerate(), file.getnframes()) == (4000, 800)


def test_tables_and_tables_of_texts(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    logger = WandbLogger(save_dir=tmp_path, project="a", prefix="p")
    logger.log_metrics({"loss": 1.0}, 2)
    logger.log_table("table", ["a", "b"], [[1, "x"], [2, "y"]])
    logger.log_table("frame", dataframe=pandas.DataFrame({"c": [5]}), step=3)
    logger.log_text("texts", columns=["prompt"], data=[["to be"], ["or not"]], step=4)
    logger.log_text("note", "to be", 5)
    logger.log_text(key="word", text="or not", step=6)
    folder = Path(logger.experiment.dir)
    logger.experiment.finish()

    rows = history(run_files(tmp_path)[0])[1:]
    assert [row[STEP] for row in rows] == [2, 3, 4, 5, 6]
    paths = {name.removesuffix("/path"): value for row in rows for name, value in row.items() if name.endswith("/path")}
    tables = {name: json.loads((folder / path).read_text()) for name, path in paths.items()}
    assert {name: (table["columns"], table["data"]) for name, table in tables.items()} == {
        "p-table": (["a", "b"], [[1, "x"], [2, "y"]]),
        "p-frame": (["c"], [[5]]),
        "p-texts": (["prompt"], [["to be"], ["or not"]]),
        "p-note": (["step", "text"], [[5, "to be"]]),
        "p-word": (["step", "text"], [[6, "or not"]]),
    }


@pytest.mark.parametrize("verb, arguments, error, words", [
    ("log_image", dict(images=[np.ones((4, 4))], caption=["a", "b"]), ConfigurationError, "one value for each of 1, got 2 of"),
    ("log_image", dict(images=np.ones((4, 4)), caption="a"), ConfigurationError, "caption must be a list .* got 'a'"),
    ("log_image", dict(images=[np.ones((4, 4))], captoin=["a"]), UnknownNameError, "Did you mean 'caption'"),
    ("log_image", dict(images=["nowhere.png"]), ConfigurationError, "expected the path of a file, got 'nowhere.png'"),
    ("log_image", dict(), MetricError, "expected a tensor or array"),
    ("log_audio", dict(audios=["nowhere.wav"]), ConfigurationError, "log_audio: expected the path of a file"),
    ("log_video", dict(videos=[Path("nowhere.gif")], fpss=[3]), UnknownNameError, "Did you mean 'fps'"),
])  # fmt: skip
def test_media_that_cannot_be_logged(verb: str, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        getattr(WandbLogger(), verb)("key", **arguments)


class Server:
    """What wandb asks its server for, an artifact by its name."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def artifact(self, name: str, type: str | None = None) -> Server:
        self.asked.append((name, type))
        return self

    use_artifact = artifact

    def download(self, root: str | None = None) -> str:
        return root or "chosen"


def test_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a server has artifacts to download, so here an object answers for it."""
    import wandb

    api, run = Server(), Server()
    monkeypatch.setattr(wandb, "Api", lambda: api)
    logger = WandbLogger(save_dir=tmp_path)
    logger._experiment = run
    assert logger.use_artifact("data:v0", "dataset") is run
    assert WandbLogger.download_artifact("model:best", tmp_path, "model") == str(tmp_path)
    assert (run.asked, api.asked) == ([("data:v0", "dataset")], [("model:best", "model")])
    monkeypatch.setattr(wandb, "run", run)
    assert logger.download_artifact("model:best") == "chosen"
    assert logger.download_artifact("model:best", use_artifact=False) == "chosen"
    assert run.asked[1:] == api.asked[1:] == [("model:best", None)]
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert WandbLogger.download_artifact("model:best") is None
    assert len(run.asked) == 2


def test_one_run_for_all_fits_of_a_logger_and_none_open_twice(tmp_path: Path) -> None:
    import wandb

    logger = WandbLogger(save_dir=tmp_path)
    for fit in range(3):
        attach([logger], tmp_path)
        logger.log_metrics({"loss": fit}, fit)
        logger.finalize("success")
    assert wandb.run is logger.experiment  # still open: a wandb.log() after fit goes to it
    wandb.finish()
    [path] = run_files(tmp_path)
    assert [row["loss"] for row in history(path)] == [0, 1, 2]


def test_the_next_logger_ends_the_idle_run_of_the_last_one(tmp_path: Path) -> None:
    import wandb

    counts: list[int] = []
    for fold in range(6):
        logger = WandbLogger(save_dir=tmp_path, id=f"fold{fold}")
        attach([logger], tmp_path)
        logger.log_metrics({"loss": fold}, 0)
        assert wandb.run is logger.experiment
        logger.finalize("success")
        gc.collect()
        counts.append(held().total())
        assert len(WandbLogger._started) == 1
    assert counts[-1] <= counts[2]  # from then on; wandb opens some things once
    wandb.finish()
    assert [[row["loss"] for row in history(path)] for path in run_files(tmp_path)] == [[fold] for fold in range(6)]


def test_two_loggers_of_one_trainer_have_a_run_each(tmp_path: Path) -> None:
    pair = [WandbLogger(save_dir=tmp_path, project="a"), WandbLogger(save_dir=tmp_path, project="b")]
    for fit in range(2):
        attach(pair, tmp_path)
        for logger in pair:
            logger.log_metrics({logger.name: fit}, fit)
        for logger in pair:
            logger.finalize("success")
    for logger in pair:
        logger.experiment.finish()
    rows = sorted([history(path) for path in run_files(tmp_path)], key=lambda rows: sorted(rows[0]))  # by metric names
    assert rows == [[{name: fit, STEP: fit} for fit in range(2)] for name in ("a", "b")]


def test_a_failed_run_ends_at_once_and_is_resumed_by_its_id(tmp_path: Path) -> None:
    import wandb

    logger = WandbLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    run_id = logger.version
    logger.finalize("failed")
    assert wandb.run is None
    exits = [record.exit.exit_code for record in records(run_files(tmp_path)[0]) if record.HasField("exit")]
    assert exits == [1]
    logger.finalize("failed")  # no run is open, so this does nothing
    logger.log_metrics({"loss": 2.0}, 1)
    assert logger.experiment.id == run_id
    logger.experiment.finish()
    rows = [row for path in run_files(tmp_path) for row in history(path)]
    assert [row["loss"] for row in rows] == [1.0, 2.0]


def test_a_run_that_the_user_ended_is_resumed(tmp_path: Path) -> None:
    import wandb

    logger = WandbLogger(save_dir=tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    run_id = logger.version
    wandb.finish()
    logger.log_metrics({"loss": 2.0}, 1)
    assert logger.version == run_id


def test_a_run_of_the_user_is_used_and_never_ended(tmp_path: Path) -> None:
    import wandb

    mine = wandb.init(project="mine", dir=tmp_path)
    given = WandbLogger(experiment=mine)
    given.log_metrics({"a": 1}, 0)
    given.finalize("failed")
    adopted = WandbLogger(save_dir=tmp_path / "elsewhere")
    adopted.log_metrics({"b": 2}, 0)
    assert adopted.experiment is mine
    assert (given.version, adopted.version) == (mine.id, mine.id)
    adopted.finalize("failed")
    assert wandb.run is mine
    mine.log({"c": 3})
    with pytest.warns(TrainkitWarning, match=r"wandb.init\(\) has started.*name, project have no effect"):
        assert WandbLogger("x", project="other").experiment is mine
    beside = WandbLogger(save_dir=tmp_path, id="another")
    assert beside.experiment.id == "another"
    assert wandb.run is mine
    beside.experiment.finish()
    mine.finish()
    assert [sorted(set(row) - {STEP}) for row in history(run_files(tmp_path)[0])] == [["a"], ["b"], ["c"]]


def test_nothing_happens_on_other_processes(tmp_path: Path) -> None:
    import wandb

    logger = WandbLogger(save_dir=tmp_path)
    logger.set_rank(1)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_hyperparams({"lr": 1})
    logger.experiment.config.update({"a": 1})
    logger.watch(None)  # type: ignore[arg-type]
    logger.unwatch()
    logger.log_image("a", ["nowhere.png"])
    logger.log_audio("a", ["nowhere.wav"])
    logger.log_table("a", ["b"], [[1]])
    logger.log_text("a", "b")
    logger.finalize("failed")
    assert logger.version is None
    assert wandb.run is None
    assert not (tmp_path / "wandb").exists()


def test_what_watch_says_to_wandb(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    said: list[dict[str, Any]] = []

    class Run:
        def watch(self, model: Any, **options: Any) -> None:
            said.append(options)

    logger = WandbLogger(save_dir=tmp_path)
    logger._experiment = Run()
    logger.watch(torch.nn.Linear(1, 1))
    logger.watch(torch.nn.Linear(1, 1), log="all", log_freq=7, log_graph=False)
    assert said == [
        {"log": "gradients", "log_freq": 100, "log_graph": True},
        {"log": "all", "log_freq": 7, "log_graph": False},
    ]


def test_watch_logs_gradients(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    logger = WandbLogger(save_dir=tmp_path)
    model = torch.nn.Linear(2, 1)
    logger.watch(model, log_freq=1, log_graph=False)
    model(torch.ones(1, 2)).sum().backward()
    logger.log_metrics({"loss": 1.0}, 0)
    logger.experiment.finish()
    assert any("gradients" in key for row in history(run_files(tmp_path)[0]) for key in row)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_unwatch_ends_it(tmp_path: Path, all_of_them: bool) -> None:
    torch = pytest.importorskip("torch")

    logger = WandbLogger(save_dir=tmp_path)
    model = torch.nn.Linear(2, 1)
    logger.watch(model, log_freq=1, log_graph=False)
    logger.unwatch(None if all_of_them else model)
    model(torch.ones(1, 2)).sum().backward()
    logger.log_metrics({"loss": 1.0}, 0)
    logger.experiment.finish()
    assert history(run_files(tmp_path)[0]) == [{"loss": 1.0, STEP: 0}]


@pytest.mark.parametrize("arguments, error, words", [
    (dict(log_model=True), UnsupportedArgumentError, "log_artifact"),
    (dict(checkpoint_name="x"), UnsupportedArgumentError, "log_artifact"),
    (dict(entiti="me"), UnknownNameError, "Did you mean 'entity'"),
    (dict(save_dir="a", dir="b"), ConfigurationError, "save_dir and dir mean the same"),
    (dict(version="a", id="b"), ConfigurationError, "version and id mean the same"),
    (dict(offline=True, mode="online"), ConfigurationError, "contradicts mode='online'"),
])  # fmt: skip
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        WandbLogger(**arguments)


def test_the_argument_offline_is_enough(tmp_path: Path) -> None:
    program = """
import sys
from trainkit.loggers import WandbLogger
logger = WandbLogger(save_dir=sys.argv[1], offline=True)
logger.log_metrics({"loss": 0.25}, 3)
logger.finalize("success")  # the run is left to wandb, which ends it with the program
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path)], check=True, env=environment, capture_output=True
    )
    [path] = run_files(tmp_path)
    assert history(path) == [{"loss": 0.25, STEP: 3}]


def test_project_and_the_way_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "from_environment")
    assert WandbLogger().name == "from_environment"
    monkeypatch.delenv("WANDB_PROJECT")
    assert repr(WandbLogger(dir="d", version="v")) == "WandbLogger(save_dir='d', project='trainkit', id='v')"


def test_next_to_other_loggers_it_keeps_its_own_layout(tmp_path: Path) -> None:
    table, run = CSVLogger(), WandbLogger()
    attach([run, table], tmp_path)
    assert (run.root_dir, run.log_dir) == (str(tmp_path / "logs"), str(tmp_path / "logs"))
    assert table.log_dir == str(tmp_path / "logs" / "default" / "version_0")


def test_without_wandb_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install wandb.*trainkit-torch\[wandb\]"):
        WandbLogger()
