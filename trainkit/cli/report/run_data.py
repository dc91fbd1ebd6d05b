"""The data in the folder of a run: metrics, hyper-parameters, checkpoints and starts.

The starts come from `starts.jsonl` and the times of event files and checkpoints; without it, from event files only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trainkit.checkpoint.folder import CHECKPOINTS, ListedCheckpoint, candidates, folders_below, list_checkpoints
from trainkit.checkpoint.manifest import Manifest
from trainkit.cli.logged_runs import check_folder, metrics_folder, unique
from trainkit.errors import CheckpointError, ConfigurationError, TrainkitError
from trainkit.loggers.logged_values import flatten
from trainkit.loggers.run_files import STARTS, RecordedStart, Series, home_of, read_metrics, read_starts, yaml_in
from trainkit.loggers.tensorboard import event_files, event_times
from trainkit.masking import mask_value

__all__ = ["KINDS", "RunData", "RunStart", "kind_of", "read_run", "report_folders", "save_time", "starts_of"]


_MOST_STARTS = 100  # The limit of a page, since charts of many starts are slow.
KINDS = ("Metrics", "Learning rates", "Throughput", "Memory")
"""The kinds of metrics, in the order of the page."""


@dataclass
class RunData:
    """A run; attributes are empty if the folder has no such data.

    Attributes:
        label: Its short name.
        folder: The folder of its metrics.
        metrics: Name → points.
        hparams: Flat hyper-parameters.
        checkpoints: Valid ones, newest first, then damaged ones.
        starts: Its starts, in order.
        notes: Messages about data that could not be read.
    """

    label: str
    folder: Path
    metrics: dict[str, Series] = field(default_factory=dict)
    hparams: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[ListedCheckpoint] = field(default_factory=list)
    starts: list[RunStart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of the newest valid checkpoint."""
        return next((one.manifest for one in self.checkpoints if one.problem is None), None)

    @property
    def resumable(self) -> ListedCheckpoint | None:
        """The newest checkpoint from which the run can continue."""
        for one in self.checkpoints:
            if one.problem is None and one.manifest is not None and one.manifest.contents.get("resumable", False):
                return one
        return None

    @property
    def start_records(self) -> Sequence[Mapping[str, Any]]:
        """What was recorded at each start; empty if starts were not recorded."""
        return [start.record for start in self.starts if start.record]

    @property
    def last_step(self) -> int | None:
        """The highest step of metrics and checkpoints."""
        steps = [step for points in self.metrics.values() for step, _ in points]
        steps += [one.manifest.step for one in self.checkpoints if one.manifest is not None]
        return max(steps, default=None)


def kind_of(name: str) -> str:
    """The kind of a metric, by the names that `LearningRateMonitor`, `ThroughputMonitor` and `MemoryMonitor` use."""
    if name in ("lr", "learning_rate") or name.startswith(("lr-", "lr/")) or name.endswith("/lr"):
        return "Learning rates"
    return next((kind for kind in KINDS[2:] if name.startswith(f"{kind.lower()}/")), "Metrics")


def report_folders(run_dirs: Sequence[str]) -> dict[Path, list[str]]:
    """The folders of the runs, each once, with notes about them.

    A run may have only checkpoints; a note then says where its metrics may be.

    Raises:
        ConfigurationError: There are too many runs, or a folder has neither metrics nor checkpoints.
    """
    notes_of = dict(map(_report_folder, run_dirs))
    return {folder: notes_of[folder] for folder in unique(list(notes_of))}


def _report_folder(run_dir: str) -> tuple[Path, list[str]]:
    try:
        return metrics_folder(run_dir, "report"), []
    except ConfigurationError as error:
        root = check_folder(run_dir, "report")
        checkpoints = candidates(*folders_below(root))
        if not checkpoints:
            raise
        return checkpoints[0].path.parent.parent, [str(error)]


def read_run(folder: Path, label: str, notes: Sequence[str] = ()) -> RunData:
    """Read a run; `notes` are the first notes about it.

    Raises:
        MissingPackageError: The run has only event files, and tensorboard is not installed.
        TrainkitError: A file of metrics does not have the format of its name.
    """
    run = RunData(label, folder, notes=list(notes))
    home = home_of(folder)
    if not _only_checkpoints(folder):
        run.metrics = read_metrics(folder)
    run.hparams = _hparams(run, folder, home)
    try:
        run.checkpoints = list_checkpoints(home / CHECKPOINTS)
    except CheckpointError as error:
        run.notes.append(f"The checkpoints could not be read: {error}")
    manifests = [one.manifest for one in run.checkpoints if one.manifest is not None]
    try:
        starts = starts_of(folder, home, manifests, run.last_step)
        run.starts = starts[-_MOST_STARTS:]
        if len(starts) > len(run.starts):
            run.notes.append(f"The last {len(run.starts)} of {len(starts):,} starts are shown.")
    except TrainkitError as error:
        run.notes.append(str(error))
    if not run.start_records:
        run.notes.append(
            f"The starts of this run were not recorded: there is no {home / STARTS}, which a Trainer writes. Its "
            "interruptions, host and command line are not known, except for times in event files of TensorBoard."
        )
    return run


