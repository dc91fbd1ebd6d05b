"""The page of a report: sections of HTML, each omitted if the runs have no data for it."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from datetime import datetime, timezone

from trainkit._version import __version__
from trainkit.cli.logged_runs import group_of, not_drawn
from trainkit.cli.report import charts
from trainkit.cli.report.continuing import continue_blocks
from trainkit.cli.report.html import card, definitions, element, number, safe, section, time_text
from trainkit.cli.report.run_data import KINDS, RunData, kind_of
from trainkit.cli.report.style import COLORS, PAGE
from trainkit.cli.report.tables import (
    checkpoint_tables,
    environment_table,
    facts,
    hparams_table,
    results_table,
    runs_table,
    starts_tables,
)
from trainkit.console import counted
from trainkit.loggers.metrics_reader import Series

__all__ = ["page"]

_UNITS = {
    "throughput/samples_per_sec": "samples/s",
    "throughput/batches_per_sec": "batches/s",
    "throughput/tokens_per_sec": "tokens/s",
    "throughput/data_wait_share": "share of time, 0 to 1",
    "throughput/tflops_per_device": "TFLOP/s",
    "throughput/mfu": "share of peak, 0 to 1",
    **{f"memory/{name}": "MB" for name in ("host", "host_peak", "device", "device_peak")},
}

Panels = dict[str, dict[charts.Key, Series]]


def page(runs: Sequence[RunData]) -> str:
    """The HTML of a report about these runs."""
    colors = {run.label: COLORS[index] for index, run in enumerate(runs)}
    hidden, left = not_drawn(_in_order(runs), "report")
    kinds = _by_kind(runs, hidden)
    lines = sum(len(series) for panels in kinds.values() for series in panels.values())
    most, shared = charts.most_points(lines), charts.shared_range()
    drawn = {}
    for kind, panels in kinds.items():
        for group, series in panels.items():
            styles = charts.styles_of(list(series), runs)
            drawn[f"{kind}/{group}"] = charts.metric_chart(series, styles, shared, most, len(runs) > 1)
    if charts.timed(runs):
        drawn["time"] = charts.time_chart(runs, colors)
    script, elements = charts.embed(drawn)

    body = [_header(runs)]
    body.append(section("Runs", runs_table(runs, colors)) if len(runs) > 1 else card(definitions(facts(runs[0]).items())))
    for kind, panels in kinds.items():
        keys = {group: _figure(kind, group, series, runs, elements[f"{kind}/{group}"]) for group, series in panels.items()}
        legend = _legend(runs, colors) if len(runs) > 1 else ""
        body.append(section(kind, legend + element("div", *keys.values(), css="grid")))
    body.append(section("Results", results_table(runs, colors)))
    body.append(section("Time", _time(runs, colors, elements)))
    body.append(section("Checkpoints", checkpoint_tables(runs)))
    body.append(section("Hyper-parameters", hparams_table(runs)))
    body.append(section("Environment", environment_table(runs)))
    body.append(section("Continue", continue_blocks(runs)))
    body.append(section("Notes", _notes(runs, most, left)))
    title = f"trainkit: {', '.join(run.label for run in runs)}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{safe(title)}</title>\n<style>{PAGE}</style>\n{charts.bokeh_script() if drawn else ''}\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n{script}\n</body>\n</html>\n"
    )


def _in_order(runs: Sequence[RunData]) -> list[str]:
    """The names of all metrics, in the order of the page."""
    names = [name for run in runs for name in run.metrics if name != "epoch"]
    return sorted(names, key=lambda name: KINDS.index(kind_of(name)))


def _by_kind(runs: Sequence[RunData], hidden: Container[str]) -> dict[str, Panels]:
    """The heading of a section → its panels, in the order of the page; without the metrics in `hidden`."""
    kinds: dict[str, Panels] = {kind: {} for kind in KINDS}
    for run in runs:
        for name, points in run.metrics.items():
            if name == "epoch" or name in hidden or not points:
                continue
            kinds[kind_of(name)].setdefault(group_of(name), {})[run.label, name] = points
    return {kind: panels for kind, panels in kinds.items() if panels}


def _header(runs: Sequence[RunData]) -> str:
    heading = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    now = datetime.now(timezone.utc).timestamp()
    where = f"<p class='soft'><code>{safe(runs[0].folder)}</code></p>" if len(runs) == 1 else ""
    written = f"<p class='soft'>Written by trainkit {safe(__version__)} on {time_text(now)}.</p>"
    return f"<header><h1>{safe(heading)}</h1>{where}{written}</header>\n"


def _legend(runs: Sequence[RunData], colors: dict[str, str]) -> str:
    keys = [f"<span><b class='dot' style='background:{colors[run.label]}'></b>{safe(run.label)}</span>" for run in runs]
    return element("p", *keys, css="keys")


def _figure(kind: str, group: str, series: dict[charts.Key, Series], runs: Sequence[RunData], chart: str) -> str:
    styles = charts.styles_of(list(series), runs)
    names = list(dict.fromkeys(name for _, name in series))
    unit = next((f" <span class='soft'>({_UNITS[name]})</span>" for name in names if name in _UNITS), "")
    keys = ""
    if names != [group]:
        shown = []
        for name in names:
            style = next(styles[key] for key in series if key[1] == name)
            color = style.color if len(runs) == 1 else "currentColor"
            line = f"<i class='{style.dash}' style='border-color:{color};border-top-style:{_css_line(style.dash)}'></i>"
            shown.append(f"<span>{line}{safe(name)}</span>")
        keys = element("div", *shown, css="keys")
    return f"<figure><h3>{safe(group.removeprefix(f'{kind.lower()}/'))}{unit}</h3>{keys}{chart}</figure>"


def _css_line(dash: str) -> str:
    return {"dotdash": "double"}.get(dash, dash)


def _time(runs: Sequence[RunData], colors: dict[str, str], elements: dict[str, str]) -> str:
    if "time" not in elements:
        return ""
    keys = []
    if any(run.starts for run in runs):
        keys.append("<span>line: step</span>")
    if any(len(run.starts) > 1 for run in runs):
        keys.append("<span>▲ resumed</span>")
    if any(charts.interrupted(run) for run in runs):
        keys.append("<span>✕ interrupted; for a killed process, its last record</span>")
    if len(runs) == 1 and len(runs[0].starts) > 1:
        keys.append(f"<span>gray: no {'record' if runs[0].recorded else 'events in the log'}</span>")
    if any(run.checkpoints for run in runs):
        keys.append("<span>◆ checkpoint</span>")
    return f"<figure>{element('div', *keys, css='keys')}{elements['time']}</figure>{starts_tables(runs, colors)}"


def _notes(runs: Sequence[RunData], most: int, left: str | None) -> str:
    notes = [] if left is None else [f"{left}. The tables have all."]
    several = len(runs) > 1
    for run in runs:
        before = f"{run.label}: " if several else ""
        notes += [f"{before}{note}" for note in run.notes]
        long = [points for name, points in run.metrics.items() if name != "epoch" and len(points) > most]
        if long:
            notes.append(
                f"{before}The charts of {counted(len(long), 'metric')} with up to {number(max(map(len, long)))} points show at "
                f"most {number(most)} of them, the lowest and the highest of each interval. The tables use all points."
            )
        for name, points in run.metrics.items():
            missing = sum(not math.isfinite(value) for _, value in points)
            if missing:
                notes.append(f"{before}{name}: {number(missing)} of {number(len(points))} values are not finite.")
    return card("".join(f"<p>{safe(note)}</p>" for note in notes)) if notes else ""
