"""The worker processes of a `DataLoader`: starts them, again if a start hangs, ends them, and says why one has died."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.util import Finalize
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from trainkit.console import notice
from trainkit.errors import DataError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
import threading
from contextlib import contextmanager
from types import FrameType

__all__ = [
    "HANDLED",
    "block_signals",
    "end_workers",
    "explain_failures",
    "ignore_group_signals",
    "start_iterator",
    "worker_failures",
]

_START_TIMEOUT = 5.0  # seconds in which a forked process must start; doubled at each try
_TRIES = 5
_EXIT_TIMEOUT = 5.0  # seconds in which a worker whose connection broke must have ended

# What torch says of a worker that died, of an exception that was raised in one, and of a full shared memory.
_DIED = "DataLoader worker (pid"
_RAISED = re.compile(r"['\"]?Caught \w+ in DataLoader worker process \d+\.")
_NO_SHARED_MEMORY = re.compile(r"unable to (allocate shared memory\(shm\)|open shared memory object|write to file </torch_)")


def start_iterator(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator over a loader whose workers have started.

    Forked workers, the default on Linux, are forked again if they hang before their first line. A lock that another thread
    holds at the moment of the fork stays locked forever in the new process. The interpreter's list of threads has such a lock:
    Python before 3.12 acquires it in the new process before recreating it, and the threads of a process group hold it for a
    moment after each collective, when they release its tensors.

    Args:
        loader: a copy that trainkit owns: its `multiprocessing_context` is replaced if it is the default one.

    Raises:
        DataError: a worker hung at every try.
    """
    if loader.num_workers > 0 and sys.platform != "win32":
        chosen = loader.multiprocessing_context or multiprocessing.get_context()
        if type(chosen) is multiprocessing.context.ForkContext:  # A context of the user's own is not replaced.
            loader.multiprocessing_context = _Context()
    with block_signals(), worker_failures():  # signals to the whole process group: workers handle them once started
        iterator = iter(loader)
    if getattr(iterator, "_worker_pids_set", False):  # It is False for persistent workers that were started before.
        _adopt(iterator)
    return iterator


def _adopt(iterator: Any) -> None:
    """Let the failure of a worker raise where its batch is missing, and let the workers end at once when they must.

    torch would raise from its handler of SIGCHLD, wherever the main process is at that moment: in a step, in a save, at the
    exit of the interpreter. A worker does not end at a SIGTERM (see `ignore_group_signals`), so this process ends it with
    SIGKILL.
    """
    signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # torch does not export it
    iterator._worker_pids_set = False
    if sys.platform != "win32":  # On Windows, terminate does that.
        for worker in iterator._workers:
            worker._popen.terminate = partial(os.kill, worker.pid, signal.SIGKILL)
    # This runs at exit, before multiprocessing waits for its processes, or when the iterator is deleted.
    Finalize(iterator, _kill, (iterator._workers,), exitpriority=0)


