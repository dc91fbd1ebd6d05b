"""The disk for offload: a folder for each process, and errors before anything is written."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.errors import ConfigurationError
from trainkit.strategies.zero.nvme import Folder, check_path, check_space


def test_a_folder_is_created_and_removed(tmp_path: Path) -> None:
    one, other = Folder(tmp_path), Folder(tmp_path)
    (one.path / "deep").mkdir(parents=True)
    (one.path / "deep" / "file").write_text("x")
    assert one.path != other.path
    one.close()
    assert not one.path.exists()
    assert other.path.is_dir()
    other.close()
    assert not [*tmp_path.iterdir()]


CHILD = """
import sys, time
from trainkit.strategies.zero.nvme import Folder
folder = Folder(sys.argv[1])
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


def child(base: Path, what: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(base), what],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    process.stdout.close()
    return process, path


def test_files_of_a_killed_process_are_removed_by_the_next_one(tmp_path: Path) -> None:
    alive, used = child(tmp_path, "wait")
    killed, left = child(tmp_path, "wait")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (left / "file").exists()
    folder = Folder(tmp_path)
    assert not left.exists()
    assert (used / "file").exists()
    folder.close()
    alive.kill()
    alive.wait()
    Folder(tmp_path).close()
    assert not [*tmp_path.iterdir()]


def test_a_process_removes_its_folder_at_exit(tmp_path: Path) -> None:
    process, _ = child(tmp_path, "end")
    assert process.wait() == 0
    assert not [*tmp_path.iterdir()]


def test_files_of_others_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    (tmp_path / "mine.lock").write_text("x")
    Folder(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine.lock"]


def test_a_path_that_can_be_used(tmp_path: Path) -> None:
    check_path(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_path_that_is_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a folder. Create one on a local disk: mkdir -p"):
        check_path(tmp_path / "nothing")


def test_a_path_that_cannot_be_written_to() -> None:
    with pytest.raises(ConfigurationError, match=r"'/proc' is not writable \("):
        check_path("/proc")


def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*arguments: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(ConfigurationError, match=r"no direct I/O. Use a folder on a local disk \(ext4, xfs\)"):
        check_path(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_space_on_the_disk(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path, free // 4, 4096, 2)
    with pytest.raises(ConfigurationError, match=r"needs .* GiB \(3 processes with .* GiB each\), but only .* GiB are free"):
        check_space(tmp_path, free // 2, 4096, 3)


def test_memory_that_cannot_be_locked(tmp_path: Path) -> None:
    """No machine has so much memory, so the system refuses, as it does above a user's limit."""
    with pytest.raises(ConfigurationError, match=r"1024.0 GiB of page-locked memory .*ulimit -l unlimited"):
        check_space(tmp_path, 0, 2**40, 1)
