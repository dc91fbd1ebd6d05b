"""`JSONLLogger`: metrics as JSON lines, `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.loggers.base import Logger
from trainkit.loggers.files import AppendFile
from trainkit.loggers.resumed_logs import cut_file, has_mark, is_cut_off, mark_of

__all__ = ["JSONLLogger", "JSONLWriter"]

_FILES = ("metrics.jsonl", "text.jsonl")


class JSONLLogger(Logger):
    """Writes `<save_dir>/<name>/version_N/metrics.jsonl`, `hparams.yaml` and, if there is text, `text.jsonl`.

    Each call of `log_metrics` appends one object: `{"step": 10, "epoch": 0, "train_loss": 0.5}`. It is strict JSON: values
    that are not finite are the strings `"nan"`, `"inf"` and `"-inf"`. `log_text` appends
    `{"step": 10, "key": "sample", "text": "…"}`. Each line is flushed, so that a kill loses none.

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

    def open_experiment(self) -> JSONLWriter:
        return JSONLWriter(Path(self.log_dir or self.root_dir) / "metrics.jsonl")

    def close_experiment(self, experiment: JSONLWriter, status: str) -> None:
        experiment.close()

    def write_metrics(self, metrics: Mapping[str, int | float], step: int) -> None:
        first = {"step": step, "epoch": metrics["epoch"]} if "epoch" in metrics else {"step": step}
        self.experiment.write({**first, **metrics})

    def write_text(self, key: str, text: str, step: int) -> None:
        writer = JSONLWriter(Path(self.log_dir or self.root_dir) / "text.jsonl")  # rare, so the file is not kept open
        writer.write({"step": step, "key": key, "text": text})
        writer.close()

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
    """Appends to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendFile(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object."""
        values = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
        }
        self._file.append(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
