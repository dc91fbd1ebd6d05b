"""Commits under real kills, on full disks and in unwritable folders: a checkpoint is never incomplete under its name."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import IMPORTABLE, draft, names, seal, verified
from helpers.support import run_python

from trainkit.checkpoint import commit as module
from trainkit.checkpoint.commit import commit, sync_folder
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.errors import CheckpointError, CheckpointWriteError

POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")


# ------------------------------------------------------------------------------------------------------- the normal case


def test_a_checkpoint_is_written(run_dir: Path) -> None:
    made = draft(3, size=20_000)
    written = commit(made, run_dir / "step-3")
    assert (written.path, written.finite, written.kept) == (run_dir / "step-3", True, None)
    assert names(run_dir) == ["step-3"]
    assert verified(run_dir / "step-3") == 3
    assert Manifest.from_bytes((run_dir / "step-3" / MANIFEST).read_bytes(), "") == written.manifest
    assert {path.name: path.stat().st_size for path in (run_dir / "step-3").iterdir()} == made.sizes
    assert sum(path.stat().st_size for path in (run_dir / "step-3").iterdir()) == made.size


def test_bytes_written_are_at_most_a_hundredth_more_than_the_state(run_dir: Path) -> None:
    commit(draft(size=2_000_000), run_dir / "a")
    size = sum(path.stat().st_size for path in (run_dir / "a").iterdir())
    assert 2_000_000 < size <= 1.01 * 2_000_000


def test_parents_are_created_and_the_path_may_be_relative(run_dir: Path) -> None:
    commit(draft(2), Path("a/b/c"))
    assert verified(run_dir / "a" / "b" / "c") == 2
    assert names(run_dir / "a" / "b") == ["c"]


def test_the_manifest_and_then_its_digest_are_written_last(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    write_file = module.write_file
    monkeypatch.setattr(module, "write_file", lambda path, *rest: order.append(path.name) or write_file(path, *rest))
    commit(draft(), run_dir / "a")
    assert order[-2:] == [MANIFEST, DIGEST]
    assert set(order) == set(names(run_dir / "a"))


@POSIX
@pytest.mark.parametrize("replace", [False, True])
def test_everything_is_synced_before_it_gets_its_name(run_dir: Path, monkeypatch: pytest.MonkeyPatch, replace: bool) -> None:
    """A power failure cannot leave an incomplete checkpoint, because of the order of the operations.

    First the files, then the manifest, its digest and the temporary folder are synced. Then the folder gets its name and the
    parent folder is synced. Only then is the old checkpoint removed.
    """
    if replace:
        commit(draft(1), run_dir / "a")
    events: list[int | str] = []
    fsync, put_in_place, rmtree = os.fsync, module._put_in_place, shutil.rmtree

    def recorded(event: str, call: Any) -> Any:
        return lambda *arguments, **options: (events.append(event), call(*arguments, **options))[1]

    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
    monkeypatch.setattr(module, "_put_in_place", recorded("in place", put_in_place))
    monkeypatch.setattr(shutil, "rmtree", recorded("old removed", rmtree))
    commit(draft(2), run_dir / "a", replace=replace)
    before, after = events[: events.index("in place")], events[events.index("in place") + 1 :]
    written = {path.stat().st_ino: path.name for path in (run_dir / "a").iterdir()}
    assert {written[number] for number in before[:-1]} == set(draft().sizes)
    assert [written[number] for number in before[-3:-1]] == [MANIFEST, DIGEST]
    assert before[-1] == (run_dir / "a").stat().st_ino
    assert after == [run_dir.stat().st_ino, *(["old removed"] if replace else [])]


@pytest.mark.parametrize("replace", [False, True])
def test_an_empty_folder_is_used(run_dir: Path, replace: bool) -> None:
    (run_dir / "a").mkdir()
    commit(draft(2), run_dir / "a", replace=replace)
    assert verified(run_dir / "a") == 2
    assert names(run_dir) == ["a"]


def test_what_a_kill_of_this_run_left_is_removed_and_nothing_else(run_dir: Path) -> None:
    (run_dir / ".a.tmp-run1").mkdir()
    (run_dir / ".a.tmp-run1" / "model.safetensors").write_bytes(b"half")
    (run_dir / ".a.tmp-run2").mkdir()
    commit(draft(2), run_dir / "a")
    assert names(run_dir) == [".a.tmp-run2", "a"]
    assert verified(run_dir / "a") == 2
    assert names(run_dir / "a") == sorted(draft().sizes)


# ------------------------------------------------------------------------------------------------------------ not finite


def broken(counter: int) -> Any:
    """A draft whose parameter is NaN."""
    tensors = {"model": {"weight": torch.full((5,), math.nan)}}
    return draft(counter, tensors=tensors, parameters={"model": {"weight": True}})


def test_the_manifest_says_whether_the_parameters_are_finite(run_dir: Path) -> None:
    written = commit(broken(1), run_dir / "a")
    assert (written.path, written.finite, written.nonfinite, written.kept) == (run_dir / "a", False, ("weight",), None)
    assert written.text == f"parameters in {run_dir / 'a'} are not finite: weight."
    assert open_checkpoint(run_dir / "a").manifest.finite is False
    commit(draft(2), run_dir / "b")
    assert open_checkpoint(run_dir / "b").manifest.finite is True


@pytest.mark.parametrize("way", ["exchange", "renames"], indirect=True)
def test_what_is_not_finite_does_not_replace_what_is(run_dir: Path, way: str) -> None:
    """Neither one whose manifest says that it is finite, nor one of an earlier version; but any other."""
    commit(draft(1), run_dir / "a")
    if way == "renames":
        seal(run_dir / "a", lambda manifest: manifest.pop("finite"))
    for counter in (2, 3):  # the second replaces the first
        written = commit(broken(counter), run_dir / "a", replace=True)
        assert (written.path, written.kept) == (run_dir / "a-nonfinite", run_dir / "a")
        assert f"{run_dir / 'a'} is finite, so it was not replaced" in written.text
        assert (verified(run_dir / "a"), verified(run_dir / "a-nonfinite")) == (1, counter)
        assert names(run_dir) == ["a", "a-nonfinite"]
    commit(draft(4), run_dir / "a", replace=True)
    commit(draft(5), run_dir / "a-nonfinite", replace=True)
    assert (verified(run_dir / "a"), verified(run_dir / "a-nonfinite")) == (4, 5)
    with pytest.raises(CheckpointError, match="a-nonfinite: expected an unused path"):
        commit(broken(6), run_dir / "a", replace=True)
    assert names(run_dir) == ["a", "a-nonfinite"]
    (run_dir / "a" / MANIFEST).write_bytes(b"{}")
    assert commit(broken(7), run_dir / "a", replace=True).path == run_dir / "a"  # it is damaged


# ------------------------------------------------------------------------------------------------------------- replacing


@pytest.fixture(params=["exchange", "renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How `commit` replaces a folder: by one atomic exchange, or by renames where the file system has no exchange."""
    if request.param == "renames":
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    elif sys.platform not in ("linux", "darwin"):
        pytest.skip("no exchange on this system")
    return str(request.param)


