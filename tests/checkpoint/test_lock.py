"""At most one live run holds the lock of a folder. The tests kill and suspend real processes, and start two at once."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.runs.leaks import held
from helpers.support import run_python

from trainkit.checkpoint import lock as lock_module
from trainkit.checkpoint.lock import LOCK, FolderLock
from trainkit.distributed import process_identity
from trainkit.errors import CheckpointLockedError, CheckpointWriteError, ConfigurationError

NEVER = 3600.0  # `stale_after` in seconds: no test takes this long, so no lock is taken over for a missing heartbeat

# Takes the lock, prints "held", and runs the commands that it reads, one per line.
HOLDER = """
import os, sys
from pathlib import Path
from trainkit.checkpoint.lock import FolderLock

lock = FolderLock(Path(sys.argv[1]), sys.argv[2], interval=float(sys.argv[3]), stale_after=3600)
lock.acquire()
print("held", os.getpid(), flush=True)
for line in sys.stdin:
    if line == "lost?\\n":
        print(lock.lost, flush=True)
    elif line == "release\\n":
        lock.release()
        print("released", flush=True)
"""


@contextlib.contextmanager
def process(program: str, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


def ask(child: subprocess.Popen[str], line: str) -> str:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
    return answer(child)


def answer(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@contextlib.contextmanager
def holder(folder: Path, run_id: str = "other-run", interval: float = 10.0) -> Iterator[subprocess.Popen[str]]:
    with process(HOLDER, folder, run_id, interval) as child:
        assert answer(child) == f"held {child.pid}"
        yield child


@contextlib.contextmanager
def taken(
    folder: Path, run_id: str = "this-run", *, interval: float = 10.0, stale_after: float = NEVER
) -> Iterator[FolderLock]:
    lock = FolderLock(folder, run_id, interval=interval, stale_after=stale_after)
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release()


def content(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / LOCK).read_text())
    return value


def elsewhere(folder: Path, **changes: Any) -> bytes:
    """CheckpointContent of the lock file of a process on another host."""
    with taken(folder):
        value = content(folder)
    data = json.dumps({**value, "host": "elsewhere", "boot": "b", "pid": 77, "token": "t", "run_id": "far-run", **changes})
    return data.encode() + b"\n"


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_lock_names_its_holder_and_release_empties_it(run_dir: Path) -> None:
    with taken(run_dir) as lock:
        value = content(run_dir)
        assert (value["run_id"], value["pid"], value["beat"]) == ("this-run", os.getpid(), 0)
        assert {"host", "boot", "namespace", "start", "token"} <= set(value)
        assert not lock.lost
        lock.acquire()  # no effect: it already has the lock
        assert content(run_dir) == value
    assert (run_dir / LOCK).read_bytes() == b""
    assert not lock.lost
    lock.release()
    with taken(run_dir, "another"):
        assert content(run_dir)["run_id"] == "another"


def test_a_live_holder_is_named(run_dir: Path) -> None:
    with holder(run_dir) as child:
        before = (run_dir / LOCK).read_bytes()
        with pytest.raises(CheckpointLockedError) as caught:
            FolderLock(run_dir, "this-run").acquire()
        for part in (str(run_dir), "other-run", str(child.pid), repr(content(run_dir)["host"])):
            assert part in str(caught.value)
        assert (run_dir / LOCK).read_bytes() == before
        assert ask(child, "lost?") == "False"
        assert ask(child, "release") == "released"
        with taken(run_dir):
            pass


@pytest.mark.parametrize("reaped", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_lock_of_a_killed_holder_is_taken_over_immediately(
    run_dir: Path, caplog: pytest.LogCaptureFixture, reaped: bool
) -> None:
    with holder(run_dir) as child:
        child.kill()
        if reaped:
            child.wait()
        else:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but not reaped yet
        with taken(run_dir):
            assert content(run_dir)["run_id"] == "this-run"
    assert not caplog.messages


def test_a_process_with_the_id_of_a_dead_one_is_not_the_holder(run_dir: Path) -> None:
    with holder(run_dir) as child:
        value = content(run_dir)
        assert value["start"] is not None
        value["start"] = str(int(value["start"]) - 1)
        (run_dir / LOCK).write_text(json.dumps(value))
        with taken(run_dir):
            assert content(run_dir)["pid"] == os.getpid()
        assert ask(child, "lost?") == "True"


def test_second_lock_of_same_process(run_dir: Path) -> None:
    """A second lock of the same process is refused. A lock that is garbage collected is released."""
    with taken(run_dir, "first"), pytest.raises(CheckpointLockedError, match="first"):
        FolderLock(run_dir, "second").acquire()
    before = held()
    forgotten = FolderLock(run_dir, "forgotten")
    forgotten.acquire()
    assert held() - before
    del forgotten
    gc.collect()
    assert (run_dir / LOCK).read_bytes() == b""
    assert not held() - before


def test_an_interpreter_that_exits_releases_the_lock(run_dir: Path) -> None:
    program = HOLDER.split("for line")[0]
    assert run_python("-c", program, str(run_dir), "run", "10").returncode == 0
    assert (run_dir / LOCK).read_bytes() == b""


def test_the_lock_of_another_host_without_a_heartbeat_is_taken_over_later(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / LOCK).write_bytes(elsewhere(run_dir))
    start = time.monotonic()
    with taken(run_dir, interval=0.1, stale_after=0.5):
        assert time.monotonic() - start >= 0.5
        assert content(run_dir)["run_id"] == "this-run"
    (said,) = caplog.messages
    for part in ("'far-run'", "'elsewhere'", "77", "0.5 s"):
        assert part in said


@pytest.mark.parametrize("same", [{}, {"boot": "another start"}, {"namespace": "another container"}])
def test_another_host_with_a_heartbeat_is_refused(run_dir: Path, same: dict[str, str]) -> None:
    """A lock whose heartbeat changes is not taken over from another host: process IDs say nothing about other hosts.

    This also holds for a host with the same name, and for another container on this host.
    """
    with taken(run_dir):
        here = content(run_dir)
    known = {name: here[name] for name in ("host", "boot", "namespace")} if same else {}
    write = [elsewhere(run_dir, **{**known, **same}, beat=beat) for beat in range(100)]
    ended = threading.Event()

    def write_heartbeats() -> None:
        for data in write * 100:
            (run_dir / "new").write_bytes(data)
            os.replace(run_dir / "new", run_dir / LOCK)
            if ended.wait(0.01):
                return

    (run_dir / LOCK).write_bytes(write[0])
    thread = threading.Thread(target=write_heartbeats)
    thread.start()
    try:
        with pytest.raises(CheckpointLockedError, match="far-run"):
            FolderLock(run_dir, "this-run", stale_after=30).acquire()
    finally:
        ended.set()
        thread.join()
    assert content(run_dir)["run_id"] == "far-run"


def test_heartbeats_are_written(run_dir: Path) -> None:
    with taken(run_dir, interval=0.01) as lock:
        until(lambda: lock._heartbeat is not None and lock._heartbeat.count > 3)
        assert content(run_dir)["beat"] >= 1
        assert not lock.lost
        lock.check()


def test_a_lock_that_another_run_took_is_lost(run_dir: Path) -> None:
    other = elsewhere(run_dir)
    with taken(run_dir, interval=0.01) as lock:
        assert lock._heartbeat is not None
        (run_dir / LOCK).write_bytes(other)
        assert lock.lost
        until(lambda: not lock._heartbeat.is_alive())
        with pytest.raises(CheckpointLockedError, match="far-run"):
            lock.check()
    assert (run_dir / LOCK).read_bytes() == other


def test_a_suspended_process_sees_the_takeover_before_its_heartbeat(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was suspended for longer than `stale_after` loses its lock to a run on another host.

    When it continues, it reports the lock as lost and does not overwrite the lock file of the other run.
    """
    with holder(run_dir, interval=3000.0) as child:
        os.kill(child.pid, signal.SIGSTOP)
        monkeypatch.setattr(process_identity.socket, "gethostname", lambda: "elsewhere")
        with taken(run_dir, interval=0.1, stale_after=0.3) as lock:
            os.kill(child.pid, signal.SIGCONT)
            assert ask(child, "lost?") == "True"
            assert ask(child, "release") == "released"
            assert not lock.lost


