"""`CSVLogger` and `JSONLLogger`: metrics as one table, `metrics.csv`, or as JSON lines, `metrics.jsonl`."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.checks import is_whole
from trainkit.errors import ConfigurationError, TrainkitError
from trainkit.loggers.base import Logger
from trainkit.loggers.log_folder import (
    AppendFile,
    Waiting,
    cut_file,
    digest,
    has_mark,
    is_cut_off,
    mark_of,
    replace_file,
    too_short,
)
from trainkit.loggers.run_files import lines_in
from trainkit.names import lazily

if TYPE_CHECKING:
    from io import TextIOWrapper

__all__ = ["CSVLogger", "CSVWriter", "JSONLLogger", "JSONLWriter"]


__getattr__, _ = lazily(globals(), {})  # says what to use instead of other names of Lightning's file

_FILE = "metrics.csv"
_VALUE = 100  # bytes of memory for a value of a row


class CSVLogger(Logger):
    """Writes `<save_dir>/<name>/version_N/metrics.csv` and `hparams.yaml`.

    Each call of `log_metrics` appends a row; each metric is a column, after "step" and "epoch". A cell is empty if the
    metric was not logged in this call; values that are not finite are `nan`, `inf` and `-inf`. A new metric adds a column
    at the right: the file is rewritten and replaced in one step, so that a kill loses no row. On a full disk, training
    continues with one warning: rows, at most about 16 MB, are kept in memory and written when there is space again.

    Args:
        save_dir: As in `Logger`.
        name: As in `Logger`.
        version: As in `Logger`.
        prefix: As in `Logger`.
        flush_logs_every_n_steps: Number of calls of `log_metrics` after which rows are flushed. They are also flushed by a
            call more than a second after the last time, `save` and `finalize`. With 1, a kill loses no row.

    Raises:
        ConfigurationError: An argument is wrong.

    Example:
        ```python
        trainer = Trainer(logger=CSVLogger("runs", name="digits"))
        ```
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "default",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if type(flush_logs_every_n_steps) is not int or flush_logs_every_n_steps < 1:
            raise ConfigurationError(
                f"flush_logs_every_n_steps: expected a whole number ≥ 1, got {flush_logs_every_n_steps!r}. "
                "Fix: flush_logs_every_n_steps=1"
            )
        self._flush_every = flush_logs_every_n_steps

    def open_experiment(self) -> CSVWriter:
        writer = CSVWriter(Path(self.log_dir or self.root_dir) / _FILE, self._flush_every)
        self._close_when_dropped(writer.close)
        return writer

    def close_experiment(self, experiment: CSVWriter, status: str) -> None:
        experiment.close()

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        first = {"step": step, "epoch": metrics["epoch"]} if "epoch" in metrics else {"step": step}
        self.experiment.write({**first, **metrics})

    def save(self) -> None:
        if self._experiment is not None:
            self._experiment.flush()

    def _log_files(self, folder: Path) -> list[str]:
        return [_FILE] if os.path.lexists(folder / _FILE) else []

    def mark_files(self, folder: Path) -> dict[str, Any]:
        """Numbers of rows and columns of `metrics.csv`; not of bytes, because a new column rewrites the file."""
        path = folder / _FILE
        mark = _mark(path) if self._experiment is None else self._experiment.mark()
        return {_FILE: mark} if mark["rows"] else {}

    def is_log_of(self, folder: Path, files: Mapping[str, Any]) -> bool:
        """Whether the first row, and the last row at that position, are still the same, or there is no row yet."""
        path, mark = folder / _FILE, files.get(_FILE)
        if mark is None:
            return not path.exists()
        rows, columns = mark["rows"], mark["columns"]
        if not is_whole(rows) or not is_whole(columns) or rows < 1 or columns < 1:
            return False
        present = _mark(path, rows)
        if present["rows"] < rows:  # a part of the log is missing
            return bool(present["first"] in ("", mark["first"]))
        return bool(present["first"] == mark["first"] and present["last"] == mark["last"])

    def cut_files(self, folder: Path, files: Mapping[str, Any]) -> list[str]:
        path, mark = folder / _FILE, files.get(_FILE)
        if mark is None:
            path.unlink(missing_ok=True)
            return []
        rows, columns = mark["rows"], mark["columns"]
        present = _mark(path)
        if present["rows"] > rows or (present["rows"] and present["columns"] > columns):
            replace_file(path, partial(_copy, path, None, rows, columns))
        return [too_short(path, f"{present['rows']} rows", str(rows))] if present["rows"] < rows else []


