"""The runs that `trainkit plot` and `trainkit report` draw: find them, read their metrics, and group related metrics."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainkit.checkpoint.regular_file import not_regular
from trainkit.checkpoint.urls import remote_at
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.loggers.log_folder import replace_file
from trainkit.loggers.run_files import MAX_STEP, Series, find_run, folders_in
from trainkit.paths import local_path

__all__ = [
    "MOST_DRAWN",
    "MOST_RUNS",
    "check_folder",
    "find_runs",
    "group_of",
    "labels_of",
    "metric_names",
    "metrics_folder",
    "not_drawn",
    "over_epochs",
    "select",
    "unique",
    "write_output",
]

MOST_RUNS = 10  # There are as many colors.

_STAGE = re.compile(r"^(train|training|val|valid|validation|test|eval)[_/.-]+", re.IGNORECASE)
_SUFFIX = re.compile(r"(_step|_epoch)?(/dataloader_idx_\d+)?$")

MOST_DRAWN = 100
"""Names of metrics that one page or picture draws unless the user names some: each takes tens of milliseconds."""

_WANDB = re.compile(r"(offline-)?run-\d{8}_\d{6}-(.+)")
_COMET = re.compile(r"[0-9a-z]{32,50}(-.*)?\.zip")
_ALSO = "Or also log to a file: Trainer(logger=[{logger}(), CSVLogger()])"


def find_runs(run_dirs: Sequence[str], command: str) -> list[Path]:
    """The folders with the metrics of these runs, each once.

    Args:
        run_dirs: Each is the folder of a run, or a folder above it, which means the newest run in it that trained.
        command: "plot" or "report", for messages.

    Raises:
        ConfigurationError: There are too many runs, or a folder has no metrics. If it contains a run of W&B, MLflow or Comet,
            the message says where its metrics are.
    """
    return unique([metrics_folder(one, command) for one in run_dirs])


def unique(folders: Sequence[Path]) -> list[Path]:
    """The folders without repetitions; raises if there are more than `MOST_RUNS`."""
    different = list({folder.resolve(): folder for folder in folders}.values())
    if len(different) > MOST_RUNS:
        raise ConfigurationError(
            f"Expected at most {MOST_RUNS} runs, got {len(different)}. Fix: pass only the folders of the runs to compare"
        )
    return different


def check_folder(run_dir: str, command: str) -> Path:
    """The folder of a run; raises if it does not exist."""
    root = local_path(run_dir, "RUN_DIR")
    if (remote := remote_at(root)) is not None:
        remote.pull_files()
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise ConfigurationError(
            f"Expected the folder of a run, got {str(root)!r}, which {what}. Fix: trainkit {command} trainkit_runs"
        )
    return root


def metrics_folder(run_dir: str, command: str) -> Path:
    """The folder with the metrics of one run; raises like `find_runs`. Prints which newer run is skipped."""
    root = check_folder(run_dir, command)
    try:
        run = find_run(root)
        if run.newer is not None:
            print(f"Skipping {run.newer}, which is newer but has no training metrics")
        return run.folder
    except ConfigurationError:
        hint = _service_hint(root)
        if hint is None:
            raise
        raise ConfigurationError(
            f"{root} has no metrics that trainkit can read. Expected metrics.csv, metrics.jsonl or event files of TensorBoard. "
            f"{hint}"
        ) from None


def _service_hint(root: Path) -> str | None:
    """Where the metrics are, if they were logged to a service."""
    for folder, folders, names in folders_in(root):
        if match := next(filter(None, map(_WANDB.fullmatch, [folder.name, *folders])), None):
            place = folder if folder.name == match[0] else folder / match[0]
            page = f"open the page of the run {match[2]} on Weights & Biases"
            fix = f"send the run with: wandb sync {place}   and {page}" if match[1] else page
            return f"It contains a run of Weights & Biases. Fix: {fix}. {_ALSO.format(logger='WandbLogger')}"
        if "mlflow.db" in names:
            uri = f"sqlite:///{Path(folder, 'mlflow.db').absolute().as_posix()}"
            fix = f"show the runs with: mlflow ui --backend-store-uri {uri}"
            return f"It contains runs of MLflow. Fix: {fix}   {_ALSO.format(logger='MLFlowLogger')}"
        if archive := next(filter(_COMET.fullmatch, sorted(names)), None):
            fix = f"send it with: comet upload {Path(folder, archive)}   and open the page that it prints"
            return f"It contains an offline experiment of Comet. Fix: {fix}. {_ALSO.format(logger='CometLogger')}"
    return None


def labels_of(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder, such as `default/version_3`; longer if two folders would have the same name."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(2, max(map(len, parts), default=2) + 1):
        labels = ["/".join(one[-length:]) for one in parts]
        if len(set(labels)) == len(labels):
            return labels
    return ["/".join(one) for one in parts]


def group_of(name: str) -> str:
    """The name without its stage and Lightning's endings: val_loss_epoch → loss."""
    return _STAGE.sub("", _SUFFIX.sub("", name)) or name


