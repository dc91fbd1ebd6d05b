"""The data in the folder of a run: metrics, hyper-parameters, checkpoints, and the times of its event files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.checkpoint.folder import CHECKPOINTS, ListedCheckpoint, candidates, folders_below, list_checkpoints
from trainkit.checkpoint.manifest import Manifest
from trainkit.cli.logged_runs import check_folder, metrics_folder, unique
from trainkit.errors import CheckpointError, ConfigurationError
from trainkit.loggers.event_files import event_files, event_times
from trainkit.loggers.logged_values import flatten
from trainkit.loggers.metrics_reader import Series, read_metrics

__all__ = ["KINDS", "LoggedStart", "RunData", "kind_of", "read_run", "report_folders", "saved_time"]

KINDS = ("Metrics", "Learning rates", "Throughput", "Memory")
"""The kinds of metrics, in the order of the page."""

_LATEST = 32503680000.0  # the year 3000; a larger number is not a time


class LoggedStart(NamedTuple):
    """One start of a run, from its event file.

    Attributes:
        opened: When the file was opened, in seconds since 1970.
        end: When the last event in the file was written.
        points: (time, highest step so far) of its events.
    """

    opened: float
    end: float
    points: list[tuple[float, int]]


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
    starts: list[LoggedStart] = field(default_factory=list)
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
    found = dict(map(_report_folder, run_dirs))
    return {folder: found[folder] for folder in unique(list(found))}


def _report_folder(run_dir: str) -> tuple[Path, list[str]]:
    try:
        return metrics_folder(run_dir, "report"), []
    except ConfigurationError as error:
        root = check_folder(run_dir, "report")
        found = candidates(*folders_below(root))
        if not found:
            raise
        return found[0].path.parent.parent, [str(error)]


def read_run(folder: Path, label: str, notes: Sequence[str] = ()) -> RunData:
    """Read a run; `notes` are the first notes about it.

    Raises:
        MissingPackageError: The run has only event files, and tensorboard is not installed.
        TrainkitError: A file of metrics does not have the format of its name.
    """
    run = RunData(label, folder, notes=list(notes))
    home = _home(folder)
    if not _only_checkpoints(folder):
        run.metrics = read_metrics(folder)
    run.hparams = _hparams(run, folder, home)
    try:
        run.checkpoints = list_checkpoints(home / CHECKPOINTS)
    except CheckpointError as error:
        run.notes.append(f"The checkpoints could not be read: {error}")
    run.starts = _starts(folder)
    return run


def _only_checkpoints(folder: Path) -> bool:
    return not any(path.name.startswith(("metrics.", "events.out.tfevents.")) for path in folder.iterdir())


def _home(folder: Path) -> Path:
    """The folder of the run: the folder of its metrics, or the one above it (`TensorBoardLogger(sub_dir=)`)."""
    return next((one for one in (folder, *folder.resolve().parents) if re.fullmatch(r"version_\d+", one.name)), folder)


def _hparams(run: RunData, folder: Path, home: Path) -> dict[str, Any]:
    import yaml

    for path in dict.fromkeys([folder / "hparams.yaml", home / "hparams.yaml"]):
        try:
            values = yaml.safe_load(path.read_text("utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, yaml.YAMLError) as error:
            run.notes.append(f"{path.name} could not be read: {' '.join(str(error).split())}")
            continue
        if isinstance(values, dict):
            return flatten({str(key): value for key, value in values.items()})
    return {}


def _starts(folder: Path) -> list[LoggedStart]:
    starts = []
    for name in event_files(folder):
        if "/" in name:  # written by add_scalars
            continue
        times = [(time, step) for time, step in event_times(folder / name) if 0 < time < _LATEST]
        if times:
            starts.append(LoggedStart(times[0][0], max(time for time, _ in times), times))
    starts.sort()
    highest = 0
    for number, start in enumerate(starts):
        points = []
        for time, step in start.points:  # the step of an evaluation metric may be the index of its batch
            highest = max(highest, step)
            points.append((time, highest))
        starts[number] = start._replace(points=points)
    return starts


def saved_time(manifest: Manifest) -> float:
    """When a checkpoint was saved, in seconds since 1970; NaN if the manifest has no valid time."""
    try:
        return datetime.fromisoformat(manifest.saved_at.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return math.nan
