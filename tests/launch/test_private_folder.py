"""Folders that killed processes have left: the next start removes them, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.launch.agents import start_agent, wait_until
from helpers.patience import within
from helpers.resume.faulting import Child

from trainkit.distributed.process_identity import ProcessIdentity
from trainkit.launch import private_folder as module
from trainkit.launch.placeholder import LOCK_PREFIX, WORKERS
from trainkit.launch.private_folder import private_folder, remove_leftovers

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners of POSIX")


@pytest.fixture
def place(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary folders are created."""
    place = run_dir / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(module, "MEMORY", str(place))
    return place


@pytest.fixture
def dead() -> dict[str, Any]:
    """The identity of a process that has ended; its ID may belong to another process now."""
    return asdict(replace(ProcessIdentity.this(), start="1"))


def left(place: Path, owner: Any, name: str = "trainkit-x") -> Path:
    """A folder as a killed process leaves it."""
    folder = place / name
    (folder / "inside").mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "inside" / "call").write_text("arguments")
    if owner is not None:
        (folder / "owner.json").write_text(owner if isinstance(owner, str) else json.dumps(owner))
    return folder


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_folder_of_a_killed_process_is_removed_by_the_next_start(place: Path, in_memory: bool) -> None:
    def begin() -> None:
        tempfile.tempdir = module.MEMORY = str(place)
        with private_folder("a-", in_memory=in_memory) as folder:
            Path(folder, "call").write_text("arguments")
            os.kill(os.getpid(), signal.SIGKILL)

    with Child(begin, "killed") as child:
        assert child.code == -signal.SIGKILL
    [folder] = place.glob("trainkit-a-*")
    assert (folder / "call").exists()
    with private_folder(in_memory=in_memory) as own:
        assert [str(path) for path in place.iterdir()] == [own]
        assert os.stat(own).st_mode & 0o777 == 0o700
        remove_leftovers()  # of a process that lives
        assert os.path.isdir(own)
    assert list(place.iterdir()) == []


def test_the_id_of_a_process_that_ended_is_used_again(place: Path, dead: dict[str, Any]) -> None:
    left(place, dead)  # the ID of this process
    remove_leftovers()
    assert list(place.iterdir()) == []


OTHERS: dict[str, Any] = {
    "no owner": None,
    "no JSON": "x",
    "deep": "[" * 4000,
    "no object": "[]",
    "an owner without its ID": {"pid": None},
    "a process that lives": {"start": ProcessIdentity.this().start},
    "another host": {"host": "another"},
    "an earlier boot": {"boot": "another"},
    "another container": {"namespace": "another"},
}


@pytest.mark.parametrize("owner", OTHERS.values(), ids=OTHERS.keys())
def test_what_stays(place: Path, dead: dict[str, Any], owner: Any) -> None:
    """A folder stays if it is not known that its process has ended."""
    folder = left(place, {**dead, **owner} if isinstance(owner, dict) else owner)
    remove_leftovers()
    assert (folder / "inside" / "call").exists()


def test_other_names_stay(place: Path, dead: dict[str, Any]) -> None:
    folder = left(place, dead, "other-x")
    (place / "trainkit-file").touch()
    remove_leftovers()
    assert (folder / "inside" / "call").exists()
    assert (place / "trainkit-file").exists()


def test_links_are_not_followed(place: Path, dead: dict[str, Any], run_dir: Path) -> None:
    """Neither a link with such a name, nor one in the folder, nor an owner that is a link or a pipe."""
    target = left(run_dir, dead, "precious")
    (place / "trainkit-link").symlink_to(target)
    inside = left(place, dead, "trainkit-inside")
    (inside / "link").symlink_to(target)
    linked, pipe = left(place, None, "trainkit-linked"), left(place, None, "trainkit-pipe")
    (linked / "owner.json").symlink_to(target / "owner.json")
    os.mkfifo(pipe / "owner.json")
    remove_leftovers()
    assert (target / "inside" / "call").exists()
    assert {path.name for path in place.iterdir()} == {"trainkit-link", "trainkit-linked", "trainkit-pipe"}


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o770])
def test_a_folder_that_others_can_use_stays(place: Path, dead: dict[str, Any], mode: int) -> None:
    folder = left(place, dead)
    folder.chmod(mode)
    remove_leftovers()
    assert folder.exists()


def test_a_folder_of_another_user_stays(place: Path, dead: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(place, dead)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    remove_leftovers()
    assert folder.exists()


@contextlib.contextmanager
def kept_by_placeholder(folder: Path) -> Iterator[Path]:
    """Lets a folder be that of a launcher whose placeholder still runs; yields the file with the IDs of its workers."""
    with open(folder / "inside" / f"{LOCK_PREFIX}1", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        workers = folder / "inside" / WORKERS
        workers.touch()
        yield workers


def test_placeholders_that_still_end_workers_are_waited_for(
    place: Path, dead: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = left(place, dead)
    waited: list[float] = []
    with kept_by_placeholder(folder) as workers:
        monkeypatch.setattr(module.time, "sleep", lambda _: (waited.append(1), workers.unlink()))
        remove_leftovers()
    assert waited == [1]
    assert not folder.exists()


def test_a_slow_placeholder_still_finds_the_workers(place: Path, dead: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder stays until the placeholder has ended them, or has ended itself."""
    monkeypatch.setattr(module, "_PLACEHOLDER_TIMEOUT_S", 0.0)
    folder = left(place, dead)
    with kept_by_placeholder(folder) as workers:
        remove_leftovers()
        assert workers.exists()
    remove_leftovers()
    assert not folder.exists()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="Linux")
@pytest.mark.prompt
def test_a_killed_launcher(tmp_path: Path) -> None:
    """The folder in memory of a launcher that was killed together with its placeholders is removed by the next launcher."""

    def folders(pid: int) -> list[Path]:
        found = []
        for path in Path("/dev/shm").glob("trainkit-*/owner.json"):
            with contextlib.suppress(OSError, ValueError):  # another process removes or writes it
                found += [path.parent] if json.loads(path.read_text())["pid"] == pid else []
        return found

    (tmp_path / "first").mkdir()
    agent = start_agent("ready()\ntime.sleep(1000)\n", tmp_path / "first")
    agent.ready()
    assert len(folders(agent.process)) == 1
    agent.signal(signal.SIGKILL)
    agent.killed()
    (tmp_path / "second").mkdir()
    assert start_agent("", tmp_path / "second").code() == 0
    wait_until(lambda: not folders(agent.process), within(3.0))
