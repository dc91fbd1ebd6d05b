"""The data in the folder of a run: metrics, hyper-parameters, checkpoints and starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.checkpoint.folder import CHECKPOINTS, ListedCheckpoint, candidates, folders_below, list_checkpoints
from trainkit.checkpoint.manifest import Manifest
from trainkit.cli.logged_runs import check_folder, metrics_folder, unique
from trainkit.cli.report.run_starts import RunStart, starts_of
from trainkit.errors import CheckpointError, ConfigurationError, TrainkitError
from trainkit.loggers.logged_values import flatten
from trainkit.loggers.metrics_reader import Series, home_of, read_metrics
from trainkit.loggers.run_files import yaml_in
from trainkit.loggers.starts_file import STARTS
from trainkit.masking import mask_value

__all__ = ["KINDS", "RunData", "kind_of", "read_run", "report_folders"]

_MOST_STARTS = 100  # on a page, since charts of many are slow
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
    def recorded(self) -> Sequence[Mapping[str, Any]]:
        """What was recorded at each start; empty if starts were not recorded."""
        return [start.facts for start in self.starts if start.facts]

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
    if not run.recorded:
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