def _kill(workers: Sequence[Any]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join()


def end_workers(iterator: Any) -> None:
    """End the workers of an iterator now. A traceback may keep the iterator alive, and its own clean-up then takes seconds."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()
        for worker in getattr(iterator, "_workers", ()):
            if worker.is_alive():  # too busy to notice that it should end
                worker.kill()


@contextlib.contextmanager
def worker_failures() -> Iterator[None]:
    """Say which worker died and why, where a batch is missing; an exception that was raised in a worker stays as it is.

    Raises:
        DataError: A worker died, or the shared memory is full.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise DataError(reason) from error


def explain_failures(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches that workers fetch, with `worker_failures`."""
    with worker_failures():
        yield from batches


def _reason(error: Exception) -> str | None:
    """Why a worker failed, and what to do; `None` if the error has another cause."""
    text, workers = str(error), _workers_behind(error)
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC and workers is not None
    if full or _NO_SHARED_MEMORY.search(text):
        return "the shared memory of the DataLoader workers is full" + _describe_shared_memory()
    if _RAISED.match(text):
        return None
    if workers and isinstance(error, ConnectionError | EOFError | FileNotFoundError):
        ending = wait([worker.sentinel for worker in workers], _EXIT_TIMEOUT)  # connections close a moment before the exit
        for worker in workers:
            if worker.sentinel in ending:
                worker.join(_EXIT_TIMEOUT)
    elif not text.startswith(_DIED):
        return None
    return next((_reason_of_exit(worker) for worker in workers or () if worker.exitcode), None)


def _workers_behind(error: Exception) -> Sequence[Any] | None:
    """The workers of the `DataLoader` in whose iterator an error was raised; `None`: it was raised elsewhere."""
    for frame, _ in walk_tb(error.__traceback__):
        iterator = frame.f_locals.get("self")
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            return getattr(iterator, "_workers", ())
    return None


def _reason_of_exit(process: Any) -> str:
    worker, code = f"a DataLoader worker (pid {process.pid})", process.exitcode
    if code == -getattr(signal, "SIGBUS", 0):
        return f"{worker} was ended by SIGBUS, because the shared memory of the workers is full" + _describe_shared_memory()
    if code == -getattr(signal, "SIGKILL", 0):
        return (
            f"{worker} was killed with SIGKILL, as the kernel does where memory runs out (dmesg, or the events of the "
            "container, say so). Use less memory: fewer workers, DataLoader(num_workers=1, prefetch_factor=1); smaller "
            "batches; samples that are loaded in __getitem__ instead of kept in the dataset. Or raise the memory limit."
        )
    how = f"ended with exit code {code} and without an exception"
    if code < 0:
        how = "was ended by " + next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return (
        f"{worker} {how}: code of the dataset or the collate_fn, or a library that it calls, ended the process. To see where, "
        "use DataLoader(num_workers=0) and run python -X faulthandler."
    )


def _describe_shared_memory() -> str:
    """The size of the shared memory, and how to have enough of it; the end of a message."""
    size = ""
    with contextlib.suppress(OSError, AttributeError):
        usage = os.statvfs("/dev/shm")
        free, whole = (blocks * usage.f_frsize / 2**20 for blocks in (usage.f_bavail, usage.f_blocks))
        size = f" (/dev/shm: {free:.0f} of {whole:.0f} MiB free)"
    return (
        f"{size}. It holds the batches that wait for the main process. Enlarge it (docker run --shm-size=8g or --ipc=host; "
        "Kubernetes: an emptyDir with medium: Memory at /dev/shm), or let less wait: DataLoader(num_workers=1, "
        "prefetch_factor=1) or smaller batches. num_workers=0 needs none."
    )


if sys.platform != "win32":
    from multiprocessing.popen_fork import Popen
    from multiprocessing.queues import Queue

    class _Worker(multiprocessing.context.ForkProcess):
        """A process that is forked again if it does not reach `run`."""

        _pipe: tuple[int, int]

        @staticmethod
        def _Popen(process: _Worker) -> Popen:  # type: ignore[override]  # noqa: N802  # multiprocessing's name
            for attempt in range(_TRIES):
                timeout = _START_TIMEOUT * 2**attempt
                popen = _fork(process, timeout)
                if popen is not None:
                    return popen
                notice(f"a DataLoader worker did not start within {timeout:g} s of its fork; forking it again.")
            raise DataError(
                f"a DataLoader worker could not be started: it was forked {_TRIES} times and hung before its first line. A "
                "thread, or code that runs at each fork, holds a lock. Start workers in a new interpreter instead: "
                'DataLoader(..., multiprocessing_context="forkserver")'
            )

        def run(self) -> None:
            read_end, write_end = self._pipe
            os.write(write_end, b".")
            os.close(write_end)
            os.close(read_end)
            super().run()

    class _Queue(Queue):  # type: ignore[type-arg]
        """A queue whose thread sends an error in the place of a result that it cannot send.

        The queue of multiprocessing prints the error and drops the result, and the main process waits for it forever: where
        the shared memory is full, or where a batch cannot be pickled.
        """

        def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
            worker = get_worker_info()
            number = "" if worker is None else worker.id
            self.put((item[0], ExceptionWrapper(where=f"in DataLoader worker process {number}")))

    class _Context(multiprocessing.context.ForkContext):
        Process = _Worker

        def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802  # multiprocessing's name
            return _Queue(maxsize, ctx=self.get_context())

    def _fork(process: _Worker, timeout: float) -> Popen | None:
        """Fork; `None` if the new process hangs. If it died, the DataLoader reports it."""
        read_end, write_end = process._pipe = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, read_end)
            with contextlib.ExitStack() as until_forked:
                until_forked.callback(os.close, write_end)
                popen = Popen(process)
            if wait([read_end], timeout):
                return popen
            popen.kill()
            popen.wait()
            popen.close()
        return None


HANDLED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name))
"""The signals that request a fit to stop."""

_GRACE_PERIOD = 30  # seconds that a worker continues after SIGTERM


def ignore_group_signals() -> None:
    """In a worker process of a loader: ignore a signal to the whole process group, which the main process handles.

    The main process still needs the worker's batches to finish its step, and then ends its workers. If it does not, SIGTERM
    ends the worker after 30 seconds, and a second SIGTERM ends it immediately.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGTERM, _end_later)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # blocked by `block_signals`


@contextmanager
def block_signals() -> Iterator[None]:
    """Block these signals. Workers that are started inside inherit that until they install handlers.

    Otherwise a signal to the whole process group would end a worker that was forked a moment ago.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_later(number: int, frame: FrameType | None) -> None:
    for each in (number, signal.SIGALRM):
        signal.signal(each, signal.SIG_DFL)
    signal.alarm(_GRACE_PERIOD)
