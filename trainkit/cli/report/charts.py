"""The charts of a report, drawn by Bokeh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainkit.cli.report.html import CHART, COLORS, DASHES
from trainkit.cli.report.run_data import RunData, RunStart, save_time
from trainkit.loggers.run_files import Series

__all__ = [
    "Key",
    "bokeh_script",
    "embed",
    "find_interrupted_starts",
    "metric_chart",
    "runs_over_time",
    "styles_of",
    "time_chart",
]

Key = tuple[str, str]
"""(label of a run, name of a metric)."""

_FEW = 40  # a line with at most this number of points has markers
_MOST_IN_ALL = 400_000  # maximum number of points on a page
_MOST = 2000  # maximum number of points of a line
_LARGEST = 1e100  # numbers near the largest float64 overflow in the axes


class Style(NamedTuple):
    """How a line is drawn."""

    color: str
    dash: str


def styles_of(keys: Sequence[Key], runs: Sequence[RunData]) -> dict[Key, Style]:
    """One run: a color for each metric of a panel. Several: a color for each run, a kind of line for each metric."""
    names = list(dict.fromkeys(name for _, name in keys))
    labels = [run.label for run in runs]
    if len(runs) == 1:
        return {key: Style(COLORS[names.index(key[1]) % len(COLORS)], "solid") for key in keys}
    return {key: Style(COLORS[labels.index(key[0])], DASHES[names.index(key[1]) % len(DASHES)]) for key in keys}


def thin(points: Series, most: int) -> tuple[Any, Any]:
    """Steps and values as arrays; for a long series only the lowest value, the highest value and one gap of each interval."""
    steps = np.array([step for step, _ in points], dtype=np.float64)
    values = np.array([value for _, value in points], dtype=np.float64)
    values[~(np.abs(values) < _LARGEST)] = np.nan
    if len(steps) <= most:
        return steps, values
    kept = {0, len(steps) - 1}
    edges = np.linspace(0, len(steps), max(1, most // 3) + 1).astype(int)
    for start, stop in itertools.pairwise(edges):
        part = values[start:stop]
        gaps = np.isnan(part)
        if gaps.any():
            kept.add(start + int(gaps.argmax()))
        if not gaps.all():
            kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    chosen = np.array(sorted(kept))
    return steps[chosen], values[chosen]


def most_points(lines: int) -> int:
    """The maximum number of points of a line on a page with this number of lines."""
    return max(100, min(_MOST, _MOST_IN_ALL // max(1, lines)))


def metric_chart(series: Mapping[Key, Series], styles: Mapping[Key, Style], shared: Any, most: int, comparing: bool) -> Any:
    """One panel over the step.

    Args:
        series: Its lines.
        styles: Their styles.
        shared: The range of the x-axis that all panels share.
        most: Maximum number of points of a line; longer ones are thinned.
        comparing: Whether there are several runs, for the names in the tooltip.
    """
    from bokeh.models import NumeralTickFormatter

    chart = _figure(shared, "step", [("", "$name"), ("step", "@x{0,0}"), ("value", "@y{%.6g}")], {"@y": "printf"})
    chart.xaxis.formatter = NumeralTickFormatter(format="0,0")
    for (label, name), points in series.items():
        x, y = thin(points, most)
        style = styles[label, name]
        shown = f"{label}: {name}" if comparing else name
        # A line does not show a point between two gaps, but a marker does.
        if np.isfinite(y).sum() > 1:
            chart.line(x, y, name=shown, line_color=style.color, line_width=1.8, line_dash=style.dash)
        if len(x) <= _FEW or np.isnan(y).any():
            chart.scatter(x, y, name=shown, size=5, color=style.color)
    return chart


def find_common_range() -> Any:
    """The range of the x-axis that all panels share: zooming one zooms all."""
    from bokeh.models import DataRange1d

    return DataRange1d(range_padding=0.02)


def _figure(x_range: Any, x_label: str, tooltips: list[tuple[str, str]], formatters: dict[str, Any]) -> Any:
    from bokeh.models import BoxZoomTool, HoverTool, InlineStyleSheet, NoOverlap, ResetTool
    from bokeh.plotting import figure

    hover = HoverTool(tooltips=tooltips, formatters=formatters, mode="mouse", limit=6)
    chart: Any = figure(
        height=230, sizing_mode="stretch_width", min_width=240, x_range=x_range, tools=[BoxZoomTool(), ResetTool(), hover],
        x_axis_label=x_label, toolbar_location="right", background_fill_color=None, border_fill_color=None,
        outline_line_color=None, stylesheets=[InlineStyleSheet(css=CHART)],
    )  # fmt: skip
    chart.toolbar.active_drag = None  # A finger on a chart scrolls the page instead.
    chart.toolbar.logo = None
    chart.toolbar.autohide = True
    chart.xaxis.ticker.desired_num_ticks = 5
    chart.xaxis.major_label_policy = NoOverlap(min_distance=8)  # Labels would overlap on a phone.
    chart.yaxis.ticker.desired_num_ticks = 5
    chart.axis.minor_tick_line_color = None
    chart.axis.axis_label_text_font_style = "normal"
    chart.xgrid.grid_line_color = None
    return chart


def runs_over_time(runs: Sequence[RunData]) -> list[RunData]:
    """The runs to draw over time: those whose start is known, or a single run with at least two checkpoints."""
    return [run for run in runs if run.starts or (len(runs) == 1 and len(_checkpoint_times(run)) > 1)]


def time_chart(runs: Sequence[RunData], colors: Mapping[str, str]) -> Any:
    """The step over time: the time of day for one run, the time since the start of each run for several."""
    from bokeh.models import NumeralTickFormatter

    known = runs_over_time(runs)
    if one := len(runs) == 1:
        scale, unit = 1e-3, "UTC"  # milliseconds since 1970
        chart = _figure(find_common_range(), "time (UTC)", _tooltips("@x{%F %T} UTC"), {"@x": "datetime"})
        _mark_gaps(chart, known[0])
    else:
        scale, unit = _unit(max(max(_times(run)) - min(_times(run)) for run in known))
        chart = _figure(find_common_range(), f"{unit} since the start", _tooltips(f"@x{{0.00}} {unit}"), {})
    for run in known:
        origin = 0.0 if one else min(_times(run))
        for start in run.starts:
            points = _thin_times(start.points)
            x = [(time - origin) / scale for time, _ in points]
            chart.line(x, [step for _, step in points], name=run.label, line_color=colors[run.label], line_width=1.8)
        marked = {
            "diamond": _checkpoint_times(run),
            "triangle": [start.points[0] for start in run.starts[1:]],
            "x": [start.points[-1] for start in find_interrupted_starts(run)],
        }
        for marker, marks in marked.items():
            x = [(time - origin) / scale for time, _ in marks]
            y, width = [step for _, step in marks], 2.5 if marker == "x" else 1
            chart.scatter(x, y, name=run.label, marker=marker, size=9, color=colors[run.label], line_width=width)
    chart.yaxis.formatter = NumeralTickFormatter(format="0,0")
    chart.yaxis.axis_label = "step"
    return chart


def find_interrupted_starts(run: RunData) -> list[RunStart]:
    """The recorded starts of a run that did not reach the end of training; not the last one if it may be running."""
    return [
        start for start in run.starts if start.record and not start.finished and (start.ended or start is not run.starts[-1])
    ]


def _tooltips(when: str) -> list[tuple[str, str]]:
    return [("", "$name"), ("time", when), ("step", "@y{0,0}")]


def _mark_gaps(chart: Any, run: RunData) -> None:
    """Shade the time between the starts of a run, and label the axis with the time of day."""
    from bokeh.models import DatetimeTickFormatter
    from bokeh.models.annotations import BoxAnnotation

    clock: dict[str, Any] = dict.fromkeys(("milliseconds", "seconds", "minsec"), "%H:%M:%S")
    clock |= dict.fromkeys(("minutes", "hourmin"), "%H:%M")
    chart.xaxis.formatter = DatetimeTickFormatter(**clock, hours="%d %b, %H:%M", days="%d %b")
    for earlier, later in itertools.pairwise(run.starts):
        left, right = earlier.end * 1e3, later.opened * 1e3
        chart.add_layout(BoxAnnotation(left=left, right=right, fill_color="#8a8f98", fill_alpha=0.2, line_color=None))


def _times(run: RunData) -> list[float]:
    return [time for start in run.starts for time in (start.opened, start.end)] + [time for time, _ in _checkpoint_times(run)]


def _checkpoint_times(run: RunData) -> list[tuple[float, int]]:
    manifests = [one.manifest for one in run.checkpoints if one.manifest is not None]
    times = [(save_time(one), one.step) for one in manifests]
    return [(time, step) for time, step in times if math.isfinite(time)]


def _thin_times(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    every = max(1, len(points) // _MOST)
    return [*points[::every], points[-1]]


def _unit(seconds: float) -> tuple[float, str]:
    return (1, "seconds") if seconds < 180 else (60, "minutes") if seconds < 3 * 3600 else (3600, "hours")


def embed(charts: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The script that draws all charts, and the element of each."""
    if not charts:
        return "", {}
    from bokeh.document import Document
    from bokeh.embed import components

    document = Document()
    with document.models.freeze():  # otherwise each chart is added in time proportional to all before it
        for chart in charts.values():
            document.add_root(chart)
    script, elements = components(dict(charts))
    return str(script), {str(name): str(element) for name, element in elements.items()}


def bokeh_script() -> str:
    """Bokeh itself, so that the page needs no network."""
    from bokeh.resources import Resources

    return str(Resources(mode="inline", components=["bokeh"], log_level="warn").render_js())
