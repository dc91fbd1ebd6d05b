"""Reads the metrics of a run from CSV, JSON lines and TensorBoard event files."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.checkpoint.remote_folder import remote_at
from trainkit.errors import ConfigurationError, TrainkitError, missing_package
from trainkit.loggers.run_files import MAX_FILE, MAX_VALUES, folders_in, is_step, lines_in, regular_size
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
    if any(_is_metrics(name) for _, _, names in itertools.islice(folders_in(root), 1) for name in names):
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
    for folder, _, names in folders_in(root):
        if files := [folder / name for name in names if _is_metrics(name)]:
            experiment, version = _experiment(folder, root)
            one = _Candidate(version, max(os.lstat(file).st_mtime for file in files), folder)
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
        if match := re.fullmatch(r"version_(\d{1,18})", path.name):
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
        if os.path.lexists(folder / name):
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
    rows = csv.reader(lines_in(path))
    try:
        return _read_rows(path, rows)
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise TrainkitError(f"{path}, line {rows.line_num}: {error}. Fix: remove the line") from error


def _read_rows(path: Path, rows: Any) -> dict[str, Series]:
    header: list[str] = next(rows, [])
    if header and "step" not in header:
        raise TrainkitError(f"{path}: expected a column 'step', got {', '.join(header)}. Fix: name the column 'step'")
    metrics: dict[str, Series] = {name: [] for name in header if name != "step"}
    count = _Count(path)
    for row in rows:
        cells = dict(zip(header, row, strict=False))
        count.add(len(cells))
        try:
            step = _step(float(cells.pop("step")))
            for name, cell in cells.items():
                if cell:
                    metrics[name].append((step, float(cell)))
        except (KeyError, ValueError, OverflowError) as error:
            shown = reprlib.repr(row)
            raise TrainkitError(f"{path}, line {rows.line_num}: expected numbers, got {shown}. Fix: remove it") from error
    return {name: series for name, series in metrics.items() if series}


class _Count:
    """The values that were read from a file, which fit into memory."""

    def __init__(self, path: Path) -> None:
        self._path, self._number = path, 0

    def add(self, number: int) -> None:
        """Count more of them; raises if they are too many."""
        self._number += number
        if self._number > MAX_VALUES:
            raise TrainkitError(f"{self._path}: expected at most {MAX_VALUES:,} values. Fix: remove lines")


def _step(value: float) -> int:
    """The step as a whole number; raises a `ValueError` for one that no chart can show."""
    step = int(value)
    if not is_step(step):
        raise ValueError("the step is too large")
    return step


def _read_jsonl(path: Path) -> dict[str, Series]:
    metrics: dict[str, Series] = {}
    count = _Count(path)
    for number, line in enumerate(lines_in(path), start=1):
        try:
            record: dict[str, Any] = json.loads(line)
            step = _step(record.pop("step"))
            count.add(len(record))
            for name, value in record.items():
                metrics.setdefault(name, []).append((step, float(value)))
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise TrainkitError(
                f'{path}, line {number}: expected an object such as {{"step": 1, "loss": 0.5}}, got {line.strip()[:80]!r}. '
                "Fix: remove it"
            ) from error
    return metrics


def _read_events(folder: Path) -> dict[str, Series]:
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    events = _events_in(folder)
    metrics: dict[str, Series] = {}
    for tag in events.Tags()[event_accumulator.SCALARS]:
        metrics[tag] = [(event.step, event.value) for event in _as_written(events.Scalars(tag))]
    for tag in events.Tags()[event_accumulator.TENSORS]:
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            protos = [(event.step, event.tensor_proto) for event in _as_written(events.Tensors(tag))]
            metrics[tag] = [(step, float(tensor_util.make_ndarray(one))) for step, one in protos if _is_scalar(one)]
    placeholder = metrics.pop("hp_metric", [])  # TensorBoardLogger(default_hp_metric=True) writes a placeholder
    real = [(step, value) for step, value in placeholder if (step, value) != (0, -1.0)]
    metrics = {**metrics, "hp_metric": real} if real else metrics
    return {name: [point for point in series if is_step(point[0])] for name, series in metrics.items()}


def _events_in(folder: Path) -> Any:
    """TensorBoard's `EventAccumulator` of a folder, read.

    Raises:
        TrainkitError: A file is a link, a pipe or malformed, or they are too large.
    """
    from tensorboard.backend.event_processing import event_accumulator

    # tensorboard reads every file with this in its name
    names = [path.name for path in folder.iterdir() if "tfevents" in path.name]
    total = sum(regular_size(folder / name) for name in names)
    if total > MAX_FILE:
        raise TrainkitError(f"{folder}: expected at most {MAX_FILE:,} bytes of event files, found {total:,}. Fix: remove some")
    everything = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}  # the default keeps a random sample
    events = event_accumulator.EventAccumulator(str(folder), size_guidance=everything)
    try:
        events.Reload()
    except Exception as error:  # a malformed message of protobuf, a length that is not that of a record
        problem = f"{type(error).__name__}: {error!s:.200}"
        raise TrainkitError(f"{folder}: the event files cannot be read: {problem}. Fix: remove them") from error
    return events


def _is_scalar(proto: Any) -> bool:
    """Whether a tensor has no dimensions; one with a large shape needs as much memory, whatever is in the file."""
    numbers = ("float_val", "double_val", "int_val", "int64_val", "half_val", "bool_val", "tensor_content")
    return not proto.tensor_shape.dim and any(getattr(proto, name) for name in numbers)


def _as_written(events: Iterable[Any]) -> list[Any]:
    # Files of the same second are read in the order of their names, where 10 comes before 2.
    return sorted(events, key=lambda event: float(event.wall_time))
