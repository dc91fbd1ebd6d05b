"""What is a checkpoint, and why a path is none: hidden files and files of other programs are in no listing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.resume.checkpoints import make

from trainkit.checkpoint.folder import candidates, folders_below, list_checkpoints
from trainkit.checkpoint.lock import LOCK, FolderLock
from trainkit.checkpoint.manifest import DIGEST, why_not_a_checkpoint
from trainkit.checkpoint.reader import open_checkpoint
from trainkit.cli.checkpoint.listing import checkpoints_at
from trainkit.errors import CheckpointNotFoundError, CorruptCheckpointError

INCOMPLETE = "marks one that is incomplete or being removed"


def locked(path: Path) -> None:
    FolderLock(path.parent, "run").acquire()


def killed(path: Path) -> None:
    shutil.copytree("runs/version_0/checkpoints/good", path)
    (path / DIGEST).unlink()


def kept(path: Path) -> None:
    path.mkdir()
    (path / "good-checkpoint.json").write_text("{}")


STRANGERS: dict[str, tuple[Callable[[Path], object], str]] = {
    LOCK: (locked, "this is a file; a checkpoint is a folder"),
    ".DS_Store": (Path.touch, "this is a file; a checkpoint is a folder"),
    ".nfs000000000001": (Path.touch, "this is a file; a checkpoint is a folder"),
    "readme.txt": (Path.touch, "this is a file; a checkpoint is a folder"),
    ".ipynb_checkpoints": (kept, "the folder contains no checkpoint files"),
    ".locks": (Path.mkdir, "the folder contains no checkpoint files"),
    "lost+found": (Path.mkdir, "the folder contains no checkpoint files"),
    ".step-00000009.tmp-abc": (killed, INCOMPLETE),
    ".good.del-0123456789abcdef": (killed, INCOMPLETE),
    ".missing": (lambda path: None, "this path does not exist"),
}


@pytest.mark.parametrize("where", ["version_0", "version_0/checkpoints", "version_0/checkpoints/good"])
@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_not_listed(run_dir: Path, name: str, where: str) -> None:
    folder = run_dir / "runs/version_0/checkpoints"
    make(folder / "good", 1, run_id="run", metrics={}, minute=1)
    create, reason = STRANGERS[name]
    create(run_dir / "runs" / where / name)
    assert sorted([*os.listdir(run_dir / "runs" / where), name])[0] == name or not name.startswith(".")
    found = [
        list_checkpoints(folder),
        candidates(*folders_below(run_dir / "runs")),
        *(checkpoints_at(path) for path in (folder, folder.parent, folder.parent.parent, folder / "good")),
    ]
    assert [[(one.path, one.problem) for one in listed] for listed in found] == [[(folder / "good", None)]] * 6
    open_checkpoint(folder / "good").verify()
    if where.endswith("checkpoints"):
        why = why_not_a_checkpoint(folder / name)
        assert reason in why
        assert (INCOMPLETE in why) == (reason == INCOMPLETE)
        assert "Checkpoints in" in why
        assert "'good'" in why
        with pytest.raises(CheckpointNotFoundError, match="expected a checkpoint, but"):
            open_checkpoint(folder / name)


@pytest.mark.parametrize("files", [("config.json", "model.safetensors"), ("adapter_config.json", "adapter_model.safetensors")])
@pytest.mark.parametrize("more", [(), ("trainer_state.json", "optimizer.pt")])
def test_a_folder_of_transformers_says_how_to_use_it(run_dir: Path, files: tuple[str, str], more: tuple[str, ...]) -> None:
    folder = run_dir / "checkpoint-500"
    folder.mkdir()
    for name in (*files, *more):
        (folder / name).touch()
    with pytest.raises(CheckpointNotFoundError, match=r"of transformers or PEFT.*from_pretrained\('.*'\).*checkpoint import"):
        open_checkpoint(folder)


def test_a_damaged_checkpoint_is_no_folder_of_transformers(run_dir: Path) -> None:
    make(run_dir / "good", 1, run_id="run", metrics={}, minute=1)
    (run_dir / "good/config.json").write_text("{}")
    (run_dir / "good" / DIGEST).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{DIGEST}: missing"):
        open_checkpoint(run_dir / "good")


def test_weight_files_and_links_are_named(run_dir: Path) -> None:
    make(run_dir / "good", 1, run_id="run", metrics={}, minute=1)
    for name in ("step-00000002.ckpt", "model.PT", "notes.txt", ".step.ckpt"):
        (run_dir / name).touch()
    os.symlink("step-00000003.ckpt", "last.ckpt")
    with pytest.raises(CheckpointNotFoundError) as caught:
        open_checkpoint("step-0000002.ckpt")
    os.mkdir("folder.ckpt")
    files = "Weight files: 'model.PT', 'step-00000002.ckpt'. Did you mean 'step-00000002.ckpt'?"
    assert str(caught.value).endswith(f"this path does not exist. Checkpoints in {run_dir}: 'good'. {files}")
    with pytest.raises(CheckpointNotFoundError, match="but this is a link to step-00000003.ckpt, which does not exist. Check"):
        open_checkpoint("last.ckpt")
