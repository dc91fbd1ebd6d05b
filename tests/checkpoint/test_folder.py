"""A folder of checkpoints: order, names, removal, leftovers, the pointer, and errors of the folder itself."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from helpers.resume.checkpoints import IMPORTABLE, make
from helpers.support import run_python

from trainkit.checkpoint import folder as folder_module
from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.folder import (
    ListedCheckpoint,
    candidates,
    check_writable,
    free_name,
    list_checkpoints,
    next_counter,
    remove,
    remove_leftovers,
    write_pointer,
)
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest
from trainkit.checkpoint.pointers import POINTER, read_pointer
from trainkit.errors import CheckpointError, CheckpointWriteError, CorruptCheckpointError


def names(found: list[ListedCheckpoint]) -> list[str]:
    return [one.path.name for one in found]


# ---------------------------------------------------------------------------------------------------------------- order


def test_newest_first_run_by_run(run_dir: Path) -> None:
    """Checkpoints are listed newest first: first by run, then by counter within a run.

    The clock may be set back during a run, so the times within a run are not compared.
    """
    make(run_dir / "a1", 1, run_id="first", metrics={}, minute=10)
    make(run_dir / "a2", 2, run_id="first", metrics={}, minute=20)
    make(run_dir / "b1", 1, run_id="second", metrics={}, minute=31)
    make(run_dir / "b3", 3, run_id="second", metrics={}, minute=15)  # the clock was set back
    make(run_dir / "b2", 2, run_id="second", metrics={}, minute=30)
    expected = ["b3", "b2", "b1", "a2", "a1"]
    assert names(list_checkpoints(run_dir)) == names(candidates(run_dir)) == expected
    assert names(list_checkpoints(str(run_dir))) == expected
    for one in list_checkpoints(run_dir):
        assert one.problem is None
        assert one.manifest == open_checkpoint(one.path).manifest
    assert (next_counter(run_dir, "first"), next_counter(run_dir, "second"), next_counter(run_dir, "third")) == (3, 4, 1)


def test_what_is_not_finite_comes_last_in_its_run(run_dir: Path) -> None:
    nan = {"tensors": {"model": {"w": torch.tensor(math.nan)}}, "parameters": {"model": {"w": True}}}
    for counter, changes in enumerate([{}, {}, nan, nan], 1):
        make(run_dir / f"a{counter}", counter, minute=counter, run_id="a", **changes)
    make(run_dir / "b1", 1, minute=0, run_id="b")
    (make(run_dir / "cut", 5, minute=3, run_id="a") / "state.json").unlink()
    assert names(list_checkpoints(run_dir)) == ["a2", "a1", "a4", "a3", "b1", "cut"]
    assert names(candidates(run_dir)) == ["cut", "a2", "a1", "a4", "a3", "b1"]
    assert next_counter(run_dir, "a") == 6


def test_bad_ones_are_named(run_dir: Path) -> None:
    """Valid checkpoints are listed first, newest first. Then come the damaged ones, each with its problem."""
    make(run_dir / "good-1", 1, minute=1)
    make(run_dir / "good-3", 3, minute=3)
    (make(run_dir / "cut-2", 2, minute=2) / "model.safetensors").write_bytes(b"x")
    (make(run_dir / "lost-4", 4, minute=4) / "state.json").unlink()
    (make(run_dir / "no-digest", 9) / DIGEST).unlink()
    (run_dir / "foreign").mkdir()
    (run_dir / "foreign" / "model.safetensors").write_bytes(b"")
    found = list_checkpoints(run_dir)
    assert names(found) == ["good-3", "good-1", "foreign", "no-digest", "lost-4", "cut-2"]
    # Checkpoints with an invalid manifest cannot be ordered: they come first, so that they are reported.
    assert names(candidates(run_dir)) == ["foreign", "no-digest", "lost-4", "good-3", "cut-2", "good-1"]
    problems = {one.path.name: one.problem for one in found}
    assert problems.pop("good-1") is problems.pop("good-3") is None
    for name, part in {
        "cut-2": "model.safetensors: expected 248 bytes, found 1",
        "lost-4": "state.json: missing",
        "no-digest": f"{DIGEST}: missing",
        "foreign": f"{DIGEST}: missing",
    }.items():
        assert f"{run_dir / name}{os.sep}{part}" in (problems[name] or "")
    assert {one.path.name for one in found if one.manifest is None} == {"foreign", "no-digest"}
    assert next_counter(run_dir, "run1") == 5


def test_other_folders_are_not_listed(run_dir: Path) -> None:
    make(run_dir / "checkpoint")
    for name in (".checkpoint.tmp-run", ".checkpoint.del-0123456789abcdef", ".hidden"):
        shutil.copytree(run_dir / "checkpoint", run_dir / name)
    (run_dir / "notes").mkdir()
    (run_dir / "last").write_text("checkpoint\n")
    (run_dir / ".lock").write_text("")
    (run_dir / "dangling").symlink_to(run_dir / "nowhere")
    (run_dir / "loop").symlink_to(run_dir / "loop")
    (run_dir / "again").symlink_to(run_dir / "checkpoint")  # a link to a checkpoint that is in the list already
    assert names(list_checkpoints(run_dir)) == ["checkpoint"]
    assert list_checkpoints(run_dir / "nowhere") == candidates(run_dir / "nowhere") == []
    assert next_counter(run_dir / "nowhere", "run") == 1
    with pytest.raises(CheckpointError, match="expected a folder"):
        list_checkpoints(run_dir / "last")


def test_a_link_to_a_checkpoint_elsewhere_is_listed(run_dir: Path) -> None:
    make(run_dir / "elsewhere" / "checkpoint")
    (run_dir / "folder").mkdir()
    (run_dir / "folder" / "start").symlink_to(run_dir / "elsewhere" / "checkpoint")
    assert names(list_checkpoints(run_dir / "folder")) == ["start"]


def test_a_checkpoint_that_vanishes_is_not_reported(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that its run removes while another process lists the folder is not listed as damaged."""
    make(run_dir / "1", 1)
    make(run_dir / "2", 2)
    real = folder_module.inspect_checkpoint

    def slow(path: Path) -> tuple[Manifest | None, str | None]:
        if path.name == "1":
            remove(path)
        return real(path)

    monkeypatch.setattr(folder_module, "inspect_checkpoint", slow)
    assert names(list_checkpoints(run_dir)) == ["2"]


