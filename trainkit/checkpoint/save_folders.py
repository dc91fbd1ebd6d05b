"""The folders that a run saves to: the main process looks, locks and names, and the others follow."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from trainkit.checkpoint.all_ranks import SHARED_FOLDER_ADVICE, run_on_all_ranks, wait_for_path
from trainkit.checkpoint.folder import check_writable, free_name, is_abandoned, next_counter, remove_leftovers
from trainkit.checkpoint.lock import FolderLock
from trainkit.distributed.world import World
from trainkit.errors import CheckpointError, CheckpointWriteError

__all__ = ["SaveFolders"]


class SaveFolders:
    """The folders of one run, the same ones for all its processes, which call each method together.

    Args:
        world: the processes.
        name: what no other object of these processes is called.

    Attributes:
        folders: in the order in which they were named.
        of_run: the one that is used where no other was named, ``<the run's folder>/checkpoints``; None before it is known.
    """

    def __init__(self, world: World, name: str) -> None:
        self.folders: list[Path] = []
        self.of_run: Path | None = None
        self._placed: list[Callable[[Path], None]] = []
        self._may_leave = False  # of_run was not named by use()
        self._name = name
        self._world = world
        self._team = world.team(f"folders/{name}")  # for a lock that is waited for
        self._locks: dict[Path, FolderLock] = {}  # on the main process
        self._entered: set[Path] = set()

    def use(self, folder: Path, run_id: str) -> None:
        """Save to a folder, of which the main process's path counts; it is made when the run :meth:`begins <begin>`.

        Raises:
            CheckpointWriteError: it is there, and cannot be written, or is not the same one for all processes.
            CheckpointLockedError: another live run saves there.
        """
        path, there = run_on_all_ranks(self._world, lambda: [str(folder.absolute()), os.path.exists(folder)])[0]
        if Path(path) not in self.folders:
            if there:  # else it is made when training begins: a fit that fails before leaves none behind
                self._enter(Path(path), run_id)
            self.folders.append(Path(path))

    def use_of_run(self, placed: Callable[[Path], None]) -> None:
        """Save to the folder of the run; ``placed`` is called with it now or, if it is not known yet, by :meth:`choose`."""
        if self.of_run is None:
            self._placed.append(placed)
        else:
            placed(self.of_run)

    def choose(self, choice: Callable[[], Path]) -> None:
        """A run that continues no other gets its folder, if :meth:`use_of_run` was called; raises as :meth:`use` does."""
        waiting, self._placed = self._placed, []
        if waiting:
            if self.of_run is None:
                self.continue_in(choice())
            assert self.of_run is not None
            for placed in waiting:
                placed(self.of_run)

    def continue_in(self, folder: Path) -> None:
        """Let ``folder`` be that of the run, instead of the one before; raises as :meth:`use` does."""
        if self.of_run == folder:
            return
        before, self.of_run = self.of_run, None
        if before is not None and self._may_leave:
            self.folders.remove(before)
            self._entered.discard(before)
            if before in self._locks:
                self._locks.pop(before).release()
        self._may_leave = folder not in self.folders
        self.use(folder, self._name)
        self.of_run = folder

    def remove_abandoned(self, folders: Iterable[Path]) -> None:
        """Remove what runs that were killed before their first checkpoint have left: no run will resume there. Collective."""

        def remove() -> None:
            for folder in folders if self._world.is_main else ():
                if not is_abandoned(folder):
                    continue
                lock = FolderLock(folder, self._name)
                with contextlib.suppress(CheckpointError):  # of a live run, or not writable
                    lock.acquire()
                    remove_leftovers(folder)
                lock.release()

        run_on_all_ranks(self._team, remove)

    def begin(self, run_id: str) -> None:
        """Enter the folders that were not there when they were named; raises as :meth:`use` does."""
        for folder in self.folders:
            if folder not in self._entered:
                self._enter(folder, run_id)

    def last_counter(self, run_id: str) -> int:
        """The highest save counter of a run in these folders; 0 if there is none."""

        def look() -> int:
            folders = self.folders if self._world.is_main else []
            return max((next_counter(folder, run_id) - 1 for folder in folders), default=0)

        highest: int = run_on_all_ranks(self._world, look)[0]
        return highest

    def place(self, folder: Path, name: str, replace: bool) -> Path:
        """Where a checkpoint goes: ``name`` in the folder or, if that is taken and not to be replaced, another name.

        Raises:
            CheckpointLockedError: another run has taken over a folder, as this one did not answer for too long.
        """

        def choose() -> str | None:
            if not self._world.is_main:
                return None
            for lock in self._locks.values():
                lock.check()
            return str(folder / (name if replace else free_name(folder, name)))

        return Path(run_on_all_ranks(self._world, choose)[0])

    def release(self) -> None:
        """Let other runs into the folders."""
        for lock in self._locks.values():
            lock.release()
        self._locks, self._entered = {}, set()

    def _enter(self, folder: Path, run_id: str) -> None:
        def take() -> None:
            if self._world.is_main:
                check_writable(folder)
                lock = FolderLock(folder, run_id)
                lock.acquire()
                self._locks[folder] = lock
                remove_leftovers(folder)

        run_on_all_ranks(self._team, take, CheckpointWriteError)
        self._entered.add(folder)
        if self._world.size > 1:
            _probe(self._world, folder)


def _probe(world: World, folder: Path) -> None:
    """Make sure that a folder is one and the same for all processes, and that each can write to it.

    Raises:
        CheckpointWriteError: it is not so; the message names the processes and their machines.
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
            f"{folder} is not the same folder for all processes: what rank 0 on {seen[0][1]} writes there is not seen by "
            f"{', '.join(blind)}. {SHARED_FOLDER_ADVICE}"
        )
    run_on_all_ranks(world, lambda: None if world.is_main else check_writable(folder), CheckpointWriteError)
