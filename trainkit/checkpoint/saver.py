"""`Saver`: saves in one thread while training continues, with at most one save in progress; every failure is reported."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainkit.checkpoint.all_ranks import run_on_all_ranks
from trainkit.checkpoint.commit import Committed, commit
from trainkit.checkpoint.draft import Draft
from trainkit.checkpoint.host_copy import HostBuffers
from trainkit.checkpoint.staging import staging
from trainkit.console import echo
from trainkit.distributed.world import ThreadExchange
from trainkit.errors import CheckpointWriteError

__all__ = ["Saver"]

_SINGLE_RANK = ThreadExchange()


@dataclass
class _Failure:
    target: Path
    error: BaseException
    failed: Callable[[Exception], None] | None


class Saver:
    """Commits drafts, in a thread or immediately.

    A save in the thread costs the caller a copy of the tensors into host memory, which later saves reuse. The thread exists
    only during a save, and the interpreter waits for it at exit: a save in progress is finished even without `close`. All
    methods are for the main thread.

    With several ranks, all of them call `save` and `wait` in the same order, and get the same errors from them.
    `poll` reports what this rank knows; other ranks may not know it yet.

    Args:
        notify: called in the thread when `poll` has something to report.
        group: the ranks that save together; used only by this object.
    """

    def __init__(self, notify: Callable[[], None], group: ThreadExchange = _SINGLE_RANK) -> None:
        self.notify = notify
        self.group = group
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._failures: deque[_Failure] = deque()
        # Report failures that were never polled when the saver is deleted or the interpreter exits.
        weakref.finalize(self, _print, self._failures)

    def save(
        self,
        draft: Draft,
        target: Path,
        *,
        blocking: bool,
        replace: bool = False,
        committed: Callable[[Committed], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Wait for the save in progress, then commit `draft` to `target`.

        Args:
            draft: what to write.
            target: the folder of the checkpoint.
            blocking: write the tensors without a copy and return after the commit. False: copy them and return; the draft
                cannot be used again.
            replace: see `commit`.
            committed: called after the commit, in the same thread, with the result of the commit.
            failed: called by `poll` with the error if the save or `committed` failed; without it `poll` raises
                the error. Not used if `blocking`.

        Raises:
            CheckpointError: the save failed (`blocking`), or an earlier one failed that had no `failed`.
        """
        self.wait()
        target = Path(os.path.abspath(target))  # the working directory may change during the save
        if blocking:
            written = commit(draft, target, replace=replace, group=self.group)
            if committed is not None:
                committed(written)
            staging.wait()
            staging.report()
            return
        run_on_all_ranks(self.group, lambda: draft.detach(self._buffers), CheckpointWriteError)
        job = (draft, target, replace, committed, failed)
        if not self.group.concurrent:
            self._run(*job)
            return
        thread = threading.Thread(target=self._run, args=job, name="trainkit-save", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:
            if self.group.size > 1:
                self._run(*job)  # the other ranks wait for it
                return
            raise CheckpointWriteError(
                f"{target}: the checkpoint could not be written: {error}. Fix: save with blocking=True, or raise the thread "
                "limit (ulimit -u)"
            ) from error
        self._thread = thread

    def poll(self) -> None:
        """Report saves that have failed: call their `failed`, or raise the error if they have none. Cheap."""
        while self._failures:
            failure = self._failures.popleft()
            if failure.failed is None or not isinstance(failure.error, Exception):
                raise failure.error
            failure.failed(failure.error)

    def wait(self) -> None:
        """Wait for the save in progress, and report like `poll`."""
        self.join()
        self._thread = None
        self.poll()

    def join(self) -> None:
        """Wait for the save in progress, and report nothing. Other ranks need not do the same."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Wait, report and free the memory of the copies. The saver can be used again."""
        try:
            self.wait()
        finally:
            self._buffers.free()

    def _run(
        self,
        draft: Draft,
        target: Path,
        replace: bool,
        committed: Callable[[Committed], None] | None,
        failed: Callable[[Exception], None] | None,
    ) -> None:
        try:
            try:
                written = commit(draft, target, replace=replace, group=self.group)
            finally:
                draft.release()  # it refers to buffers that the next save uses or that are freed
            if committed is not None:
                committed(written)
        except BaseException as error:
            # A reference to the error must not keep the state alive.
            traceback.clear_frames(error.__traceback__)
            del draft
            self._failures.append(_Failure(target, error, failed))
            self.notify()


def _print(failures: deque[_Failure]) -> None:
    while failures:
        failure = failures.popleft()
        text = f"trainkit: saving {failure.target} failed. The error was not reported during training:\n"
        echo(text + "".join(traceback.format_exception(failure.error)), end="", file=sys.stderr)
