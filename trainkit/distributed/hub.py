"""`Hub`: what the main process knows of all ranks of a run, and the messages that it sends them. No sockets here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainkit.distributed.failure import Failure, Runs

__all__ = ["Hub"]


class Hub:
    """The center of the star: receives the messages of all ranks and decides what happened, in the same order for all ranks.

    An exchange is complete when every rank has given its value. During a failure no exchange completes: the ranks that take
    part in it get the reason. The failure of a run in a process that survives is over when every rank has left that run; a
    failure that ends a process is permanent.

    Args:
        size: the number of processes.
        send: `send(rank, message)`.
    """

    def __init__(self, size: int, send: Callable[[int, Any], None]) -> None:
        self._size, self._send = size, send
        self._given: dict[str, dict[int, Any]] = {}
        self._runs = [Runs() for _ in range(size)]
        self._failures: dict[int | None, Failure] = {}  # the first of each run, in the order of arrival
        self._latest: Failure | None = None  # the latest failure of a run, also if it is over
        self._gone: dict[int, Failure] = {}
        self._asking: dict[int, str] = {}  # ranks that asked what all are doing → key of the answer
        self._answers: dict[int, Any] = {}

    @property
    def waiting(self) -> int:
        """Number of exchanges that are not complete."""
        return len(self._given)

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Receive a message of a rank."""
        if rank in self._gone:
            return
        if "give" in message:
            self._give(rank, message["give"], message["value"])
        elif "take back" in message:
            self._take_back(rank, message["take back"])
        elif "begin" in message:
            self._runs[rank].begin()
            self._after_runs(rank)
            self._find_missing()
        elif "end" in message:
            self._runs[rank].end(message["end"])
            self._after_runs(rank)
            self._clear()
        elif "fail" in message:
            self._fail(Failure(**message["fail"]), message.get("of"))
        elif "ask" in message:
            self._ask(rank, message["ask"])
        elif "answer" in message:
            self._answer(rank, message["answer"])
        elif "bye" in message:
            kind, text = message["bye"]
            self.on_exit(rank, kind, text, message.get("begun"))
        if "number" in message:
            self._send(rank, {"acknowledged": message["number"]})

    def on_exit(self, rank: int, kind: str, text: str = "", begun: int | None = None) -> None:
        """A rank has exited. `kind`: see `Failure`; `begun`: number of its collectives, if known."""
        if rank in self._gone:
            return
        mine = next((one for one in self._failures.values() if one.rank == rank), None)
        end = mine if kind == "died" and mine is not None else Failure(rank, kind, text)
        self._gone[rank] = end
        self._tell({"exited": end.record(), "begun": begun})
        self._asking.pop(rank, None)
        self._settle_questions()
        self._find_missing()
        for key, values in list(self._given.items()):
            if rank not in values:
                self._void(key, end)

    def _give(self, rank: int, key: str, value: Any) -> None:
        why = next(iter(self._failures.values()), None)
        if why is not None:
            self._send(rank, {"void": key, "why": why.record()})
            return
        values = self._given.setdefault(key, {})
        values[rank] = value
        missing = [end for other, end in self._gone.items() if other not in values]
        if missing:
            self._void(key, missing[0])
        elif len(values) == self._size:
            del self._given[key]
            self._tell({"result": key, "values": [values[other] for other in range(self._size)]})

    def _take_back(self, rank: int, key: str) -> None:
        values = self._given.get(key, {})
        values.pop(rank, None)
        if not values:
            self._given.pop(key, None)

    def _void(self, key: str, why: Failure) -> None:
        for rank in self._given.pop(key):
            self._send(rank, {"void": key, "why": why.record()})

    def _fail(self, failure: Failure, of: int | None = None) -> None:
        """A failure. It may be the one that a rank has posted as a failure of run `of`, if that now ends the process."""
        run = failure.run
        if run is not None and all(runs.over(run) for rank, runs in enumerate(self._runs) if rank != failure.rank):
            return  # all other ranks have left that run: they are affected only if the process exits
        if run is None:
            self._tell({"fallen": failure.rank})
        if run in self._failures:
            return
        if run is not None:
            self._latest = failure
        elif self._latest is not None and self._latest.run == of:  # all ranks must name the first failure
            failure = replace(self._latest, run=None)
        self._failures[run] = failure
        self._tell({"failed": failure.record()})
        for key in list(self._given):
            self._void(key, next(iter(self._failures.values())))

    def _ask(self, rank: int, key: str) -> None:
        """Ask all ranks once, however many of them ask: they usually wait for the same rank, and ask repeatedly."""
        if not self._asking:
            self._answers = {}
            self._tell({"asked": True})
        self._asking[rank] = key

    def _answer(self, rank: int, what: Any) -> None:
        if self._asking:
            self._answers[rank] = what
            self._settle_questions()

    def _settle_questions(self) -> None:
        """Send the answers to the ranks that asked, as soon as all ranks that have not exited have answered."""
        if not self._asking or any(rank not in self._answers for rank in range(self._size) if rank not in self._gone):
            return
        values = [self._answers.get(rank) for rank in range(self._size)]
        asking, self._asking, self._answers = self._asking, {}, {}
        for rank, key in asking.items():
            self._send(rank, {"result": key, "values": values})

    def _find_missing(self) -> None:
        """Report a failure if a rank that has exited is needed by a rank in a run."""
        if None in self._failures:
            return
        inside = {number for rank, runs in enumerate(self._runs) if rank not in self._gone for number in runs.open}
        for rank, end in self._gone.items():
            if any(self._runs[rank].missing(number) for number in inside):
                self._fail(replace(end, run=None))

    def _clear(self) -> None:
        for run in [run for run in self._failures if run is not None and all(runs.over(run) for runs in self._runs)]:
            del self._failures[run]
            self._tell({"cleared": run})

    def _after_runs(self, rank: int) -> None:
        """Send the runs of the main process, which the other ranks must know if it exits, and the hub with it."""
        if rank == 0:
            self._tell({"main": self._runs[0].record()})

    def _tell(self, message: dict[str, Any]) -> None:
        for rank in reversed(range(self._size)):  # the main process last: when it acts, the other ranks know already
            if rank not in self._gone:
                self._send(rank, message)