def test_contents_are_not_read(run_dir: Path) -> None:
    """Listing a folder does not read the tensors: a checkpoint with a flipped bit in a tensor is listed without a problem."""
    path = make(run_dir / "checkpoint")
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    assert list_checkpoints(run_dir)[0].problem is None


# ---------------------------------------------------------------------------------------------------------------- names


def test_free_names(run_dir: Path) -> None:
    assert free_name(run_dir / "nowhere", "step-1") == "step-1"
    assert free_name(run_dir, "step-1", ["step-1", "step-1-v1"]) == "step-1-v2"
    (run_dir / "step-1").mkdir()
    (run_dir / "step-1-v1").symlink_to(run_dir / "nowhere")
    (run_dir / "step-1-v3").write_text("")
    assert free_name(run_dir, "step-1") == "step-1-v2"
    assert free_name(run_dir, "step-1", {"step-1-v2"}) == "step-1-v4"
    assert free_name(run_dir, POINTER) == "last-v1"  # the name of the pointer is reserved
    assert free_name(run_dir, "last-v1") == "last-v1"


def test_the_pointer(run_dir: Path) -> None:
    assert read_pointer(run_dir) is None
    write_pointer(run_dir, "step-1")
    assert (run_dir / POINTER).read_text() == "step-1\n"
    write_pointer(run_dir, "epoch=3-vål_löss=0.5 b")
    assert read_pointer(run_dir) == "epoch=3-vål_löss=0.5 b"
    assert os.listdir(run_dir) == [POINTER]


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/etc", "../x", "a\\b", "C:x", "a\nb", "a\0b", "x" * 256])
def test_a_pointer_leads_nowhere_else(run_dir: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="without a path"):
        write_pointer(run_dir, name)
    assert read_pointer(run_dir) is None
    (run_dir / POINTER).write_bytes(name.encode() + b"\n")
    with pytest.raises(CorruptCheckpointError, match=POINTER):
        read_pointer(run_dir)