class CSVWriter:
    """Appends rows to a CSV file, and columns when a row has new ones. Rows that the file has already stay.

    A row that cannot be written is kept, and written with the next one that can.

    Args:
        flush_every: Flush after this number of rows.
        flush_seconds: … or at the first row this many seconds after the last flush.
    """

    def __init__(self, path: Path, flush_every: int = 1, flush_seconds: float = 1.0) -> None:
        self.path = path
        self._flush_every = flush_every
        self._flush_seconds = flush_seconds
        self._flushed_at = time.monotonic()
        self._pending: Waiting[Mapping[str, int | float]] = Waiting(path)
        self._last = ""  # the line flushed last
        self._file: AppendFile | None = None
        # Describes the rows that were flushed.
        self._position: dict[str, Any] = {"rows": 0, "columns": 0, "first": "", "last": ""}
        self._columns: dict[str, None] = {}
        with suppress(OSError):  # the first flush tries again, and raises
            self._open()

    def _open(self) -> AppendFile:
        if self._file is None:
            file = AppendFile(self.path)
            if not self._columns:
                self._position = _mark(self.path)
                self._columns = dict.fromkeys(next(_table(self.path), []))
            self._file = file
        return self._file

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return (*self._columns, *self._new_columns())

    def _new_columns(self) -> dict[str, None]:
        """The columns of pending rows that the file does not have."""
        return dict.fromkeys(key for row in self._pending.records for key in row if key not in self._columns)

    def write(self, row: Mapping[str, int | float]) -> None:
        """Append one row."""
        try:
            if any(key not in self._columns for key in row):
                self.flush()
                self._add_columns({**self._columns, **dict.fromkeys(row)})
        finally:  # The row is kept even if the disk is full.
            self._pending.add(row, _VALUE * len(row))
        waiting = len(self._pending.records)
        if waiting >= self._flush_every or time.monotonic() - self._flushed_at >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Write the pending rows."""
        if self._pending.records:
            with self._pending.writing():
                self._write_pending()
        self._flushed_at = time.monotonic()

    def _write_pending(self) -> None:
        if new := self._new_columns():
            self._add_columns({**self._columns, **new})
        columns, rows = self._columns, self._pending.records
        lines = [_line(repr(row[key]) if key in row else "" for key in columns) for row in rows]
        self._open().append("".join(lines))
        self._position["rows"] += len(lines)
        self._position["first"] = self._position["first"] or _row_digest(lines[0])
        self._last = lines[-1]

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        except OSError as error:
            raise self._pending.loss_error(error) from error
        finally:
            self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def mark(self) -> dict[str, Any]:
        """Numbers of rows and columns in the file, and digests that identify it; without pending rows."""
        last = _row_digest(self._last) if self._last else self._position["last"]
        return {**self._position, "columns": len(self._columns), "last": last}

    def _add_columns(self, columns: dict[str, None]) -> None:
        self._open()
        if self._columns:
            self._close_file()  # Some systems cannot replace an open file.
            replace_file(self.path, partial(_copy, self.path, list(columns), None, None))
        else:
            self._open().append(_line(columns))
        self._columns = columns


def _copy(path: Path, columns: list[str] | None, rows: int | None, width: int | None, target: TextIOWrapper) -> None:
    """Write the table with these columns, or its first `rows` rows and `width` columns."""
    table = _table(path)
    header = next(table)
    columns = columns or header[:width]
    target.write(_line(columns))
    for row in islice(table, rows):
        target.write(_line((row + [""] * (len(columns) - len(row)))[:width]))


def _table(path: Path) -> Iterator[list[str]]:
    """The rows of a table, without an incomplete last one. A damaged one is an `OSError`, like others that keep it from use."""
    try:
        yield from csv.reader(lines_in(path, sys.maxsize))
    except (csv.Error, TrainkitError) as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from error


def _mark(path: Path, rows: int | None = None) -> dict[str, Any]:
    """Number of rows, at most `rows`, and of columns of a table, and the digests of the first and last of these rows."""
    count, columns, first, last = 0, 0, "", ""
    if os.path.lexists(path):
        table = _table(path)
        columns = len(next(table, []))
        for row in islice(table, rows):
            count += 1
            last = _line(row)
            first = first or _row_digest(last)
    return {"rows": count, "columns": columns, "first": first, "last": _row_digest(last) if count else ""}


def _row_digest(line: str) -> str:
    """The same after columns have been added at the right."""
    return digest(line.rstrip(",\n").encode())


def _line(cells: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


_FILES = ("metrics.jsonl", "text.jsonl")


class JSONLLogger(Logger):
    """Writes `<save_dir>/<name>/version_N/metrics.jsonl`, `hparams.yaml` and, if there is text, `text.jsonl`.

    Each call of `log_metrics` appends one object: `{"step": 10, "epoch": 0, "train_loss": 0.5}`. It is strict JSON: values
    that are not finite are the strings `"nan"`, `"inf"` and `"-inf"`. `log_text` appends
    `{"step": 10, "key": "sample", "text": "…"}`. Each line is flushed, so that a kill loses none. On a full disk, training
    continues with one warning: lines, at most about 16 MB, are kept in memory and written when there is space again.

    Args:
        save_dir: As in `Logger`.
        name: As in `Logger`.
        version: As in `Logger`.
        prefix: As in `Logger`.

    Raises:
        ConfigurationError: An argument is wrong.

    Example:
        ```python
        trainer = Trainer(logger=JSONLLogger("runs", name="digits"))
        ```
    """

    _texts: JSONLWriter | None = None  # while lines wait for it

    def open_experiment(self) -> JSONLWriter:
        return JSONLWriter(Path(self.log_dir or self.root_dir) / "metrics.jsonl")

    def close_experiment(self, experiment: JSONLWriter, status: str) -> None:
        experiment.close()

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        first = {"step": step, "epoch": metrics["epoch"]} if "epoch" in metrics else {"step": step}
        self.experiment.write({**first, **metrics})

    def write_text(self, key: str, text: str, step: int) -> None:
        self._texts = self._texts or JSONLWriter(Path(self.log_dir or self.root_dir) / "text.jsonl")
        self._texts.write({"step": step, "key": key, "text": text})
        self._close_texts()  # rare, so the file is not kept open

    def _close_texts(self) -> None:
        if self._texts is not None:
            self._texts.close()
            self._texts = None

    def save(self) -> None:
        if self._experiment is not None:
            self._experiment.flush()
        if self._texts is not None:
            self._texts.flush()
            self._close_texts()

    def finalize(self, status: str = "success") -> None:
        try:
            with self._surviving("write to its end"):
                self._close_texts()
        finally:
            self._texts = None
            super().finalize(status)

    def _log_files(self, folder: Path) -> list[str]:
        return [name for name in _FILES if os.path.lexists(folder / name)]

    def mark_files(self, folder: Path) -> dict[str, Any]:
        marks = {name: mark_of(folder / name) for name in _FILES}
        return {name: mark for name, mark in marks.items() if mark is not None}

    def is_log_of(self, folder: Path, files: Mapping[str, Any]) -> bool:
        """Whether the files start with what was logged by then, or with a part of it.

        A file without a mark began later. It counts only if another file has its mark, because it will be removed.
        """
        marks = {name: files[name] for name in _FILES if name in files}
        marked = [has_mark(folder / name, mark) for name, mark in marks.items()]
        if not any(marked) and any((folder / name).exists() for name in _FILES if name not in marks):
            return False
        return all(ok or is_cut_off(folder / name, marks[name]) for name, ok in zip(marks, marked, strict=True))

    def cut_files(self, folder: Path, files: Mapping[str, Any]) -> list[str]:
        problems: list[str | None] = []
        for name in _FILES:
            if name in files:
                problems.append(cut_file(folder / name, files[name]["bytes"]))
            else:
                (folder / name).unlink(missing_ok=True)
        return [problem for problem in problems if problem is not None]


class JSONLWriter:
    """Appends to a file of JSON lines. A line that cannot be written is kept, and written with the next one that can."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: Waiting[str] = Waiting(path)
        self._file: AppendFile | None = None
        with suppress(OSError):  # the first line tries again, and raises
            self._open()

    def _open(self) -> AppendFile:
        if self._file is None:
            self._file = AppendFile(self.path)
        return self._file

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object."""
        values = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
        }
        line = json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"
        self._pending.add(line, len(line))
        self.flush()

    def flush(self) -> None:
        """Write what could not be written before."""
        if self._pending.records:
            with self._pending.writing():
                self._open().append("".join(self._pending.records))

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        except OSError as error:
            raise self._pending.loss_error(error) from error
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
