"""Reads the metrics of a run from CSV, JSON lines and TensorBoard event files."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigurationError, TrainkitError, missing_package
from trainkit.loggers.files import complete_lines
from trainkit.paths import local_path

__all__ = ["Series", "find_run", "read_metrics"]

Series = list[tuple[int, float]]
"""The values of one metric in the order of writing: (step, value); values may be NaN or infinite."""

_EVENTS = "events.out.tfevents."
_LOOKED_FOR = f"metrics.csv, metrics.jsonl, {_EVENTS}*"


def find_run(run_dir: str | os.PathLike[str]) -> Path:
    """The folder with the metrics of `run_dir`: itself, or the newest run in it.

    The newest of an experiment is the `version_N` with the highest N; of several experiments, the one written to last.

    Raises:
        ConfigurationError: There is no such folder, or it has no metrics.
    """
    root = local_path(run_dir, "run_dir")
    if not root.is_dir():
        raise ConfigurationError(
            f"Expected the folder of a run, got {str(root)!r}, which {'is a file' if root.exists() else 'does not exist'}. "
            "Fix: trainkit plot trainkit_runs"
        )
    newest: dict[Path, tuple[int, float, Path]] = {}  # experiment → its newest version
    for folder, _, names in os.walk(root):
        files = [Path(folder, name) for name in names if _is_metrics(name)]
        if Path(folder) == root and files:
            return root
        if files:
            experiment, version = _experiment(Path(folder), root)
            found = (version, max(file.stat().st_mtime for file in files), Path(folder))
            newest[experiment] = max(newest.get(experiment, found), found)
    if not newest:
        raise ConfigurationError(
            f"No metrics in {root} or its subfolders, expected {_LOOKED_FOR}. Fix: pass the folder of a run that was "
            "logged with CSVLogger, JSONLLogger or TensorBoardLogger; see metrics of W&B on its website"
        )
    return max(newest.values(), key=lambda found: (found[1], found[0]))[2]


def _is_metrics(name: str) -> bool:
    return name in ("metrics.csv", "metrics.jsonl") or name.startswith(_EVENTS)


def _experiment(folder: Path, root: Path) -> tuple[Path, int]:
    """The folder that contains the versions, and the number of this one; -1 for a run without a number."""
    for path in (folder, *folder.parents):
        if path == root:
            break
        if match := re.fullmatch(r"version_(\d+)", path.name):
            return path.parent, int(match[1])
    return folder, -1


def read_metrics(run_dir: str | os.PathLike[str]) -> dict[str, Series]:
    """All metrics of a run: name → [(step, value), …], "epoch" among them.

    A metric in several files of the run is read from one of them: CSV before JSON lines (both keep full precision) before
    TensorBoard. An incomplete row that a killed process left is skipped.

    Args:
        run_dir: As for `find_run`.

    Raises:
        ConfigurationError: No metrics are found.
        MissingPackageError: The run has only event files, and tensorboard is not installed.
        TrainkitError: A file does not have the format of its name.
    """
    folder = find_run(run_dir)
    readers: list[tuple[str, Callable[[Path], dict[str, Series]]]] = [
        ("metrics.csv", _read_csv),
        ("metrics.jsonl", _read_jsonl),
    ]
    metrics: dict[str, Series] = {}
    found = False
    for name, read in readers:
        if (folder / name).is_file():
            found = True
            metrics = read(folder / name) | metrics
    if any(path.name.startswith(_EVENTS) for path in folder.iterdir()):
        try:
            metrics = _read_events(folder) | metrics
        except ImportError as error:
            if not found:
                raise missing_package("tensorboard", "tensorboard", f"Reading the event files in {folder}") from error
    return metrics


def _read_csv(path: Path) -> dict[str, Series]:
    rows = csv.reader(complete_lines(path))
    header = next(rows, [])
    if header and "step" not in header:
        raise TrainkitError(f"{path}: expected a column 'step', got {', '.join(header)}. Fix: name the column 'step'")
    metrics: dict[str, Series] = {name: [] for name in header if name != "step"}
    for row in rows:
        cells = dict(zip(header, row, strict=False))
        try:
            step = int(float(cells.pop("step")))
            for name, cell in cells.items():
                if cell:
                    metrics[name].append((step, float(cell)))
        except (KeyError, ValueError, OverflowError) as error:
            raise TrainkitError(f"{path}, line {rows.line_num}: expected numbers, got {row}. Fix: remove it") from error
    return {name: series for name, series in metrics.items() if series}


def _read_jsonl(path: Path) -> dict[str, Series]:
    metrics: dict[str, Series] = {}
    for number, line in enumerate(complete_lines(path), start=1):
        try:
            record: dict[str, Any] = json.loads(line)
            step = int(record.pop("step"))
            for name, value in record.items():
                metrics.setdefault(name, []).append((step, float(value)))
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise TrainkitError(
                f'{path}, line {number}: expected an object such as {{"step": 1, "loss": 0.5}}, got {line.strip()[:80]!r}. '
                "Fix: remove it"
            ) from error
    return metrics


def _read_events(folder: Path) -> dict[str, Series]:
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    everything = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}  # the default keeps a random sample
    events = event_accumulator.EventAccumulator(str(folder), size_guidance=everything)
    events.Reload()
    metrics: dict[str, Series] = {}
    for tag in events.Tags()[event_accumulator.SCALARS]:
        metrics[tag] = [(event.step, event.value) for event in _as_written(events.Scalars(tag))]
    for tag in events.Tags()[event_accumulator.TENSORS]:
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            written = _as_written(events.Tensors(tag))
            metrics[tag] = [(event.step, float(tensor_util.make_ndarray(event.tensor_proto))) for event in written]
    placeholder = metrics.pop("hp_metric", [])  # TensorBoardLogger(default_hp_metric=True) writes a placeholder
    real = [(step, value) for step, value in placeholder if (step, value) != (0, -1.0)]
    return {**metrics, "hp_metric": real} if real else metrics


def _as_written(events: Iterable[Any]) -> list[Any]:
    # Files of the same second are read in the order of their names, where 10 comes before 2.
    return sorted(events, key=lambda event: float(event.wall_time))