def test_a_checkpoint_is_replaced(run_dir: Path, way: str) -> None:
    for counter in (1, 2, 3):
        commit(draft(counter, run_id=f"run{counter}"), run_dir / "best", replace=True)
        assert verified(run_dir / "best") == counter
        assert names(run_dir) == ["best"]


@pytest.mark.skipif(sys.platform != "linux", reason="the file systems of Linux")
def test_the_exchange_is_one_step_here(run_dir: Path) -> None:
    for name in ("one", "other"):
        (run_dir / name).mkdir()
        (run_dir / name / name).touch()
    assert module._exchange(run_dir / "one", run_dir / "other")
    assert (names(run_dir / "one"), names(run_dir / "other")) == (["other"], ["one"])
    with pytest.raises(OSError, match="No such file") as raised:
        module._exchange(run_dir / "one", run_dir / "missing")
    assert raised.value.errno == errno.ENOENT


def test_a_checkpoint_that_is_removed_while_its_successor_is_written(
    run_dir: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(draft(1), run_dir / "best")
    made = draft(2)
    files = made.files

    def removing() -> Iterator[Any]:
        shutil.rmtree(run_dir / "best")
        return files()

    monkeypatch.setattr(made, "files", removing)
    commit(made, run_dir / "best", replace=True)
    assert verified(run_dir / "best") == 2


def test_names_as_long_as_can_be(run_dir: Path) -> None:
    for name in ("x" * 255, "ü" * 127):
        commit(draft(3), run_dir / name)
        assert verified(run_dir / name) == 3
    with pytest.raises(CheckpointWriteError, match="too long"):
        commit(draft(3), run_dir / ("x" * 256))


@pytest.mark.parametrize("damage", ["manifest", "digest", "newer"])
def test_a_damaged_or_newer_checkpoint_is_replaced_too(run_dir: Path, damage: str) -> None:
    commit(draft(1, max_shard_size=1000), run_dir / "best")
    if damage == "manifest":
        (run_dir / "best" / MANIFEST).write_bytes(b"")
    elif damage == "digest":
        (run_dir / "best" / DIGEST).unlink()
    else:
        (run_dir / "best" / MANIFEST).write_bytes(b'{"format_version": 99}')
    commit(draft(2), run_dir / "best", replace=True)
    assert verified(run_dir / "best") == 2
    assert names(run_dir / "best") == sorted(draft().sizes)


def test_other_files_in_the_old_one_are_kept(run_dir: Path, way: str) -> None:
    """A user saves a tokenizer next to the weights: a later save must not delete it."""
    best = run_dir / "best"
    commit(draft(1, attachments={"config.json": b"1", "old.json": b"1"}, max_shard_size=1000), best)
    (best / "tokenizer.json").write_bytes(b"words")
    (best / "notes" / "deep").mkdir(parents=True)
    (best / "notes" / "deep" / "a.txt").write_bytes(b"mine")
    (best / "link").symlink_to("nowhere")
    commit(draft(2), best, replace=True)
    assert verified(best) == 2
    assert names(best) == sorted([*draft().sizes, "tokenizer.json", "notes", "link"])
    assert (best / "tokenizer.json").read_bytes() == b"words"
    assert (best / "notes" / "deep" / "a.txt").read_bytes() == b"mine"
    assert os.readlink(best / "link") == "nowhere"
    assert names(run_dir) == ["best"]


def test_a_link_to_a_checkpoint_is_followed(run_dir: Path) -> None:
    commit(draft(1), run_dir / "real")
    (run_dir / "link").symlink_to("real")
    commit(draft(2), run_dir / "link", replace=True)
    assert (run_dir / "link").is_symlink()
    assert verified(run_dir / "real") == 2
    assert names(run_dir) == ["link", "real"]


# ------------------------------------------------------------------------------------------------ paths that are refused


def test_a_name_that_is_taken_is_an_error(run_dir: Path) -> None:
    commit(draft(1), run_dir / "a")
    with pytest.raises(CheckpointError, match="not empty.*Fix: choose another path"):
        commit(draft(2), run_dir / "a")
    assert verified(run_dir / "a") == 1
    assert names(run_dir) == ["a"]


@pytest.mark.parametrize(
    "inside", [{"thesis.tex": b"x"}, {"model.safetensors": b"x"}, {MANIFEST: b"{}"}, {DIGEST: b"x"}], ids=str
)
def test_a_folder_with_other_files_is_never_replaced(run_dir: Path, inside: dict[str, bytes]) -> None:
    (run_dir / "a").mkdir()
    for name, data in inside.items():
        (run_dir / "a" / name).write_bytes(data)
    with pytest.raises(CheckpointError, match="has other files.*Fix: choose another path"):
        commit(draft(), run_dir / "a", replace=True)
    assert {name: (run_dir / "a" / name).read_bytes() for name in names(run_dir / "a")} == inside
    assert names(run_dir) == ["a"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_is_never_replaced(run_dir: Path, replace: bool) -> None:
    (run_dir / "a").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="found a file"):
        commit(draft(), run_dir / "a", replace=replace)
    assert (run_dir / "a").read_bytes() == b"x"


def test_a_name_that_no_reader_would_see_is_an_error(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot start with '.'"):
        commit(draft(), run_dir / ".hidden")
    assert names(run_dir) == []


def test_the_root_and_the_working_directory_are_refused(run_dir: Path) -> None:
    (run_dir / "x").touch()
    for path in (Path("."), Path("/"), Path("..")):
        with pytest.raises(CheckpointError):
            commit(draft(), path, replace=True)
    assert names(run_dir) == ["x"]


# -------------------------------------------------------------------------------------------- failures of the file system


def test_too_little_space_is_an_error_before_anything_is_written(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = draft()
    monkeypatch.setattr(module, "_write", lambda *_: pytest.fail("written"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (10**9, 10**9, made.size - 1))
    with pytest.raises(CheckpointWriteError, match=rf"needs \d+ bytes, but only {made.size - 1} are free.*Fix: "):
        commit(made, run_dir / "a")
    assert names(run_dir) == []


def test_a_file_system_that_does_not_tell_its_size_is_tried(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (0, 0, 0))
    commit(draft(4), run_dir / "a")
    assert verified(run_dir / "a") == 4


@pytest.fixture
def small_disk(run_dir: Path) -> Iterator[Path]:
    """Mount a file system of 4 MB."""
    disk = run_dir / "disk"
    disk.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(disk)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting is not allowed here; see the test of a limit on the size of files")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_too_small_is_never_written_to(small_disk: Path) -> None:
    made = draft(size=4_200_000)
    with pytest.raises(CheckpointWriteError, match=r"not enough disk space.*needs \d+ bytes, but only \d+ are free"):
        commit(made, small_disk / "a")
    assert names(small_disk) == []
    commit(draft(5, size=4_100_000), small_disk / "a")
    assert verified(small_disk / "a") == 5


def test_the_required_space_is_exact(small_disk: Path) -> None:
    """The check of the free space is exact: a checkpoint that passes the check fits on the disk.

    Checkpoints of increasing size pass the check and are written, and from some size on the check refuses all of them.
    """
    outcomes = []
    for blocks in range(1005, 1025):
        made = draft(1, size=4096 * blocks)
        try:
            commit(made, small_disk / "a")
        except CheckpointWriteError as error:
            outcomes.append("refused" if "not enough disk space" in str(error) else str(error))
        else:
            outcomes.append("passed")
            shutil.rmtree(small_disk / "a")
    passed = outcomes.count("passed")
    assert 0 < passed < len(outcomes)
    assert outcomes == ["passed"] * passed + ["refused"] * (len(outcomes) - passed)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


@pytest.mark.parametrize("replace", [False, True])
def test_a_disk_that_fills_up_in_the_middle_leaves_the_old_and_no_partial(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    commit(draft(1, size=200_000), small_disk / "best")
    made = draft(2, size=1_000_000)
    files = made.files

    def filling() -> Iterator[Any]:
        for name, pieces in files():
            if name == "optimizer.safetensors":  # as if another program filled the disk during the save
                fill(small_disk / "filler")
            yield name, pieces

    monkeypatch.setattr(made, "files", filling)
    target = small_disk / ("best" if replace else "other")
    with pytest.raises(
        CheckpointWriteError,
        match=rf"{target}: .*No space.*optimizer\.safetensors.*needs \d+ bytes, \d+ are free",
    ) as raised:
        commit(made, target, replace=replace)
    assert isinstance(raised.value.__cause__, OSError)
    assert names(small_disk) == ["best", "filler"]
    assert verified(small_disk / "best") == 1
    (small_disk / "filler").unlink()
    commit(draft(3, size=1_000_000), target, replace=replace)
    assert verified(target) == 3


CHILD = """
import os, resource, shutil, signal, sys
from pathlib import Path
import torch
from helpers.resume.checkpoints import draft, names, verified
from trainkit.checkpoint import commit as module
from trainkit.checkpoint.commit import commit
from trainkit.errors import CheckpointWriteError
"""


@POSIX
def test_a_limit_on_the_size_of_files(run_dir: Path) -> None:
    program = """
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
commit(draft(1, size=100_000), Path("best"))
for target, replace in (("best", True), ("other", False)):
    try:
        commit(draft(2, size=1_000_000), Path(target), replace=replace)
    except CheckpointWriteError as error:
        print(error)
assert names(Path()) == ["best"] and verified(Path("best")) == 1
"""
    done = run_python(CHILD + program, env=IMPORTABLE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("File too large" in line and "Fix: raise the file size limit" in line for line in lines)


AS_NOBODY = """
def as_nobody(run):
    # Root may write everywhere: use another user, in a separate process with all modules loaded before.
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(writing, str(run()).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    return open(reading, "rb").read().decode()

def attempt(target, **options):
    try:
        commit(draft(2), Path(target), **options)
    except CheckpointWriteError as error:
        return error
    return "written"
"""


@POSIX
def test_a_folder_that_cannot_be_written_to(run_dir: Path) -> None:
    program = """
Path("closed").mkdir()
commit(draft(1), Path("closed/best"))
os.chmod(".", 0o755)
os.chmod("closed", 0o555)
print(as_nobody(lambda: attempt("closed/best", replace=True)))
print(as_nobody(lambda: attempt("closed/other")))
print(as_nobody(lambda: attempt("closed/new/other")))
os.chmod("closed", 0o755)
assert names(Path("closed")) == ["best"] and verified(Path("closed/best")) == 1
"""
    done = run_python(CHILD + AS_NOBODY + program, env=IMPORTABLE)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout
    assert all("Permission denied" in line and "Fix: make the folder writable" in line for line in lines), done.stdout


@POSIX
def test_a_folder_that_may_be_written_to_but_not_listed(run_dir: Path) -> None:
    program = """
Path("blind").mkdir()
os.chmod(".", 0o755)
os.chmod("blind", 0o333)
print(as_nobody(lambda: attempt("blind/a")))
os.chmod("blind", 0o755)
assert names(Path("blind")) == ["a"] and verified(Path("blind/a")) == 2
"""
    done = run_python(CHILD + AS_NOBODY + program, env=IMPORTABLE)
    assert (done.returncode, done.stdout) == (0, "written\n"), done.stderr


def test_a_parent_that_is_a_file(run_dir: Path) -> None:
    (run_dir / "file").touch()
    with pytest.raises(CheckpointWriteError, match="Not a directory|exists"):
        commit(draft(), run_dir / "file" / "a")


def test_tensors_that_change_their_size_during_the_save(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = draft()
    files = made.files
    monkeypatch.setattr(made, "files", lambda: ((name, [*pieces, b"more"]) for name, pieces in files()))
    with pytest.raises(CheckpointWriteError, match=r"state\.json: expected to write \d+ bytes, but wrote \d+"):
        commit(made, run_dir / "a")
    assert names(run_dir) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_leaves_no_partial(run_dir: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    commit(draft(1), run_dir / "best")
    made = draft(2)

    def interrupted() -> Iterator[Any]:
        yield "state.json", [b""]
        raise error

    made.sizes["state.json"] = 0
    monkeypatch.setattr(made, "files", interrupted)
    with pytest.raises(error):
        commit(made, run_dir / "best", replace=True)
    assert names(run_dir) == ["best"]
    assert verified(run_dir / "best") == 1


def test_renames_that_fail_are_taken_back(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(draft(1), run_dir / "best")
    rename = os.rename

    def failing(source: Path, destination: Path) -> None:
        if Path(source).name.startswith("."):
            raise OSError(errno.EIO, "a disk that fails")
        rename(source, destination)

    monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointWriteError, match="a disk that fails"):
        commit(draft(2), run_dir / "best", replace=True)
    assert names(run_dir) == ["best"]
    assert verified(run_dir / "best") == 1


def test_a_disk_that_fails_to_sync_is_reported(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(run_dir)
    with pytest.raises(CheckpointWriteError, match="Input/output"):
        commit(draft(), run_dir / "a")
    assert names(run_dir) == []
    number = errno.EINVAL  # as from a file system that cannot sync folders: ignored
    sync_folder(run_dir)
    commit(draft(2), run_dir / "a")
    assert verified(run_dir / "a") == 2


# ----------------------------------------------------------------------------------------------------------------- kills

# A process that has imported everything forks children that save, kills each, and checks the files that it left behind.
KILLS = """
import random, time
torch.set_num_threads(1)
mode, way, moments, places = sys.argv[1:]
if way == "renames":
    module._exchange = lambda one, other: False
folder = Path("folder")
folder.mkdir()

def target(counter):
    return folder / ("best" if mode == "replace" else f"step-{counter}")

def save(counter):
    commit(draft(counter, size=400_000), target(counter), replace=mode == "replace")

def killed(begin, kill):
    # Returns the counter of the last commit that the child knew of.
    shutil.rmtree(folder)
    folder.mkdir()
    save(1)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(reading)
            begin(writing)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb", buffering=0) as said:
        known = said.read(8)
        kill(child)
        known = (known + said.read())[-8:]
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return int.from_bytes(known, "little")

def say(writing, counter):
    os.write(writing, counter.to_bytes(8, "little"))

def partial_left(known):
    # All visible checkpoints are complete, no committed one is lost, and hidden folders are leftovers of saves.
    hidden = [name for name in names(folder) if name.startswith(".")]
    found = {name: verified(folder / name) for name in names(folder) if name not in hidden}
    assert all(name in (f".{target(k).name}.tmp-run1" for k in (known, known + 1)) for name in hidden), hidden
    if mode == "fresh":
        assert set(found.values()) in (set(range(1, known + 1)), set(range(1, known + 2))), (found, known)
        assert all(name == f"step-{counter}" for name, counter in found.items())
    elif "best" in found:
        assert found["best"] in (known, known + 1), (found, known)
    else:  # between two renames: the old checkpoint has its temporary name
        assert way == "renames" and found == {"best.replaced": known}, (found, known)
    # Leftovers of a kill do not prevent the next save.
    save(known + 2)
    assert verified(target(known + 2)) == known + 2
    return bool(hidden)

# At a random moment of one save after the other.
start = time.perf_counter()
save(1)
one = time.perf_counter() - start
draw = random.Random(20261120)

def save_for_ever(writing):
    for counter in range(2, 100_000):
        say(writing, counter - 1)
        save(counter)

def kill_at_random(child):
    time.sleep(draw.random() * 2 * one)
    os.kill(child, signal.SIGKILL)

at_random = sum(partial_left(killed(save_for_ever, kill_at_random)) for _ in range(int(moments)))

# Before evenly chosen lines of the package that a save runs: not random.
passed = 0

def trace(frame, event, argument):
    global passed
    if os.path.dirname(frame.f_code.co_filename) != os.path.dirname(module.__file__):
        return None
    if event == "line":
        passed += 1
        if passed == until:
            os.kill(os.getpid(), signal.SIGKILL)
    return trace

def save_until(writing):
    global passed
    passed = 0
    say(writing, 1)
    sys.settrace(trace)
    save(2)

def lines_of_a_save():
    killed(lambda writing: os.kill(os.getpid(), signal.SIGKILL), lambda child: None)
    sys.settrace(trace)
    save(2)
    sys.settrace(None)
    return passed

until = 0
total = lines_of_a_save()
at_lines = 0
for until in range(1, total + 1, max(1, total // int(places))):
    at_lines += partial_left(killed(save_until, lambda child: None))
print(at_random, at_lines)
"""

WAYS = pytest.mark.parametrize("mode, way", [("fresh", "exchange"), ("replace", "exchange"), ("replace", "renames")])


def partials_left(mode: str, way: str, moments: int, places: int) -> list[int]:
    """Return how many kills interrupted a save: of the kills at random times, and of the kills before single lines of code."""
    Path("program.py").write_text(CHILD + KILLS)
    done = run_python("program.py", mode, way, str(moments), str(places), env=IMPORTABLE, timeout=1200)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@POSIX
@WAYS
def test_a_kill_leaves_the_old_or_the_new(run_dir: Path, mode: str, way: str) -> None:
    """After a kill during a save, each checkpoint is complete and no committed one is lost. A few kills."""
    assert all(partials_left(mode, way, 8, 17))


@POSIX
@pytest.mark.slow
@WAYS
def test_a_kill_anywhere_leaves_the_old_or_the_new(run_dir: Path, mode: str, way: str) -> None:
    """Like `test_a_kill_leaves_the_old_or_the_new`, with hundreds of kills."""
    assert all(partials_left(mode, way, 100, 300))


def test_what_killed_runs_have_left_at_this_path_goes(run_dir: Path) -> None:
    """A commit removes the old temporary folders of its path, from any run.

    It keeps a folder that was changed recently, because that save may still be in progress.
    """
    old, young, other = (run_dir / f".{name}" for name in ("best.tmp-aaaa", "best.tmp-bbbb", "next.tmp-aaaa"))
    for folder in (old, young, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    for folder in (old, other):
        for path in (folder / "model.safetensors", folder):
            os.utime(path, (0, 0))
    commit(draft(1), run_dir / "best")
    assert [folder.exists() for folder in (old, young, other)] == [False, True, True]
