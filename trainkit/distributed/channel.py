"""``Channel``: a connection of all processes of a run beside the collectives.

It is a star: a thread of the main process is the hub, and each other process has one TCP connection to it. Through it any
thread can exchange values, for as long as that takes, and every process knows within milliseconds when another one fails or
dies, whatever its main thread is waiting for.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from trainkit.distributed.collective_tracker import CollectiveTracker
from trainkit.distributed.failure import Failure, Runs
from trainkit.distributed.links import HubConnection, LocalHubConnection
from trainkit.distributed.wire import LIMIT, encode
from trainkit.errors import ProcessFailedError

__all__ = ["PATIENCE", "Channel"]

PATIENCE = 30.0  # seconds of silence after which a machine is taken to be gone
_MEETING = 10.0  # seconds in which all must have connected
_HEARD = 1.0  # seconds in which the hub hears what must be heard
_CLEARED = 60.0  # seconds that a run waits for the others to get out of a failed one
_LOOK = 1.0  # seconds after which one that waits looks what the others are doing; and again after twice as long, and so on
_SELDOM = 8.0  # seconds between two such looks at most
_ANSWER = 2.0  # seconds in which all must have said it

_QUESTION = "what all are doing"
_Call = Callable[[], None]

_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class _Waiter:
    """Somebody who waits for an exchange."""

    __slots__ = ("complete", "done", "values", "why")

    def __init__(self, complete: Callable[[], None] | None = None) -> None:
        self.complete = complete
        self.done = threading.Event()
        self.values: list[Any] = []
        self.why: Failure | None = None


class Channel:
    """One process's end of the connection; made by :meth:`open`. All methods are for any thread.

    Attributes:
        rank: of this process.
        size: the number of processes.
        changed: notified whenever :attr:`failure`, :attr:`gone`, :attr:`fallen` or :attr:`runs` has changed.
        gone: the processes that are no longer there, with why.
        fallen: the processes that end by an error, still there or not.
        runs: those of this process.
        waits: the collectives of this process.
        alone: the main process is gone, and of the others nothing is heard any more.
        closed: it is no longer of use.
        traceback: of the error that a run on this process ends by; empty: of none yet.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.changed = threading.Condition()
        self.gone: dict[int, Failure] = {}
        self.failed_ranks: frozenset[int] = frozenset()
        self.runs, self.collectives = Runs(), CollectiveTracker()
        self.alone = self.closed = False
        self.traceback = ""
        self._failures: dict[int | None, Failure] = {}  # replaced and never changed, as is `gone`: read without the lock
        self._waiters: dict[str, _Waiter] = {}
        self._listeners: list[Callable[[Failure | None], None]] = []
        self._last_begun: dict[int, int] = {}  # collectives that had begun in processes that have ended
        self._unwell: set[int] = set()  # runs that do not end here as they should
        self._farewell: tuple[str, str] | None = None
        self._posted: Failure | None = None
        self._sent = self._acknowledged = 0
        self._main = Runs()  # of the main process
        self._link = (LocalHubConnection if rank == 0 else HubConnection)(rank, size, self._on_message, self._on_lost)
        _channels.add(self)

    @classmethod
    def open(
        cls,
        rank: int,
        size: int,
        master_addr: str | None,
        share: Callable[[Any], Any],
        *,
        limit: float = _MEETING,
        patience: float = PATIENCE,
    ) -> Channel:
        """Connect all processes; collective.

        Args:
            rank: of this process.
            size: the number of processes.
            master_addr: where the machine of rank 0 can be reached, as the launcher says; ``None`` if nobody does.
            share: gives the value of rank 0 to all, as :meth:`trainkit.distributed.world.World.from_main` does.
            limit: seconds in which all must be connected.
            patience: seconds after which a machine that no longer answers is taken to be gone.

        Raises:
            ProcessFailedError: a process cannot be reached; on all of them.
        """
        channel = cls(rank, size)
        try:
            channel._link.open(master_addr, share, limit, patience)
        except BaseException:
            channel.close()
            raise
        return channel

    # ------------------------------------------------------------------------------------------------ exchanging

    def exchange(self, key: str, value: Any, looking: _Call | None = None, complete: _Call | None = None) -> list[Any]:
        """What every process gave under a key, in the order of their ranks; waits for as long as that takes.

        Args:
            key: the same on all processes; free again when the exchange is complete.
            value: JSON, of at most 16 MiB.
            looking: called now and then while it waits; what it raises ends the wait.
            complete: called by another thread when all have given theirs, on all processes or on none, whatever ends the wait.

        Raises:
            ProcessFailedError: a process has failed, has died or has left before it gave its value.
            ValueError: the value is too large.
        """
        line = encode({"give": key, "value": value})
        if len(line) > LIMIT:
            raise ValueError(f"an exchange takes at most {LIMIT} bytes a process, and this value has {len(line)}. Use a file.")
        waiter = _Waiter(complete)
        try:
            with self.changed:
                if self.closed or self.alone:
                    raise ProcessFailedError(f"exchange {key!r} cannot be: {self.gone.get(0, 'the channel is closed')}.")
                if key in self._waiters:
                    raise ValueError(f"exchange {key!r} is under way in another thread of this process.")
                self._waiters[key] = waiter
            self._link.say(line)
            pause = _LOOK
            while not waiter.done.wait(None if looking is None else pause):
                looking()  # type: ignore[misc]
                pause = min(2 * pause, _SELDOM)
        except BaseException:  # a signal: what was given must not count for a later exchange of this name
            if self._waiters.get(key) is waiter:
                self._say_and_wait({"take back": key})  # a result that was faster than that is here by then
            raise
        finally:
            if self._waiters.get(key) is waiter:
                del self._waiters[key]
        if waiter.why is not None:
            raise ProcessFailedError(f"exchange {key!r} cannot be completed: {waiter.why}.")
        return waiter.values

    def ask(self) -> list[dict[str, Any] | None] | None:
        """What all processes are doing, whatever their main threads wait for: :meth:`CollectiveTracker.record` by rank.

        Returns:
            ``None`` for a process that has ended; ``None`` in all if not all others have answered in time.
        """
        waiter = _Waiter()
        with self.changed:
            if self.closed or self.alone:
                return None
            self._waiters[_QUESTION] = waiter
        self._link.say(encode({"ask": _QUESTION}))
        waiter.done.wait(_ANSWER)
        self._waiters.pop(_QUESTION, None)
        return waiter.values if waiter.done.is_set() and waiter.why is None else None

    # --------------------------------------------------------------------------------------------------- failing

    @property
    def failure(self) -> Failure | None:
        """The first failure that stands."""
        return next(iter(self._failures.values()), None)

    @property
    def own_failure(self) -> Failure | None:
        """What this process has posted, if that still stands."""
        posted = self._posted
        return posted if posted is not None and (posted.run in self._failures or posted.run is None) else None

    @property
    def cause(self) -> Failure | None:
        """Why a collective with the other processes cannot be completed, if that is known."""
        ends = sorted(self.gone.values(), key=lambda end: end.kind == "left")
        return self.failure or next(iter(ends), None)

    @property
    def ending(self) -> str:
        """How this process is on its way out of the run that it is in: as of :meth:`farewell`, "error", or empty: it is not."""
        if not self._unwell.intersection(self.runs.open[-1:]):
            return ""
        return self._farewell[0] if self._farewell is not None else "error"

    def post_failure(self, kind: str, summary: str, *, fatal: bool = False) -> Failure:
        """Tell all processes that this one has failed, with :attr:`traceback`; the first that does counts.

        Args:
            kind: "error" or "timeout".
            summary: the error in one line.
            fatal: the process ends. Else the failure is over when all processes have got out of the run.
        """
        run = None if fatal or not self.runs.open else self.runs.open[-1]
        failure = Failure(self.rank, kind, summary, self.traceback, run=run)
        before = self._posted
        with self.changed:
            self._posted = failure
        self.mark_failed()
        self._post(failure, of=before.run if before is not None and before.summary == summary else None)
        return failure

    def report_cause(self, cause: Failure) -> None:
        """Tell all processes that this one has failed because another one did, or is gone."""
        self.mark_failed()
        if self.failure is None:
            self._post(Failure(**(cause.record() | {"run": None})))

    def report_missing_rank(self) -> None:
        """Tell all if this process waits for one that has ended, in a collective to which that one has not come."""
        begun, inside = self.collectives.begun, self.collectives.depth > 0
        end = next((end for end in self.gone.values() if inside and self._last_begun.get(end.rank, begun) < begun), None)
        if end is not None:
            self._post(Failure(**(end.record() | {"run": None})))

    def mark_failed(self) -> None:
        """Note that the run that this process is in does not end here as it should."""
        with self.changed:
            self._unwell.update(self.runs.open[-1:])
            self.changed.notify_all()

    def announce_exit(self, kind: str, text: str = "") -> None:
        """Say how this process is going to end: by "exit", "preempted" or "interrupt". That is no failure if all do."""
        self.mark_failed()
        self._farewell = (kind, text)

    def on_failure(self, listener: Callable[[Failure | None], None]) -> None:
        """Call a function, in a thread of the channel's, with :attr:`failure` whenever another one stands, or none."""
        self._listeners.append(listener)

    def wait(self, condition: Callable[[], bool], limit: float | None = None) -> bool:
        """Wait until something holds that depends on what the channel knows; returns whether it does, in ``limit`` seconds."""
        with self.changed:
            return self.changed.wait_for(condition, limit)

    # ---------------------------------------------------------------------------------------------------- running

    def enter_run(self) -> None:
        """A run begins on this process; waits until all are out of an earlier one that has failed.

        Raises:
            ProcessFailedError: a process is gone, or did not get out of it.
        """
        number = self.runs.begun + 1

        def cannot_begin() -> bool:
            return self.closed or bool(self.gone) or None in self._failures

        self.wait(lambda: self._earlier(number) is None or cannot_begin(), _CLEARED)
        with self.changed:
            cause = self._earlier(number) or self.cause if cannot_begin() else self._earlier(number)
            if self.closed or cause is not None:
                raise ProcessFailedError(f"a run needs all {self.size} processes, but {cause or 'the channel is closed'}.")
            self._farewell, self.traceback = None, ""
            self.runs.begin()
            self._link.say(encode({"begin": number}))
            self.changed.notify_all()

    def leave_run(self) -> None:
        """The innermost run ends on this process."""
        with self.changed:
            fine = self.runs.open[-1] not in self._unwell
            self._unwell.discard(self.runs.end(fine))
            self.changed.notify_all()
        self._say_and_wait({"end": fine})  # so that to end now, in whatever way, is no failure in this run

    def _earlier(self, number: int) -> Failure | None:
        """A failure that stands in the way of the run of that number."""
        return next((one for run, one in self._failures.items() if run is None or run < number), None)

    # ----------------------------------------------------------------------------------------------------- ending

    def announce_end(self) -> None:
        """This process ends as it should: that its connection ends is no failure."""
        while self.runs.open:  # of a loop of the user's own, which ends with his script: who needs this process no more goes on
            self.leave_run()
        self._link.say(encode({"bye": self._farewell or ("left", ""), "begun": self.collectives.begun}))

    def close(self) -> None:
        """Close the connections; any number of times."""
        self._link.close()
        with self.changed:
            self.closed = True
            self._release(Failure(self.rank, "error", "the channel was closed"))
            self.changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- the hub

    def _say_and_wait(self, message: dict[str, Any]) -> bool:
        """Tell the hub, and wait until it has heard it; not for long, for it may be gone. Returns whether it has."""
        with self.changed:
            self._sent += 1
            number = self._sent
        self._link.say(encode({**message, "number": number}))
        self.wait(lambda: self._acknowledged >= number or self.alone or self.closed, _HEARD)
        return self._acknowledged >= number

    def _post(self, failure: Failure, of: int | None = None) -> None:
        heard = self._say_and_wait({"fail": failure.record(), "of": of})
        # the hub is gone; or it is what hangs, with all its threads, and stacks must be written all the same
        if self.alone or self.closed or (failure.kind == "timeout" and not heard):
            self._note(failure)

    def _on_message(self, message: dict[str, Any]) -> None:
        """What the hub says; in the link's thread."""
        if "result" in message or "void" in message:
            waiter = self._waiters.get(message.get("result") or message["void"])
            if waiter is not None:
                waiter.values = message.get("values", [])
                waiter.why = Failure(**message["why"]) if "why" in message else None
                if waiter.why is None and waiter.complete is not None:
                    waiter.complete()
                waiter.done.set()
        elif "asked" in message:
            self._link.say(encode({"answer": self.collectives.record()}))
        elif "failed" in message:  # of a run the hub says it once, and what it says counts
            failure = Failure(**message["failed"])
            self._change({**self._failures, failure.run: failure})
        elif "cleared" in message:
            self._change({run: one for run, one in self._failures.items() if run != message["cleared"]})
        elif "fallen" in message:
            with self.changed:
                self.failed_ranks |= {message["fallen"]}
                self.changed.notify_all()
        elif "gone" in message:
            end = Failure(**message["gone"])
            with self.changed:
                if message["begun"] is not None:
                    self._last_begun[end.rank] = message["begun"]
                self.gone = {**self.gone, end.rank: end}
                self.changed.notify_all()
        elif "main" in message:
            self._main = Runs(**message["main"])
        elif "heard" in message:
            with self.changed:
                self._acknowledged = message["heard"]
                self.changed.notify_all()

    def _on_lost(self, kind: str) -> None:
        """There is no hub any more: the main process is gone."""
        failure = next((one for one in self._failures.values() if one.rank == 0), None)
        with self.changed:
            self.alone = True
            end = self.gone.get(0) or failure or Failure(0, kind)
            self.gone = {**self.gone, 0: end}
            self._release(end)
            self.changed.notify_all()
        if any(self._main.missing(number) for number in self.runs.open):
            self._note(Failure(**(end.record() | {"run": None})))

    def _note(self, failure: Failure) -> None:
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
        """Nobody will complete an exchange any more."""
        for waiter in list(self._waiters.values()):
            if not waiter.done.is_set():
                waiter.why = why
                waiter.done.set()

    def _abandon(self) -> None:
        """In a process that was forked from this one: the channel is its parent's."""
        self.changed = threading.Condition()
        self.closed = True
        self._waiters, self._listeners = {}, []


def _abandon_all() -> None:
    for channel in list(_channels):
        channel._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
