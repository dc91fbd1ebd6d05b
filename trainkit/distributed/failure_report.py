"""Report the failure of a process to the other ranks, and print its traceback only if it was the first to fail."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from trainkit.console import echo
from trainkit.distributed.channel import Channel
from trainkit.distributed.failure import Failure, is_communication, is_timeout, summary
from trainkit.distributed.process_exit import end_after_others, end_process, write_error_file
from trainkit.errors import Preempted, ProcessFailedError

__all__ = ["FailureReport", "report_failure"]

_CAUSE = 4.0  # seconds to wait for the cause of a broken connection
_LAST = 5.0  # seconds that the first failed rank waits for the other ranks to exit before it prints
_OVER = 60.0  # seconds to wait until all ranks have left a failed run or have exited
_TIMEOUT_HELP = (
    "waited too long in a collective. Expected: all ranks call the same collective within the timeout. Read the stacks to find "
    "the rank that hangs; if it only needs more time, raise timeout=, for example DDPStrategy(timeout=timedelta(hours=2))."
)


def report_failure(channel: Channel | None, error: BaseException) -> BaseException:
    """Report to the other ranks that an error ends a run on this one.

    Args:
        channel: the channel of the run; `None` if there is a single process.
        error: the error.

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
        channel.wait(lambda: channel.cause is not None, _CAUSE)
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
        self._hook = self._print  # one object, to compare with `is`
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
        with _sigterm_ignored():  # from before the report on: a launcher must not end this process before it has printed
            self._print_error(kind, error, trace)

    def _print_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        channel = self._channel
        ending = _report(channel, error, fatal=True)
        first = channel.cause
        if first is None or first.rank == channel.rank:
            with suppress(KeyboardInterrupt):
                channel.wait(self._others_have_ended, _LAST)
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
        channel.wait(lambda: rank in {*channel.failed_ranks, *channel.exited}, _CAUSE)
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
            channel.wait(lambda: channel.own_failure is None or self._others_have_ended(), _OVER)
        elif channel.rank == 0 and channel.own_failure is None:
            channel.wait(lambda: getattr(channel.failure, "run", None) is None or self._others_have_ended(), _OVER)
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
