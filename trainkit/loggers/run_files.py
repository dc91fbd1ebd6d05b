"""Reads the files in the folder of a run, which may be a stranger's: regular files, with limits of size, depth and count.

Everything that a subcommand reads from the folder of a run, except its checkpoints, is read here: metrics from CSV, JSON lines
and TensorBoard event files, and `starts.jsonl`, which says when each fit of the run started, how, and how it ended. Each line
of it is one JSON object. A fit appends one of the kind "start" and, when it ends, one of the kind "end", whose "started" is the
time of its start. A process that was killed leaves a start without an end. A resumed run appends to the same file.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.checkpoint.regular_file import not_regular, read_small_file, regular_file
from trainkit.checkpoint.urls import remote_at
from trainkit.errors import ConfigurationError, CorruptCheckpointError, TrainkitError, missing_package
from trainkit.loggers.log_folder import AppendFile
from trainkit.masking import mask_arguments, mask_text
from trainkit.paths import local_path

__all__ = [
    "MAX_FILE",
    "MAX_STEP",
    "MAX_VALUES",
    "STARTS",
    "RecordedStart",
    "Series",
    "append_record",
    "find_run",
    "folders_in",
    "home_of",
    "is_step",
    "lines_in",
    "read_metrics",
    "read_starts",
    "regular_size",
    "stream",
    "utc_now",
    "yaml_in",
]


MAX_FILE = 2**30  # bytes of a file of metrics, or of all event files of a folder
MAX_VALUES = 20_000_000  # The limit for all metrics in a file together.
MAX_STEP = 2**53  # larger whole numbers are not exact in a chart
_MAX_LINE = 8 * 2**20  # bytes
_MAX_YAML = 4 * 2**20  # bytes
_MAX_NODES = 100_000  # values in a YAML file, each as often as it is referred to
_MAX_DEPTH = 100
_MAX_BITS = 2048  # Python does not print whole numbers of more than 4,300 digits.
_MAX_FOLDERS = 100_000
_MAX_LEVELS = 16  # The limit for nested folders.


def stream(path: Path, most: int = MAX_FILE) -> io.BufferedReader:
    """Open a regular file of at most `most` bytes; the caller closes it."""
    regular_size(path, most)
    try:
        with regular_file(path) as file:
            return io.BufferedReader(io.FileIO(os.dup(file.fileno())))
    except CorruptCheckpointError as error:
        raise TrainkitError(f"{error}. Fix: replace it by a regular file, or remove it") from error


def regular_size(path: Path, most: int = MAX_FILE) -> int:
    """The size of a regular file in bytes; raises like `stream`, and opens nothing."""
    try:
        status = os.lstat(path)
    except OSError as error:
        raise TrainkitError(f"{path} cannot be read: {error.strerror or error}. Fix: remove it") from error
    if (problem := not_regular(status.st_mode)) is not None:
        raise TrainkitError(f"{path}: {problem}. Fix: replace it by a regular file, or remove it")
    if status.st_size > most:
        raise TrainkitError(f"{path}: expected at most {most:,} bytes, status {status.st_size:,}. Fix: remove it")
    return status.st_size


def lines_in(path: Path, most: int = MAX_FILE) -> Iterator[str]:
    """The lines of a text file with their ends, without an incomplete last line, which a killed process leaves."""
    with stream(path, most) as file:
        for number in range(1, most):
            line = file.readline(_MAX_LINE + 1)
            if len(line) > _MAX_LINE:
                raise TrainkitError(f"{path}, line {number}: expected at most {_MAX_LINE:,} bytes. Fix: remove the line")
            if not line.endswith(b"\n"):
                return
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise TrainkitError(
                    f"{path}, line {number}: expected UTF-8, got {line[:40]!r}. Fix: remove the line"
                ) from error


def yaml_in(path: Path) -> Any:
    """The plain values of a YAML file; `None` if there is no file."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        os.lstat(path)
    except OSError:
        return None
    regular_size(path, _MAX_YAML)
    try:
        text = read_small_file(path, _MAX_YAML).decode("utf-8")
        _check_events(yaml.parse(text, Loader=loader))
        reader = loader(text)
        try:
            value = reader.get_single_data()  # yaml.safe_load does the same, but its loader is slow for a large file.
        finally:
            reader.dispose()
        _check_values(value)
    except (OSError, ValueError, OverflowError, AttributeError, TypeError, yaml.YAMLError, TrainkitError) as error:
        # the constructors of dates and numbers raise any of these
        raise TrainkitError(f"{path} could not be read: {' '.join(str(error).split())}. Fix: remove it") from error
    return value


