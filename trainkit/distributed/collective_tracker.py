"""`CollectiveTracker`: counts the collectives of a process, so that other ranks can see when it waits forever."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from trainkit.registry import strategy_infos

__all__ = ["CollectiveTracker", "file_name_of", "find_call", "find_caller"]

# Packages between a user's script and trainkit: their frames are not the script's.
_BETWEEN = ("accelerate", "contextlib", "functools", "peft", "torch", "transformers")
_OURS = "trainkit"


class CollectiveTracker:
    """The collectives of one process: use `with tracker:` around each one in which the main thread may wait.

    All ranks call the same collectives, so each collective has the same number on all ranks. A rank in a collective whose
    number another rank has not reached waits for that rank. It waits forever if that rank calls something else first.

    Attributes:
        begun: the number of collectives that have begun.
        depth: the number of collectives that this process is in; one may be part of another.
        checks: the number of completed comparisons of verbs; see `trainkit/accelerator/collective_checks.py`.
        location: the verb and the place of its call, if the stack frames do not show them.
    """

    __slots__ = ("_forward", "begun", "checks", "depth", "location", "thread")

    def __init__(self) -> None:
        self.begun = self.depth = self.checks = 0
        self.location: tuple[str, str] | None = None
        self.thread = threading.get_ident()
        self._forward: tuple[object, int, FrameType] | None = None

    def __enter__(self) -> None:
        if self._forward is not None:
            self.in_forward()
        self.begun += 1
        if not self.depth:  # parts may be in other threads, as those of a backward pass are
            self.thread = threading.get_ident()
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1

    def enter_forward(self, part: object, frame: FrameType, location: tuple[str, str]) -> None:
        """Count a forward; torch calls hooks at its beginning and its end.

        Args:
            part: the module that is called.
            frame: a frame of this thread that exists while the forward runs.
            location: the attribute, unless the forward is part of another collective.
        """
        thread = threading.get_ident()
        # no calls between these lines, which a signal could interrupt
        if not self.depth:
            self.location, self.thread = location, thread
        self.begun += 1
        self.depth += 1
        self._forward = (part, thread, frame)

    def leave_forward(self, part: object) -> None:
        """End the forward, if it is that of `part`."""
        if self._forward is not None and self._forward[0] is part:
            self._end_forward()

    def in_forward(self) -> bool:
        """Whether a forward runs. torch calls no hook for a forward that Ctrl-C has ended; it is ended here."""
        if self._forward is not None and not _runs(*self._forward[1:]):
            self._end_forward()
        return self._forward is not None

    def _end_forward(self) -> None:
        self._forward = None
        self.depth -= 1
        if not self.depth:
            self.location = None

    def record(self) -> dict[str, Any]:
        """The counters as JSON, for other ranks; from any thread.

        `where` is the verb that waits and the place of its call; `None` if this rank does not wait.
        """
        begun, forward = self.begun, self._forward
        waiting = self.depth and (forward is None or _runs(*forward[1:]))
        where = list(self.location or find_call(sys._current_frames().get(self.thread))) if waiting else None
        # `checks` is read last: a collective in `begun` cannot have begun after a later check
        return {"begun": begun, "where": where, "checks": self.checks}


def find_call(frame: FrameType | None) -> tuple[str, str]:
    """The trainkit function that a script has called, and where: `("backward", "train.py:12")`.

    Args:
        frame: a frame of that function, or of what it calls.
    """
    verb, script = find_caller(frame)
    if script is None:
        return verb, "an unknown line"
    return verb, f"{file_name_of(script)}:{script.f_lineno}"


def find_caller(frame: FrameType | None) -> tuple[str, FrameType | None]:
    """The trainkit function that a script has called, and the script's frame; see `find_call`."""
    while frame is not None and _package(frame) != _OURS:
        frame = frame.f_back
    verb = ""
    between = {_OURS, *_BETWEEN, *(package for info in strategy_infos() for package in info.packages)}
    while frame is not None and _package(frame) in between:
        verb = frame.f_code.co_name if _package(frame) == _OURS else verb
        frame = frame.f_back
    return verb, frame


def _runs(thread: int, frame: FrameType) -> bool:
    """Whether a frame is still on the stack of a thread."""
    found = sys._current_frames().get(thread)
    while found is not None and found is not frame:
        found = found.f_back
    return found is not None


def file_name_of(frame: FrameType) -> str:
    """The name of the frame's file, without folders."""
    return frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0]
