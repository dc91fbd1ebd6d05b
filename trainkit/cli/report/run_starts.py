"""The starts of a run, from `starts.jsonl` and the times of event files and checkpoints; without it, from event files only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trainkit.checkpoint.manifest import Manifest
from trainkit.loggers.event_files import event_files, event_times
from trainkit.loggers.starts_file import RecordedStart, read_starts

__all__ = ["RunStart", "saved_time", "starts_of"]

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
        facts: What was recorded at the start; empty if starts were not recorded.
    """

    opened: float
    end: float
    points: _Points
    reached: int
    ending: str = ""
    ended: bool = False
    finished: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)


def starts_of(folder: Path, home: Path, manifests: Sequence[Manifest], last_step: int | None) -> list[RunStart]:
    """The starts of a run, in order.

    Args:
        folder: The folder of its metrics.
        home: The folder of the run.
        manifests: Those of its checkpoints.
        last_step: The highest step of metrics and checkpoints.
    """
    logged = _logged(folder)
    recorded = sorted(read_starts(home), key=lambda one: one.time)
    if not recorded:
        return _climbing(logged)
    run_id = recorded[-1].start.get("run_id")  # the folder may also have been used for other runs
    recorded = [one for one in recorded if one.start.get("run_id") == run_id]
    saved = [(saved_time(one), one.step) for one in manifests if one.run_id == run_id]
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
    return RunStart(one.time, points[-1][0], points, max(highest, reached or 0), ending, facts=one.start)


def _points_in(logged: Sequence[_Points], one: RecordedStart, following: RecordedStart | None, first: bool) -> _Points:
    """The events of the files that were opened in one start; the first one has also those that are older."""
    begin, end = -math.inf if first else one.time, math.inf if following is None else following.time
    return [(max(time, one.time), step) for file in logged if begin <= file[0][0] < end for time, step in file]


def _logged(folder: Path) -> list[_Points]:
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


def saved_time(manifest: Manifest) -> float:
    """When a checkpoint was saved, in seconds since 1970; NaN if the manifest has no valid time."""
    try:
        return datetime.fromisoformat(manifest.saved_at.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return math.nan