def over_epochs(series: Mapping[str, Series], epochs: Series) -> dict[str, Series]:
    """The mean of each metric over each epoch: name → [(epoch, mean), …].

    Args:
        series: The metrics.
        epochs: The metric "epoch": the epoch of each step.

    Raises:
        ConfigurationError: There are no epochs.
    """
    if not epochs:
        raise ConfigurationError("The run has no metric 'epoch', so its metrics cannot be drawn over epochs. Fix: --x step")
    known = sorted((step, epoch) for step, epoch in epochs if abs(epoch) < MAX_STEP)  # The comparison also excludes NaN.
    if not known:
        return {}
    steps = [step for step, _ in known]
    result: dict[str, Series] = {}
    for name, points in series.items():
        by_epoch: dict[int, list[float]] = {}
        for step, value in points:
            epoch = int(known[max(bisect_right(steps, step) - 1, 0)][1])
            by_epoch.setdefault(epoch, []).append(value)
        result[name] = [(epoch, _mean(values)) for epoch, values in sorted(by_epoch.items())]
    return result


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def metric_names(metrics: str) -> list[str]:
    """The names in the argument `--metrics`."""
    return [name for name in re.split(r"\s*,\s*", metrics.strip()) if name]


def not_drawn(names: Iterable[str], command: str) -> tuple[set[str], str | None]:
    """The metrics after the first `MOST_DRAWN`, and what to tell the user about them, if there are any."""
    left = list(dict.fromkeys(names))[MOST_DRAWN:]
    if not left:
        return set(), None
    text = (
        f"The first {MOST_DRAWN} of {MOST_DRAWN + len(left):,} metrics are drawn. To draw others: trainkit {command} RUN_DIR "
        f"--metrics {left[0]}"
    )
    return set(left), text


def write_output(path: Path, data: bytes, fix: str) -> None:
    """Write a file of a command in one step; its folder is created. What is not a regular file is not replaced.

    Args:
        path: The file.
        data: Its content.
        fix: The arguments for another place, for messages.

    Raises:
        ConfigurationError: It cannot be written, or is a link, a folder, a pipe or a device.
    """
    try:
        if os.path.lexists(path) and (problem := not_regular(os.lstat(path).st_mode)) is not None:
            raise ConfigurationError(f"{path} cannot be written: {problem}. Fix: {fix}")
        replace_file(path, lambda file: file.buffer.write(data))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}. Fix: {fix}") from error


def select(metrics: Mapping[str, Series], choices: Iterable[str], known: Iterable[str]) -> dict[str, Series]:
    """The metrics with a wanted name or of a wanted group, and "epoch".

    Raises:
        UnknownNameError: No run has such a metric.

    Args:
        metrics: Those of one run.
        choices: Names or groups.
        known: The names in all runs.
    """
    names = [name for name in dict.fromkeys(known) if name != "epoch"]
    selected = {"epoch": metrics["epoch"]} if "epoch" in metrics else {}
    for choice in choices:
        chosen = [name for name in names if choice in (name, group_of(name))]
        if not chosen:
            raise UnknownNameError(
                f"No run has a metric {choice!r}.{nearest(choice, names)} Metrics: {', '.join(sorted(names))}"
            )
        selected.update({name: metrics[name] for name in chosen if name in metrics})
    return selected