def test_a_pointer_that_is_something_else(run_dir: Path) -> None:
    path = run_dir / POINTER
    for content in (b"", b"x", b"step-1\nstep-2\n", b"\xff\xfe\n" * 200, b"\n"):
        path.write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match=POINTER):
            read_pointer(run_dir)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorruptCheckpointError, match="a pipe"):
        read_pointer(run_dir)
    path.unlink()
    (run_dir / "secret").write_text("secret\n")
    path.symlink_to(run_dir / "secret")
    with pytest.raises(CorruptCheckpointError, match="a link"):
        read_pointer(run_dir)
    write_pointer(run_dir, "step-1")  # replaces the link
    assert (run_dir / "secret").read_text() == "secret\n"
    path.unlink()
    make(path)
    assert read_pointer(run_dir) is None
    with pytest.raises(CheckpointWriteError, match="last could not be written"):
        write_pointer(run_dir, "step-1")
    assert sorted(os.listdir(run_dir)) == [POINTER, "secret"]


# -------------------------------------------------------------------------------------------------------------- removal


def test_remove(run_dir: Path) -> None:
    path = make(run_dir / "checkpoint")
    (path / "logs").mkdir()
    (path / "logs" / "x").write_text("")
    remove(path)
    assert os.listdir(run_dir) == []
    remove(path)  # already removed: not an error
    remove(make(run_dir / ("x" * 255)))  # no name is too long
    bad = make(run_dir / "bad")
    (bad / MANIFEST).unlink()
    remove(bad)
    assert os.listdir(run_dir) == []


def test_other_folders_are_not_removed(run_dir: Path) -> None:
    (run_dir / "notes").mkdir()
    (run_dir / "notes" / "model.txt").write_text("")
    (run_dir / "file").write_text("")
    for path in (run_dir, run_dir / "notes", run_dir / "file"):
        with pytest.raises(CheckpointError, match="it was not changed"):
            remove(path)
    assert (run_dir / "notes" / "model.txt").exists()


def test_of_a_link_the_link_is_removed(run_dir: Path) -> None:
    """Removing a link to a checkpoint removes the link and keeps the checkpoint."""
    path = make(run_dir / "elsewhere" / "checkpoint")
    (run_dir / "folder").mkdir()
    (run_dir / "folder" / "link").symlink_to(path)
    remove(run_dir / "folder" / "link")
    assert os.listdir(run_dir / "folder") == []
    open_checkpoint(path).verify()


# Removes checkpoint n in a separate process, which is killed after n renames and deletions.
REMOVER = """
import os, signal, sys
from pathlib import Path
from trainkit.checkpoint.folder import remove

for number, path in enumerate(sys.argv[1:]):
    child = os.fork()
    if child == 0:
        left = [number]

        def count(event, arguments):
            if event in ("os.rename", "os.remove", "os.rmdir"):
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(count)
        remove(Path(path))
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_killed_removal_leaves_all_or_nothing(run_dir: Path) -> None:
    paths = [make(run_dir / f"checkpoint-{number}", number) for number in range(9)]
    files = len(os.listdir(paths[0]))
    assert run_python("-c", REMOVER, *map(str, paths)).returncode == 0
    left = [name for name in sorted(os.listdir(run_dir)) if name.startswith(".")]
    # The first process was killed before any operation, later ones with fewer files left, and the last ones not at all.
    assert [len(os.listdir(run_dir / name)) for name in left] == list(range(files, -1, -1))
    assert names(list_checkpoints(run_dir)) == ["checkpoint-0"]
    assert list_checkpoints(run_dir)[0].problem is None
    assert [path.name for path in remove_leftovers(run_dir)] == left
    assert os.listdir(run_dir) == ["checkpoint-0"]


def test_leftovers(run_dir: Path) -> None:
    make(run_dir / "checkpoint")
    ours = {
        ".step-1.tmp-run": True,
        ".step-2.tmp-0a-B_c": False,
        ".step-1.del-0123456789abcdef": True,
        ".step-2.del-0123456789abcdef": False,
        ".a b\n.tmp-x": False,
    }
    for name, full in ours.items():
        shutil.copytree(run_dir / "checkpoint", run_dir / name) if full else (run_dir / name).mkdir()
    (run_dir / ".step-1.del-0123456789abcdef" / "logs").mkdir()
    (run_dir / ".step-1.tmp-run" / "logs").mkdir()  # kept from the replaced checkpoint
    files = [".probe.tmp-0123456789abcdef", ".last.tmp-0123456789abcdef"]
    for name in files:
        (run_dir / name).write_text("")
    theirs = [
        ".git",
        ".cache.tmp",
        ".tmp-run",
        ".x.tmp-",
        ".x.tmp-a.b",
        ".step-1.del-run",
        "step.tmp-run",
        ".x.tmp-" + "r" * 65,
    ]
    for name in theirs:
        (run_dir / name).mkdir()
    (run_dir / ".theirs.tmp-run" / "folder").mkdir(parents=True)
    (run_dir / ".file.tmp-run").write_text("")
    (run_dir / ".probe.tmp-0123").write_text("")
    (run_dir / "outside").mkdir()
    (run_dir / "outside" / "x").write_text("")
    (run_dir / ".link.tmp-run").symlink_to(run_dir / "outside")
    (run_dir / ".link.del-0123456789abcdef").symlink_to(run_dir / "outside")
    before = set(os.listdir(run_dir))
    removed = remove_leftovers(run_dir)
    assert {path.name for path in removed} == {*ours, *files}
    assert set(os.listdir(run_dir)) == before - {*ours, *files}
    assert (run_dir / "outside" / "x").exists()
    open_checkpoint(run_dir / "checkpoint").verify()
    assert remove_leftovers(run_dir) == remove_leftovers(run_dir / "nowhere") == []


def test_leftovers_of_a_save_are_removed(run_dir: Path) -> None:
    """`remove_leftovers` finds what a killed `commit` really leaves behind."""
    program = """
