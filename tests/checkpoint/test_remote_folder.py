"""Checkpoints in staging folders are copied to their URLs: complete or not there, and tried again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from helpers.resume.saving import Adam, saved
from helpers.runs.tiny import TinyModule

from trainkit import paths
from trainkit.checkpoint import list_checkpoints, open_checkpoint
from trainkit.checkpoint import uploads as module
from trainkit.checkpoint.folder import free_name, remove
from trainkit.checkpoint.remote_folder import RemoteFolder, fetch, remote_at
from trainkit.checkpoint.uploads import Uploads, uploads
from trainkit.console import TrainkitWarning
from trainkit.errors import CheckpointNotFoundError, CorruptCheckpointError
from trainkit.paths import local_path

FOLDER = "memory://bucket/run"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """An empty bucket, staged in the test's folder; failed uploads are tried again at once."""
    monkeypatch.setattr(paths, "_schemes", {})
    monkeypatch.setattr(module, "_PAUSES", (0.0, 0.0))
    bucket = MemoryFileSystem()
    bucket.store.clear()
    bucket.pseudo_dirs[:] = [""]
    yield bucket
    uploads.wait()
    uploads._failed.clear()
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


def put(source: Path, name: str) -> Path:
    """Copy a checkpoint to the staging folder, as a save does, and upload it."""
    path = staged(name)
    shutil.copytree(source, path)
    uploads.changed(path)
    uploads.wait()
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
    with pytest.raises(CheckpointNotFoundError, match="^memory://bucket/run/good: expected .* next to it: none.$"):
        open_checkpoint(f"{FOLDER}/good")
    put(two()[0], "best")
    with pytest.raises(CheckpointNotFoundError, match="^memory://bucket/run/good: expected .* next to it: 'best'.$"):
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
    uploads.changed(path)
    uploads.wait()
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
    uploads.finish()


def test_an_upload_that_fails_loses_nothing(
    bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = two()
    put(older, "older")
    failing = Failing(monkeypatch, times=-1, after=2)
    path = put(newer, "newer")
    assert f"the upload of {path} failed: ConnectionError: no route." in caplog.text
    assert not bucket.exists("/bucket/run/newer/manifest.sha256")
    open_checkpoint(path).verify()
    with pytest.warns(
        TrainkitWarning, match=r"newer could not be uploaded to memory://bucket/run/newer: ConnectionError.*complete"
    ):
        uploads.finish()
    shutil.rmtree(staged("older"))
    assert [one.path.name for one in list_checkpoints(FOLDER)] == ["newer", "older"]
    failing.times = 0
    uploads.missing(staged())  # as the next run does
    uploads.wait()
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
    uploads.wait()
    assert {key.split("/")[0] for key in keys(bucket)} == {"newer"}
    shutil.rmtree(staged("newer"))
    remove(staged("newer"))  # it is at the URL only
    uploads.wait()
    assert keys(bucket) == []


@pytest.mark.parametrize("file", ["model.safetensors", "manifest.json", "state.json"])
def test_what_is_damaged_at_the_url(bucket: MemoryFileSystem, file: str) -> None:
    path = put(two()[-1], "good")
    shutil.rmtree(path)
    content = bytearray(bucket.cat_file(f"/bucket/run/good/{file}"))
    content[-3] ^= 1
    bucket.pipe_file(f"/bucket/run/good/{file}", bytes(content))
    with pytest.raises(CorruptCheckpointError, match=rf"memory://bucket/run/good/{file}.*SHA-256"):
        fetch(path)
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
    own = Uploads()
    own.with_files(run)
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
    own = Uploads()
    own.changed(Path("runs"))
    own.with_files(Path("runs"))
    own.missing(Path("runs"))
    own.finish()
    assert own._thread is None
