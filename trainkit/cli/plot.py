"""`trainkit plot RUN_DIR …`: draw the metrics of runs, with related metrics in one panel."""

from __future__ import annotations

import argparse
import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.logged_runs import (
    find_runs,
    group_of,
    labels_of,
    metric_names,
    not_drawn,
    over_epochs,
    select,
    write_output,
)
from trainkit.errors import ConfigurationError, missing_package
from trainkit.loggers.run_files import Series, read_metrics
from trainkit.masking import escape_controls

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["add_arguments", "draw", "draw_runs", "run"]

_PANEL = (5.2, 3.4)  # inches
_LARGEST = 1e100  # matplotlib overflows near the largest float64
_FEW = 40  # a line with at most this number of points has markers
_FEW_LINES = 8  # a legend with at most this number of names has a larger font
_DASHES = ("-", "--", ":", "-.")
_MOST_TEXT = 200  # characters of a name
_MANY = 20_000  # With more points, the best place for a legend is slow to find.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trainkit plot`."""
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        nargs="+",
        help="a run's folder (…/version_3), or a folder above it, for the newest run that trained; "
        "several runs share the same panels",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the PNG file (default: metrics.png in the run's folder; for several runs, the current folder)",
    )
    parser.add_argument("--metrics", metavar="A,B", help="draw only these metrics; 'loss' includes train_loss and val_loss")
    parser.add_argument("--x", choices=("step", "epoch"), default="step", help="the x-axis (default: step)")


def run(args: argparse.Namespace) -> int:
    """Draw runs; print their folders and the file of the picture."""
    folders = find_runs(args.run_dir, "plot")
    labels = labels_of(folders)
    runs: dict[str, dict[str, Series]] = {}
    for folder, label in zip(folders, labels, strict=True):
        print(f"Reading {folder}")
        runs[label] = read_metrics(folder)
    runs = _select_metrics(runs, args.metrics)
    if len(runs) == 1:
        out = draw(runs[labels[0]], args.out or folders[0] / "metrics.png", x=args.x, title=labels[0])
    else:
        out = draw_runs(runs, args.out or "metrics.png", x=args.x)
    print(f"Wrote {out}")
    return 0


def _select_metrics(runs: dict[str, dict[str, Series]], choices: str | None) -> dict[str, dict[str, Series]]:
    """The metrics to draw: those that were named, and not too many; prints that others are left."""
    if choices:
        known = [name for metrics in runs.values() for name in metrics]
        runs = {label: select(metrics, metric_names(choices), known) for label, metrics in runs.items()}
    hidden, left = not_drawn((name for metrics in runs.values() for name in metrics if name != "epoch"), "plot")
    if left is not None:
        print(escape_controls(left, keep=""))
        runs = {label: {name: metrics[name] for name in metrics if name not in hidden} for label, metrics in runs.items()}
    return runs


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
    return draw_runs({"": metrics}, out, x=x, title=title)


def draw_runs(
    runs: Mapping[str, Mapping[str, Series]], out: str | os.PathLike[str], *, x: str = "step", title: str | None = None
) -> Path:
    """Draw the metrics of several runs over each other; each run has a color, each metric of a panel a kind of line.

    Args:
        runs: The name of the run, for the legend → its metrics.
        out: As for `draw`.
        x: As for `draw`.
        title: As for `draw`.

    Returns:
        The path of the file.

    Raises:
        ConfigurationError: As for `draw`.
        MissingPackageError: As for `draw`.
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
    panels = _panels(runs, x)
    columns = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # This does not use the global state of pyplot.
    for position, (group, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, position)
        _draw_panel(axes, lines, list(runs))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        axes.set_xlabel("epoch (mean over each)" if x == "epoch" else "step")
        axes.set_ylabel(_literal(group))
    if title:
        figure.suptitle(_literal(title), fontsize="medium")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_output(path, picture.getvalue(), "--out metrics.png")
    return path


def _panels(runs: Mapping[str, Mapping[str, Series]], x: str) -> dict[str, dict[tuple[str, str], Series]]:
    """Group of metrics → (run, metric) → points."""
    panels: dict[str, dict[tuple[str, str], Series]] = {}
    for label, metrics in runs.items():
        series = {name: points for name, points in metrics.items() if name != "epoch"}
        if series and x == "epoch":
            series = over_epochs(series, metrics.get("epoch", []))
        for name, points in series.items():
            panels.setdefault(group_of(name), {})[label, name] = points
    if not panels:
        raise ConfigurationError("Nothing to draw: no metric was logged. Fix: self.log('train_loss', loss)")
    return panels


def _draw_panel(axes: Axes, series: Mapping[tuple[str, str], Series], runs: list[str]) -> None:
    anything = False
    names = list(dict.fromkeys(name for _, name in series))
    for (run, name), points in series.items():
        label, style = name, {}
        if len(runs) > 1:
            label = f"{name}, {run}"
            style = {"color": f"C{runs.index(run)}", "linestyle": _DASHES[names.index(name) % len(_DASHES)]}
        anything = _draw_line(axes, points, label, style) or anything
    if not anything:
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center")
    many = sum(map(len, series.values())) > _MANY
    size = "small" if len(series) <= _FEW_LINES else "xx-small"
    axes.legend(fontsize=size, loc="upper right" if many else "best")
    axes.grid(visible=True, alpha=0.3)


def _draw_line(axes: Axes, points: Series, label: str, style: dict[str, Any]) -> bool:
    """Draw one line; returns whether any of its values is finite."""
    finite = [abs(value) < _LARGEST for _, value in points]  # False for nan
    missing = len(points) - sum(finite)
    label = f"{label} ({missing} of {len(points)} not finite)" if missing else label
    values = [value if kept else math.nan for (_, value), kept in zip(points, finite, strict=True)]
    # A line does not show a point between two gaps, but a marker does.
    marker = "." if len(points) <= _FEW or missing else None
    axes.plot([step for step, _ in points], values, label=_literal(label), marker=marker, linewidth=1.2, **style)
    return any(finite)


def _literal(text: str) -> str:
    text = escape_controls(text, keep="").replace("$", r"\$")  # A $ would begin a formula.
    text = f"{text[:_MOST_TEXT]}…" if len(text) > _MOST_TEXT else text
    return f" {text}" if text.startswith("_") else text  # matplotlib hides labels that begin with an underscore