import os, signal, sys
from pathlib import Path
from helpers.resume.checkpoints import draft
from trainkit.checkpoint import commit as module

module._put_in_place = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
module.commit(draft(), Path(sys.argv[1]) / "checkpoint")
"""
    done = run_python("-c", program, str(run_dir), env=IMPORTABLE)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = os.listdir(run_dir)
    assert list_checkpoints(run_dir) == []
    assert remove_leftovers(run_dir) == [run_dir / left]


# -------------------------------------------------------------------------------------------------------------- writing


def test_a_folder_is_created_and_left_empty(run_dir: Path) -> None:
    check_writable(run_dir / "a" / "b")
    check_writable(run_dir / "a" / "b")
    assert os.listdir(run_dir / "a" / "b") == []


def test_a_folder_that_cannot_be_written(run_dir: Path) -> None:
    (run_dir / "file").write_text("")
    for folder in (run_dir / "file", run_dir / "file" / "sub", Path("/proc/trainkit"), Path("/proc"), run_dir / ("x" * 300)):
        with pytest.raises(CheckpointWriteError, match="Fix: choose another") as caught:
            check_writable(folder)
        assert str(folder) in str(caught.value)


AS_NOBODY = """
import os, sys
from pathlib import Path
from trainkit.checkpoint.folder import check_writable, write_pointer
from trainkit.checkpoint.folder import remove
from trainkit.checkpoint.lock import FolderLock
from trainkit.errors import CheckpointWriteError

folder = Path(sys.argv[1])
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for action in (
    lambda: check_writable(folder),
    lambda: check_writable(folder / "new"),
    lambda: write_pointer(folder, "x"),
    lambda: remove(folder / "checkpoint"),
    lambda: FolderLock(folder, "run").acquire(),
):
    try:
        action()
        print("done")
    except CheckpointWriteError as error:
        print("Permission denied" in str(error) and str(folder) in str(error))
"""


def test_a_folder_of_another_user() -> None:
    # Not below pytest's own folders, which other users cannot enter.
    folder = Path(tempfile.mkdtemp())
    make(folder / "checkpoint")
    folder.chmod(0o555)
    try:
        done = run_python("-c", AS_NOBODY, str(folder))
        assert done.stdout.split() == ["True"] * 5, done.stderr
        open_checkpoint(folder / "checkpoint").verify()
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_link_to_the_newest_that_was_not_finished_is_removed(run_dir: Path) -> None:
    """Links of other names are kept."""
    make(run_dir / "a")
    write_pointer(run_dir, "a", link=True)
    assert os.readlink(run_dir / "last") == "a"
    assert read_pointer(run_dir) is None  # not a file
    unfinished, other = run_dir / f".last.tmp-{'0' * 16}", run_dir / f".probe.tmp-{'0' * 16}"
    for link in (unfinished, other):
        link.symlink_to("a")
    assert remove_leftovers(run_dir) == [unfinished]
    assert (os.path.islink(other), (run_dir / "a").is_dir(), os.readlink(run_dir / "last")) == (True, True, "a")
