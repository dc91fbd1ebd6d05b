"""Saving beside the training: one thread, at most one save in flight, and no failure lost."""

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
from trainkit.checkpoint.commit import commit
from trainkit.checkpoint.draft import Draft
from trainkit.checkpoint.host_copy import HostBuffers
from trainkit.checkpoint.manifest import Manifest
from trainkit.distributed.world import Team
from trainkit.errors import CheckpointWriteError

__all__ = ["Saver"]

_SINGLE_RANK = Team()


@dataclass
class _Failure:
    target: Path
    error: BaseException
    failed: Callable[[Exception], None] | None


class Saver:
    """Commits drafts, in a thread or at once.

    A save in the thread costs the caller a copy of the tensors into host memory that is used again by the next one. The
    thread lives as long as the save does, and the interpreter waits for it before it ends: a save in flight is finished
    without :meth:`close` too. All methods are for one thread, the main one.

    Over several processes all of them call :meth:`save` and :meth:`wait`, in the same order, and what is reported is then the
    same on all. :meth:`poll` reports what this process knows by now; others may not know it yet.

    Args:
        attention: called from the thread when :meth:`poll` has something to report.
        team: the processes that save together; nobody else may use it.
    """

    def __init__(self, notify: Callable[[], None], team: Team = _SINGLE_RANK) -> None:
        self.notify = notify
        self.team = team
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._failures: deque[_Failure] = deque()
        # The last chance to tell of a failure that nobody asked for: the saver is dropped, or the interpreter ends.
        weakref.finalize(self, _print, self._failures)

    def save(
        self,
        draft: Draft,
        target: Path,
        *,
        blocking: bool,
        replace: bool = False,
        committed: Callable[[Manifest | None], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Wait for the save in flight, then commit ``draft`` to ``target``.

        Args:
            draft: what to write.
            target: the folder that the checkpoint will be.
            blocking: write the tensors from where they are and return when all is committed. Otherwise copy them and
                return; the draft is used up with that.
            replace: see :func:`~trainkit.checkpoint.commit.commit`.
            committed: called after the commit, in the thread that made it, with what the commit returned.
            failed: called from :meth:`poll` if the save failed, or ``committed`` did, with what was raised; without it
                :meth:`poll` raises that. Not used if ``blocking``.

        Raises:
            CheckpointError: the save failed (``blocking``), or an earlier one did that was given no ``failed``.
        """
        self.wait()
        target = Path(os.path.abspath(target))  # the working directory may be another one by then
        if blocking:
            manifest = commit(draft, target, replace=replace, team=self.team)
            if committed is not None:
                committed(manifest)
            return
        run_on_all_ranks(self.team, lambda: draft.detach(self._buffers), CheckpointWriteError)
        job = (draft, target, replace, committed, failed)
        if not self.team.concurrent:
            self._run(*job)
            return
        thread = threading.Thread(target=self._run, args=job, name="trainkit-save", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:
            if self.team.size > 1:
                self._run(*job)  # the others count on it
                return
            raise CheckpointWriteError(
                f"{target}: the checkpoint could not be written: {error}. Fix: save with blocking=True, or raise the limit on "
                "threads (ulimit -u)"
            ) from error
        self._thread = thread

    def poll(self) -> None:
        """Report the saves that have failed since: call their ``failed``, or raise the error if there is none. Cheap."""
        while self._failures:
            failure = self._failures.popleft()
            if failure.failed is None or not isinstance(failure.error, Exception):
                raise failure.error
            failure.failed(failure.error)

    def wait(self) -> None:
        """Return when nothing is in flight, and report as :meth:`poll` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.poll()

    def close(self) -> None:
        """Wait, report and give the memory of the copies back. The saver may be used again."""
        try:
            self.wait()
        finally:
            self._buffers.free()

    def _run(
        self,
        draft: Draft,
        target: Path,
        replace: bool,
        committed: Callable[[Manifest | None], None] | None,
        failed: Callable[[Exception], None] | None,
    ) -> None:
        try:
            try:
                manifest = commit(draft, target, replace=replace, team=self.team)
            finally:
                draft.release()  # it lies in the buffers, which are the next one's or given back
            if committed is not None:
                committed(manifest)
        except BaseException as error:
            # Whoever keeps the error must not keep the state with it.
            traceback.clear_frames(error.__traceback__)
            del draft
            self._failures.append(_Failure(target, error, failed))
            self.notify()


def _print(failures: deque[_Failure]) -> None:
    while failures:
        failure = failures.popleft()
        print(f"trainkit: saving {failure.target} failed, and nobody asked:", file=sys.stderr)
        traceback.print_exception(failure.error)
