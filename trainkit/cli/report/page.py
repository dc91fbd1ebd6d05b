"""The page of a report: sections of HTML, each omitted if the runs have no data for it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Container, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from trainkit._version import __version__
from trainkit.cli.logged_runs import group_of, not_drawn
from trainkit.cli.report import charts
from trainkit.cli.report.html import COLORS, PAGE, card, definitions, element, number, safe, section, time_text
from trainkit.cli.report.run_data import KINDS, RunData, kind_of
from trainkit.cli.report.tables import (
    checkpoint_tables,
    environment_table,
    hparams_table,
    results_table,
    run_properties,
    runs_table,
    starts_tables,
)
from trainkit.console import quantity
from trainkit.launch.environment import SCRIPT
from trainkit.loggers.run_files import Series

__all__ = ["continue_blocks", "page"]


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
    most, shared = charts.most_points(lines), charts.find_common_range()
    drawn = {}
    for kind, panels in kinds.items():
        for group, series in panels.items():
            styles = charts.styles_of(list(series), runs)
            drawn[f"{kind}/{group}"] = charts.metric_chart(series, styles, shared, most, len(runs) > 1)
    if charts.runs_over_time(runs):
        drawn["time"] = charts.time_chart(runs, colors)
    script, elements = charts.embed(drawn)

    body = [_header(runs)]
    if len(runs) > 1:
        body.append(section("Runs", runs_table(runs, colors)))
    else:
        body.append(card(definitions(run_properties(runs[0]).items())))
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
    if any(charts.find_interrupted_starts(run) for run in runs):
        keys.append("<span>✕ interrupted; for a killed process, its last record</span>")
    if len(runs) == 1 and len(runs[0].starts) > 1:
        keys.append(f"<span>gray: no {'record' if runs[0].start_records else 'events in the log'}</span>")
    if any(run.checkpoints for run in runs):
        keys.append("<span>◆ checkpoint</span>")
    return f"<figure>{element('div', *keys, css='keys')}{elements['time']}</figure>{starts_tables(runs, colors)}"


def _notes(runs: Sequence[RunData], most: int, left: str | None) -> str:
    notes = [] if left is None else [f"{left}. The tables have all."]
    comparing = len(runs) > 1
    for run in runs:
        before = f"{run.label}: " if comparing else ""
        notes += [f"{before}{note}" for note in run.notes]
        long = [points for name, points in run.metrics.items() if name != "epoch" and len(points) > most]
        if long:
            notes.append(
                f"{before}The charts of {quantity(len(long), 'metric')} with up to {number(max(map(len, long)))} points show "
                f"at most {number(most)} of them, the lowest and the highest of each interval. The tables use all points."
            )
        for name, points in run.metrics.items():
            missing = sum(not math.isfinite(value) for _, value in points)
            if missing:
                notes.append(f"{before}{name}: {number(missing)} of {number(len(points))} values are not finite.")
    return card("".join(f"<p>{safe(note)}</p>" for note in notes)) if notes else ""


_DIRECT = ("one process", SCRIPT)  # launchers of runs whose command line starts all processes


def continue_blocks(runs: Sequence[RunData]) -> str:
    """How each run continues from its newest checkpoint; empty if no run can."""
    blocks = []
    for run in runs:
        if run.resumable is not None:
            heading = element("h3", safe(run.label)) if len(runs) > 1 else ""
            blocks.append(card(heading + "".join(_block(run, str(run.resumable.path.resolve())))))
    return "".join(blocks)


def _block(run: RunData, newest: str) -> list[str]:
    call = _code(f"trainer.fit(module, train_dataloaders, ckpt_path={newest!r})")
    if not run.start_records:
        return [_text("In the script of the run, with the same module and data:"), call]
    start = run.start_records[-1]
    blocks = []
    if run.starts[-1].finished:
        blocks.append(_text(f"The run is finished: {run.starts[-1].ending}. To train for longer, change that."))
    command, ckpt_path = _command(start), start.get("ckpt_path")
    if command is None:
        blocks.append(_text("The run was not started by a command line that can be run again (a notebook, python -c, a test)."))
    elif ckpt_path in ("auto", "last"):
        what = f"The last start passed ckpt_path={ckpt_path!r} to fit, so the same command continues from the newest checkpoint"
        return [*blocks, _text(f"{what}{_launch_advice(start)}:"), command, _text("Or from this checkpoint:"), call]
    else:
        passed = "passed no ckpt_path" if ckpt_path is None else f"passed ckpt_path={str(ckpt_path)!r}"
        does = "begins a new run" if ckpt_path is None else "resumes from there, not from the newest checkpoint"
        what = f"The last start {passed} to fit, so this command {does}, unless you change the script as below"
        blocks += [_text(f"{what}{_launch_advice(start)}:"), command]
    script = "In the script, with the same module and data, pass ckpt_path='auto' for the newest checkpoint, or this one:"
    return [*blocks, _text(script), call]


def _command(start: Mapping[str, Any]) -> str | None:
    command = start.get("command")
    if not isinstance(command, list) or not command:
        return None
    lines = ["cd", str(start.get("folder", "."))], [str(argument) for argument in command]
    return element("pre", element("code", "\n".join(map(_shell, lines))))


def _shell(arguments: Sequence[str]) -> str:
    """A command for a shell, as `shlex.join` writes it; a narrow page breaks it between arguments."""
    return " ".join(element("span", safe(shlex.quote(argument)), css="argument") for argument in arguments)


def _launch_advice(start: Mapping[str, Any]) -> str:
    """How to start the processes, if the command line is that of one of several."""
    launcher, count = str(start.get("launcher", "")), start.get("processes")
    if launcher in _DIRECT:
        return ""
    return f". Start it with {launcher} on {count} processes, as before; the command is that of each process"


def _text(text: str) -> str:
    return element("p", safe(text), css="soft")


def _code(line: str) -> str:
    return element("pre", element("code", safe(line)))
