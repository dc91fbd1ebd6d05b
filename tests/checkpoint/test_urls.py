"""Checkpoints in staging folders are copied to their URLs: complete or not there, in order, and tried again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from helpers.resume.saving import Adam, saved
from helpers.runs.tiny import TinyModule

from trainkit import Accelerator, paths
from trainkit.checkpoint import list_checkpoints, open_checkpoint
from trainkit.checkpoint import urls as module
from trainkit.checkpoint.ckpt_file import file_of, is_of_others, link_last, remove_file_of, write_ckpt
from trainkit.checkpoint.folder import checkpoints_here, free_name, remove, write_pointer
from trainkit.checkpoint.pointers import resolve_pointer
from trainkit.checkpoint.urls import RemoteFolder, RemoteSync, remote_at, remote_sync
from trainkit.console import TrainkitWarning
from trainkit.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError, CorruptCheckpointError
from trainkit.paths import local_path

FOLDER = "memory://bucket/run"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """An empty bucket, staged in the test's folder; failed uploads are tried again at once."""
    monkeypatch.setattr(paths, "_schemes", {})
    monkeypatch.setattr(module, "_RETRY_PAUSES_SECONDS", (0.0, 0.0))
    bucket = MemoryFileSystem()
    bucket.store.clear()
    bucket.pseudo_dirs[:] = [""]
    yield bucket
    remote_sync.wait()
    remote_sync._forget()
    bucket.store.clear()


def staged(*names: str) -> Path:
    return local_path(FOLDER, "folder").joinpath(*names)


def keys(bucket: MemoryFileSystem, name: str = "") -> list[str]:
    return sorted(path.removeprefix("/bucket/run/") for path in bucket.find(f"/bucket/run/{name}"))


def two() -> list[Path]:
    """Two checkpoints of a run, the older one first."""
    saved(default_root_dir="local", max_epochs=2)
    found = sorted(Path("local").rglob("step-*"))
    assert len(found) == 2
    return found


def enter() -> None:
    """As a run does that saves to the folder."""
    remote_sync.enter(staged(), [one.path for one in checkpoints_here(staged()) if one.problem is None])


def flip(path: Path) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def put(source: Path, name: str) -> Path:
    """Copy a checkpoint to the staging folder, as a save does, and upload it."""
    path = staged(name)
    shutil.copytree(source, path)
    remote_sync.note_change(path)
    remote_sync.wait()
    return path


def test_a_checkpoint_at_a_url_is_the_same_and_is_read_from_there(bucket: MemoryFileSystem) -> None:
    source = two()[-1]
    path = put(source, "good")
    assert keys(bucket) == sorted(f"good/{file.name}" for file in source.iterdir())
    shutil.rmtree(path)
    checkpoint = open_checkpoint(f"{FOLDER}/good")
    assert checkpoint.path == path
    assert checkpoint.manifest == open_checkpoint(source).manifest
    assert torch.equal(
        checkpoint.read().tensors["model"]["layer.weight"], open_checkpoint(source).read().tensors["model"]["layer.weight"]
    )
    shutil.rmtree(path)
    assert isinstance(Adam.load_from_checkpoint(f"{FOLDER}/good"), TinyModule)


def test_a_url_without_a_checkpoint_is_named(bucket: MemoryFileSystem) -> None:
    with pytest.raises(
        CheckpointNotFoundError, match="^memory://bucket/run/good: .* Checkpoints in memory://bucket/run: none. Fix: "
    ):
        open_checkpoint(f"{FOLDER}/good")
    put(two()[0], "best")
    bucket.pipe_file("/bucket/run/god.pt", b"")
    with pytest.raises(CheckpointNotFoundError, match=r"good: .* 'best'. Weight files: 'god.pt'. Did you mean 'god.pt'\? "):
        open_checkpoint(f"{FOLDER}/good")
    with pytest.raises(CheckpointNotFoundError, match="run is a folder of checkpoints.* Fix: 'memory://bucket/run/best'.$"):
        open_checkpoint(FOLDER)