def _only_checkpoints(folder: Path) -> bool:
    return not any(path.name.startswith(("metrics.", "events.out.tfevents.")) for path in folder.iterdir())


def _hparams(run: RunData, folder: Path, home: Path) -> dict[str, Any]:
    for path in dict.fromkeys([folder / "hparams.yaml", home / "hparams.yaml"]):
        try:
            values = yaml_in(path)
        except TrainkitError as error:
            run.notes.append(str(error))
            continue
        if isinstance(values, dict):
            return flatten({str(key): mask_value(str(key), value) for key, value in values.items()})
    return {}


_Points = list[tuple[float, int]]  # (seconds since 1970, step)

_LATEST = 32503680000.0  # the year 3000; a larger number is not a time
_KILLED = "killed (no end was recorded)"
_OPEN = "running or killed"


@dataclass(frozen=True)
class RunStart:
    """One start of a run.

    Attributes:
        opened: When it began, in seconds since 1970.
        end: When it ended; if that is not known, the last time that is known of it.
        points: (time, highest step so far), at least one.
        reached: The highest step that is known of it.
        ending: How it ended; empty if starts were not recorded.
        ended: Whether its end was recorded.
        finished: Whether it reached the end of training.
        record: What was recorded at the start; empty if starts were not recorded.
    """

    opened: float
    end: float
    points: _Points
    reached: int
    ending: str = ""
    ended: bool = False
    finished: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)


def starts_of(folder: Path, home: Path, manifests: Sequence[Manifest], last_step: int | None) -> list[RunStart]:
    """The starts of a run, in order.

    Args:
        folder: The folder of its metrics.
        home: The folder of the run.
        manifests: Those of its checkpoints.
        last_step: The highest step of metrics and checkpoints.
    """
    logged = _read_points(folder)
    recorded = sorted(read_starts(home), key=lambda one: one.time)
    if not recorded:
        return _climbing(logged)
    run_id = recorded[-1].start.get("run_id")  # the folder may also have been used for other runs
    recorded = [one for one in recorded if one.start.get("run_id") == run_id]
    saved = [(save_time(one), one.step) for one in manifests if one.run_id == run_id]
    saved += [(one.resumed_saved_at, one.step) for one in recorded if one.resumed_saved_at is not None]
    return [
        _start(one, following, _points_in(logged, one, following, first=number == 0) + saved, last_step)
        for number, (one, following) in enumerate(itertools.zip_longest(recorded, recorded[1:]))
    ]


def _start(one: RecordedStart, following: RecordedStart | None, known: _Points, last_step: int | None) -> RunStart:
    """One start.

    Args:
        one: What was recorded.
        following: The next start; it shows that this one has ended.
        known: Times and steps, also of other starts.
        last_step: The highest step of the run.
    """
    latest = math.inf if following is None else following.time
    points, highest = [(one.time, one.step)], one.step
    for time, step in sorted(known):
        if one.time < time < latest:
            highest = max(highest, step)  # the step of an evaluation metric may be the index of its batch
            points.append((time, highest))
    end, last = one.end_time, one.end_step
    if end is not None and last is not None:
        points = [*(point for point in points if point[0] <= end), (max(end, one.time), last)]
        reason, finished = str(one.end.get("reason", "")), one.end.get("finished") is True
        return RunStart(one.time, points[-1][0], points, last, reason, True, finished, one.start)
    reached = last_step if following is None else following.step
    ending = _OPEN if following is None else _KILLED
    return RunStart(one.time, points[-1][0], points, max(highest, reached or 0), ending, record=one.start)


def _points_in(logged: Sequence[_Points], one: RecordedStart, following: RecordedStart | None, first: bool) -> _Points:
    """The events of the files that were opened in one start; the first one has also those that are older."""
    begin, end = -math.inf if first else one.time, math.inf if following is None else following.time
    return [(max(time, one.time), step) for file in logged if begin <= file[0][0] < end for time, step in file]


def _read_points(folder: Path) -> list[_Points]:
    """The times and steps in each event file, in the order in which the files were opened."""
    files = [event_times(folder / name) for name in event_files(folder) if "/" not in name]  # "/": written by add_scalars
    return sorted(filter(None, ([(time, step) for time, step in file if 0 < time < _LATEST] for file in files)))


def _climbing(logged: Sequence[_Points]) -> list[RunStart]:
    """One start for each event file."""
    starts, highest = [], 0
    for file in logged:
        points = []
        for time, step in file:  # the step of an evaluation metric may be the index of its batch
            highest = max(highest, step)
            points.append((time, highest))
        starts.append(RunStart(file[0][0], max(time for time, _ in file), points, highest))
    return starts


def save_time(manifest: Manifest) -> float:
    """When a checkpoint was saved, in seconds since 1970; NaN if the manifest has no valid time."""
    try:
        return datetime.fromisoformat(manifest.saved_at.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return math.nan
