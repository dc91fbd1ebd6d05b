"""Starts the worker processes of a `DataLoader`, again if a start hangs, and ends them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from trainkit.console import notice
from trainkit.data.worker_signals import signals_held_back
from trainkit.errors import DataError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["end_workers", "started"]

_START_TIMEOUT = 5.0  # seconds in which a forked process must start; doubled at each try
_TRIES = 5


def started(loader: DataLoader[Any]) -> Iterator[Any]:
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
        if type(chosen) is multiprocessing.context.ForkContext:  # not the user's own
            loader.multiprocessing_context = _Context()
    with signals_held_back():  # signals to the whole process group: workers handle them once they have started
        return iter(loader)


def end_workers(iterator: Any) -> None:
    """End the workers of an iterator now. A traceback may keep the iterator alive, and its own clean-up then takes seconds."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()
        for worker in getattr(iterator, "_workers", ()):
            if worker.is_alive():  # too busy to notice that it should end
                worker.kill()


if sys.platform != "win32":
    from multiprocessing.popen_fork import Popen

    class _Worker(multiprocessing.context.ForkProcess):
        """A process that is forked again if it does not reach `run`."""

        _pipe: tuple[int, int]

        @staticmethod
        def _Popen(process: _Worker) -> Popen:  # type: ignore[override]  # noqa: N802  # multiprocessing's name
            for attempt in range(_TRIES):
                timeout = _START_TIMEOUT * 2**attempt
                popen = _forked(process, timeout)
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

    class _Context(multiprocessing.context.ForkContext):
        Process = _Worker

    def _forked(process: _Worker, timeout: float) -> Popen | None:
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