def test_the_order_of_an_upload(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is uploaded last; of a checkpoint that is replaced it is removed first, and files that are left go."""
    older, newer = two()
    put(older, "best")
    bucket.pipe_file("/bucket/run/best/model-00002-of-00002.safetensors", b"of a larger model")
    path = staged("best")
    shutil.rmtree(path)
    shutil.copytree(newer, path)
    digests: list[bool] = []
    put_file = MemoryFileSystem.put_file

    def watched(self: Any, source: str, target: str, **options: Any) -> None:
        digests.append(self.exists("/bucket/run/best/manifest.sha256"))
        put_file(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", watched)
    remote_sync.note_change(path)
    remote_sync.wait()
    assert digests == [False] * (len(list(newer.iterdir())) - 1)
    assert keys(bucket) == sorted(f"best/{file.name}" for file in newer.iterdir())
    assert bucket.cat_file("/bucket/run/best/manifest.sha256") == (newer / "manifest.sha256").read_bytes()


class Failing:
    """Makes uploads fail: the first `times`, after `after` files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, after: int = 0) -> None:
        self.times, self.after, self.done = times, after, 0
        self.put_file = MemoryFileSystem.put_file
        monkeypatch.setattr(MemoryFileSystem, "put_file", lambda fs, *given, **options: self(fs, *given, **options))

    def __call__(self, fs: Any, *given: Any, **options: Any) -> None:
        if self.times and self.done >= self.after:
            self.times, self.done = self.times - 1, 0
            raise ConnectionError("no route")
        self.done += 1
        self.put_file(fs, *given, **options)


