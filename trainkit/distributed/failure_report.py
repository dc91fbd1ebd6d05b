"""How a process says that it fails, and what it leaves on the terminal: one line, or, if it was the first, its traceback."""

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
from typing import Any, Protocol

from trainkit.distributed.channel import Channel
from trainkit.distributed.failure import Failure, is_communication, is_timeout, summary
from trainkit.distributed.process_exit import end_after_others, end_process, write_error_file
from trainkit.errors import Preempted, ProcessFailedError

__all__ = ["FailureReport", "install", "report_failure"]

_CAUSE = 4.0  # seconds in which the cause of a broken connection must be known
_LAST = 5.0  # seconds that the first process that failed waits for the others before it prints
_OVER = 60.0  # seconds in which all are out of a run that has failed, or have been ended


class _World(Protocol):
    @property
    def channel(self) -> Channel | None: ...


def report_failure(channel: Channel | None, error: BaseException) -> BaseException:
    """Tell the other processes that a run on this one ends by an error, and by what it is to end.

    Args:
        channel: of the run; ``None`` if there is one process only.
        error: what ends it.

    Returns:
        The error itself; or, where it is only what another process's failure looks like from here (a connection that is
        closed, an exchange that cannot be completed), a :class:`~trainkit.errors.ProcessFailedError` that names that one,
        or its own ``CollectiveError``, or ``Preempted`` if that one was told to end. To be raised from the error.
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
    """The failure of another process that an error is but a consequence of, if it is."""
    if not (isinstance(error, ProcessFailedError) or is_communication(error)):
        return None
    if not is_timeout(error):
        channel.wait(lambda: channel.cause is not None, _CAUSE)
    cause = channel.cause
    return None if cause is None or cause.rank == channel.rank else cause


def install(world: _World) -> FailureReport:
    """Take care of how this process ends; from its main thread, when it has become one of several."""
    assert world.channel is not None
    return FailureReport(world.channel)


class FailureReport:
    """From here on, the end of this process is told to the others, and the terminal shows the first error last.

    An error that nobody catches is printed as one line if it is the consequence of another process's; the first that failed
    waits until the others have ended, and prints its traceback. Made by :func:`install`.

    Args:
        channel: to the other processes; closed at the end of this one.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._process = os.getpid()
        self._uncaught = False
        self._before = sys.excepthook
        self._hook = self._print  # one object, so that it is recognised
        sys.excepthook = self._hook
        atexit.register(self._exit)

    def close(self) -> None:
        """Put back what was there; any number of times."""
        if sys.excepthook is self._hook:  # else somebody else's hook is there by now, and may call this one
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
        with _sigterm_ignored():  # from before the others know of it: a launcher must not end the process before it has printed
            self._print_error(kind, error, trace)

    def _print_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        channel = self._channel
        ending = _report(channel, error, fatal=True)
        first = channel.cause
        if first is None or first.rank == channel.rank:
            with suppress(KeyboardInterrupt):
                channel.wait(self._others_have_ended, _LAST)
            self._before(kind, error, trace)
            sys.stderr.flush()
            return
        if ending is not error or isinstance(error, ProcessFailedError):
            print(f"trainkit: rank {channel.rank} ended because {first}", file=sys.stderr, flush=True)
        elif summary(error) == first.summary and self._prints_its_error(first.rank):
            print(f"trainkit: rank {channel.rank} failed with the same error: {summary(error)}", file=sys.stderr, flush=True)
        else:
            self._before(kind, error, trace)
        end_after_others(channel, first)

    def _prints_its_error(self, rank: int) -> bool:
        """Whether another process ends by its error too, and so prints it: it may have caught it, and be gone by now."""
        channel = self._channel
        channel.wait(lambda: rank in {*channel.failed_ranks, *channel.gone}, _CAUSE)
        return rank in channel.failed_ranks

    def _exit(self) -> None:
        """The end of the interpreter."""
        channel = self._channel
        if os.getpid() != self._process or channel.closed:
            return
        if not self._uncaught:
            self._finish_caught_error()
            channel.announce_end()
        channel.close()

    def _finish_caught_error(self) -> None:
        """An error in a run was caught: fine if all processes get out of that run, else this one fails after all.

        The main process waits for that too, for only it can tell the others.
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
            print(
                f"{failure.text}trainkit: this error was caught on rank {channel.rank}, but the other processes were in the "
                "middle of the run and have been ended. Catch it on all of them alike, or on none.",
                file=sys.stderr,
                flush=True,
            )
        channel.close()
        end_process(1)

    def _others_have_ended(self) -> bool:
        """The main process ends after all others but the first that has failed: see :func:`end_after_others`."""
        return self._channel.alone or len(self._channel.gone) == self._channel.size - 1


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """Within it SIGTERM, which a launcher sends to the others when one has ended, is ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _has_escaped() -> bool:
    """Whether this is a child of ``torch.multiprocessing.spawn`` whose function has raised.

    Its wrapper catches the error, leaves the traceback in a file for the parent, and exits. The parent reports the child that
    ends first, so it must not be kept waiting.
    """
    child: Any = multiprocessing.current_process()
    wrapped = getattr(getattr(child, "_target", None), "__module__", "") == "torch.multiprocessing.spawn"
    return wrapped and os.path.exists(str(child._args[-1]))
