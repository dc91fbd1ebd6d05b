"""What a process does when it or another rank fails: report, print, write its stacks, and exit in the right order."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from trainkit.console import echo
from trainkit.distributed.channel import Channel
from trainkit.distributed.failure import Failure, is_communication, is_timeout, summary
from trainkit.errors import Preempted, ProcessFailedError

__all__ = ["FailureReport", "Watchdog", "end_process", "release_groups", "report_failure", "stacks", "write_stderr"]

_CAUSE_S = 4.0  # seconds to wait for the cause of a broken connection
_LAST_S = 5.0  # seconds that the first failed rank waits for the other ranks to exit before it prints
_OVER_S = 60.0  # seconds to wait until all ranks have left a failed run or have exited
_TIMEOUT_HELP = (
    "waited too long in a collective. Expected: all ranks call the same collective within the timeout. Read the stacks to find "
    "the rank that hangs; if it only needs more time, raise timeout=, for example DDPStrategy(timeout=timedelta(hours=2))."
)

_GRACE_S = 3.0  # seconds for a process to leave a run with its own error after another rank has failed
_ENDING_S = 30.0  # seconds for a process that is already leaving the run, or if a signal ended the other rank
_LOOK_S = 1.0  # seconds between checks whether the main thread waits for a rank that has exited
_CODES = {"preempted": 143, "interrupt": 130}
_ABOVE = "the lines above"

_HUB_LINGER_S = 2.5  # seconds that the main process, which is the hub, waits for other ranks to end
_FLUSH_S = 1.0  # seconds to flush output
_GROUP_LINGER_S = 2.0  # seconds for the threads of process groups to end
_OURS = ("trainkit-channel", "trainkit-watchdog")
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the file from which torchrun reads why a process failed


def report_failure(channel: Channel | None, error: BaseException) -> BaseException:
    """Report to the other ranks that an error ends a run on this one.

    Returns:
        The error to raise from this one. Usually that is the error itself. If it is only the consequence of another rank's
        failure (a closed connection, an exchange that cannot complete), it is a `ProcessFailedError` that names that rank, its
        `CollectiveError`, or `Preempted` if that rank was preempted.
    """
    if channel is None:
        return error
    if isinstance(error, Preempted):
        channel.announce_exit("preempted", str(error))
    elif isinstance(error, KeyboardInterrupt):
        channel.announce_exit("interrupt")
    elif isinstance(error, SystemExit):
        channel.announce_exit("exit", f"sys.exit({'' if error.code is None else error.code!r})")
    else:
        return _report(channel, error)
    return error


def _report(channel: Channel, error: BaseException, *, fatal: bool = False) -> BaseException:
    channel.traceback = "".join(traceback.format_exception(error))
    cause = _cause(channel, error)
    if cause is None:
        kind = "timeout" if is_timeout(error) else "error"
        write_error_file(channel.post_failure(kind, summary(error), fatal=fatal), channel.rank)
        return error
    channel.report_cause(cause)
    write_error_file(cause, channel.rank)
    if cause.kind == "preempted":
        channel.announce_exit("preempted", str(cause))
        return Preempted(str(cause))
    known = cause.collective_error
    if known is not None:
        return known
    return error if isinstance(error, ProcessFailedError) else ProcessFailedError(f"{str(cause).rstrip('.')}.")


def _cause(channel: Channel, error: BaseException) -> Failure | None:
    """The failure of another rank, if the error is only its consequence."""
    if not (isinstance(error, ProcessFailedError) or is_communication(error)):
        return None
    if not is_timeout(error):
        channel.wait(lambda: channel.cause is not None, _CAUSE_S)
    cause = channel.cause
    return None if cause is None or cause.rank == channel.rank else cause


class FailureReport:
    """Announces the exit of this process to the other ranks, and makes the first error the last output on the terminal.

    An uncaught error is printed as one line if it is the consequence of another rank's. The first failed rank waits until the
    other ranks have exited and then prints its traceback. Must be created in the main thread.

    Args:
        channel: the channel to the other ranks; closed when this process exits.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._process = os.getpid()
        self._uncaught = False
        self._before = sys.excepthook
        self._hook = self._print  # It is stored as one object, to be compared with `is`.
        sys.excepthook = self._hook
        atexit.register(self._exit)

    def close(self) -> None:
        """Restore the previous hook; may be called again."""
        if sys.excepthook is self._hook:  # another hook installed since may call this one
            sys.excepthook = self._before
        atexit.unregister(self._exit)

    def _print(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        channel = self._channel
        if os.getpid() != self._process or channel.closed:
            self._before(kind, error, trace)
            return
        if isinstance(error, KeyboardInterrupt):
            channel.announce_exit("interrupt")
            if channel.rank == 0:
                self._before(kind, error, trace)
            return
        self._uncaught = True
        with _sigterm_ignored():  # A launcher must not end this process before it has printed.
            self._print_error(kind, error, trace)

    def _print_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        channel = self._channel
        ending = _report(channel, error, fatal=True)
        first = channel.cause
        if first is None or first.rank == channel.rank:
            with suppress(KeyboardInterrupt):
                channel.wait(self._others_have_ended, _LAST_S)
            self._before(kind, error, trace)
            if is_timeout(error) and channel.runs.begun:
                echo(f"trainkit: rank {channel.rank} {_TIMEOUT_HELP}", file=sys.stderr)
            with suppress(OSError):
                sys.stderr.flush()
            return
        if ending is not error or isinstance(error, ProcessFailedError):
            echo(f"trainkit: rank {channel.rank} ended because {first}", file=sys.stderr, flush=True)
        elif summary(error) == first.summary and self._prints_its_error(first.rank):
            echo(f"trainkit: rank {channel.rank} failed with the same error: {summary(error)}", file=sys.stderr, flush=True)
        else:
            self._before(kind, error, trace)
        end_after_others(channel, first)

    def _prints_its_error(self, rank: int) -> bool:
        """Whether another rank exits with its error and prints it. It may have caught the error and exited normally."""
        channel = self._channel
        channel.wait(lambda: rank in {*channel.failed_ranks, *channel.exited}, _CAUSE_S)
        return rank in channel.failed_ranks

    def _exit(self) -> None:
        """Called at the exit of the interpreter."""
        channel = self._channel
        if os.getpid() != self._process or channel.closed:
            return
        if not self._uncaught:
            self._finish_caught_error()
            channel.announce_end()
        channel.close()

    def _finish_caught_error(self) -> None:
        """After an error in a run that was caught: end this process as failed, unless all ranks leave that run.

        The main process also waits for this decision, because the other ranks learn of it only through the main process.
        """
        channel = self._channel
        if channel.own_failure is not None and not _has_escaped():
            channel.wait(lambda: channel.own_failure is None or self._others_have_ended(), _OVER_S)
        elif channel.rank == 0 and channel.own_failure is None:
            channel.wait(lambda: getattr(channel.failure, "run", None) is None or self._others_have_ended(), _OVER_S)
        failure = channel.own_failure
        if failure is None:
            return
        if multiprocessing.parent_process() is None:
            echo(
                f"{failure.text}trainkit: this error was caught on rank {channel.rank}, but the other ranks were still in the "
                "run and were ended. Catch the error on all ranks, or on none.",
                file=sys.stderr,
                flush=True,
            )
        channel.close()
        end_process(1)

    def _others_have_ended(self) -> bool:
        """Whether all other ranks have exited. The main process is last but for the first failed rank: `end_after_others`."""
        return self._channel.hub_lost or len(self._channel.exited) == self._channel.size - 1


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Ignore SIGTERM, which a launcher sends to all other processes after one has exited."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _has_escaped() -> bool:
    """Whether this is a child of `torch.multiprocessing.spawn` whose function has raised.

    The wrapper there catches the error, writes the traceback to a file for the parent, and exits. The parent reports the child
    that exits first, so this one must not wait.
    """
    child: Any = multiprocessing.current_process()
    wrapped = getattr(getattr(child, "_target", None), "__module__", "") == "torch.multiprocessing.spawn"
    return wrapped and os.path.exists(str(child._args[-1]))


# -------------------------------------------------------------------------------------------- waiting for a rank that failed


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

    def __init__(self, channel: Channel, *, grace: float = _GRACE_S) -> None:
        self.folder: str | Path | None = None
        self._channel = channel
        self._grace = grace
        self._closed = False
        self._known = 0.0  # time of the failure, or of the start of the run if that was later
        self._writing = threading.Lock()
        self._written: tuple[Failure | None, str] = (None, "")  # the failure for which stacks were written, and the file
        self._text = ""  # the stacks written last
        channel.on_failure(self._on_failure)
        self._thread = threading.Thread(target=self._watch, name="trainkit-watchdog", daemon=True)
        self._thread.start()

    def enter(self) -> None:
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

    def leave(self) -> None:
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
            if self._is_over:
                return
            if failure is not known:  # A listener may be called after this thread has woken up, so this is not done there.
                known, self._known = failure, time.monotonic()
            if failure is not None and limit is not None and not self._wait_for_recovery(failure, limit):
                self._end(failure)

    def _wait(self) -> None:
        """Wait for something to do. Whether the main thread waits for a rank that has exited is checked regularly."""
        channel, looks = self._channel, bool(self._channel.exited)
        channel.wait(
            lambda: self._is_over or self._limit() is not None or bool(channel.exited) != looks, _LOOK_S if looks else None
        )
        if channel.failure is None and channel.runs.open:
            channel.report_missing_rank()

    def _wait_for_recovery(self, failure: Failure, limit: float) -> bool:
        """Wait until the time is up. Returns whether this failure is over or has a different limit by then."""
        pause = max(0.0, self._known + limit - time.monotonic())
        channel = self._channel
        return channel.wait(lambda: self._is_over or channel.failure is not failure or self._limit() != limit, pause)

    @property
    def _is_over(self) -> bool:
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
        return _ENDING_S if ending or earlier or failure.kind in _CODES else self._grace

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


# ------------------------------------------------------------------------------------------------------------------ the exit


def stacks() -> str:
    """The stacks of all threads of this process, the main thread first, without the threads that watch for failures."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    texts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda one: one[0] != main):
        name = names.get(ident, f"thread {ident}")
        if name not in _OURS:
            texts.append(f"\n{name}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(texts)


def write_error_file(failure: Failure, rank: int) -> None:
    """Write the first failure to the file from which torchrun shows why the first process that ends has failed."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    why = "" if failure.rank == rank else f"rank {rank} ended because {failure}\n"
    more = {"py_callstack": f"{why}{failure.text}", "timestamp": str(int(failure.time))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": f"{why}{failure.summary}", "extraInfo": more}}, file)


def remove_error_file() -> None:
    """Remove the file of `write_error_file`: the process continues."""
    path = os.environ.get(_ERROR_FILE)
    if path:
        with contextlib.suppress(OSError):
            os.unlink(path)


def write_stderr(text: str) -> None:
    """Write to standard error from any thread, even while another thread writes to it."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def end_after_others(channel: Channel, failure: Failure) -> None:
    """Before this process ends because of a failure of another rank: wait for the ranks that must end first.

    The hub is in the main process, which therefore ends after all ranks but the first failed one; that rank prints its
    traceback last. A parent that waits for its children, as `torch.multiprocessing.spawn` does, reports the child that ends
    first: there the first failed rank ends before the others.
    """
    others = set(range(channel.size)) - {channel.rank, failure.rank}
    if multiprocessing.parent_process() is not None:
        channel.wait(lambda: failure.rank in channel.exited, 2 * _HUB_LINGER_S)
    elif channel.rank == 0:
        channel.wait(lambda: others <= set(channel.exited), _HUB_LINGER_S)


def release_groups(groups: list[Any]) -> None:
    """Release process groups, and wait until their threads have ended.

    A gloo thread needs the GIL to release a tensor. If it requests the GIL while the interpreter shuts down, the process ends
    by SIGABRT, whatever its exit code (pytorch/pytorch#190489). This also waits for a pending operation, whose peer may have
    exited, so there is a timeout.

    Args:
        groups: the only references to these groups. The threads of other groups continue: torch's DDP keeps a reference to its
            group. Such a thread has no more tensors to release.
    """
    _run_within(_GROUP_LINGER_S, groups.clear)


def end_process(code: int) -> None:
    """End this process now, whatever its threads are doing, and its daemonic children."""
    _run_within(_FLUSH_S, _flush)
    _run_within(_FLUSH_S, _end_children)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end_children() -> None:
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _run_within(limit: float, function: Callable[[], None]) -> None:
    """Call a function that may wait for a lock forever; return after `limit` seconds at the latest."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(limit)
