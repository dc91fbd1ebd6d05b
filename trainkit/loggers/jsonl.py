"""`JSONLLogger`: metrics as JSON lines, `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit.loggers.base import Logger
from trainkit.loggers.files import AppendFile, Waiting
from trainkit.loggers.resumed_logs import cut_file, has_mark, is_cut_off, mark_of

__all__ = ["JSONLLogger", "JSONLWriter"]

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
            with self._pending.written():
                self._open().append("".join(self._pending.records))

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        except OSError as error:
            raise self._pending.lost(error) from error
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
