"""`Hub`: what the main process knows about all ranks of a run, and the messages that it sends them. No sockets here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainkit.distributed.failure import Failure, Runs

__all__ = ["Hub"]


class Hub:
    """The center of the star: receives the messages of all ranks and decides what happened, in the same order for all ranks.

    An exchange is complete when every rank has sent its value. During a failure no exchange completes: the participating ranks
    receive the reason. The failure of a run in a process that survives is over when every rank has left that run. A failure
    that ends a process is permanent.

    Args:
        size: the number of processes.
        send: `send(rank, message)`.
    """

    def __init__(self, size: int, send: Callable[[int, Any], None]) -> None:
        self._size, self._send = size, send
        self._exchanges: dict[str, dict[int, Any]] = {}  # key → values by rank
        self._runs = [Runs() for _ in range(size)]
        self._failures: dict[int | None, Failure] = {}  # the first of each run, in the order of arrival
        self._latest: Failure | None = None  # the latest failure of a run, even if it is over
        self._exited: dict[int, Failure] = {}
        self._asking: dict[int, str] = {}  # ranks that asked what each rank is doing → key of the answer
        self._answers: dict[int, Any] = {}

    @property
    def waiting(self) -> int:
        """Number of exchanges that are not complete."""
        return len(self._exchanges)

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Receive a message of a rank."""
        if rank in self._exited:
            return
        if "exchange" in message:
            self._add_value(rank, message["exchange"], message["value"])
        elif "withdraw" in message:
            self._withdraw(rank, message["withdraw"])
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
        elif "exit" in message:
            kind, text = message["exit"]
            self.on_exit(rank, kind, text, message.get("begun"))
        if "number" in message:
            self._send(rank, {"acknowledged": message["number"]})

    def on_exit(self, rank: int, kind: str, text: str = "", begun: int | None = None) -> None:
        """A rank has exited. `kind`: see `Failure`; `begun`: number of its collectives, if known."""
        if rank in self._exited:
            return
        mine = next((one for one in self._failures.values() if one.rank == rank), None)
        end = mine if kind == "died" and mine is not None else Failure(rank, kind, text)
        self._exited[rank] = end
        self._send_all({"exited": end.record(), "begun": begun})
        self._asking.pop(rank, None)
        self._send_answers()
        self._find_missing()
        for key, values in list(self._exchanges.items()):
            if rank not in values:
                self._cancel(key, end)

    def _add_value(self, rank: int, key: str, value: Any) -> None:
        why = next(iter(self._failures.values()), None)
        if why is not None:
            self._send(rank, {"canceled": key, "why": why.record()})
            return
        values = self._exchanges.setdefault(key, {})
        values[rank] = value
        missing = [end for other, end in self._exited.items() if other not in values]
        if missing:
            self._cancel(key, missing[0])
        elif len(values) == self._size:
            del self._exchanges[key]
            self._send_all({"result": key, "values": [values[other] for other in range(self._size)]})

    def _withdraw(self, rank: int, key: str) -> None:
        values = self._exchanges.get(key, {})
        values.pop(rank, None)
        if not values:
            self._exchanges.pop(key, None)

    def _cancel(self, key: str, why: Failure) -> None:
        for rank in self._exchanges.pop(key):
            self._send(rank, {"canceled": key, "why": why.record()})

    def _fail(self, failure: Failure, of: int | None = None) -> None:
        """Handle a failure. `of`: the run for which the rank posted the same failure before, if it now ends the process."""
        run = failure.run
        if run is not None and all(runs.over(run) for rank, runs in enumerate(self._runs) if rank != failure.rank):
            return  # all other ranks have left that run: they are affected only if the process exits
        if run is None:
            self._send_all({"failed rank": failure.rank})
        if run in self._failures:
            return
        if run is not None:
            self._latest = failure
        elif self._latest is not None and self._latest.run == of:  # all ranks must name the first failure
            failure = replace(self._latest, run=None)
        self._failures[run] = failure
        self._send_all({"failed": failure.record()})
        for key in list(self._exchanges):
            self._cancel(key, next(iter(self._failures.values())))

    def _ask(self, rank: int, key: str) -> None:
        """Ask all ranks once, however many of them ask: they usually wait for the same rank, and ask repeatedly."""
        if not self._asking:
            self._answers = {}
            self._send_all({"asked": True})
        self._asking[rank] = key

    def _answer(self, rank: int, what: Any) -> None:
        if self._asking:
            self._answers[rank] = what
            self._send_answers()

    def _send_answers(self) -> None:
        """Send the answers to the ranks that asked, as soon as all ranks that have not exited have answered."""
        if not self._asking or any(rank not in self._answers for rank in range(self._size) if rank not in self._exited):
            return
        values = [self._answers.get(rank) for rank in range(self._size)]
        asking, self._asking, self._answers = self._asking, {}, {}
        for rank, key in asking.items():
            self._send(rank, {"result": key, "values": values})

    def _find_missing(self) -> None:
        """Report a failure if a rank that has exited is needed by a rank in a run."""
        if None in self._failures:
            return
        inside = {number for rank, runs in enumerate(self._runs) if rank not in self._exited for number in runs.open}
        for rank, end in self._exited.items():
            if any(self._runs[rank].missing(number) for number in inside):
                self._fail(replace(end, run=None))

    def _clear(self) -> None:
        for run in [run for run in self._failures if run is not None and all(runs.over(run) for runs in self._runs)]:
            del self._failures[run]
            self._send_all({"cleared": run})

    def _after_runs(self, rank: int) -> None:
        """Send the runs of the main process: the other ranks need them if it exits, and the hub with it."""
        if rank == 0:
            self._send_all({"main runs": self._runs[0].record()})

    def _send_all(self, message: dict[str, Any]) -> None:
        for rank in reversed(range(self._size)):  # the main process last: when it acts, the other ranks already know
            if rank not in self._exited:
                self._send(rank, message)