def test_a_lock_that_another_run_had_in_the_meantime_is_lost(run_dir: Path) -> None:
    """An empty lock file means that another run took the lock and released it again."""
    with taken(run_dir) as lock:
        (run_dir / LOCK).write_bytes(b"")
        assert lock.lost


def test_a_lock_file_that_was_deleted_is_taken_again(run_dir: Path) -> None:
    with taken(run_dir, interval=0.01) as lock:
        (run_dir / LOCK).unlink()
        until((run_dir / LOCK).exists)
        until(lambda: (run_dir / LOCK).read_bytes())
        assert not lock.lost
        assert content(run_dir)["run_id"] == "this-run"


def test_a_folder_that_is_gone(run_dir: Path) -> None:
    folder = run_dir / "gone"
    with pytest.raises(CheckpointWriteError, match="could not be locked"):
        FolderLock(folder, "run").acquire()
    folder.mkdir()
    with taken(folder, interval=0.01) as lock:
        (folder / LOCK).unlink()
        with contextlib.suppress(FileNotFoundError, OSError):
            folder.rmdir()  # unless the heartbeat recreated the lock file
        assert not lock.lost


STARTER = """
import sys
from pathlib import Path
from trainkit.checkpoint.lock import FolderLock
from trainkit.errors import CheckpointLockedError

print("ready", flush=True)
held = []
for line in sys.stdin:
    lock = FolderLock(Path(line.strip()), sys.argv[1], stale_after=3600)
    try:
        lock.acquire()
        held.append(lock)
        print("won", flush=True)
    except CheckpointLockedError as error:
        print("refused", flush=True)
"""


