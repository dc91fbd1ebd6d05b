"""The tables of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainkit.checkpoint.folder import ListedCheckpoint
from trainkit.checkpoint.manifest import Manifest
from trainkit.cli.checkpoint.text import bytes_text, contents_text, on_one_line
from trainkit.cli.report.html import data, duration, number, safe, table, time_text
from trainkit.cli.report.run_data import KINDS, RunData, RunStart, kind_of, save_time
from trainkit.loggers.run_files import Series

__all__ = [
    "checkpoint_tables",
    "environment_table",
    "hparams_table",
    "results_table",
    "run_properties",
    "runs_table",
    "starts_tables",
]


def run_properties(run: RunData) -> dict[str, str]:
    """The properties of a run: name → HTML."""
    properties = {}
    if run.last_step is not None:
        properties["last step"] = number(run.last_step)
    epochs = [int(value) for _, value in run.metrics.get("epoch", []) if math.isfinite(value)]
    if epochs:
        properties["last epoch (from 0)"] = number(max(epochs))
    properties |= _times(run)
    if len(run.starts) > 1:
        properties["resumed"] = "once" if len(run.starts) == 2 else f"{len(run.starts) - 1} times"
    if run.checkpoints:
        properties["checkpoints"] = f"{len(run.checkpoints)}, {bytes_text(sum(map(_size, run.checkpoints)))}"
    return properties


def _times(run: RunData) -> dict[str, str]:
    if not run.starts:
        return {}
    first, last, newest = run.starts[0].opened, max(start.end for start in run.starts), run.starts[-1]
    names = ("started", "last record") if run.start_records else ("first logged", "last logged")
    times = {names[0]: time_text(first), names[1]: time_text(last), "time between": duration(last - first)}
    return {**times, "how it ended": safe(newest.ending)} if newest.ending else times


def runs_table(runs: Sequence[RunData], colors: Mapping[str, str]) -> str:
    """One row for each run."""
    known = {run.label: {**run_properties(run), "folder": f"<code>{safe(run.folder)}</code>"} for run in runs}
    names = list(dict.fromkeys(name for values in known.values() for name in values))
    names.append(names.pop(names.index("folder")))
    rows = []
    for run in runs:
        cells = "".join(_cell(known[run.label].get(name, ""), True) for name in names)
        rows.append(f"<tr><th class='nowrap'>{_dot(run, colors)}</th>{cells}</tr>")
    return table(["run", *names], rows)


def _dot(run: RunData, colors: Mapping[str, str]) -> str:
    return f"<b class='dot' style='background:{colors[run.label]}'></b>{safe(run.label)}"


def _cell(content: str, nowrap: bool = False) -> str:
    return f"<td{' class=nowrap' if nowrap else ''}>{content}</td>"


def _number_cell(content: str) -> str:
    return f"<td class='number'>{content}</td>"


def results_table(runs: Sequence[RunData], colors: Mapping[str, str]) -> str:
    """The last, lowest and highest value of each metric, with their steps."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics if name != "epoch"))
    rows = []
    names.sort(key=lambda name: KINDS.index(kind_of(name)))
    comparing = len(runs) > 1
    for name in names:
        if comparing:
            rows.append(f"<tr class='group'><th colspan='8'>{safe(name)}</th></tr>")
        for run in runs:
            if points := run.metrics.get(name):
                whose = f"<td class='nowrap'>{_dot(run, colors)}</td>" if comparing else f"<th>{safe(name)}</th>"
                rows.append(f"<tr>{whose}{''.join(map(_number_cell, _extremes(points)))}</tr>")
    columns = ["last", "at step", "lowest", "at step", "highest", "at step", "values"]
    return table(["run" if comparing else "metric", *columns], rows, right=columns) if rows else ""


def _extremes(points: Series) -> list[str]:
    finite = [point for point in points if math.isfinite(point[1])]
    chosen = [points[-1]]
    chosen += [min(finite, key=_value), max(finite, key=_value)] if finite else []
    cells = [cell for step, value in chosen for cell in (data(value), number(step))]
    return [*cells, *[""] * (6 - len(cells)), number(len(points))]


def _value(point: tuple[int, float]) -> float:
    return point[1]


def starts_tables(runs: Sequence[RunData], colors: Mapping[str, str]) -> str:
    """The starts of runs that were resumed."""
    rows = []
    resumed = [run for run in runs if len(run.starts) > 1]
    recorded = any(run.start_records for run in resumed)
    for run in resumed:
        before = None
        for start in run.starts:
            first = f"<th class='nowrap'>{_dot(run, colors)}</th>" if len(runs) > 1 else ""
            pause = "" if before is None else duration(max(0.0, start.opened - before))
            cells = [_cell(time_text(start.opened), True), _cell(time_text(start.end), True), _number_cell(_steps(start))]
            ending = _cell(safe(start.ending), len(start.ending) < 60) if recorded else ""
            rows.append(f"<tr>{first}{''.join(cells)}{_number_cell(pause)}{ending}</tr>")
            before = start.end
    header = [*(["run"] if len(runs) > 1 else []), "started", "last record" if recorded else "last kept event"]
    header += ["steps", "gap before", *(["how it ended"] if recorded else [])]
    return table(header, rows, right=["steps", "gap before"]) if rows else ""


