"""`trainkit plot RUN_DIR`: draw the metrics of a run, with related metrics in one panel."""

from __future__ import annotations

import argparse
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.errors import ConfigurationError, UnknownNameError, missing_package, nearest
from trainkit.loggers.metrics_reader import Series, find_run, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["add_arguments", "draw", "run"]

_STAGE = re.compile(r"^(train|training|val|valid|validation|test|eval)[_/.-]+", re.IGNORECASE)
_FORK = re.compile(r"(_step|_epoch)?(/dataloader_idx_\d+)?$")
_PANEL = (5.2, 3.4)  # inches
_LARGEST = 1e100  # matplotlib overflows near the largest float64
_FEW = 40  # up to this number, points have markers
_MANY = 20_000  # from this number, the best place for a legend is slow to find


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit plot`."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="a run's folder (…/version_3), or a folder above it, for the newest run"
    )
    parser.add_argument("--out", metavar="FILE", help="the PNG file (default: metrics.png in the run's folder)")
    parser.add_argument("--metrics", metavar="A,B", help="draw only these; 'loss' includes train_loss and val_loss")
    parser.add_argument("--x", choices=("step", "epoch"), default="step", help="the x-axis (default: step)")


def run(args: argparse.Namespace) -> int:
    """Draw a run; print its folder and the file of the picture."""
    folder = find_run(args.run_dir)
    print(f"Reading {folder}")
    metrics = read_metrics(folder)
    if args.metrics:
        metrics = _select(metrics, [name for name in re.split(r"\s*,\s*", args.metrics.strip()) if name])
    out = draw(metrics, args.out or folder / "metrics.png", x=args.x, title=_title(folder))
    print(f"Wrote {out}")
    return 0


def draw(metrics: Mapping[str, Series], out: str | os.PathLike[str], *, x: str = "step", title: str | None = None) -> Path:
    """Draw metrics to a PNG file, with related metrics in one panel: train_loss and val_loss share one.

    Values that are not finite are gaps, counted in the legend.

    Args:
        metrics: Name → [(step, value), …], as `read_metrics` returns them.
        out: The file to write, ending in `.png`; its folder is created.
        x: "step", or "epoch": each point is then the mean over an epoch, which the metric "epoch" defines.
        title: The title above the panels.

    Returns:
        The path of the file.

    Raises:
        ConfigurationError: Nothing to draw, not a PNG file, or no metric "epoch".
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise missing_package("matplotlib", "plot", "Drawing metrics") from error

    path = Path(out)
    if path.suffix.lower() != ".png":
        raise ConfigurationError(f"Expected a file ending in .png, got {str(path)!r}. Fix: {path.with_suffix('.png')}")
    series = {name: points for name, points in metrics.items() if name != "epoch"}
    if not series:
        raise ConfigurationError("Nothing to draw: no metric was logged. Fix: self.log('train_loss', loss)")
    if x == "epoch":
        series = _over_epochs(series, metrics.get("epoch", []))
    groups: dict[str, list[str]] = {}
    for name in series:
        groups.setdefault(_group(name), []).append(name)

    columns = 1 if len(groups) == 1 else 2 if len(groups) <= 4 else 3
    rows = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # without the global state of pyplot
    for position, (group, names) in enumerate(groups.items(), start=1):
        axes = figure.add_subplot(rows, columns, position)
        _draw_panel(axes, {name: series[name] for name in names})
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        axes.set_xlabel("epoch (mean over each)" if x == "epoch" else "step")
        axes.set_ylabel(_literal(group))
    if title:
        figure.suptitle(_literal(title), fontsize="medium")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}. Fix: --out metrics.png") from error
    return path


def _draw_panel(axes: Axes, series: Mapping[str, Series]) -> None:
    anything = False
    for name, points in series.items():
        finite = [abs(value) < _LARGEST for _, value in points]  # False for nan
        missing = len(points) - sum(finite)
        label = f"{name} ({missing} of {len(points)} not finite)" if missing else name
        values = [value if kept else math.nan for (_, value), kept in zip(points, finite, strict=True)]
        # A line does not show a point between two gaps, but a marker does.
        marker = "." if len(points) <= _FEW or missing else None
        axes.plot([step for step, _ in points], values, label=_literal(label), marker=marker, linewidth=1.2)
        anything = anything or any(finite)
    if not anything:
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center")
    many = sum(map(len, series.values())) > _MANY
    axes.legend(fontsize="small", loc="upper right" if many else "best")
    axes.grid(visible=True, alpha=0.3)


def _literal(text: str) -> str:
    text = text.replace("$", r"\$")  # not a formula
    return f" {text}" if text.startswith("_") else text  # matplotlib hides labels that begin with an underscore


def _group(name: str) -> str:
    """The name without its stage and Lightning's endings: val_loss_epoch → loss."""
    return _STAGE.sub("", _FORK.sub("", name)) or name


def _over_epochs(series: Mapping[str, Series], epochs: Series) -> dict[str, Series]:
    if not epochs:
        raise ConfigurationError("No epochs to draw over: the run has no metric 'epoch'. Fix: --x step")
    known = sorted(epochs)
    steps = [step for step, _ in known]
    result: dict[str, Series] = {}
    for name, points in series.items():
        by_epoch: dict[int, list[float]] = {}
        for step, value in points:
            epoch = int(known[max(bisect_right(steps, step) - 1, 0)][1])
            by_epoch.setdefault(epoch, []).append(value)
        result[name] = [(epoch, _mean(values)) for epoch, values in sorted(by_epoch.items())]
    return result


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _select(metrics: Mapping[str, Series], wanted: Iterable[str]) -> dict[str, Series]:
    selected = {"epoch": metrics["epoch"]} if "epoch" in metrics else {}
    names = [name for name in metrics if name != "epoch"]
    for wish in wanted:
        found = [name for name in names if wish in (name, _group(name))]
        if not found:
            raise UnknownNameError(
                f"No metric {wish!r} in this run.{nearest(wish, names)} There are: {', '.join(sorted(names))}"
            )
        selected.update({name: metrics[name] for name in found})
    return selected


def _title(folder: Path) -> str:
    return "/".join(folder.resolve().parts[-2:])
