"""Reads the metrics of a run from CSV, JSON lines and TensorBoard event files."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.checkpoint.remote_folder import remote_at
from trainkit.errors import ConfigurationError, TrainkitError, missing_package
from trainkit.loggers.files import complete_lines
from trainkit.loggers.starts_file import STARTS
from trainkit.paths import local_path

__all__ = ["FoundRun", "Series", "find_run", "home_of", "read_metrics"]

Series = list[tuple[int, float]]
"""The values of one metric in the order of writing: (step, value); values may be NaN or infinite."""

_EVENTS = "events.out.tfevents."
_EVALUATION = re.compile(r"(val|valid|validation|test|eval)([_/.-]|$)", re.IGNORECASE)  # names of metrics
_LOOKED_FOR = f"metrics.csv, metrics.jsonl, {_EVENTS}*"


class FoundRun(NamedTuple):
    """A run that was chosen in a folder.

    Attributes:
        folder: The folder with its metrics.
        newer: A newer one, which was not chosen because it has no training metrics; None if there is none.
    """

    folder: Path
    newer: Path | None = None


class _Candidate(NamedTuple):
    """A folder with metrics; the newest of an experiment is the largest."""

    version: int
    written: float
    folder: Path


def find_run(run_dir: str | os.PathLike[str]) -> FoundRun:
    """The run in `run_dir`: itself, or the newest run in it that trained, since an evaluation has a folder of its own.

    The newest of an experiment is the `version_N` with the highest N; of several experiments, the one written to last. If no
    run has trained, the newest is taken.

    Raises:
        ConfigurationError: There is no such folder, or it has no metrics.
    """
    root = local_path(run_dir, "run_dir")
    if (remote := remote_at(root)) is not None:
        remote.pull_files()
    if not root.is_dir():
        raise ConfigurationError(
            f"Expected the folder of a run, got {str(root)!r}, which {'is a file' if root.exists() else 'does not exist'}. "
            "Fix: trainkit plot trainkit_runs"
        )
    if any(_is_metrics(name) for _, _, names in itertools.islice(os.walk(root), 1) for name in names):
        return FoundRun(root)
    experiments = _experiments_in(root)
    if not experiments:
        raise ConfigurationError(
            f"No metrics in {root} or its subfolders, expected {_LOOKED_FOR}. Fix: pass the folder of a run that was "
            "logged with CSVLogger, JSONLLogger or TensorBoardLogger; see metrics of W&B on its website"
        )
    newest = max(map(max, experiments), key=_written)
    trained = _newest_trained(experiments) or newest
    return FoundRun(trained.folder, None if trained == newest else newest.folder)


def _experiments_in(root: Path) -> list[list[_Candidate]]:
    """The folders with metrics below a folder, those of each experiment in one list; the experiment written to last first."""
    found: dict[Path, list[_Candidate]] = {}
    for folder, _, names in os.walk(root):
        if files := [Path(folder, name) for name in names if _is_metrics(name)]:
            experiment, version = _experiment(Path(folder), root)
            one = _Candidate(version, max(file.stat().st_mtime for file in files), Path(folder))
            found.setdefault(experiment, []).append(one)
    return sorted(found.values(), key=lambda runs: max(map(_written, runs)), reverse=True)


def _newest_trained(experiments: list[list[_Candidate]]) -> _Candidate | None:
    trained: _Candidate | None = None
    for runs in experiments:
        if trained is not None and max(map(_written, runs)) < trained.written:
            break
        one = next((one for one in sorted(runs, reverse=True) if _has_trained(one.folder)), None)
        trained = max(filter(None, (trained, one)), key=_written, default=None)
    return trained


def _written(one: _Candidate) -> float:
    return one.written


def _has_trained(folder: Path) -> bool:
    """Whether a run has recorded a start or saved checkpoints, or has other metrics than those of an evaluation."""
    home = home_of(folder)
    if (home / STARTS).exists() or (home / "checkpoints").exists():
        return True
    try:
        names = read_metrics(folder).keys() - {"epoch"}
    except TrainkitError:  # raised when the run is read
        return True
    return not all(map(_EVALUATION.match, names))


def home_of(folder: Path) -> Path:
    """The folder of a run: the folder of its metrics, or the one above it (`TensorBoardLogger(sub_dir=)`)."""
    return next((one for one in (folder, *folder.resolve().parents) if re.fullmatch(r"version_\d+", one.name)), folder)


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
    folder = find_run(run_dir).folder
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