def test_one_of_two_runs_that_start_at_the_same_time_gets_the_lock(run_dir: Path) -> None:
    with holder(run_dir) as child:
        dead = (run_dir / LOCK).read_bytes()
    with process(STARTER, "one") as one, process(STARTER, "two") as two:
        both = (one, two)
        assert [answer(child) for child in both] == ["ready", "ready"]
        for number in range(20):
            folder = run_dir / str(number)
            folder.mkdir()
            if number % 2:
                (folder / LOCK).write_bytes(dead)
            for child in both:
                assert child.stdin is not None
                child.stdin.write(f"{folder}\n")
            for child in both[:: 1 if number % 4 < 2 else -1]:
                assert child.stdin is not None
                child.stdin.flush()
            answers = [answer(child) for child in both]
            assert sorted(answers) == ["refused", "won"]
            assert content(folder)["run_id"] == ["one", "two"][answers.index("won")]


WORKERS = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
from trainkit.checkpoint.lock import FolderLock

class Slow(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        with open(Path(sys.argv[1]) / f"worker-{index}.tmp", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, Path(sys.argv[1]) / f"worker-{index}")
        time.sleep(600)

lock = FolderLock(Path(sys.argv[1]), "run", interval=0.001, stale_after=3600)
lock.acquire()
batches = iter(DataLoader(Slow(), num_workers=2, batch_size=1, multiprocessing_context="fork"))
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_that_outlive_the_run_do_not_keep_its_lock(run_dir: Path) -> None:
    with process(WORKERS, run_dir) as child:
        assert answer(child) == "started"
        names = [run_dir / "worker-0", run_dir / "worker-1"]
        until(lambda: all(name.exists() for name in names))
        workers = [int(name.read_text()) for name in names]
        child.kill()
        child.wait()
        try:
            with taken(run_dir):
                for worker in workers:
                    os.kill(worker, 0)  # they are alive
        finally:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)


def test_a_forked_process_does_not_release_the_lock(run_dir: Path) -> None:
    program = (
        HOLDER.split("for line")[0]
        + """
child = os.fork()
lock.release() if child == 0 else os.waitpid(child, 0)
print(len(Path(sys.argv[1], ".lock").read_bytes()) > 0 and not lock.lost, flush=True)
if child == 0:
    sys.exit(0)
"""
    )
    done = run_python("-W", "ignore", "-c", program, str(run_dir), "run", "10")
    assert done.stdout.split()[2:] == ["True", "True"], done.stderr
    assert (run_dir / LOCK).read_bytes() == b""


