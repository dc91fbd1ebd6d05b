"""``CSVLogger``: metrics as one table, ``metrics.csv``."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import ConfigurationError
from trainkit.loggers.base import Logger
from trainkit.loggers.files import AppendFile, complete_lines, replace_file
from trainkit.loggers.resumed_logs import digest, too_short

if TYPE_CHECKING:
    from io import TextIOWrapper

__all__ = ["CSVLogger", "CSVWriter"]

_FILE = "metrics.csv"


class CSVLogger(Logger):
    """Writes ``<save_dir>/<name>/version_N/metrics.csv`` and ``hparams.yaml``.

    One row a call of ``log_metrics``, one column a metric; the columns "step" and "epoch" come first, an empty cell
    means "not logged in this call", and what is not finite reads ``nan``, ``inf`` or ``-inf``. Rows are appended. A
    metric that was not there before adds a column at the right: the file is rewritten next to the old one and put in
    its place, so that a kill at any moment loses no row.

    Args:
        save_dir, name, version, prefix: As for every ``Logger``.
        flush_logs_every_n_steps: Rows are handed to the operating system every this many calls of ``log_metrics``, at a
            call more than a second after the last time, and by ``save`` and ``finalize``. 1, the default, loses no row
            when the process is killed.

    Raises:
        ConfigurationError: An argument that cannot be used.
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
        """The writer of ``metrics.csv``."""
        writer = CSVWriter(Path(self.log_dir or self.root_dir) / _FILE, self._flush_every)
        self._close_when_dropped(writer.close)
        return writer

    def close_experiment(self, experiment: CSVWriter, status: str) -> None:
        """Write what is left and give the descriptor back."""
        experiment.close()

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        """Append a row."""
        first = {"step": step, "epoch": metrics["epoch"]} if "epoch" in metrics else {"step": step}
        self.experiment.write({**first, **metrics})

    def save(self) -> None:
        """Hand the rows that wait to the operating system."""
        if self._experiment is not None:
            self._experiment.flush()

    def mark_files(self, folder: Path) -> dict[str, Any]:
        """The rows and columns of ``metrics.csv``; bytes do not tell, as a new column has the file rewritten."""
        path = folder / _FILE
        mark = _mark(path) if self._experiment is None else self._experiment.mark()
        return {_FILE: mark} if mark["columns"] else {}

    def is_log_of(self, folder: Path, files: Mapping[str, Any]) -> bool:
        """Whether the first row, and the last of those that were there, are still the same."""
        if _FILE not in files:
            return True
        mark = files[_FILE]
        found = _mark(folder / _FILE, mark["rows"])
        short = found["rows"] < mark["rows"]
        return found["first"] in ("", mark["first"]) and (short or found["last"] == mark["last"])

    def cut_files(self, folder: Path, files: Mapping[str, Any]) -> list[str]:
        """Leave the rows and columns that there were."""
        path, mark = folder / _FILE, files.get(_FILE)
        if mark is None:
            path.unlink(missing_ok=True)
            return []
        rows, columns = mark["rows"], mark["columns"]
        found = _mark(path)
        if found["rows"] > rows or found["columns"] > columns:
            replace_file(path, partial(_copy, path, None, rows, columns))
        return [too_short(path, f"{found['rows']} rows", str(rows))] if found["rows"] < rows else []


class CSVWriter:
    """A CSV file to which rows are appended and that grows columns as they come.

    Args:
        path: The file; rows that are already there stay.
        flush_every: Hand rows to the operating system every this many calls of ``write``.
        flush_seconds: … or at the first call this many seconds after the last time.
    """

    def __init__(self, path: Path, flush_every: int = 1, flush_seconds: float = 1.0) -> None:
        self.path = path
        self._flush_every = flush_every
        self._flush_seconds = flush_seconds
        self._flushed_at = time.monotonic()
        self._pending: list[str] = []
        self._mark: dict[str, Any] | None = None  # made when it is first asked for, then kept up to date
        self._last: list[str] = []
        self._file = AppendFile(path)
        with path.open(encoding="utf-8", newline="") as file:
            self._columns = next(csv.reader(file), [])

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns so far."""
        return tuple(self._columns)

    def write(self, row: Mapping[str, int | float]) -> None:
        """Append one row."""
        new = [key for key in row if key not in self._columns]
        if new:
            self._add_columns(new)
        self._last = [repr(row[key]) if key in row else "" for key in self._columns]
        self._pending.append(_line(self._last))
        if self._mark is not None:
            self._mark["rows"] += 1
        if len(self._pending) >= self._flush_every or time.monotonic() - self._flushed_at >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Hand the rows that wait to the operating system."""
        if self._pending:
            self._file.append("".join(self._pending))
            self._pending = []
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Write what waits and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()

    def mark(self) -> dict[str, Any]:
        """The rows and columns that are in the file, and by what to know it again."""
        if self._pending:
            return _mark(self.path)  # rows that could not be written are not in it
        if self._mark is None or not self._mark["first"]:
            self._mark = _mark(self.path)  # the whole file is read, once
        elif self._last:
            self._mark.update(columns=len(self._columns), last=_row_digest(self._last))
        return dict(self._mark)

    def _add_columns(self, new: list[str]) -> None:
        self.flush()
        columns = [*self._columns, *new]
        if self._columns:
            self._file.close()  # some systems cannot replace an open file
            try:
                replace_file(self.path, partial(_copy, self.path, columns, None, None))
            finally:
                self._file = AppendFile(self.path)
        else:
            self._file.append(_line(columns))
        self._columns = columns


def _copy(path: Path, columns: list[str] | None, rows: int | None, width: int | None, target: TextIOWrapper) -> None:
    """Write the table with other columns, or its first ``rows`` rows and first ``width`` columns."""
    with path.open(encoding="utf-8", newline="") as source:
        table = csv.reader(source)
        header = next(table)
        columns = columns or header[:width]
        target.write(_line(columns))
        for row in islice(table, rows):
            target.write(_line((row + [""] * (len(columns) - len(row)))[:width]))


def _mark(path: Path, rows: int | None = None) -> dict[str, Any]:
    """The rows of a table, at most ``rows`` of them, its columns, and the digests of the first and the last of these rows."""
    count, columns, first = 0, 0, ""
    last: list[str] = []
    if path.is_file():
        table: Iterator[list[str]] = csv.reader(complete_lines(path))
        columns = len(next(table, []))
        for row in islice(table, rows):
            count += 1
            first, last = first or _row_digest(row), row
    return {"rows": count, "columns": columns, "first": first, "last": _row_digest(last) if count else ""}


def _row_digest(cells: list[str]) -> str:
    """Of a row, whatever columns have been added at its right since."""
    return digest(_line(cells).rstrip(",\n").encode())


def _line(cells: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
