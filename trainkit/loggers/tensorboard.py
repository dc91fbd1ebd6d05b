"""`TensorBoardLogger`: event files for TensorBoard."""

from __future__ import annotations

import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.checks import is_whole
from trainkit.console import warn
from trainkit.errors import UnsupportedArgumentError, missing_package
from trainkit.loggers.base import Logger, is_installed
from trainkit.loggers.log_folder import check_name, cut_file
from trainkit.loggers.logged_values import flatten, number
from trainkit.loggers.run_files import MAX_FILE, regular_size, stream

__all__ = ["TensorBoardLogger", "event_files", "event_times"]


_RETRY = 60.0  # seconds between attempts to write to a full disk


class TensorBoardLogger(Logger):
    """Writes TensorBoard event files and `hparams.yaml` to `<save_dir>/<name>/version_N[/<sub_dir>]`.

    `experiment` is a `torch.utils.tensorboard.SummaryWriter`. `tensorboard --logdir <save_dir>` shows the runs.

    Args:
        save_dir: As in `Logger`.
        name: As in `Logger`.
        version: As in `Logger`.
        prefix: As in `Logger`.
        default_hp_metric: Log the placeholder `hp_metric` = -1 with hyper-parameters that have no metrics, so that
            TensorBoard's HPARAMS page lists the run.
        sub_dir: Subfolder of the run for the event files.
        max_queue: Number of events that may wait for the writer's thread.
        flush_secs: Maximum number of seconds between two flushes (120 in `SummaryWriter`).
        comment: No effect, as in Lightning: `SummaryWriter` uses it only for a folder that it chooses itself.
        filename_suffix: Appended to the names of event files.
        purge_step: TensorBoard hides earlier events of this step and later ones.
        log_graph: Not supported; the error names the call to use.

    Raises:
        MissingPackageError: The package tensorboard is not installed.
        ConfigurationError: An argument is wrong.

    Example:
        ```python
        trainer = Trainer(logger=TensorBoardLogger("runs", name="digits"))
        ```
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "default",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | None = None,
        *,
        max_queue: int = 10,
        flush_secs: float = 1,
        comment: str = "",
        filename_suffix: str = "",
        purge_step: int | None = None,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if not is_installed("tensorboard"):
            raise missing_package("tensorboard", "tensorboard", "TensorBoardLogger")
        if log_graph:
            raise UnsupportedArgumentError(
                "TensorBoardLogger(log_graph=True) is not supported. Fix: call\n"
                "    logger.experiment.add_graph(module, module.example_input_array)"
            )
        self._default_hp_metric = default_hp_metric
        self._sub_dir = check_name(sub_dir, "sub_dir")
        self._writer_options = {"max_queue": max_queue, "flush_secs": flush_secs, "filename_suffix": filename_suffix}
        self._purge_step = purge_step
        self._failed_at: float | None = None  # time.monotonic() of the last failed write
        self._hparams: dict[str, Any] = {}
        self._page: tuple[dict[str, Any], dict[str, int | float]] | None = None

    @property
    def log_dir(self) -> str | None:
        """The folder of the event files: `<save_dir>/<name>/version_N[/<sub_dir>]`."""
        folder = super().log_dir
        return folder if folder is None or not self._sub_dir else str(Path(folder) / self._sub_dir)

    def _new_version(self) -> None:
        super()._new_version()
        self._hparams = {}
        self._page = None
        self._purge_step = None
        self._failed_at = None

    def open_experiment(self) -> Any:
        """A `SummaryWriter`: a new event file in the folder of the run."""
        from torch.utils.tensorboard import SummaryWriter

        quiet_writers()
        purge_step, self._purge_step = self._purge_step, None  # a later file must not hide the events of this one
        writer = SummaryWriter(log_dir=self.log_dir, purge_step=purge_step, **self._writer_options)
        self._close_when_dropped(writer.close)
        return writer

    def close_experiment(self, experiment: Any, status: str) -> None:
        try:
            experiment.close()
        except OSError as error:
            self._note_failure(error)

    def save(self) -> None:
        if self._experiment is not None:
            self._write(lambda: self._experiment.flush())

    def _write(self, work: Callable[[], object]) -> None:
        """Call `work`. If the disk is full, warn once, drop what is logged, and try again after a minute."""
        if self._failed_at is not None and self._experiment is None and time.monotonic() < self._failed_at + _RETRY:
            return
        try:
            work()
        except OSError as error:
            self._note_failure(error)
            super().finalize("failed")  # the writer's thread has ended

    def _note_failure(self, error: OSError) -> None:
        first, self._failed_at = self._failed_at is None, time.monotonic()
        if first:
            warn(
                f"TensorBoardLogger could not write to {self.log_dir}: {error}. Training continues without these events; it "
                "tries again every minute. Fix: free some space"
            )

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        """Write scalars; TensorBoard stores them in single precision."""

        def add() -> None:
            for key, value in metrics.items():
                self.experiment.add_scalar(key, value, step)

        self._write(add)

    def log_hyperparams(self, params: Any = None, metrics: Mapping[str, Any] | float | None = None) -> None:
        """Write hyper-parameters for the HPARAMS page and to `hparams.yaml`.

        Args:
            params: As for every `Logger`.
            metrics: Results shown next to them: name → number, or one number, which is called `hp_metric`.
        """
        super().log_hyperparams(params)
        if not self.is_main_process or params is None:
            return
        if metrics is not None and not isinstance(metrics, Mapping):
            metrics = {"hp_metric": metrics}
        self._write_hparams_page({key: number(key, value) for key, value in (metrics or {}).items()})

    def write_hyperparams(self, params: Mapping[str, Any]) -> None:
        super().write_hyperparams(params)
        self._hparams.update(flatten(params))

    def _log_files(self, folder: Path) -> list[str]:
        return list(event_files(folder, self._sub_dir))

    def mark_files(self, folder: Path) -> dict[str, Any]:
        sizes = event_files(folder, self._sub_dir)
        page = None if self._page is None else list(self._page)
        return {"sizes": sizes, "hparams": dict(self._hparams), "page": page} if sizes else {}

    def is_log_of(self, folder: Path, files: Mapping[str, Any]) -> bool:
        """Whether one of the event files exists, because their names contain time, host and process; or there is none yet."""
        sizes = sizes_in(folder, files.get("sizes", {}))
        return any((folder / name).is_file() for name in sizes) or not event_files(folder, self._sub_dir)

    def cut_files(self, folder: Path, files: Mapping[str, Any]) -> list[str]:
        """Cut the event files to their sizes then, and remove later ones; a running TensorBoard hides their events too."""
        sizes = sizes_in(folder, files.get("sizes", {}))
        missing = cut_event_files(folder, self._sub_dir, sizes)
        self._hparams = dict(files.get("hparams", {}))
        self._page = tuple(files["page"]) if files.get("page") else None
        if self._purge_step is None and sizes:
            # not the step of the checkpoint: the user may log other steps, such as batches of validation
            self._purge_step = 1 + max(last_step_in(folder / name) for name in sizes)
        return missing

    def _write_hparams_page(self, metrics: dict[str, int | float]) -> None:
        from torch.utils.tensorboard.summary import hparams

        if not metrics and self._default_hp_metric:
            metrics = {"hp_metric": -1}
        page = (dict(self._hparams), metrics)
        if page == self._page:
            return  # a second fit of the same run
        known = {} if self._page is None else self._page[1]
        self._page = page

        def add() -> None:
            for summary in hparams(self._hparams, metrics):
                self.experiment.file_writer.add_summary(summary)
            for key, value in metrics.items():
                if known.get(key) != value:  # once: a resume with another learning rate has the same results
                    self.experiment.add_scalar(key, value, 0)

        self._write(add)

    def write_image(self, key: str, images: Sequence[Any], step: int) -> None:
        """Write images; several are called `<key>/0`, `<key>/1`, …"""

        def add() -> None:
            for index, image in enumerate(images):
                tag = key if len(images) == 1 else f"{key}/{index}"
                self.experiment.add_image(tag, image, step, dataformats="HWC")

        self._write(add)

    def write_text(self, key: str, text: str, step: int) -> None:
        """Write a text; TensorBoard reads it as Markdown."""
        self._write(lambda: self.experiment.add_text(key, text, step))

    def write_histogram(self, key: str, values: Any, step: int) -> None:
        self._write(lambda: self.experiment.add_histogram(key, values, step))


# ---------------------------------------------------------------------------------------------------------- event files


# An event file is a sequence of records: the length (8 bytes, little-endian), a checksum (4), an `Event` in protobuf's
# encoding, a checksum (4). tensorboard's own reader computes each checksum in Python, too slowly for large files.
_NAME = re.compile(r"events\.out\.tfevents\.\d+\.(.+\.\d+)\.\d+(?!\d)")  # seconds, then host and process, then a number
_WRITERS = "tensorboard.summary.writer.event_file_writer"
_START = 32  # bytes of an event that hold its time and its step


def event_files(folder: Path, sub_dir: str = "") -> dict[str, int]:
    """The event files of one logger: name relative to `folder` → size in bytes.

    They are in `folder / sub_dir`, and in its subfolders if the same process wrote both, as `add_scalars` does.
    """
    top = folder / sub_dir
    sizes: dict[str, int] = {}
    processes: set[str] = set()
    for path, _, names in os.walk(top):
        for name in sorted(names):
            match = _NAME.match(name)
            if match is None:
                continue
            if Path(path) == top:
                processes.add(match[1])
            if match[1] in processes:
                file = Path(path, name)
                sizes[file.relative_to(folder).as_posix()] = os.lstat(file).st_size
    return sizes


def sizes_in(folder: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of event files that lie in a folder; anyone may have written `sizes`, so others are ignored."""
    top = Path(os.path.realpath(folder))
    return {
        name: size
        for name, size in sizes.items()
        if _NAME.match(Path(name).name) and top in Path(os.path.realpath(folder / name)).parents and is_whole(size) and size > 0
    }


