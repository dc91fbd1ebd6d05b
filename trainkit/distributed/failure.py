"""What is known of a process that has failed, has died or has gone, and of the runs that a process is in."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from trainkit.errors import CollectiveError

__all__ = ["Failure", "Runs", "is_communication", "is_timeout", "names_another_failure", "summary"]

# What gloo, NCCL and torch's store say when another process has closed its connections, or does not answer.
_CLOSED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Connection refused",
    "Broken pipe",
    "Application timeout caused pair closure",
    "Socket closed",
    "remote process exited",
    "remote error",
    "NCCL communicator was aborted",
    "NCCL error",
    "failed to recv",
    "Failed to recv",
)
_TIMED_OUT = (
    "Timed out waiting",
    "Socket Timeout",
    "wait timeout after",
    "monitoredBarrier",
    "Watchdog caught collective operation timeout",
)

_LINE, _LINES = 300, 1000  # characters of a summary; of one that names lines of several ranks
_LONGEST = 65536  # characters of a traceback that travel


@dataclass(frozen=True)
class Failure:
    """Why a process is no longer there for the others.

    Attributes:
        rank: of the process.
        kind: "error"; "timeout": it has waited too long for another; "died": its connection ended without a word; "lost": it
            no longer answers; "left": it has ended as it should, but too early; "exit": by ``sys.exit`` in a run; "preempted"
            or "interrupt": by a signal.
        summary: one line, such as ``ValueError: …``.
        text: the traceback; empty where there is none.
        time: seconds since 1970.
        run: the number of the run that it failed in; ``None``: it is over with the process.
    """

    rank: int
    kind: str
    summary: str = ""
    text: str = ""
    time: float = field(default_factory=time.time)
    run: int | None = None

    def __str__(self) -> str:
        who = f"rank {self.rank}"
        return {
            "died": f"{who} has died (no traceback: killed, out of memory?)",
            "lost": f"the connection to {who} is lost: it no longer answers",
            "left": f"{who} has left: its script ended while the others were still in a run",
            "exit": f"{who} has left in the middle of a run, by {self.summary}",
            "preempted": f"{who} was told to end: {self.summary}",
            "interrupt": f"{who} was interrupted (Ctrl-C)",
            "timeout": f"{who} waited too long for another: {self.summary}",
        }.get(self.kind, f"{who} failed: {self.summary}")

    @property
    def collective_error(self) -> CollectiveError | None:
        """The error that it is on every rank, if not all of them have called the same; else ``None``."""
        name, _, text = self.summary.partition(": ")
        return CollectiveError(text) if name == CollectiveError.__name__ else None

    def record(self) -> dict[str, Any]:
        """It as JSON."""
        return asdict(self) | {"text": self.text[-_LONGEST:]}


class Runs:
    """The runs of one process by their numbers, from 1. All processes make the same ones; a run may be inside another.

    Attributes:
        begun: how many there were.
        open: those that it is in, the innermost last.
        broken: those that did not end as they should.
    """

    def __init__(self, begun: int = 0, open: list[int] | None = None, broken: list[int] | None = None) -> None:
        self.begun = begun
        self.open = list(open or ())
        self.broken = set(broken or ())

    def begin(self) -> int:
        """A run begins; returns its number."""
        self.begun += 1
        self.open.append(self.begun)
        return self.begun

    def end(self, fine: bool) -> int:
        """The innermost run ends; returns its number."""
        number = self.open.pop()
        if not fine:
            self.broken.add(number)
        return number

    def over(self, number: int) -> bool:
        """Whether it has been in that run and no longer is."""
        return number <= self.begun and number not in self.open

    def missing(self, number: int) -> bool:
        """Whether somebody in that run needs this process and would wait in vain, were it gone now."""
        return not self.over(number) or number in self.broken

    def record(self) -> dict[str, Any]:
        """It as JSON; the arguments of the constructor."""
        return {"begun": self.begun, "open": list(self.open), "broken": sorted(self.broken)}


def summary(error: BaseException) -> str:
    """An error in one line."""
    first = re.sub(
        r"^\[\S+\.\w+:\d+\] ", "", _message_of(error).strip().partition("\n")[0]
    )  # gloo begins with a line of its source
    name, limit = type(error).__name__, _LINES if isinstance(error, CollectiveError) else _LINE
    return f"{name}: {first[:limit]}" if first else name


def is_communication(error: BaseException | None) -> bool:
    """Whether it is what a collective raises when another process is not there."""
    return isinstance(error, RuntimeError) and any(text in _message_of(error) for text in _CLOSED + _TIMED_OUT)


def is_timeout(error: BaseException | None) -> bool:
    """Whether it is what a collective raises when another process does not come."""
    return isinstance(error, RuntimeError) and any(text in _message_of(error) for text in _TIMED_OUT)


def names_another_failure(text: str) -> bool:
    """Whether the last lines of a process are about another one that has failed: ours, or torch's."""
    return re.search(r"rank \d+ (was )?ended because ", text) is not None or any(
        words in text for words in _CLOSED + _TIMED_OUT
    )


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's own class may be broken, and what is to be told is that error and not this one
        return ""
