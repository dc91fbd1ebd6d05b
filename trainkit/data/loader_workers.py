"""The worker processes of a `DataLoader`: their start, which is repeated where it hangs, and their end."""

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

_PATIENCE = 5.0  # seconds in which a forked process must have started; twice as long each time
_TRIES = 5


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator over a loader, with its workers at work.

    Workers that are forked, as they are on Linux by default, are forked again if they hang before
    they have begun. A lock that another thread holds at the moment of the fork is held for ever in the new process. The
    interpreter's own list of threads has such a lock: Python before 3.12 takes it in the new process before it makes it again,
    and the threads of a process group take it for a moment after each collective, when they let go of its tensors.

    Args:
        loader: a copy that is ours: its `multiprocessing_context` is replaced where it is the usual one.

    Raises:
        DataError: a worker has hung at every try.
    """
    if loader.num_workers > 0 and sys.platform != "win32":
        chosen = loader.multiprocessing_context or multiprocessing.get_context()
        if type(chosen) is multiprocessing.context.ForkContext:  # not the user's own
            loader.multiprocessing_context = _Context()
    with signals_held_back():  # signals to the whole process group: workers take care of them once they are there
        return iter(loader)


def end_workers(iterator: Any) -> None:
    """End the workers of an iterator over a loader now; a traceback can hold it for long, and its end then takes seconds."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()
        for worker in getattr(iterator, "_workers", ()):
            if worker.is_alive():  # so busy that it does not even notice that it is to end
                worker.kill()


if sys.platform != "win32":
    from multiprocessing.popen_fork import Popen

    class _Worker(multiprocessing.context.ForkProcess):
        """A process that is forked again if it does not get as far as `run`."""

        _pipe: tuple[int, int]

        @staticmethod
        def _Popen(process: _Worker) -> Popen:  # type: ignore[override]  # noqa: N802  # multiprocessing's name
            for attempt in range(_TRIES):
                patience = _PATIENCE * 2**attempt
                popen = _forked(process, patience)
                if popen is not None:
                    return popen
                notice(f"a loader worker has not started within {patience:g} s of its fork, and is forked again.")
            raise DataError(
                f"a loader worker could not be started: {_TRIES} times it was forked and hung before its first line. Something "
                "that runs in a thread or at each fork holds a lock. Start workers in a new interpreter instead: "
                'DataLoader(..., multiprocessing_context="forkserver")'
            )

        def run(self) -> None:
            ear, mouth = self._pipe
            os.write(mouth, b".")
            os.close(mouth)
            os.close(ear)
            super().run()

    class _Context(multiprocessing.context.ForkContext):
        Process = _Worker

    def _forked(process: _Worker, patience: float) -> Popen | None:
        """Fork; `None` if the new process hangs. One that has died is the loader's to report."""
        ear, mouth = process._pipe = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, ear)
            with contextlib.ExitStack() as until_forked:
                until_forked.callback(os.close, mouth)
                popen = Popen(process)
            if wait([ear], patience):
                return popen
            popen.kill()
            popen.wait()
            popen.close()
        return None
