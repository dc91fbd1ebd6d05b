"""The file `starts.jsonl` in the folder of a run: when each fit of the run started, how, and how it ended.

Each line is one JSON object. A fit appends one of the kind "start" and, when it ends, one of the kind "end", whose "started" is
the time of its start. A process that was killed leaves a start without an end. A resumed run appends to the same file.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainkit.loggers.files import AppendFile
from trainkit.loggers.run_files import is_step, lines_in
from trainkit.masking import mask_arguments, mask_text

__all__ = ["STARTS", "RecordedStart", "append_record", "read_starts", "utc_now"]

STARTS = "starts.jsonl"

_MAX_BYTES = 64 * 2**20  # of the file
_MAX_LINES = 10_000
_LATEST = 32503680000.0  # the year 3000; a larger number is not a time


def utc_now() -> str:
    """The time in UTC, such as `2026-11-20T15:07:48.123456Z`: these strings sort by time."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def append_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Append one line with a single write, so that a kill leaves all of it or nothing.

    Raises:
        OSError: it cannot be written; a full disk leaves the file as it was.
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
        return _known_time(self.end.get("time"))

    @property
    def resumed_saved_at(self) -> float | None:
        """When the checkpoint was saved from which the fit resumed; None if it did not resume."""
        return _known_time(self.start.get("resumed_saved_at"))

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
    return _masked(record) if isinstance(record, dict) else {}


def _masked(record: dict[str, Any]) -> dict[str, Any]:
    """What may be a secret is hidden when a fit is recorded; earlier versions hid less."""
    for name, value in record.items():
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            record[name] = mask_arguments(value)
        elif isinstance(value, str):
            record[name] = mask_text(value)
    return record


def _known_time(time: object) -> float | None:
    seconds = _seconds(time)
    return seconds if math.isfinite(seconds) else None


def _seconds(time: object) -> float:
    """A time as seconds since 1970; NaN if it is not one."""
    try:
        seconds = datetime.fromisoformat(str(time).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return math.nan
    return seconds if 0 < seconds < _LATEST else math.nan