def cut_event_files(folder: Path, sub_dir: str, sizes: Mapping[str, int]) -> list[str]:
    """Truncate event files to these sizes and remove others; returns messages about what is missing."""
    for name in event_files(folder, sub_dir).keys() - sizes.keys():
        (folder / name).unlink()
    problems = [cut_file(folder / name, size) for name, size in sizes.items()]
    return [problem for problem in problems if problem is not None]


def last_step_in(path: Path) -> int:
    """The highest step of the events in a file; -1 if it has none or is not an event file."""
    return max((step for _, step in event_times(path, sys.maxsize)), default=-1)


def event_times(path: Path, most: int = MAX_FILE) -> Iterator[tuple[float, int]]:
    """The time (seconds since 1970) and the step of each event in a file of at most `most` bytes, in the order of writing.

    Raises:
        TrainkitError: It is a link, a pipe or too large.
    """
    if not os.path.lexists(path):
        return
    size = regular_size(path, most)
    with stream(path, most) as file:
        while len(head := file.read(12)) == 12:
            length = int.from_bytes(head[:8], "little")
            if not 0 < length <= size:  # an event has a time at least
                return
            event = file.read(min(length, _START))
            file.seek(length - len(event) + 4, os.SEEK_CUR)
            yield _time_of(event), _step_of(event)


def _time_of(event: bytes) -> float:
    """Field 1 of an `Event`, a double; omitted if it is 0."""
    return struct.unpack_from("<d", event, 1)[0] if event[:1] == b"\x09" and len(event) >= 9 else 0.0


def _step_of(event: bytes) -> int:
    """Field 2 of an `Event`, a variable-length integer after field 1, the time; omitted if it is 0."""
    position = 9 if event[:1] == b"\x09" else 0
    if event[position : position + 1] != b"\x10":
        return 0
    value = shift = 0
    for byte in event[position + 1 : position + 11]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value - 2**64 if value >= 2**63 else value


class _QuietHook:
    """A `threading.excepthook` that ignores errors that a logger reports."""

    def __init__(self) -> None:
        self._before = threading.excepthook

    def __call__(self, arguments: threading.ExceptHookArgs) -> None:
        if type(arguments.thread).__module__ != _WRITERS or not isinstance(arguments.exc_value, OSError):
            self._before(arguments)


def quiet_writers() -> None:
    """Print no traceback if the thread of an event file cannot write: its next use raises the same error."""
    if not isinstance(threading.excepthook, _QuietHook):
        threading.excepthook = _QuietHook()