def _steps(start: RunStart) -> str:
    open_end = "at least " if start.record and not start.ended else ""
    return f"{number(start.points[0][1])} to {open_end}{number(start.reached)}"


def checkpoint_tables(runs: Sequence[RunData]) -> str:
    """The checkpoints of each run, newest first."""
    parts = []
    for run in runs:
        if not run.checkpoints:
            continue
        saved = [one.manifest.metrics for one in run.checkpoints if one.manifest is not None]
        names = list(dict.fromkeys(name for metrics in saved for name in metrics if kind_of(name) == "Metrics"))
        damaged = any(one.problem for one in run.checkpoints)
        rows = [_checkpoint_row(one, names, damaged) for one in run.checkpoints]
        right = ["step", "epochs", "size", *names]
        header = ["checkpoint", "step", "epochs", "saved", "size", "contains", *names, *(["problem"] if damaged else [])]
        heading = f"<h3>{safe(run.label)}</h3>" if len(runs) > 1 else ""
        parts.append(heading + table(header, rows, right=right))
    return "".join(parts)


def _checkpoint_row(one: ListedCheckpoint, names: Sequence[str], damaged: bool) -> str:
    about = one.manifest
    problem = "" if one.problem is None else f"<span class='bad'>{safe(on_one_line(one.problem, one.path))}</span>"
    last = _cell(problem) if damaged else ""
    if about is None:
        return f"<tr><th class='nowrap'>{safe(one.path.name)}</th>{'<td></td>' * (5 + len(names))}{last}</tr>"
    saved = save_time(about)
    cells = [_number_cell(number(about.step)), _number_cell(number(about.epoch))]
    cells += [_cell(time_text(saved) if math.isfinite(saved) else "", True), _number_cell(bytes_text(_size(one)))]
    cells.append(_cell(safe(contents_text(about)) + (", not finite" if about.finite is False else "")))
    cells += [_number_cell(data(about.metrics[name]) if name in about.metrics else "") for name in names]
    return f"<tr><th class='nowrap'>{safe(one.path.name)}</th>{''.join(cells)}{last}</tr>"


def _size(one: ListedCheckpoint) -> int:
    return 0 if one.manifest is None else one.manifest.total_size


def hparams_table(runs: Sequence[RunData]) -> str:
    """One row for each hyper-parameter; rows in which runs differ are marked and come first."""
    values = {name: [_text(run.hparams, name) for run in runs] for run in runs for name in run.hparams}
    return _comparison("hyper-parameter", values, runs)


def _text(values: Mapping[str, object], name: str) -> str:
    return str(values[name]) if name in values else ""


def _comparison(what: str, values: Mapping[str, Sequence[str]], runs: Sequence[RunData]) -> str:
    if not values:
        return ""
    header = [what, *([run.label for run in runs] if len(runs) > 1 else ["value"])]
    rows = []
    for name, row in sorted(values.items(), key=lambda item: not _differs(*item)):
        css = " class='differs'" if _differs(name, row) else ""
        rows.append(f"<tr{css}><th>{safe(name)}</th>{''.join(_cell(safe(one)) for one in row)}</tr>")
    return table(header, rows)


def _differs(name: str, row: Sequence[str]) -> bool:
    return name != "run id" and len(set(row)) > 1  # each run has its own id


def environment_table(runs: Sequence[RunData]) -> str:
    """How and where each run was trained, from its newest checkpoint and its recorded starts."""
    described = [_environment(run) for run in runs]
    names = list(dict.fromkeys(name for one in described for name in one))
    what = "of all starts" if any(run.start_records for run in runs) else "newest checkpoint"
    return _comparison(what, {name: [one.get(name, "") for one in described] for name in names}, runs)


def _environment(run: RunData) -> dict[str, str]:
    started, saved = _start_values(run.start_records), _checkpoint_values(run.manifest)
    return {**started, **{name: value for name, value in saved.items() if name not in started}}


def _checkpoint_values(manifest: Manifest | None) -> dict[str, str]:
    if manifest is None:
        return {}
    module = manifest.contents.get("module")
    return {
        "trainkit": manifest.trainkit_version,
        **({"module": str(module)} if module else {}),
        "strategy": manifest.strategy,
        "precision": manifest.precision,
        "processes": str(manifest.world_size),
        "seed": str(manifest.seed),
        "run id": manifest.run_id,
    }


_RECORDED = ("trainkit", "torch", "python", "host", "device", "processes", "strategy", "precision")


def _start_values(starts: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """What was recorded at the starts; a value that changed has all its values."""
    by_name = {name: list(dict.fromkeys(str(start[name]) for start in starts if name in start)) for name in _RECORDED}
    return {name: ", then ".join(values) for name, values in by_name.items() if values}