# -------------------------------------------------------------------------------------------------- unusual lock files


def test_links_and_pipes_are_neither_followed_nor_waited_for(run_dir: Path) -> None:
    target = run_dir / "target"
    target.write_text("mine")
    for make in (
        lambda path: path.symlink_to(target),
        lambda path: path.symlink_to(run_dir / "nowhere"),
        os.mkfifo,
        os.mkdir,
    ):
        make(run_dir / LOCK)
        with pytest.raises(CheckpointWriteError, match="could not be locked"):
            FolderLock(run_dir, "run").acquire()
        (run_dir / LOCK).rmdir() if (run_dir / LOCK).is_dir() else (run_dir / LOCK).unlink()
    assert target.read_text() == "mine"
    assert not (run_dir / "nowhere").exists()


def test_an_unreadable_lock_file_is_taken_over_after_a_wait(run_dir: Path) -> None:
    with taken(run_dir):
        good = content(run_dir)
    broken: list[bytes] = [b"\0", b"{" * 10_000, b"[]", b"null", b"{}", b"\xff", b"x" * 200_000]
    broken += [json.dumps({**good, "pid": pid}).encode() for pid in (0, -1, 2**40, True, "7", 1.5, None)]
    broken += [json.dumps({**good, name: 3}).encode() for name in good if name not in ("pid", "beat")]
    broken += [
        json.dumps({key: value for key, value in good.items() if key != name}).encode() for name in good if name != "beat"
    ]
    for data in broken:
        assert lock_module._Holder.parse(data) is None
    (run_dir / LOCK).write_bytes(broken[-1])
    with taken(run_dir, interval=0.1, stale_after=0.2):
        assert content(run_dir)["run_id"] == "this-run"


def test_names_from_a_file_cannot_write_to_the_terminal(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run_dir / LOCK).write_bytes(elsewhere(run_dir, host="\x1b[2J", run_id="\x1b]0;x\x07"))
    with taken(run_dir, interval=0.1, stale_after=0.2):
        pass
    assert len(caplog.messages) == 1
    assert "\x1b" not in caplog.text


def test_a_process_that_is_about_to_end_is_waited_for(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process may have a thread inside a write: its lock is taken over only when the process has ended."""
    with holder(run_dir):
        start = content(run_dir)["start"]
        states = iter(["dying", "dying", "dying"])
        monkeypatch.setattr(process_identity, "_start_and_state", lambda pid: (start, next(states, "dead")))
        with taken(run_dir):
            assert next(states, None) is None


def test_a_process_that_was_suspended_in_its_write_is_an_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process keeps the lock file itself locked (`flock`), acquiring the lock fails after a timeout."""
    monkeypatch.setattr(lock_module, "_FLOCK_TIMEOUT_S", 0.05)
    with lock_module._open(run_dir / LOCK), pytest.raises(CheckpointLockedError, match="Fix: end it"):
        FolderLock(run_dir, "run").acquire()


def test_without_flock_a_claim_is_valid_if_it_was_not_overwritten(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "fcntl", None)
    monkeypatch.setattr(lock_module, "_SETTLE_S", 0.01)
    with taken(run_dir), pytest.raises(CheckpointLockedError, match="this-run"):
        FolderLock(run_dir, "second").acquire()
    assert (run_dir / LOCK).read_bytes() == b""
    with holder(run_dir) as child:
        other = (run_dir / LOCK).read_bytes()
        (run_dir / LOCK).write_bytes(b"")
        monkeypatch.setattr(lock_module.time, "sleep", lambda seconds: (run_dir / LOCK).write_bytes(other))
        with pytest.raises(CheckpointLockedError, match=str(child.pid)):
            FolderLock(run_dir, "second").acquire()


@pytest.mark.parametrize("interval, stale_after", [(0, 1), (-1, 1), (1, 1), (10, 5)])
def test_invalid_times(run_dir: Path, interval: float, stale_after: float) -> None:
    with pytest.raises(ConfigurationError, match="0 < interval < stale_after"):
        FolderLock(run_dir, "run", interval=interval, stale_after=stale_after)


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(CheckpointWriteError, match="Fix: choose another"):
        FolderLock(Path("/proc"), "run").acquire()
