"""``Waits``: what this process waits for the others in, counted, so that they can tell when it waits in vain."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from trainkit.registry import strategy_infos

__all__ = ["Waits", "called", "calling", "name_of"]

# Between a script and us: their frames are not the script's.
_BETWEEN = ("accelerate", "contextlib", "functools", "peft", "torch", "transformers")
_OURS = "trainkit"


class Waits:
    """The collectives of one process: ``with waits:`` around each one that the main thread may have to wait in.

    Where all processes do the same, a collective has the same number on all of them. So a process that is in one with a number
    that another one has not come to waits for that one, and in vain if that one is to come to something else first.

    Attributes:
        begun: how many have begun.
        depth: how many this process is in; one may be part of another.
        turn: meetings of own loops that are complete, which are no collectives; see ``trainkit/accelerator/meeting.py``.
        known: what is called and where, if a look at the frames of the process would not tell.
    """

    __slots__ = ("_forward", "begun", "depth", "known", "thread", "turn")

    def __init__(self) -> None:
        self.begun = self.depth = self.turn = 0
        self.known: tuple[str, str] | None = None
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

    def enter_forward(self, part: object, frame: FrameType, known: tuple[str, str]) -> None:
        """Count a forward whose beginning and end torch tells hooks of.

        Args:
            part: what is called.
            frame: one of this thread that is there for as long as the forward runs.
            known: the attribute, unless the forward is a part of another collective.
        """
        thread = threading.get_ident()
        # no calls in between: nothing that a signal could interrupt
        if not self.depth:
            self.known, self.thread = known, thread
        self.begun += 1
        self.depth += 1
        self._forward = (part, thread, frame)

    def leave_forward(self, part: object) -> None:
        """The forward has ended, if it was the one of that part."""
        if self._forward is not None and self._forward[0] is part:
            self._end_forward()

    def in_forward(self) -> bool:
        """Whether a forward runs. torch tells no hook of one that Ctrl-C has ended: it is ended here."""
        if self._forward is not None and not _runs(*self._forward[1:]):
            self._end_forward()
        return self._forward is not None

    def _end_forward(self) -> None:
        self._forward = None
        self.depth -= 1
        if not self.depth:
            self.known = None

    def record(self) -> dict[str, Any]:
        """What another process may know of it, as JSON; from any thread.

        ``where`` is the verb that waits and the place of its call, ``None`` if none does.
        """
        begun, forward = self.begun, self._forward
        waits = self.depth and (forward is None or _runs(*forward[1:]))
        where = list(self.known or called(sys._current_frames().get(self.thread))) if waits else None
        # last: what had begun when this turn was the latest cannot have come after a later one
        return {"begun": begun, "where": where, "turn": self.turn}


def called(frame: FrameType | None) -> tuple[str, str]:
    """What of ours a script has called, and where: ``("backward", "train.py:12")``.

    Args:
        frame: one that is in it, or in what it calls.
    """
    verb, script = calling(frame)
    if script is None:
        return verb, "an unknown place"
    return verb, f"{name_of(script)}:{script.f_lineno}"


def calling(frame: FrameType | None) -> tuple[str, FrameType | None]:
    """The function of ours that a script has called, and the script's frame; as :func:`called`."""
    while frame is not None and _package(frame) != _OURS:
        frame = frame.f_back
    verb = ""
    between = {_OURS, *_BETWEEN, *(package for info in strategy_infos() for package in info.packages)}
    while frame is not None and _package(frame) in between:
        verb = frame.f_code.co_name if _package(frame) == _OURS else verb
        frame = frame.f_back
    return verb, frame


def _runs(thread: int, frame: FrameType) -> bool:
    """Whether a frame of a thread is still among those that it is in."""
    found = sys._current_frames().get(thread)
    while found is not None and found is not frame:
        found = found.f_back
    return found is not None


def name_of(frame: FrameType) -> str:
    """The name of the file that it is in, without folders."""
    return frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0]
