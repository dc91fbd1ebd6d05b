"""The end of a process that another one's failure has left waiting in a run, with its stacks in a file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from trainkit.distributed.channel import Channel
from trainkit.distributed.failure import Failure
from trainkit.distributed.process_exit import end_after_others, end_process, remove_error_file, say, stacks, write_error_file
from trainkit.errors import Preempted, ProcessFailedError

__all__ = ["Watchdog"]

_GRACE = 3.0  # seconds that a process in a run has to leave it by an error of its own, when another one has failed
_ENDING = 30.0  # seconds that it has once it is on its way out, or when the other one was told to end by a signal
_LOOK = 1.0  # seconds between two looks whether the main thread waits for a process that has ended
_CODES = {"preempted": 143, "interrupt": 130}
_ABOVE = "the lines above"


class Watchdog:
    """A thread that ends this process when another one has failed or is gone and the main thread stays in a run.

    A collective whose partner is gone may never return, and nothing in Python can interrupt it. A failure that all processes
    get over, because all get out of the run and go on, ends nobody. If a process has waited too long for another one, which is
    then taken to hang, all processes in a run write their stacks at once. A process whose script has come to its end, as a loop
    of the user's own may on one before the others, ends nobody but who waits for it.

    Args:
        channel: tells of the failure.
        grace: seconds that the main thread has to leave the run by itself.

    Attributes:
        folder: where stacks are written, as ``stacks/rank-N.txt``; ``None``: to standard error.
    """

    def __init__(self, channel: Channel, *, grace: float = _GRACE) -> None:
        self.folder: str | Path | None = None
        self._channel, self._grace = channel, grace
        self._closed = False
        self._known = 0.0  # when the failure was, or the run began if that was later
        self._writing = threading.Lock()
        self._written: tuple[Failure | None, str] = (None, "")  # for which failure stacks were written, and where
        self._text = ""  # of the stacks written last
        channel.on_failure(self._heard)
        self._thread = threading.Thread(target=self._watch, name="trainkit-watchdog", daemon=True)
        self._thread.start()

    def entered(self) -> None:
        """The main thread enters a run; runs may be inside each other.

        Raises:
            ProcessFailedError: it cannot be: another process is gone, or has not got out of an earlier run that failed.
            Preempted: another process was told to end.
        """
        try:
            self._channel.enter_run()
        except ProcessFailedError:
            cause = self._channel.cause
            if cause is None or cause.kind != "preempted":
                raise
            self._channel.announce_exit("preempted", str(cause))
            raise Preempted(str(cause)) from None
        remove_error_file()
        self._known = max(self._known, time.monotonic())

    def left(self) -> None:
        """It leaves the run, one way or the other."""
        self._complete()
        self._channel.leave_run()

    def close(self) -> None:
        """End the thread; any number of times."""
        with self._channel.changed:
            self._closed = True
            self._channel.changed.notify_all()
        self._thread.join()

    def _heard(self, failure: Failure | None) -> None:
        if failure is not None and failure.kind == "timeout" and self._channel.runs.open:
            where = self._write(failure)
            if failure.rank == self._channel.rank:
                say(f"trainkit: rank {failure.rank} waited too long for another one; the stacks of each are beside {where}\n")

    def _watch(self) -> None:
        known: Failure | None = None
        while True:
            self._wait()
            failure, limit = self._channel.failure, self._limit()
            if self._done:
                return
            if failure is not known:  # noted here and not by a listener, which may be called after this thread has woken
                known, self._known = failure, time.monotonic()
            if failure is not None and limit is not None and not self._recovered(failure, limit):
                self._end(failure)

    def _wait(self) -> None:
        """Wait for what it is there for. That the main thread waits for a process that has ended is not told but looked for."""
        channel, looks = self._channel, bool(self._channel.gone)
        channel.wait(lambda: self._done or self._limit() is not None or bool(channel.gone) != looks, _LOOK if looks else None)
        if channel.failure is None and channel.runs.open:
            channel.report_missing_rank()

    def _recovered(self, failure: Failure, limit: float) -> bool:
        """Wait until the time is up; returns whether the process need not be ended for this failure any more."""
        pause = max(0.0, self._known + limit - time.monotonic())
        channel = self._channel
        return channel.wait(lambda: self._done or channel.failure is not failure or self._limit() != limit, pause)

    @property
    def _done(self) -> bool:
        return self._closed or self._channel.closed

    def _limit(self) -> float | None:
        """Seconds that the main thread has from the failure on; ``None``: it need not leave a run."""
        failure, runs = self._channel.failure, tuple(self._channel.runs.open)
        if failure is None or not runs:
            return None
        ending = self._channel.ending
        if ending in ("exit", *_CODES):  # it leaves by a way that all have agreed on, or that ends the others
            return None
        earlier = failure.run is not None and failure.run < runs[0]  # the others are about to get out of that one
        return _ENDING if ending or earlier or failure.kind in _CODES else self._grace

    def _write(self, failure: Failure) -> str:
        """Write the stacks, once for a failure; returns where they are."""
        with self._writing:
            if self._written[0] is not failure:
                text = f"rank {self._channel.rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {failure}.\n"
                self._text = f"{text}{self._error()}{stacks()}"
                self._written = (failure, _save(self.folder, self._channel.rank, self._text))
            return self._written[1]

    def _complete(self) -> None:
        """Add the error of this process to stacks that were written while it was still on its way."""
        with self._writing:
            failure, where = self._written
            if failure is not None and failure is self._channel.failure and where != _ABOVE and self._error() not in self._text:
                self._text += self._error()
                _save(self.folder, self._channel.rank, self._error(), more=True)

    def _error(self) -> str:
        error = self._channel.traceback
        return f"\nThe run on this rank ended by an error:\n{error}" if error else ""

    def _end(self, failure: Failure) -> None:
        rank = self._channel.rank
        reason = "was ended in the middle of a run" if failure.rank == rank else f"was ended because {str(failure).rstrip('.')}"
        where = "" if failure.kind in _CODES else f". Its stacks are in {self._write(failure)}"
        say(f"trainkit: rank {rank} {reason}{where}\n")
        write_error_file(failure, rank)
        end_after_others(self._channel, failure)
        end_process(_CODES.get(failure.kind, 1))


def _save(folder: str | Path | None, rank: int, text: str, *, more: bool = False) -> str:
    """Write stacks, or more to them: what is there stays, for the process may be ended at any moment; returns where."""
    problem = ""
    if folder is not None:
        path = Path(folder, "stacks", f"rank-{rank}.txt")
        try:
            path = path.absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if more else "w", encoding="utf-8", errors="backslashreplace") as file:  # names that are no text
                file.write(text)
            return str(path)
        except (OSError, ValueError) as error:  # whatever it is, the process must be ended
            problem = f"\ntrainkit: {path} cannot be written: {error}"
    say(f"{text}{problem}\n")
    return _ABOVE