def _check_events(events: Iterator[Any]) -> None:
    """Nested values and merge keys are refused before anything is built, because building them takes recursion and memory."""
    depth = count = 0
    for event in events:
        kind, count = type(event).__name__, count + 1
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > _MAX_DEPTH + 2 or count > 4 * _MAX_NODES:  # the stream and the document are levels, too
            raise TrainkitError(f"expected at most {_MAX_DEPTH} levels and {_MAX_NODES:,} values")
        if kind == "ScalarEvent" and event.value == "<<":
            raise TrainkitError("expected no merge key '<<'")


def _check_values(value: Any) -> None:
    """An anchor may be referred to often, also in itself: count what a reader of the value would visit."""
    left, visited = [(value, 0)], 0
    while left:
        item, depth = left.pop()
        visited += 1
        if depth > _MAX_DEPTH or visited > _MAX_NODES:
            raise TrainkitError(f"expected at most {_MAX_DEPTH} levels and {_MAX_NODES:,} values, each as often as it is used")
        if isinstance(item, int) and item.bit_length() > _MAX_BITS:
            raise TrainkitError(f"expected whole numbers of at most {_MAX_BITS} bits")
        inside: Sequence[Any] = ()
        if isinstance(item, Mapping):
            inside = [part for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple | set):
            inside = list(item)
        left += [(part, depth + 1) for part in inside]


def is_step(value: object) -> bool:
    """Whether this is a whole number that can be a step."""
    return type(value) is int and -MAX_STEP <= value <= MAX_STEP


