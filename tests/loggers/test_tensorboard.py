"""`TensorBoardLogger`: real event files, read back with tensorboard's own reader."""

from __future__ import annotations

import io
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainkit.console import TrainkitWarning
from trainkit.errors import ConfigurationError, MetricError, MissingPackageError, UnsupportedArgumentError
from trainkit.loggers import TensorBoardLogger
from trainkit.loggers.run_files import read_metrics


def events(folder: Path) -> Any:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0, "histograms": 0}).Reload()


def test_scalars_and_hyperparameters(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="digits", prefix="p")
    logger.log_hyperparams({"lr": 0.5, "model": {"width": 8, "act": None, "sizes": [1, 2]}, "flag": True, "inf": math.inf})
    logger.log_metrics({"loss": 0.25, "epoch": 0}, 10)
    logger.log_metrics({"loss": math.nan}, 20)
    logger.finalize()
    folder = tmp_path / "digits" / "version_0"
    read = events(folder)
    assert [(event.step, str(event.value)) for event in read.Scalars("p-loss")] == [(10, "0.25"), (20, "nan")]
    assert [(event.step, event.value) for event in read.Scalars("hp_metric")] == [(0, -1.0)]
    from tensorboard.plugins.hparams import metadata

    start = metadata.parse_session_start_info_plugin_data(
        read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    shown = {key: value.number_value or value.string_value for key, value in start.hparams.items()}
    assert shown == {
        "lr": 0.5, "model/width": 8.0, "model/act": "None", "model/sizes": "[1, 2]", "flag": 1.0, "inf": "inf",
    }  # fmt: skip
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["model"] == {"width": 8, "act": None, "sizes": [1, 2]}
    assert list(read_metrics(tmp_path)) == ["p-loss", "epoch"]  # the placeholder hp_metric is omitted


def test_hyperparameters_with_results(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.5})
    logger.log_hyperparams({"lr": 0.5})  # a second fit writes nothing new
    logger.log_hyperparams({"b": 2}, {"accuracy": torch.tensor(0.75)})
    logger.log_hyperparams({}, 0.5)
    logger.log_hyperparams(None)
    logger.finalize()
    assert read_metrics(tmp_path) == {"accuracy": [(0, 0.75)], "hp_metric": [(0, 0.5)]}
    with pytest.raises(MetricError, match="accuracy"):
        logger.log_hyperparams({"lr": 0.5}, {"accuracy": "good"})


def test_images_text_and_histograms(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    logger = TensorBoardLogger(tmp_path)
    gradient = torch.linspace(-0.5, 1.5, 12, dtype=torch.bfloat16).reshape(3, 4)
    logger.log_metrics({"loss": 1.0}, 6)
    logger.log_image("one", gradient)
    logger.log_image("many", [torch.zeros(3, 2, 2), np.full((2, 2, 3), 255, dtype=np.uint8)], 7)
    logger.log_text("note", "to be", 8)
    with pytest.warns(TrainkitWarning, match="Histogram 'weights': 2 of 6 values are not finite"):
        logger.log_histogram("weights", torch.tensor([[1.0, 2.0, 3.0], [4.0, math.nan, math.inf]]), 9)
    with pytest.warns(TrainkitWarning, match="2 of 2"):
        logger.log_histogram("lost", torch.tensor([math.nan, math.nan]), 9)
    logger.finalize()
    read = events(tmp_path / "default" / "version_0")
    assert {(tag, read.Images(tag)[0].step) for tag in read.Tags()["images"]} == {
        ("one", 6),
        ("many/0", 7),
        ("many/1", 7),
    }
    drawn = np.asarray(image.open(io.BytesIO(read.Images("one")[0].encoded_image_string)))[..., 0]
    assert np.array_equal(drawn, np.round(gradient.float().clip(0, 1).numpy() * 255))
    white = np.asarray(image.open(io.BytesIO(read.Images("many/1")[0].encoded_image_string)))
    assert white.shape == (2, 2, 3)
    assert white.min() == 255
    assert [event.step for event in read.Tensors("note/text_summary")] == [8]
    histogram = read.Histograms("weights")[0].histogram_value
    assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (4, 1, 4, 10)
    assert read.Tags()["histograms"] == ["weights"]


@pytest.mark.parametrize("image", [torch.zeros(5, 2, 2), torch.zeros(1, 3, 2, 2), torch.zeros(0, 3), "x", 1j * np.ones((2, 2))])
def test_what_is_no_image_is_refused(image: Any, tmp_path: Path) -> None:
    with pytest.raises(MetricError, match=r"Image 'key': expected .*\(C, H, W\).*Fix"):
        TensorBoardLogger(tmp_path).log_image("key", image, 0)


def test_a_histogram_is_of_real_numbers(tmp_path: Path) -> None:
    with pytest.raises(MetricError, match="Histogram 'key': expected real numbers"):
        TensorBoardLogger(tmp_path).log_histogram("key", 1j * np.ones(3), 0)


def test_events_are_in_the_file_after_save_and_otherwise_soon(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.save()
    logger.log_metrics({"loss": 1.0}, 1)
    logger.save()
    assert read_metrics(tmp_path) == {"loss": [(1, 1.0)]}
    logger.log_metrics({"loss": 2.0}, 2)
    end = time.monotonic() + 60  # takes about a second on an idle machine
    while len(read_metrics(tmp_path)["loss"]) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert read_metrics(tmp_path) == {"loss": [(1, 1.0), (2, 2.0)]}
    logger.finalize()


def test_options_of_the_queue_are_those_of_torchs_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import tensorboard

    given: dict[str, Any] = {}

    class Writer(tensorboard.SummaryWriter):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            given.update(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(tensorboard, "SummaryWriter", Writer)
    for options in ({}, {"max_queue": 3, "flush_secs": 7.0}):
        logger = TensorBoardLogger(tmp_path, **options)
        logger.log_metrics({"loss": 1.0}, 1)
        logger.finalize()
        assert (given["max_queue"], given["flush_secs"]) == (options.get("max_queue", 10), options.get("flush_secs", 1))


def test_options_of_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # TensorBoard sorts files of the same second by name, a process's tenth file before its ninth: reset the count
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    first = TensorBoardLogger(tmp_path, sub_dir="events", filename_suffix=".x", version=0)
    for step in range(6):
        first.log_metrics({"loss": step}, step)
    first.log_hyperparams({"a": 1})
    first.finalize()
    folder = tmp_path / "default" / "version_0" / "events"
    assert first.log_dir == str(folder)
    assert {path.suffix for path in folder.iterdir()} == {".x", ".yaml"}
    again = TensorBoardLogger(tmp_path, sub_dir="events", version=0, purge_step=3)
    for step in (3, 4):
        again.log_metrics({"loss": 10 + step}, step)
    again.finalize()
    again.log_metrics({"loss": 15}, 5)  # the file opened now must not hide steps 3 and 4
    again.finalize()
    assert read_metrics(tmp_path)["loss"] == [(0, 0), (1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]


def test_arguments_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedArgumentError, match=r"logger\.experiment\.add_graph"):
        TensorBoardLogger(log_graph=True)
    with pytest.raises(ConfigurationError, match="sub_dir: expected the name of a folder"):
        TensorBoardLogger(sub_dir="../x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install tensorboard.*trainkit-torch\[tensorboard\]"):
        TensorBoardLogger()


def test_a_folder_called_tensorboard_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainkit.loggers.base import is_installed

    (tmp_path / "some_logs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("tensorboard")
    assert not is_installed("some_logs")
