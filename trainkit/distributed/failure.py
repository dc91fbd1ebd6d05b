"""`Failure`: why a rank failed or exited. `Runs`: the runs that a process is in."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from trainkit import errors
from trainkit.errors import CollectiveError, TrainkitError

__all__ = ["Failure", "Runs", "error_of_rank", "is_communication", "is_timeout", "names_another_failure", "summary"]

# What gloo, NCCL and torch's store report when another process has closed its connections, or does not answer.
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

_LINE, _LINES = 300, 1000  # characters of a summary, and of one that names lines of several ranks
_TRACEBACK_CHARACTERS = 65536  # characters of a traceback that are sent


@dataclass(frozen=True)
class Failure:
    """Why a rank failed or exited.

    Attributes:
        rank: the rank.
        kind: "error"; "timeout": it waited too long for another rank; "died": its connection ended without an announcement;
            "lost": it no longer answers; "left": it exited normally, but too early; "exit": by `sys.exit` in a run;
            "preempted" or "interrupt": by a signal.
        summary: one line, such as `ValueError: …`.
        text: the traceback, or empty.
        time: seconds since 1970.
        run: the number of the run that failed; `None` if the process exits.
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
            "left": f"{who} has exited: its script ended while other ranks were still in a run",
            "exit": f"{who} has exited in the middle of a run, by {self.summary}",
            "preempted": f"{who} received a stop request: {self.summary}",
            "interrupt": f"{who} was interrupted (Ctrl-C)",
            "timeout": f"{who} waited too long for another rank: {self.summary}",
        }.get(self.kind, f"{who} failed: {self.summary}")

    @property
    def collective_error(self) -> CollectiveError | None:
        """The error to raise on every rank if the ranks called different collectives; otherwise `None`."""
        name, _, text = self.summary.partition(": ")
        return CollectiveError(text) if name == CollectiveError.__name__ else None

    def record(self) -> dict[str, Any]:
        """The failure as JSON."""
        return asdict(self) | {"text": self.text[-_TRACEBACK_CHARACTERS:]}


class Runs:
    """The runs of one process by number, from 1. All ranks have the same runs; a run may be inside another.

    Attributes:
        begun: number of runs so far.
        open: the runs that the process is in, the innermost last.
        broken: the runs that failed.
    """

    def __init__(self, begun: int = 0, open: list[int] | None = None, broken: list[int] | None = None) -> None:
        self.begun = begun
        self.open = list(open or ())
        self.broken = set(broken or ())

    def begin(self) -> int:
        """Begin a run. Returns its number."""
        self.begun += 1
        self.open.append(self.begun)
        return self.begun

    def end(self, fine: bool) -> int:
        """End the innermost run. Returns its number."""
        number = self.open.pop()
        if not fine:
            self.broken.add(number)
        return number

    def over(self, number: int) -> bool:
        """Whether the process has left that run."""
        return number <= self.begun and number not in self.open

    def missing(self, number: int) -> bool:
        """Whether another rank in that run would wait forever if this process exited now."""
        return not self.over(number) or number in self.broken

    def record(self) -> dict[str, Any]:
        """The arguments of the constructor, as JSON."""
        return {"begun": self.begun, "open": list(self.open), "broken": sorted(self.broken)}


def summary(error: BaseException) -> str:
    """An error in one line."""
    # gloo's messages begin with a location in its source
    first = re.sub(r"^\[\S+\.\w+:\d+\] ", "", _message_of(error).strip().partition("\n")[0])
    name, limit = type(error).__name__, _LINES if isinstance(error, CollectiveError) else _LINE
    return f"{name}: {first[:limit]}" if first else name


def is_communication(error: BaseException | None) -> bool:
    """Whether it is an error that a collective raises when another process has exited."""
    return isinstance(error, RuntimeError) and any(text in _message_of(error) for text in _CLOSED + _TIMED_OUT)


def is_timeout(error: BaseException | None) -> bool:
    """Whether it is an error that a collective raises when another process does not join it in time."""
    return isinstance(error, RuntimeError) and any(text in _message_of(error) for text in _TIMED_OUT)


def names_another_failure(text: str) -> bool:
    """Whether the last lines of a process, from trainkit or torch, report the failure of another process."""
    return re.search(r"rank \d+ (was )?ended because ", text) is not None or any(
        words in text for words in _CLOSED + _TIMED_OUT
    )


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the __str__ of a user's class may fail
        return ""


def error_of_rank(where: str, name: str, text: str, otherwise: type[TrainkitError]) -> TrainkitError:
    """The error to raise for one that another rank has raised.

    Args:
        where: The rank, as a text.
        name: The name of its class.
        text: Its message.
        otherwise: The class of the error to raise if that is not one of trainkit's.
    """
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TrainkitError):
        return kind(f"{where}: {text}")
    return otherwise(f"{where}: {name}: {text}")
