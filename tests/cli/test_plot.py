"""`trainkit plot`: the picture contains the right lines, for every kind of metrics file."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from trainkit.cli.main import main
from trainkit.cli.plot import draw
from trainkit.errors import ConfigurationError, MissingPackageError, TrainkitError
from trainkit.loggers import CSVLogger, JSONLLogger, Logger, TensorBoardLogger


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def spy(figure: Figure, *args: Any, **kwargs: Any) -> None:
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return saved


def pixels(path: Path) -> npt.NDArray[Any]:
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return np.asarray(imread(path))[..., :3]


def colored(path: Path) -> float:
    """The fraction of colored pixels, which belong to lines; everything else is white, black or gray."""
    image = pixels(path)
    return float((image.max(-1) - image.min(-1) > 0.2).mean())


def panels(figure: Figure) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """y label → label of the line → its points."""
    return {
        axes.get_ylabel(): {
            str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))  # type: ignore[arg-type]
            for line in axes.get_lines()
        }
        for axes in figure.axes
    }


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def train(logger: Logger) -> None:
    for step in range(1, 101):
        logger.log_metrics({"train_loss": math.exp(-step / 30), "epoch": (step - 1) // 25, "lr": 0.1}, step)
        if step % 25 == 0:
            value = math.nan if step == 50 else math.exp(-step / 30) + 0.05
            logger.log_metrics({"val_loss": value, "val/acc": step / 100, "epoch": (step - 1) // 25}, step)
    logger.finalize()


@pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger, TensorBoardLogger])
def test_plot_from_any_kind_of_file(
    kind: type[Logger], tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: list[Figure]
) -> None:
    train(kind(tmp_path / "logs", version=0))
    train(kind(tmp_path / "logs", version=1))
    folder = tmp_path / "logs" / "default" / "version_1"
    assert main(["plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"Reading {folder}\nWrote {folder / 'metrics.png'}\n"
    image = pixels(folder / "metrics.png")
    assert image.shape[0] > 600
    assert image.shape[1] > 1000
    assert 0.001 < colored(folder / "metrics.png") < 0.2
    [figure] = figures
    drawn = panels(figure)
    assert {panel: sorted(lines) for panel, lines in drawn.items()} == {
        "loss": ["train_loss", "val_loss (1 of 4 not finite)"], "lr": ["lr"], "acc": ["val/acc"],
    }  # fmt: skip
    assert [step for step, _ in drawn["loss"]["train_loss"]] == list(range(1, 101))
    loss = np.array([value for _, value in drawn["loss"]["train_loss"]])
    assert np.allclose(loss, np.exp(-np.arange(1, 101) / 30), rtol=1e-6)
    gap = [value for _, value in drawn["loss"]["val_loss (1 of 4 not finite)"]]
    assert [math.isnan(value) for value in gap] == [False, True, False, False]
    assert {axes.get_xlabel() for axes in figure.axes} == {"step"}
    assert figure.get_suptitle() == "default/version_1"


def test_a_line_is_where_its_values_are(tmp_path: Path) -> None:
    rising = pixels(draw({"loss": [(step, float(step)) for step in range(100)]}, tmp_path / "up.png"))
    falling = pixels(draw({"loss": [(step, -float(step)) for step in range(100)]}, tmp_path / "down.png"))
    for image, sign in ((rising, -1), (falling, 1)):
        rows, columns = np.nonzero(image.max(-1) - image.min(-1) > 0.5)
        assert np.sign(np.corrcoef(rows, columns)[0, 1]) == sign


def test_metrics_are_chosen_by_name_or_group(tmp_path: Path, figures: list[Figure]) -> None:
    train(CSVLogger(tmp_path))
    out = tmp_path / "new" / "Out.PNG"
    assert main(["plot", str(tmp_path), "--metrics", "loss, val/acc", "--out", str(out)]) == 0
    assert {panel: len(lines) for panel, lines in panels(figures[0]).items()} == {"loss": 2, "acc": 1}
    assert main(["plot", str(tmp_path), "--metrics", "train_loss", "--out", str(out)]) == 0
    assert list(panels(figures[1])["loss"]) == ["train_loss"]


def test_over_epochs(tmp_path: Path, figures: list[Figure]) -> None:
    train(JSONLLogger(tmp_path))
    assert main(["plot", str(tmp_path), "--x", "epoch", "--metrics", "loss"]) == 0
    lines = panels(figures[0])["loss"]
    expected = [float(np.mean(np.exp(-np.arange(25 * epoch + 1, 25 * epoch + 26) / 30))) for epoch in range(4)]
    assert [epoch for epoch, _ in lines["train_loss"]] == [0, 1, 2, 3]
    assert np.allclose([value for _, value in lines["train_loss"]], expected)
    assert math.isnan(lines["val_loss (1 of 4 not finite)"][1][1])
    assert figures[0].axes[0].get_xlabel() == "epoch (mean over each)"


@pytest.mark.parametrize("names, groups", [
    (["train_loss", "val_loss", "test_loss", "loss"], ["loss"]),
    (["train/loss", "val/loss", "Validation.loss", "train-loss"], ["loss"]),
    (["train_loss_step", "train_loss_epoch", "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"], ["loss"]),
    (["train_gen/loss", "train_disc/loss"], ["gen/loss", "disc/loss"]),
    (["training", "trainable", "evaluated", "val_", "value"], ["training", "trainable", "evaluated", "val_", "value"]),
    (["lr-AdamW", "lr-SGD"], ["lr-AdamW", "lr-SGD"]),
])  # fmt: skip
def test_metrics_in_one_panel(names: list[str], groups: list[str], tmp_path: Path, figures: list[Figure]) -> None:
    draw({name: [(1, 1.0)] for name in names}, tmp_path / "x.png")
    assert list(panels(figures[0])) == groups


def test_odd_values_and_names(tmp_path: Path, figures: list[Figure]) -> None:
    draw(
        {
            "huge": [(0, 1e308), (1, -1e308)], "tiny": [(0, 5e-324)], "_hidden": [(0, 1.0), (1, math.nan), (2, 2.0)],
            "$x_{$": [(0, math.inf)], "far": [(0, 1.0), (10**18, 2.0)], "back": [(5, 1.0), (3, 2.0)], "none": [],
            "\ud800\x1b[31m": [(0, 1.0)], "long" * 30_000: [(0, 1.0)],
        },
        tmp_path / "x.png",
        title="$ _{",
    )  # fmt: skip
    by_label = {axes.get_ylabel(): axes for axes in figures[0].axes}
    assert texts(by_label[r"\$x_{\$"]) == texts(by_label["huge"]) == texts(by_label["none"]) == ["no finite value"]
    assert texts(by_label["tiny"]) == []
    assert r"\ud800\x1b[31m" in by_label
    assert "long" * 50 + "…" in by_label
    isolated = by_label[" _hidden"].get_lines()[0]
    assert isolated.get_marker() == "."
    assert colored(tmp_path / "x.png") > 0.0005


def test_many_points_are_drawn_without_looking_for_a_place_for_the_legend(tmp_path: Path, figures: list[Figure]) -> None:
    draw({"loss": [(step, float(step % 7)) for step in range(50_000)]}, tmp_path / "x.png")
    line = figures[0].axes[0].get_lines()[0]
    assert line.get_marker() in (None, "None")
    assert len(np.asarray(line.get_xdata())) == 50_000


@pytest.mark.parametrize("arguments, words", [
    (["--metrics", "train_los"], "No run has a metric 'train_los'. Did you mean 'train_loss'? Metrics: lr"),
    (["--out", "x.pdf"], "Expected a file ending in .png, got 'x.pdf'. Fix: x.png"),
])  # fmt: skip
def test_drawing_errors(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(CSVLogger(tmp_path))
    assert main(["plot", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.rglob("*.png")) == []


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Nothing to draw"):
        draw({"epoch": [(1, 0.0)]}, tmp_path / "x.png")
    with pytest.raises(ConfigurationError, match="The run has no metric 'epoch', .*Fix: --x step"):
        draw({"loss": [(1, 0.0)]}, tmp_path / "x.png", x="epoch")


def test_a_folder_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "expected metrics.csv, metrics.jsonl, events.out.tfevents.*" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainkitError, match="cannot be written"):
        draw({"loss": [(1, 0.0)]}, tmp_path / "file" / "x.png")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install matplotlib.*trainkit-torch\[plot\]"):
        draw({"loss": [(1, 0.0)]}, tmp_path / "x.png")


def test_several_runs_in_one_picture(tmp_path: Path, figures: list[Figure], capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "logs" / "default" / f"version_{index}" for index in range(3)]
    for index, kind in enumerate((CSVLogger, JSONLLogger, TensorBoardLogger)):
        train(kind(tmp_path / "logs", version=index))
    only = CSVLogger(tmp_path / "logs", version=3)
    only.log_metrics({"other_loss": 1.0}, 1)
    only.finalize()
    arguments = [
        "plot",
        *map(str, folders),
        str(folders[0]),
        str(folders[0].with_name("version_3")),
        "--metrics",
        "loss,other_loss",
    ]
    assert main([*arguments, "--out", str(tmp_path / "x.png")]) == 0
    assert capsys.readouterr().out.count("Reading") == 4  # the second version_0 is the same run
    [figure] = figures
    [axes, _] = figure.axes
    lines = {str(line.get_label()).partition(" (")[0]: line for line in axes.get_lines()}
    assert list(lines) == [f"{name}, default/version_{n}" for n in range(3) for name in ("train_loss", "val_loss")]
    assert len({line.get_color() for line in lines.values()}) == 3
    assert {line.get_linestyle() for label, line in lines.items() if label.startswith("val_loss")} == {"--"}
    assert figure.get_suptitle() == ""


def test_several_runs_are_drawn_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(2):
        train(CSVLogger(tmp_path / "logs", version=index))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["plot", *(str(tmp_path / "logs" / "default" / f"version_{index}") for index in range(2))]) == 0
    assert colored(tmp_path / "here" / "metrics.png") > 0.001
