"""`Channel`: a connection between all processes of a run, in addition to the collectives.

It is a star: a thread of the main process is the hub, and each other process has one TCP connection to it. Any thread can
exchange values over it, without a time limit. Every process learns within milliseconds that another one has failed or exited,
even while its main thread waits.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.distributed.failure import Failure, Runs
from trainkit.distributed.hub import HubConnection, LocalHubConnection
from trainkit.distributed.wire import LIMIT, encode, inherited
from trainkit.distributed.world import CollectiveTracker
from trainkit.errors import ProcessFailedError

__all__ = ["SILENCE_LIMIT_S", "Channel"]

SILENCE_LIMIT_S = 30.0  # seconds of silence after which a node counts as lost
_CONNECT_LIMIT_S = 10.0  # seconds in which all must have connected
_ACKNOWLEDGE_LIMIT_S = 1.0  # seconds to wait for the hub to acknowledge a message
_CLEARED_S = 60.0  # seconds that a run waits until all ranks have left an earlier run that failed
_LOOK_S = 1.0  # seconds until a waiting rank first calls `while_waiting`; the pause doubles each time
_LONGEST_PAUSE_S = 8.0  # longest pause, in seconds
_ANSWER_S = 2.0  # seconds for all ranks to answer

_QUESTION = "what each rank is doing"
_Call = Callable[[], None]


@dataclass(eq=False)
class _Waiter:
    """A thread that waits for an exchange. `collected`: the values of all ranks are there, for the reply to them."""

    complete: _Call | None = None
    collected: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    values: list[Any] = field(default_factory=list)
    why: Failure | None = None


class Channel:
    """One process's end of the connection, created by `open`. All methods can be called from any thread.

    Attributes:
        rank: of this process.
        size: the number of processes.
        changed: notified whenever `failure`, `exited`, `failed_ranks` or `runs` has changed.
        exited: the ranks that have exited, with the reason.
        failed_ranks: the ranks that exit, or have exited, with an error.
        runs: the runs of this process.
        collectives: the collectives of this process.
        hub_lost: the main process has exited, so there is no more news about the other ranks.
        closed: no message is sent or received any more.
        traceback: the traceback of the error that ends a run on this process; empty if there is no error.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.changed = threading.Condition()
        self.exited: dict[int, Failure] = {}
        self.failed_ranks: frozenset[int] = frozenset()
        self.runs, self.collectives = Runs(), CollectiveTracker()
        self.hub_lost = self.closed = False
        self.traceback = ""
        self._failures: dict[int | None, Failure] = {}  # replaced, never modified, like `exited`: read without the lock
        self._waiters: dict[str, _Waiter] = {}
        self._listeners: list[Callable[[Failure | None], None]] = []
        self._last_begun: dict[int, int] = {}  # Rank that has exited → number of collectives that had begun.
        self._failing_runs: set[int] = set()  # runs that fail on this process
        self._announced: tuple[str, str] | None = None
        self._posted: Failure | None = None
        self._sent = self._acknowledged = 0
        self._main_runs = Runs()  # the runs of the main process
        self._link = (LocalHubConnection if rank == 0 else HubConnection)(rank, size, self._on_message, self._on_lost)
        inherited.add(self)

    @classmethod
    def open(
        cls,
        rank: int,
        size: int,
        master_addr: str | None,
        from_main: Callable[[Any], Any],
        *,
        limit: float = _CONNECT_LIMIT_S,
        silence_limit: float = SILENCE_LIMIT_S,
    ) -> Channel:
        """Connect all processes; collective.

        Args:
            rank: of this process.
            size: the number of processes.
            master_addr: the address of the node of rank 0, from the launcher; `None` if unknown.
            from_main: returns the value of rank 0 on all ranks, like `trainkit.distributed.world.World.from_main`.
            limit: seconds in which all ranks must connect.
            silence_limit: seconds of silence after which a node counts as lost.

        Raises:
            ProcessFailedError: a rank cannot connect; raised on all ranks.
        """
        channel = cls(rank, size)
        try:
            channel._link.open(master_addr, from_main, limit, silence_limit)
        except BaseException:
            channel.close()
            raise
        return channel

    # ------------------------------------------------------------------------------------------------ exchanging

    def exchange(self, key: str, value: Any, while_waiting: _Call | None = None, complete: _Call | None = None) -> list[Any]:
        """The values of all ranks, in the order of the ranks; waits without a time limit.

        Args:
            key: the same on all ranks; can be used again when the exchange is complete.
            value: JSON, at most 16 MiB.
            while_waiting: called from time to time during the wait; an exception in it ends the wait.
            complete: called in another thread when the values of all ranks have arrived: on all ranks or on none, even if the
                wait has already ended.

        Raises:
            ProcessFailedError: a rank failed or exited before it sent its value.
            ValueError: the value is too large.
        """
        waiter = _Waiter(complete)

        def wait() -> None:
            pause = _LOOK_S
            while not waiter.done.wait(None if while_waiting is None else pause):
                while_waiting()  # type: ignore[misc]
                pause = min(2 * pause, _LONGEST_PAUSE_S)

        self._exchange(key, {"value": json.dumps(value)}, waiter, wait)
        decoded = {text: json.loads(text) for text in set(waiter.values)}  # most values are often equal
        return [decoded[text] for text in waiter.values]

    def collect(self, key: str, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """The reply of the main process to the values of all ranks; waits without a time limit.

        The values go to the main process only, and only its reply goes to all ranks.

        Args:
            key: see `exchange`.
            value: see `exchange`.
            answer: on the main process, returns the reply (JSON) to the values of all ranks, in the order of the ranks.

        Raises:
            ProcessFailedError, ValueError: see `exchange`.
        """
        waiter = _Waiter()

        def wait() -> None:
            if self.rank == 0:
                waiter.collected.wait()
                if waiter.why is None:
                    reply = answer([json.loads(text) for text in waiter.values])
                    self._link.send(_line({"reply": key, "value": json.dumps(reply)}))
            waiter.done.wait()

        self._exchange(key, {"value": json.dumps(value), "collect": True}, waiter, wait)
        return json.loads(waiter.values[0])

    def _exchange(self, key: str, message: dict[str, Any], waiter: _Waiter, wait: _Call) -> None:
        """Send a value, and wait until the exchange is complete. Values are JSON inside JSON: the hub does not decode them."""
        line = _line({"exchange": key, **message})
        try:
            with self.changed:
                if self.closed or self.hub_lost:
                    raise ProcessFailedError(f"exchange {key!r} cannot start: {self.exited.get(0, 'the channel is closed')}.")
                if key in self._waiters:
                    raise ValueError(f"exchange {key!r} is already running in another thread. Use another key.")
                self._waiters[key] = waiter
            self._link.send(line)
            wait()
        except BaseException:  # such as a signal: the value must not count for a later exchange with this key
            if self._waiters.get(key) is waiter:
                self._send_and_wait({"withdraw": key})  # a result that was sent before has arrived by then
            raise
        finally:
            if self._waiters.get(key) is waiter:
                del self._waiters[key]
        if waiter.why is not None:
            raise ProcessFailedError(f"exchange {key!r} cannot be completed: {waiter.why}.")

    def ask(self) -> list[dict[str, Any] | None] | None:
        """What each rank is doing, as `CollectiveTracker.record` returns it, even while its main thread waits.

        Returns:
            A list by rank, with `None` for ranks that have exited. `None` if a rank did not answer in time.
        """
        waiter = _Waiter()
        with self.changed:
            if self.closed or self.hub_lost:
                return None
            self._waiters[_QUESTION] = waiter
        self._link.send(encode({"ask": _QUESTION}))
        waiter.done.wait(_ANSWER_S)
        self._waiters.pop(_QUESTION, None)
        return waiter.values if waiter.done.is_set() and waiter.why is None else None

    # --------------------------------------------------------------------------------------------------- failing

    @property
    def failure(self) -> Failure | None:
        """The first failure that is not over."""
        return next(iter(self._failures.values()), None)

    @property
    def own_failure(self) -> Failure | None:
        """The failure that this process has posted, if it is not over."""
        posted = self._posted
        return posted if posted is not None and (posted.run in self._failures or posted.run is None) else None

    @property
    def cause(self) -> Failure | None:
        """Why a collective with the other ranks cannot complete, if known."""
        ends = sorted(self.exited.values(), key=lambda end: end.kind == "left")
        return self.failure or next(iter(ends), None)

    @property
    def ending(self) -> str:
        """How this process is leaving its current run: a kind of `announce_exit`, or "error"; "" if it is not leaving."""
        if not self._failing_runs.intersection(self.runs.open[-1:]):
            return ""
        return self._announced[0] if self._announced is not None else "error"

    def post_failure(self, kind: str, summary: str, *, fatal: bool = False) -> Failure:
        """Report to all ranks that this one has failed, with `traceback`. The first failure counts.

        Args:
            kind: "error" or "timeout".
            summary: the error in one line.
            fatal: the process exits. False: the failure is over when all ranks have left the run.
        """
        run = None if fatal or not self.runs.open else self.runs.open[-1]
        failure = Failure(self.rank, kind, summary, self.traceback, run=run)
        before, self._posted = self._posted, failure
        self.mark_failed()
        self._post(failure, of=before.run if before is not None and before.summary == summary else None)
        return failure

    def report_cause(self, cause: Failure) -> None:
        """Report to all ranks that this one has failed because another one failed or exited."""
        self.mark_failed()
        if self.failure is None:
            self._post(replace(cause, run=None))

    def report_missing_rank(self) -> None:
        """Report to all ranks if this rank waits in a collective for a rank that exited before it called that collective."""
        begun, inside = self.collectives.begun, self.collectives.depth > 0
        end = next((end for end in self.exited.values() if inside and self._last_begun.get(end.rank, begun) < begun), None)
        if end is not None:
            self._post(replace(end, run=None))

    def mark_failed(self) -> None:
        """Note that the current run fails on this process."""
        with self.changed:
            self._failing_runs.update(self.runs.open[-1:])
            self.changed.notify_all()

    def announce_exit(self, kind: str, text: str = "") -> None:
        """Announce how this process will exit: "exit", "preempted" or "interrupt". Not a failure if all ranks do so."""
        self.mark_failed()
        self._announced = (kind, text)

    def on_failure(self, listener: Callable[[Failure | None], None]) -> None:
        """Call a function with `failure` whenever that changes, in a thread of the channel."""
        self._listeners.append(listener)

    def wait(self, condition: Callable[[], bool], limit: float | None = None) -> bool:
        """Wait until a condition on the channel's state holds. Returns whether it does, after `limit` seconds at most."""
        with self.changed:
            return self.changed.wait_for(condition, limit)

    # ---------------------------------------------------------------------------------------------------- running

    def enter_run(self) -> None:
        """Begin a run on this process; first wait until all ranks have left an earlier run that failed.

        Raises:
            ProcessFailedError: a rank has exited, or did not leave the earlier run.
        """
        number = self.runs.begun + 1

        def cannot_begin() -> bool:
            return self.closed or bool(self.exited) or None in self._failures

        self.wait(lambda: self._earlier_failure(number) is None or cannot_begin(), _CLEARED_S)
        with self.changed:
            cause = self._earlier_failure(number) or self.cause if cannot_begin() else self._earlier_failure(number)
            if self.closed or cause is not None:
                raise ProcessFailedError(f"a run needs all {self.size} processes, but {cause or 'the channel is closed'}.")
            self._announced = None
            self.traceback = ""
            self.runs.begin()
            self._link.send(encode({"begin": number}))
            self.changed.notify_all()

    def leave_run(self) -> None:
        """End the innermost run on this process."""
        with self.changed:
            fine = self.runs.open[-1] not in self._failing_runs
            self._failing_runs.discard(self.runs.end(fine))
            self.changed.notify_all()
        self._send_and_wait({"end": fine})  # once the hub has received it, an exit is not a failure of this run

    def _earlier_failure(self, number: int) -> Failure | None:
        """A failure that prevents the run with this number."""
        return next((one for run, one in self._failures.items() if run is None or run < number), None)

    # ----------------------------------------------------------------------------------------------------- ending

    def announce_end(self) -> None:
        """Announce a normal exit, so that the end of the connection does not count as a failure."""
        while self.runs.open:  # the runs of your own training loop end with the script; other ranks may continue
            self.leave_run()
        self._link.send(encode({"exit": self._announced or ("left", ""), "begun": self.collectives.begun}))

    def close(self) -> None:
        """Close the connections; may be called again."""
        self._link.close()
        with self.changed:
            self.closed = True
            self._release(Failure(self.rank, "error", "the channel was closed"))
            self.changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- the hub

    def _send_and_wait(self, message: dict[str, Any]) -> bool:
        """Send a message to the hub and wait for a short time until it is acknowledged. Returns whether it was."""
        with self.changed:
            self._sent += 1
            number = self._sent
        self._link.send(encode({**message, "number": number}))
        self.wait(lambda: self._acknowledged >= number or self.hub_lost or self.closed, _ACKNOWLEDGE_LIMIT_S)
        return self._acknowledged >= number

    def _post(self, failure: Failure, of: int | None = None) -> None:
        acknowledged = self._send_and_wait({"fail": failure.record(), "of": of})
        # the stacks must be written even if there is no hub, or all threads of its process hang
        if self.hub_lost or self.closed or (failure.kind == "timeout" and not acknowledged):
            self._add_failure(failure)

    def _on_message(self, message: dict[str, Any]) -> None:
        """A message of the hub; in the thread of the connection."""
        if "result" in message:
            self._end_exchange(message["result"], message["values"])
        elif "collected" in message:
            self._pass_values(message["collected"], message["values"])
        elif "canceled" in message:
            self._end_exchange(message["canceled"], [], Failure(**message["why"]))
        elif "asked" in message:
            self._link.send(encode({"answer": self.collectives.record()}))
        elif "failed" in message:  # sent once for each run
            failure = Failure(**message["failed"])
            self._change({**self._failures, failure.run: failure})
        elif "cleared" in message:
            self._change({run: one for run, one in self._failures.items() if run != message["cleared"]})
        else:
            with self.changed:
                self._update(message)
                self.changed.notify_all()

    def _end_exchange(self, key: str, values: list[Any], why: Failure | None = None) -> None:
        waiter = self._waiters.get(key)
        if waiter is None:
            return
        waiter.values = values
        waiter.why = why
        if why is None and waiter.complete is not None:
            waiter.complete()
        waiter.collected.set()
        waiter.done.set()

    def _pass_values(self, key: str, values: list[Any]) -> None:
        """Pass the values of all ranks to the thread that replies to them."""
        waiter = self._waiters.get(key)
        if waiter is not None:
            waiter.values = values
            waiter.collected.set()

    def _update(self, message: dict[str, Any]) -> None:
        """Store the content of a message; called with the lock."""
        if "failed rank" in message:
            self.failed_ranks |= {message["failed rank"]}
        elif "exited" in message:
            end = Failure(**message["exited"])
            if message["begun"] is not None:
                self._last_begun[end.rank] = message["begun"]
            self.exited = {**self.exited, end.rank: end}
        elif "main runs" in message:
            self._main_runs = Runs(**message["main runs"])
        elif "acknowledged" in message:
            self._acknowledged = message["acknowledged"]

    def _on_lost(self, kind: str) -> None:
        """The main process, and with it the hub, has exited."""
        failure = next((one for one in self._failures.values() if one.rank == 0), None)
        with self.changed:
            self.hub_lost = True
            end = self.exited.get(0) or failure or Failure(0, kind)
            self.exited = {**self.exited, 0: end}
            self._release(end)
            self.changed.notify_all()
        if any(self._main_runs.missing(number) for number in self.runs.open):
            self._add_failure(replace(end, run=None))

    def _add_failure(self, failure: Failure) -> None:
        if failure.run not in self._failures:
            self._change({**self._failures, failure.run: failure})

    def _change(self, failures: dict[int | None, Failure]) -> None:
        before = self.failure
        with self.changed:
            self._failures = failures
            self.changed.notify_all()
        if self.failure is not before:
            for listener in self._listeners:
                listener(self.failure)

    def _release(self, why: Failure) -> None:
        """End all exchanges, which cannot complete any more."""
        for waiter in list(self._waiters.values()):
            if not waiter.done.is_set():
                waiter.why = why
                waiter.collected.set()
                waiter.done.set()

    def abandon(self) -> None:
        """In a forked process: the channel belongs to the parent."""
        self.changed = threading.Condition()
        self.closed = True
        self._waiters = {}
        self._listeners = []


def _line(message: dict[str, Any]) -> bytes:
    """A message with a value as a line.

    Raises:
        ValueError: the value is too large.
    """
    line = encode(message)
    if len(line) > LIMIT:
        raise ValueError(f"an exchange has at most {LIMIT} bytes per process, but this value has {len(line)}. Use a file.")
    return line
