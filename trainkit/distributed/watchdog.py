"""`Watchdog`: ends a process that waits in a run for a rank that has failed, and writes its stacks to a file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from trainkit.distributed.channel import Channel
from trainkit.distributed.failure import Failure
from trainkit.distributed.process_exit import (
    end_after_others,
    end_process,
    remove_error_file,
    stacks,
    write_error_file,
    write_stderr,
)
from trainkit.errors import Preempted, ProcessFailedError

__all__ = ["Watchdog"]

_GRACE = 3.0  # seconds for a process to leave a run with its own error after another rank has failed
_ENDING = 30.0  # seconds for a process that is already leaving the run, or if a signal ended the other rank
_LOOK = 1.0  # seconds between checks whether the main thread waits for a rank that has exited
_CODES = {"preempted": 143, "interrupt": 130}
_ABOVE = "the lines above"


class Watchdog:
    """A thread that ends this process when another rank has failed or exited and the main thread stays in a run.

    A collective with a rank that has exited may never return, and nothing in Python can interrupt it. If all ranks leave the
    failed run, no process is ended. If a rank has waited too long for another one, which then counts as hanging, all ranks in a
    run write their stacks immediately. A rank whose script has finished (one rank may be the first to finish your own training
    loop) only ends the ranks that wait for it.

    Args:
        channel: reports failures.
        grace: seconds that the main thread has to leave the run itself.

    Attributes:
        folder: stacks are written to `stacks/<time of the failure, UTC>/rank-N.txt` in this folder; to standard error if it is
            `None`.
    """

    def __init__(self, channel: Channel, *, grace: float = _GRACE) -> None:
        self.folder: str | Path | None = None
        self._channel, self._grace = channel, grace
        self._closed = False
        self._known = 0.0  # time of the failure, or of the start of the run if that was later
        self._writing = threading.Lock()
        self._written: tuple[Failure | None, str] = (None, "")  # the failure for which stacks were written, and the file
        self._text = ""  # the stacks written last
        channel.on_failure(self._on_failure)
        self._thread = threading.Thread(target=self._watch, name="trainkit-watchdog", daemon=True)
        self._thread.start()

    def entered(self) -> None:
        """The main thread enters a run, which may be inside another.

        Raises:
            ProcessFailedError: another rank has exited, or has not left an earlier run that failed.
            Preempted: another rank was preempted.
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
        """The main thread leaves the run, normally or by an error."""
        self._append_error()
        self._channel.leave_run()

    def close(self) -> None:
        """End the thread; may be called again."""
        with self._channel.changed:
            self._closed = True
            self._channel.changed.notify_all()
        self._thread.join()

    def _on_failure(self, failure: Failure | None) -> None:
        if failure is not None and failure.kind == "timeout" and self._channel.runs.open:
            where = self._write(failure)
            if failure.rank == self._channel.rank:
                stacks_of_all = where if where == _ABOVE else Path(where).parent
                write_stderr(
                    f"trainkit: rank {failure.rank} waited too long for another rank; the stacks of all ranks are in "
                    f"{stacks_of_all}\n"
                )

    def _watch(self) -> None:
        known: Failure | None = None
        while True:
            self._wait()
            failure, limit = self._channel.failure, self._limit()
            if self._done:
                return
            if failure is not known:  # not in a listener, which may be called after this thread has woken up
                known, self._known = failure, time.monotonic()
            if failure is not None and limit is not None and not self._recovered(failure, limit):
                self._end(failure)

    def _wait(self) -> None:
        """Wait for something to do. Whether the main thread waits for a rank that has exited is checked regularly."""
        channel, looks = self._channel, bool(self._channel.exited)
        channel.wait(lambda: self._done or self._limit() is not None or bool(channel.exited) != looks, _LOOK if looks else None)
        if channel.failure is None and channel.runs.open:
            channel.report_missing_rank()

    def _recovered(self, failure: Failure, limit: float) -> bool:
        """Wait until the time is up. Returns whether this failure is over or has a different limit by then."""
        pause = max(0.0, self._known + limit - time.monotonic())
        channel = self._channel
        return channel.wait(lambda: self._done or channel.failure is not failure or self._limit() != limit, pause)

    @property
    def _done(self) -> bool:
        return self._closed or self._channel.closed

    def _limit(self) -> float | None:
        """Seconds after the failure in which the main thread must leave the run; `None` if it may stay."""
        failure, runs = self._channel.failure, tuple(self._channel.runs.open)
        if failure is None or not runs:
            return None
        ending = self._channel.ending
        if ending in ("exit", *_CODES):  # either all ranks agreed on this exit, or it ends the other ranks
            return None
        earlier = failure.run is not None and failure.run < runs[0]  # the other ranks are leaving that run
        return _ENDING if ending or earlier or failure.kind in _CODES else self._grace

    def _write(self, failure: Failure) -> str:
        """Write the stacks, once for each failure. Returns where they are."""
        with self._writing:
            if self._written[0] is not failure:
                text = f"rank {self._channel.rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {failure}.\n"
                self._text = f"{text}{self._error()}{stacks()}"
                self._written = (failure, _save(self._file(failure), self._text))
            return self._written[1]

    def _append_error(self) -> None:
        """Append the error of this process to stacks that were written before the error was raised."""
        with self._writing:
            failure, where = self._written
            if failure is not None and failure is self._channel.failure and where != _ABOVE and self._error() not in self._text:
                self._text += self._error()
                _save(self._file(failure), self._error(), more=True)

    def _file(self, failure: Failure) -> Path | None:
        """The file for the stacks: all ranks have the same folder, and stacks of earlier failures stay apart."""
        if self.folder is None:
            return None
        when = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime(failure.time))
        return Path(self.folder, "stacks", when, f"rank-{self._channel.rank}.txt")

    def _error(self) -> str:
        error = self._channel.traceback
        return f"\nThe run on this rank ended with an error:\n{error}" if error else ""

    def _end(self, failure: Failure) -> None:
        rank = self._channel.rank
        reason = "was ended in the middle of a run" if failure.rank == rank else f"was ended because {str(failure).rstrip('.')}"
        where = "" if failure.kind in _CODES else f". The stacks of rank {rank} are in {self._write(failure)}"
        write_stderr(f"trainkit: rank {rank} {reason}{where}\n")
        write_error_file(failure, rank)
        end_after_others(self._channel, failure)
        end_process(_CODES.get(failure.kind, 1))


def _save(path: Path | None, text: str, *, more: bool = False) -> str:
    """Write stacks, or append to them. Returns where they are."""
    problem = ""
    if path is not None:
        try:
            path = path.absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            # file names in the stacks may not be UTF-8
            with path.open("a" if more else "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return str(path)
        except (OSError, ValueError) as error:  # the process must be ended in any case
            problem = f"\ntrainkit: {path} cannot be written: {error}"
    write_stderr(f"{text}{problem}\n")
    return _ABOVE
