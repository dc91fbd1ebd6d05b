"""How a run saves: `SaveFolders` locks its folders and chooses names for all ranks, `Saver` writes while training continues."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainkit.checkpoint.checkpoint_plan import CheckpointPlan, HostBuffers
from trainkit.checkpoint.commit import CommitResult, commit
from trainkit.checkpoint.folder import (
    CHECKPOINTS,
    check_writable,
    checkpoints_here,
    free_name,
    is_abandoned,
    next_counter,
    remove_leftovers,
)
from trainkit.checkpoint.lock import FolderLock
from trainkit.checkpoint.ranks import SHARED_FOLDER_ADVICE, run_on_all_ranks, wait_for_path
from trainkit.checkpoint.urls import remote_at, remote_sync
from trainkit.console import echo
from trainkit.distributed.world import ThreadExchange, World
from trainkit.errors import CheckpointError, CheckpointWriteError

__all__ = ["SaveFolders", "Saver"]


_SINGLE_RANK = ThreadExchange()
_RESERVE_FROM_BYTES = 16 * 2**20  # allocating less takes less than 10 ms


@dataclass
class _Failure:
    target: Path
    error: BaseException
    failed: Callable[[Exception], None] | None


class Saver:
    """Commits plans, in a thread or immediately.

    A save in the thread costs the caller a copy of the tensors into host memory, which later saves reuse. The thread exists
    only during a save, and the interpreter waits for it at exit: a save in progress is finished even without `close`. All
    methods are for the main thread.

    With several ranks, all of them call `save` and `wait` in the same order, and get the same errors from them.
    `poll` reports what this rank knows; other ranks may not know it yet.

    Args:
        notify: Called in the thread when `poll` has something to report.
        group: The ranks that save together; used only by this object.
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
        plan: CheckpointPlan,
        target: Path,
        *,
        blocking: bool,
        replace: bool = False,
        committed: Callable[[CommitResult], None] | None = None,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Wait for the save in progress, then commit `plan` to `target`.

        Args:
            plan: What to write.
            target: The folder of the checkpoint.
            blocking: Write the tensors without a copy and return after the commit. False: copy them and return; the plan
                cannot be used again.
            replace: See `commit`.
            committed: Called after the commit, in the same thread, with the result of the commit.
            failed: Called by `poll` with the error if the save or `committed` failed; without it `poll` raises
                the error. Not used if `blocking`.

        Raises:
            CheckpointError: The save failed (`blocking`), or an earlier one failed that had no `failed`.
        """
        self.wait()
        target = Path(os.path.abspath(target))  # the working directory may change during the save
        if blocking:
            written = commit(plan, target, replace=replace, group=self.group)
            if committed is not None:
                committed(written)
            remote_sync.wait()
            remote_sync.report()
            return
        run_on_all_ranks(self.group, lambda: plan.detach(self._buffers), CheckpointWriteError)
        job = (plan, target, replace, committed, failed)
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

    def reserve(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Allocate the memory for the copies of the first asynchronous save in the thread, so that the save need not.

        A save that comes before that is done waits for it. Nothing is done for little memory, or after an asynchronous save.

        Args:
            sizes: From `sizes_to_copy`.
            device: The device of the tensors.
        """
        if self._thread is not None or self._buffers.nbytes or sum(sizes.values()) < _RESERVE_FROM_BYTES:
            return

        def allocate() -> None:
            with contextlib.suppress(
                RuntimeError, MemoryError
            ):  # too little memory: the save has the same error, and reports it
                self._buffers.reserve(sizes, device)

        thread = threading.Thread(target=allocate, name="trainkit-reserve", daemon=False)
        with contextlib.suppress(RuntimeError):  # no thread can be started: the save allocates it
            thread.start()
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
        plan: CheckpointPlan,
        target: Path,
        replace: bool,
        committed: Callable[[CommitResult], None] | None,
        failed: Callable[[Exception], None] | None,
    ) -> None:
        try:
            try:
                written = commit(plan, target, replace=replace, group=self.group)
            finally:
                plan.release()  # it refers to buffers that the next save uses or that are freed
            if committed is not None:
                committed(written)
        except BaseException as error:
            # A reference to the error must not keep the state alive.
            traceback.clear_frames(error.__traceback__)
            del plan
            self._failures.append(_Failure(target, error, failed))
            self.notify()


def _print(failures: deque[_Failure]) -> None:
    while failures:
        failure = failures.popleft()
        text = f"trainkit: saving {failure.target} failed. The error was not reported during training:\n"
        echo(text + "".join(traceback.format_exception(failure.error)), end="", file=sys.stderr)


