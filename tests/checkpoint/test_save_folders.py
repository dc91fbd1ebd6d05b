"""The checkpoint folders of a run on several processes: one lock, one name, and one shared file system."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.resume.checkpoints import make, names
from helpers.worlds.threaded import run_threads, try_threads

from trainkit.checkpoint import ranks as ranks_module
from trainkit.checkpoint import saver as module
from trainkit.checkpoint.lock import LOCK, FolderLock
from trainkit.checkpoint.saver import SaveFolders
from trainkit.distributed.world import World
from trainkit.errors import CheckpointLockedError, CheckpointWriteError


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_VISIBLE_WITHIN_SECONDS", 0.2)


def entered(world: World, folder: str = "a", run_id: str = "run1") -> SaveFolders:
    made = SaveFolders(world, run_id)
    try:
        made.use(Path(folder), run_id)
        made.begin(run_id)
    except BaseException:
        made.release()
        raise
    return made


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("there", [False, True])
def test_one_lock_and_nothing_left_behind(run_dir: Path, size: int, there: bool) -> None:
    """Only the main process locks the folder. The lock file is the only file there, and it is empty after the release."""
    if there:
        Path("a").mkdir()

    def work(world: World) -> Any:
        folders = entered(world)
        assert folders.folders == [run_dir / "a"]
        world.barrier() if size == 1 else world.exchange(None)
        if world.is_main:
            with pytest.raises(CheckpointLockedError):
                FolderLock(run_dir / "a", "other").acquire()
        found = names(run_dir / "a")
        world.exchange(None)
        folders.release()
        return found

    assert run_threads(size, work) == [[LOCK]] * size
    assert (run_dir / "a" / LOCK).read_bytes() == b""


def test_a_folder_is_not_created_before_the_run_begins(run_dir: Path) -> None:
    def work(world: World) -> Any:
        SaveFolders(world, "x").use(Path("a"), "x")
        return Path("a").exists()

    assert run_threads(2, work) == [False, False]


def test_another_run_is_an_error_on_all(run_dir: Path) -> None:
    Path("a").mkdir()
    lock = FolderLock(run_dir / "a", "other")
    lock.acquire()
    ends = try_threads(3, entered)
    lock.release()
    assert {type(end) for end in ends} == {CheckpointLockedError}
    assert all("rank 0" in str(end) and "'other'" in str(end) for end in ends)


def test_names_counters_and_paths_are_the_main_processs(run_dir: Path) -> None:
    """All ranks use the path, the free name and the counter that the main process has determined."""
    make(run_dir / "a" / "step-1", 4)

    def work(world: World) -> Any:
        folders = entered(world, "a" if world.is_main else "b")
        found = [str(folders.choose_path(folders.folders[0], "step-1", replace)) for replace in (False, True)]
        counter = folders.last_counter("run1")
        folders.release()
        return [*found, counter, folders.last_counter("run2")]

    assert run_threads(2, work) == [[str(run_dir / "a/step-1-v1"), str(run_dir / "a/step-1"), 4, 0]] * 2
    assert names(run_dir) == ["a"]


def test_a_lock_that_is_lost_is_an_error_on_all(run_dir: Path) -> None:
    def work(world: World) -> Any:
        folders = entered(world)
        if world.is_main:
            (run_dir / "a" / LOCK).unlink()
            FolderLock(run_dir / "a", "thief").acquire()
        world.exchange(None)
        try:
            folders.choose_path(folders.folders[0], "x", False)
        finally:
            folders.release()

    ends = try_threads(2, work)
    assert {type(end) for end in ends} == {CheckpointLockedError}
    assert all("taken over" in str(end) for end in ends)


def elsewhere(monkeypatch: pytest.MonkeyPatch, blind: tuple[int, ...]) -> Any:
    """Return a function that begins a run in folder "a"; the ranks in `blind` see another folder under this path."""
    ranks = threading.local()
    plain = module.wait_for_path
    monkeypatch.setattr(module, "wait_for_path", lambda path: plain(Path("b", path.name) if ranks.own in blind else path))
    monkeypatch.setattr(module.socket, "gethostname", lambda: f"host{ranks.own}")

    def work(world: World) -> Any:
        ranks.own = world.rank
        return entered(world)

    return work


@pytest.mark.parametrize("blind", [(1,), (1, 2)])
def test_a_folder_that_differs_between_ranks(run_dir: Path, monkeypatch: pytest.MonkeyPatch, blind: tuple[int, ...]) -> None:
    ends = try_threads(3, elsewhere(monkeypatch, blind))
    assert {type(end) for end in ends} == {CheckpointWriteError}
    assert len({str(end) for end in ends}) == 1
    message = str(ends[0])
    assert message.startswith(f"{run_dir / 'a'} is not the same folder on all processes: a file that rank 0 on host0 wrote")
    assert ", ".join(f"rank {rank} on host{rank}" for rank in blind) in message
    assert "dirpath" in message
    assert names(run_dir / "a") == [LOCK]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_one_cannot_write_to(run_dir: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    ranks = threading.local()

    def check(folder: Path) -> None:
        plain(folder)
        if ranks.own == rank:
            raise CheckpointWriteError("read-only")

    plain = module.check_writable
    monkeypatch.setattr(module, "check_writable", check)

    def work(world: World) -> Any:
        ranks.own = world.rank
        return entered(world)

    ends = try_threads(2, work)
    assert {str(end) for end in ends} == {f"rank {rank}: read-only"}
    assert {type(end) for end in ends} == {CheckpointWriteError}


@pytest.mark.parametrize("size", [1, 2])
def test_a_folder_that_cannot_be_looked_at(run_dir: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """If the parent folder is not accessible, all ranks raise the same kind of error with a fix."""

    def closed(plain: Any) -> Any:
        def call(path: Any, *given: Any, **named: Any) -> Any:
            if "closed" in os.fspath(path):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return plain(path, *given, **named)

        return call

    monkeypatch.setattr(os, "stat", closed(os.stat))
    monkeypatch.setattr(os, "mkdir", closed(os.mkdir))
    ends = try_threads(size, lambda world: entered(world, "closed/a"))
    assert {type(end) for end in ends} == {CheckpointWriteError}
    assert all("cannot be written" in str(end) and "Fix: choose another" in str(end) for end in ends)


def test_what_appears_late_is_seen(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait_for_path` waits for a file that a network file system shows late, up to its limit."""
    monkeypatch.setattr(ranks_module, "_VISIBLE_WITHIN_SECONDS", 30.0)
    timer = threading.Timer(0.3, (run_dir / "late").touch)
    timer.start()
    assert ranks_module.wait_for_path(run_dir / "late")
    timer.join()
    monkeypatch.setattr(ranks_module, "_VISIBLE_WITHIN_SECONDS", 0.1)
    assert not ranks_module.wait_for_path(run_dir / "nowhere" / "never")
    assert os.listdir(run_dir) == ["late"]