def test_an_upload_is_tried_again(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    source = two()[-1]
    Failing(monkeypatch, times=2, after=3)
    put(source, "good")
    assert keys(bucket) == sorted(f"good/{file.name}" for file in source.iterdir())
    remote_sync.finish()


def test_an_upload_that_fails_loses_nothing(
    bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = two()
    put(older, "older")
    failing = Failing(monkeypatch, times=-1, after=2)
    path = put(newer, "newer")
    assert "memory://bucket/run/newer could not be written: ConnectionError: no route." in caplog.text
    assert not bucket.exists("/bucket/run/newer/manifest.sha256")
    open_checkpoint(path).verify()
    with pytest.warns(TrainkitWarning, match=rf"run/newer could not be written: .*Not uploaded, but complete here: {path}\."):
        remote_sync.finish()
    shutil.rmtree(staged("older"))
    assert [one.path.name for one in list_checkpoints(FOLDER)] == ["newer", "older"]
    failing.times = 0
    remote_sync._forget()  # another process
    enter()  # as the next run does
    remote_sync.wait()
    assert keys(bucket, "newer") == sorted(f"newer/{file.name}" for file in newer.iterdir())


def test_what_a_killed_upload_leaves_is_no_checkpoint(bucket: MemoryFileSystem) -> None:
    older, newer = two()
    put(older, "older")
    put(newer, "newer")
    bucket.rm_file("/bucket/run/newer/manifest.sha256")
    shutil.rmtree(staged())
    assert [one.path.name for one in list_checkpoints(FOLDER)] == ["older"]


def test_a_removed_checkpoint_is_removed_from_the_url(bucket: MemoryFileSystem) -> None:
    older, newer = two()
    put(older, "older")
    put(newer, "newer")
    remove(staged("older"))
    remote_sync.wait()
    assert {key.split("/")[0] for key in keys(bucket)} == {"newer"}
    shutil.rmtree(staged("newer"))
    remove(staged("newer"))  # it is at the URL only
    remote_sync.wait()
    assert keys(bucket) == []


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json", "state.json"])
def test_what_is_damaged_at_the_url(bucket: MemoryFileSystem, file: str) -> None:
    path = put(two()[-1], "good")
    shutil.rmtree(path)
    content = bytearray(bucket.cat_file(f"/bucket/run/good/{file}"))
    content[-3] ^= 1
    bucket.pipe_file(f"/bucket/run/good/{file}", bytes(content))
    with pytest.raises(
        CorruptCheckpointError,
        match=rf"memory://bucket/run/good/{file}.*{'SHA-256' if file == 'manifest.json' else 'XXH3-128'}",
    ):
        remote_sync.fetch(path)
    assert not path.exists()
    assert not list(path.parent.glob(".*"))


def test_a_name_at_the_url_is_taken(bucket: MemoryFileSystem) -> None:
    put(two()[-1], "good")
    shutil.rmtree(staged())
    assert free_name(staged(), "good") == "good-v1"
    assert free_name(Path("good"), "good") == "good"


def test_logs_are_uploaded_and_locks_are_not(bucket: MemoryFileSystem) -> None:
    run = staged("version_0")
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.csv").write_text("step\n")
    (run / "checkpoints" / ".lock").write_text("held")
    (run / "checkpoints" / "last").write_text("good\n")
    own = RemoteSync()
    own.add_log_folder(run)
    own.finish()
    assert keys(bucket) == ["version_0/checkpoints/last", "version_0/metrics.csv"]
    shutil.rmtree(run)
    remote = remote_at(staged())
    assert isinstance(remote, RemoteFolder)
    remote.pull_folders()
    assert (run / "checkpoints").is_dir()
    assert not (run / "metrics.csv").exists()
    remote.pull_files()
    assert (run / "metrics.csv").read_text() == "step\n"


def test_local_folders_have_no_url() -> None:
    assert remote_at(Path("runs")) is None
    own = RemoteSync()
    own.note_change(Path("runs"))
    own.add_log_folder(Path("runs"))
    own.enter(Path("runs"), [])
    own.finish()
    assert own._thread is None


# ----------------------------------------------------------------------------------------------------- what may go wrong


def test_the_network_is_not_needed_during_a_run(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = two()
    put(older, "older")
    enter()

    def refuse(*given: Any, **options: Any) -> Any:
        raise ConnectionError("no route")

    with monkeypatch.context() as patched:
        for name in ("ls", "glob", "find", "cat_file", "put_file", "pipe_file", "rm_file", "rm", "exists", "isfile"):
            patched.setattr(MemoryFileSystem, name, refuse)
        assert free_name(staged(), "older") == "older-v1"
        path = put(newer, "newer")
        assert [one.path.name for one in list_checkpoints(FOLDER)] == ["newer", "older"]
        open_checkpoint(path).verify()
        remove(staged("older"))
        assert [one.path.name for one in list_checkpoints(FOLDER)] == ["newer"]
        remote_sync.wait()
    remote_sync.note_change(path)
    remote_sync.wait()
    assert {key.split("/")[0] for key in keys(bucket)} == {"newer"}
    remote_sync.leave(staged())


def test_nothing_is_removed_before_what_was_saved_earlier_is_there(
    bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = two()
    put(older, "older")
    failing = Failing(monkeypatch, times=-1)
    put(newer, "newer")
    remove(staged("older"))
    remote_sync.wait()
    assert {key.split("/")[0] for key in keys(bucket)} == {"older"}
    assert (bucket.cat_file("/bucket/run/older/manifest.sha256")) == (older / "manifest.sha256").read_bytes()
    with pytest.warns(TrainkitWarning, match=r"complete here: .*newer\..* 1 old checkpoint not removed: memory:.*older\."):
        remote_sync.finish()
    failing.times = 0
    remote_sync.finish()
    assert {key.split("/")[0] for key in keys(bucket)} == {"newer"}


def test_a_checkpoint_that_is_replaced_during_its_upload(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the URL there is never a mix of both."""
    older, path = two()[0], staged("best")
    newer = Path(shutil.copytree(older, "newer"))  # of the same sizes
    for name in ("model.safetensors", "manifest.sha256"):
        flip(newer / name)
    put_file = MemoryFileSystem.put_file
    complete: list[bool] = []
    replacements: list[str] = []

    def replaced(self: Any, source: str, target: str, **options: Any) -> None:
        if source.endswith("model.safetensors") and "model" not in replacements:
            replacements.append("model")
            shutil.rmtree(path)
            shutil.copytree(newer, path)
            remote_sync.note_change(path)
        complete.append(self.exists("/bucket/run/best/manifest.sha256"))
        put_file(self, source, target, **options)

    digests: list[bytes] = []
    pipe_file = MemoryFileSystem.pipe_file

    def noted(self: Any, target: str, data: bytes, **options: Any) -> None:
        digests.append(data)
        pipe_file(self, target, data, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", replaced)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", noted)
    put(older, "best")
    assert not any(complete)
    assert digests == [(newer / "manifest.sha256").read_bytes()]
    for file in newer.iterdir():
        assert bucket.cat_file(f"/bucket/run/best/{file.name}") == file.read_bytes()


def test_a_damaged_local_checkpoint_never_replaces_the_one_at_the_url(bucket: MemoryFileSystem) -> None:
    source = two()[-1]
    path = put(source, "good")
    flip(path / "manifest.json")
    enter()
    remote_sync.wait()
    remote_sync.leave(staged())
    assert bucket.cat_file("/bucket/run/good/manifest.json") == (source / "manifest.json").read_bytes()
    assert [(one.path.name, one.problem) for one in list_checkpoints(FOLDER)] == [("good", None)]
    open_checkpoint(path).verify()


def test_of_two_with_one_name_the_later_is_used(bucket: MemoryFileSystem) -> None:
    older, newer = two()
    path = put(newer, "model")
    shutil.rmtree(path)
    shutil.copytree(older, path)  # another machine has continued
    assert open_checkpoint(f"{FOLDER}/model").manifest == open_checkpoint(newer).manifest
    shutil.rmtree(path)
    shutil.copytree(older, path)
    enter()
    remote_sync.wait()
    assert bucket.cat_file("/bucket/run/model/manifest.sha256") == (newer / "manifest.sha256").read_bytes()
    remote_sync.leave(staged())
    shutil.rmtree(path)
    put(older, "model")
    shutil.rmtree(path)
    shutil.copytree(newer, path)  # whose upload failed
    assert open_checkpoint(f"{FOLDER}/model").manifest == open_checkpoint(newer).manifest


def test_without_the_network_the_local_one_is_read_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(two()[-1], "good")

    def refuse(*given: Any, **options: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    open_checkpoint(path).verify()
    assert "memory://bucket/run/good cannot be read: ConnectionError: no route." in caplog.text
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="cannot be read: ConnectionError: no route"):
        open_checkpoint(f"{FOLDER}/good")


def test_a_download_is_complete_or_not_there(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.pipe_file("/bucket/run/metrics.csv", b"step,loss\n1,2\n")

    def cut(self: Any, source: str, target: str, **options: Any) -> None:
        Path(target).write_bytes(b"step")
        raise ConnectionError("no route")

    remote = remote_at(staged())
    assert remote is not None
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "get_file", cut)
        with pytest.raises(CheckpointError, match="no route"):
            remote.pull_files()
    remote.pull_files()
    assert [file.name for file in staged().iterdir()] == ["metrics.csv"]
    assert staged("metrics.csv").read_bytes() == b"step,loss\n1,2\n"


def test_two_downloads_of_one_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(two()[-1], "good")
    shutil.rmtree(path)
    remote = remote_at(path)
    assert remote is not None
    there = remote.checkpoint()
    assert there is not None
    put_in_place = RemoteFolder._put_in_place

    def late(self: RemoteFolder, partial: Path, digest: bytes) -> None:
        monkeypatch.setattr(RemoteFolder, "_put_in_place", put_in_place)
        remote.download(there)  # of another process
        monkeypatch.setattr("trainkit.checkpoint.urls.has_checkpoint_files", lambda folder: False)
        put_in_place(self, partial, digest)

    monkeypatch.setattr(RemoteFolder, "_put_in_place", late)
    remote.download(there)
    open_checkpoint(path).verify()
    assert [one.name for one in path.parent.iterdir()] == ["good"]


@pytest.mark.parametrize("link", [False, True])
def test_the_pointer_is_at_the_url(bucket: MemoryFileSystem, link: bool) -> None:
    path = put(two()[-1], "good")
    write_pointer(staged(), "good", link=link)
    remote_sync.wait()
    assert bucket.cat_file("/bucket/run/last") == b"good\n"
    shutil.rmtree(path.parent)
    assert isinstance(Adam.load_from_checkpoint(f"{FOLDER}/last"), TinyModule)


def test_files_of_checkpoints_are_at_the_url(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is uploaded once, `last.ckpt` whole instead of as a link; elsewhere they stand for their checkpoints."""
    uploaded, put_file = list[str](), MemoryFileSystem.put_file

    def count(self: Any, local: str, remote: str, **options: Any) -> None:
        uploaded.append(remote.removeprefix("/bucket/run/"))
        put_file(self, local, remote, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", count)
    remote_sync.add_log_folder(staged())
    for source, name in zip(two(), ("older", "newer"), strict=True):
        path = put(source, name)
        remote_sync.wait()
        write_ckpt(open_checkpoint(path), file_of(path))
        link_last(file_of(path))
        staged(".newest.ckpt.tmp").write_bytes(b"that of an unfinished write")
        remote_sync.wait()
    remote_sync.finish()
    assert [one for one in uploaded if one.endswith((".ckpt", ".tmp"))] == [
        "older.ckpt", "last.ckpt", "newer.ckpt", "last.ckpt"
    ]  # fmt: skip
    assert (
        bucket.cat_file("/bucket/run/last.ckpt")
        == bucket.cat_file("/bucket/run/newer.ckpt")
        == Path(staged("newer.ckpt")).read_bytes()
    )
    for name in ("last.ckpt", "older.ckpt"):
        shutil.rmtree(staged().parent)
        remote_sync.fetch(staged(name))
        assert resolve_pointer(staged(name)) == staged("newer" if name == "last.ckpt" else "older")
    shutil.rmtree(staged().parent)
    remote_sync.fetch(staged("newer.ckpt"))
    link_last(staged("newer.ckpt"))
    remove_file_of(staged("newer"))
    remote_sync.wait()
    assert [name for name in keys(bucket) if name.endswith(".ckpt")] == ["older.ckpt"]
    remove_file_of(staged("older"))  # which is only at the URL
    remote_sync.wait()
    assert not [name for name in keys(bucket) if name.endswith(".ckpt")]


def test_files_of_others_at_the_url_are_kept(bucket: MemoryFileSystem) -> None:
    """A file here has another name then; `last.ckpt` stays as it is."""
    for name in ("good.ckpt", "last.ckpt"):
        bucket.pipe_file(f"/bucket/run/{name}", b"of another program")
    first, second = two()
    path, other = put(first, "good"), put(second, "other")
    remote_sync.wait()
    assert is_of_others(file_of(path))
    with pytest.raises(CheckpointWriteError, match=r"good.ckpt exists, and was not made of a checkpoint"):
        write_ckpt(open_checkpoint(path), file_of(path))
    remove_file_of(path)
    write_ckpt(open_checkpoint(other), file_of(other))
    with pytest.raises(CheckpointWriteError, match=r"last.ckpt exists and is not replaced"):
        link_last(file_of(other))
    remote_sync.wait()
    assert [bucket.cat_file(f"/bucket/run/{name}.ckpt") for name in ("good", "last")] == [b"of another program"] * 2


def test_what_is_no_checkpoint_is_not_removed(bucket: MemoryFileSystem) -> None:
    bucket.pipe_file("/bucket/run/data/precious.bin", b"1")
    remove(staged("data"))
    remote_sync.wait()
    assert keys(bucket) == ["data/precious.bin"]


def test_logs_are_uploaded_again_after_another_run_has_finished(bucket: MemoryFileSystem) -> None:
    run = staged("version_0")
    run.mkdir(parents=True)
    remote_sync.add_log_folder(run)
    for text in ("1\n", "1\n2\n"):
        (run / "metrics.csv").write_text(text)
        remote_sync.finish()
        assert bucket.cat_file("/bucket/run/version_0/metrics.csv") == text.encode()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_uploads_nothing_of_its_parent() -> None:
    own = RemoteSync()
    own._waiting.append(staged("good"))
    child = os.fork()
    if child == 0:
        os._exit(len(own._waiting))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_files_of_hooks_are_copied_with_their_folders(bucket: MemoryFileSystem) -> None:
    """Up and down, verified; they are no files of the run, and those of a checkpoint that was replaced go."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: write_files(folder, names))
    names = ["note.txt", "unet/old.bin"]
    accelerator.save_state(f"{FOLDER}/good")
    assert "good/unet/old.bin" in keys(bucket)
    names = ["note.txt", "unet/config.json"]
    path = accelerator.save_state(f"{FOLDER}/good")
    files = sorted(f"good/{file.relative_to(path).as_posix()}" for file in path.rglob("*") if file.is_file())
    assert keys(bucket) == files
    assert "good/unet/config.json" in files
    assert "good/unet/old.bin" not in files
    shutil.rmtree(path)
    remote = remote_at(staged())
    assert remote is not None
    remote.pull_files()
    remote.pull_folders()
    assert not (path / "unet").exists()
    checkpoint = open_checkpoint(f"{FOLDER}/good")
    checkpoint.verify()
    assert checkpoint.attachment("unet/config.json") == b"unet/config.json"
    shutil.rmtree(path)
    bucket.pipe_file("/bucket/run/good/unet/config.json", b"other")
    with pytest.raises(CorruptCheckpointError, match=r"good/unet/config\.json is damaged: its XXH3-128 differs"):
        open_checkpoint(f"{FOLDER}/good")


def write_files(folder: str, names: list[str]) -> None:
    for name in names:
        Path(folder, name).parent.mkdir(exist_ok=True)
        Path(folder, name).write_text(name)