def folders_in(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """A folder and those below it, without links, at most `_MAX_LEVELS` deep: the folder, its folders, its files."""
    level, count = [root], 0
    for _ in range(_MAX_LEVELS):
        below = []
        for folder in level:
            count += 1
            if count > _MAX_FOLDERS:
                raise TrainkitError(f"{root} contains more than {_MAX_FOLDERS:,} folders. Fix: pass the folder of a run")
            try:
                with os.scandir(folder) as entries:
                    sorted_entries = sorted(entries, key=lambda entry: entry.name)
            except OSError:  # It is not readable, or was removed meanwhile.
                continue
            folders = [entry.name for entry in sorted_entries if entry.is_dir(follow_symlinks=False)]
            yield folder, folders, [entry.name for entry in sorted_entries if not entry.is_dir(follow_symlinks=False)]
            below += [folder / name for name in folders]
        level = below


# ------------------------------------------------------------------------------------------------------ starts of a run


STARTS = "starts.jsonl"

_MAX_BYTES = 64 * 2**20  # The largest file that is read.
_MAX_LINES = 10_000
_LATEST = 32503680000.0  # the year 3000; a larger number is not a time


def utc_now() -> str:
    """The time in UTC, such as `2026-11-20T15:07:48.123456Z`: these strings sort by time."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def append_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Append one line with a single write, so that a kill leaves all of it or nothing.

    Raises:
        OSError: It cannot be written; a full disk leaves the file as it was.
    """
    file = AppendFile(folder / STARTS)
    try:
        file.append(json.dumps(record) + "\n")
    finally:
        file.close()


@dataclass(frozen=True)
class RecordedStart:
    """One start of a run.

    Attributes:
        time: When the fit started, in seconds since 1970.
        step: The optimizer step from which it continued; 0 for a new run.
        start: What was recorded at the start.
        end: What was recorded at the end; empty if the process was killed or is still running.
    """

    time: float
    step: int
    start: Mapping[str, Any]
    end: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_time(self) -> float | None:
        """When the fit ended; None if that was not recorded."""
        return _finite_time(self.end.get("time"))

    @property
    def resumed_saved_at(self) -> float | None:
        """When the checkpoint was saved from which the fit resumed; None if it did not resume."""
        return _finite_time(self.start.get("resumed_saved_at"))

    @property
    def end_step(self) -> int | None:
        """The optimizer step at the end; None if that was not recorded."""
        step = self.end.get("step")
        return step if is_step(step) else None


def read_starts(folder: Path) -> list[RecordedStart]:
    """The starts that are recorded in the folder of a run, in the order of writing; lines that are damaged are skipped.

    Raises:
        TrainkitError: The file is a link, a pipe, too large, or is not UTF-8.
    """
    starts: list[RecordedStart] = []
    if not os.path.lexists(folder / STARTS):
        return starts
    for record in map(_record, itertools.islice(lines_in(folder / STARTS, _MAX_BYTES), _MAX_LINES)):
        if record.get("kind") == "start" and is_step(record.get("step")) and math.isfinite(_seconds(record.get("time"))):
            starts.append(RecordedStart(_seconds(record["time"]), record["step"], record))
        elif record.get("kind") == "end":
            for number, one in enumerate(starts):
                if one.start["time"] == record.get("started"):
                    starts[number] = RecordedStart(one.time, one.step, one.start, record)
    return starts


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return _mask(record) if isinstance(record, dict) else {}


def _mask(record: dict[str, Any]) -> dict[str, Any]:
    """What may be a secret is hidden when a fit is recorded; earlier versions hid less."""
    for name, value in record.items():
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            record[name] = mask_arguments(value)
        elif isinstance(value, str):
            record[name] = mask_text(value)
    return record


def _finite_time(time: object) -> float | None:
    seconds = _seconds(time)
    return seconds if math.isfinite(seconds) else None


def _seconds(time: object) -> float:
    """A time as seconds since 1970; NaN if it is not one."""
    try:
        seconds = datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return math.nan
    return seconds if 0 < seconds < _LATEST else math.nan


# ----------------------------------------------------------------------------------------------------- metrics of a run


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
    newest = max(map(max, experiments), key=_write_time)
    trained = _newest_trained(experiments) or newest
    return FoundRun(trained.folder, None if trained == newest else newest.folder)


def _experiments_in(root: Path) -> list[list[_Candidate]]:
    """The folders with metrics below a folder, those of each experiment in one list; the experiment written to last first."""
    experiments: dict[Path, list[_Candidate]] = {}
    for folder, _, names in folders_in(root):
        if files := [folder / name for name in names if _is_metrics(name)]:
            experiment, version = _experiment(folder, root)
            one = _Candidate(version, max(os.lstat(file).st_mtime for file in files), folder)
            experiments.setdefault(experiment, []).append(one)
    return sorted(experiments.values(), key=lambda runs: max(map(_write_time, runs)), reverse=True)


def _newest_trained(experiments: list[list[_Candidate]]) -> _Candidate | None:
    trained: _Candidate | None = None
    for runs in experiments:
        if trained is not None and max(map(_write_time, runs)) < trained.written:
            break
        one = next((one for one in sorted(runs, reverse=True) if _has_trained(one.folder)), None)
        trained = max(filter(None, (trained, one)), key=_write_time, default=None)
    return trained


def _write_time(one: _Candidate) -> float:
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
    has_text_file = False
    for name, read in readers:
        if os.path.lexists(folder / name):
            has_text_file = True
            metrics = read(folder / name) | metrics
    if any(path.name.startswith(_EVENTS) for path in folder.iterdir()):
        try:
            metrics = _read_events(folder) | metrics
        except ImportError as error:
            if not has_text_file:
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
        self._path = path
        self._number = 0

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
    """TensorBoard's `EventAccumulator` of a folder, read."""
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