class SaveFolders:
    """The folders of one run, the same on all ranks. All methods are collective.

    Args:
        world: The ranks.
        name: A name that is unique for these ranks.

    Attributes:
        folders: The folders, in the order of the calls of `use`.
        of_run: The default folder, `<the run's folder>/checkpoints`; `None` before it is known.
    """

    def __init__(self, world: World, name: str) -> None:
        self.folders: list[Path] = []
        self.of_run: Path | None = None
        self._waiting_for_folder: list[Callable[[Path], None]] = []
        self._removable = False  # Only the default folder is removable, not one that was passed to use().
        self._name = name
        self._world = world
        self._exchange = world.thread_exchange(f"folders/{name}")  # Steps that may wait for a lock use this exchange.
        self._locks: dict[Path, FolderLock] = {}  # Only the main process has locks.
        self._entered: set[Path] = set()

    def use(self, folder: Path, run_id: str) -> None:
        """Save to a folder, as given on the main process. It is created by `begin`.

        Raises:
            CheckpointWriteError: The folder exists, but is not writable or not the same on all ranks.
            CheckpointLockedError: Another live run saves to it.
        """
        path, there = run_on_all_ranks(self._world, lambda: [str(folder.absolute()), os.path.exists(folder)])
        if Path(path) not in self.folders:
            if there:  # otherwise `begin` creates it, so that a fit that fails before training creates no folder
                self._enter(Path(path), run_id)
            self.folders.append(Path(path))

    def use_of_run(self, use_folder: Callable[[Path], None]) -> None:
        """Save to the folder of the run. `use_folder` is called with it, now or, if it is not known yet, by `choose`."""
        if self.of_run is None:
            self._waiting_for_folder.append(use_folder)
        else:
            use_folder(self.of_run)

    def choose(self, choice: Callable[[], Path]) -> None:
        """Choose the folder of a new run, if `use_of_run` was called. Raises like `use`."""
        waiting, self._waiting_for_folder = self._waiting_for_folder, []
        if waiting:
            if self.of_run is None:
                self.continue_in(choice())
            assert self.of_run is not None
            for use_folder in waiting:
                use_folder(self.of_run)

    def continue_in(self, folder: Path) -> None:
        """Make `folder` the folder of the run, instead of the previous one. Raises like `use`."""
        if self.of_run == folder:
            return
        before, self.of_run = self.of_run, None
        if before is not None and self._removable:
            self.folders.remove(before)
            self._entered.discard(before)
            if before in self._locks:
                self._locks.pop(before).release()
                remote_sync.leave(before)
        self._removable = folder not in self.folders
        self.use(folder, self._name)
        self.of_run = folder

    def remove_abandoned(self, folders: Iterable[Path]) -> None:
        """Remove the leftovers of runs that were killed before their first checkpoint, since no run will resume there."""

        def remove() -> None:
            for folder in folders if self._world.is_main else ():
                if not is_abandoned(folder):
                    continue
                lock = FolderLock(folder, self._name)
                with contextlib.suppress(CheckpointError):  # a live run has locked it, or it is not writable
                    lock.acquire()
                    remove_leftovers(folder)
                lock.release()

        run_on_all_ranks(self._exchange, remove)

    def begin(self, run_id: str) -> None:
        """Lock the folders that did not exist when `use` was called. Raises like `use`."""
        for folder in self.folders:
            if folder not in self._entered:
                self._enter(folder, run_id)

    def last_counter(self, run_id: str) -> int:
        """The highest save counter of a run in these folders; 0 if it has no checkpoint."""

        def find() -> int:
            folders = self.folders if self._world.is_main else []
            return max((next_counter(folder, run_id) - 1 for folder in folders), default=0)

        highest: int = run_on_all_ranks(self._world, find)
        return highest

    def choose_path(self, folder: Path, name: str, replace: bool) -> Path:
        """The path for a checkpoint: `name` in the folder or, if that exists and is not to be replaced, another name.

        Raises:
            CheckpointLockedError: Another run has taken over a folder, since this one sent no heartbeat for too long.
        """

        def choose() -> str | None:
            if not self._world.is_main:
                return None
            for lock in self._locks.values():
                lock.check()
            return str(folder / (name if replace else free_name(folder, name)))

        return Path(run_on_all_ranks(self._world, choose))

    def release(self) -> None:
        """Unlock the folders."""
        for folder, lock in self._locks.items():
            lock.release()
            remote_sync.leave(folder)
        self._locks = {}
        self._entered = set()

    def _enter(self, folder: Path, run_id: str) -> None:
        def take() -> None:
            if self._world.is_main:
                check_writable(folder)
                lock = FolderLock(folder, run_id)
                lock.acquire()
                self._locks[folder] = lock
                remove_leftovers(folder)
                remote_sync.enter(folder, [one.path for one in checkpoints_here(folder) if one.problem is None])
                if folder.name == CHECKPOINTS and (remote := remote_at(folder.parent)) is not None:
                    remote.pull_files()  # the logs, which the run continues
                    remote_sync.add_log_folder(folder.parent)

        run_on_all_ranks(self._exchange, take, CheckpointWriteError)
        self._entered.add(folder)
        if self._world.size > 1:
            _probe(self._world, folder)


def _probe(world: World, folder: Path) -> None:
    """Check that a folder is the same for all ranks, and that each can write to it.

    Raises:
        CheckpointWriteError: It is not; the message names the ranks and their nodes.
    """
    probe = folder / world.from_main(f".probe.tmp-{secrets.token_hex(8)}")
    try:
        run_on_all_ranks(world, lambda: probe.write_bytes(b"trainkit\n") if world.is_main else None, CheckpointWriteError)
        seen = world.exchange([wait_for_path(probe), socket.gethostname()])
    finally:
        if world.is_main:
            with contextlib.suppress(OSError):
                probe.unlink()
    blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(seen) if not sees]
    if blind:
        raise CheckpointWriteError(
            f"{folder} is not the same folder on all processes: a file that rank 0 on {seen[0][1]} wrote there is not visible "
            f"to {', '.join(blind)}. {SHARED_FOLDER_ADVICE}"
        )
    run_on_all_ranks(world, lambda: None if world.is_main else check_writable(folder), CheckpointWriteError)
