"""Write small checkpoints without training, damage them, and read them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.support import ROOT, STARTUP, TESTS

from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.checkpoint_plan import CheckpointContent, CheckpointPlan
from trainkit.checkpoint.checksum import CHECKSUMS, DEFAULT_CHECKSUM
from trainkit.checkpoint.commit import commit
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest, digest_line
from trainkit.errors import CorruptCheckpointError

__all__ = [
    "IMPORTABLE",
    "about",
    "complaint",
    "content",
    "digest",
    "draft",
    "load",
    "make",
    "names",
    "seal",
    "verified",
    "write_manifest",
]

# Environment variables with which another process can import trainkit and the helpers.
IMPORTABLE = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS), str(STARTUP)])}


def about(**changes: Any) -> dict[str, Any]:
    """The fields of a manifest that the caller of a save provides."""
    fields: dict[str, Any] = {
        "run_id": "run1",
        "save_counter": 1,
        "step": 1,
        "epoch": 0,
        "position": {},
        "seed": 1,
        "order_version": 1,
        "key_version": 1,
        "world_size": 1,
        "strategy": "single",
        "precision": "32-true",
        "contents": {"model": "all", "optimizer": True, "resumable": True},
        "aliases": {},
        "irregular": [],
        "metrics": {},
        "saved_by": None,
    }
    return {**fields, **changes}


def content(counter: int = 1, *, step: int = 10, **changes: Any) -> CheckpointContent:
    """CheckpointContent of a checkpoint with a bit of everything that training saves; its tensors and state contain the step.

    Args:
        counter: The `save_counter`.
        step: The `step`.
        changes: Other values for arguments of `CheckpointContent` or fields of the manifest.
    """
    made: dict[str, Any] = {
        "tensors": {
            "model": {"first.weight": torch.arange(12.0).view(3, 4) + step, "steps": torch.tensor(step)},
            "optimizer": {"0/first.weight/exp_avg": torch.full((3, 4), 0.25), "0/first.weight/step": torch.tensor(float(step))},
        },
        "state": {"mine": {"global_step": step, "betas": (0.9, 0.95)}, "best": torch.tensor(0.5)},
        "attachments": {"config.json": b'{"model_type": "tiny"}'},
        "max_shard_size": 5 * 10**9,
        "parameters": {},
        "checksum": DEFAULT_CHECKSUM,
    }
    fields: dict[str, Any] = {
        "position": {"samples": 40},
        "aliases": {} if "tensors" in changes else {"model": {"tied.weight": "first.weight"}},
        "metrics": {"val_loss": 0.5, "broken": float("nan")},
        **{name: value for name, value in changes.items() if name not in made},
    }
    made.update({name: value for name, value in changes.items() if name in made})
    return CheckpointContent(**made, about=about(save_counter=counter, step=step, **fields))


def draft(counter: int = 1, *, size: int = 4000, **changes: Any) -> CheckpointPlan:
    """A checkpoint in which every file contains its counter; `size`: bytes of each tensor, `changes`: see `content`."""
    values = torch.full((size // 8,), float(counter))
    made: dict[str, Any] = {
        "step": counter,
        "metrics": {},
        "tensors": {"model": {"weight": values}, "optimizer": {"0/weight/exp_avg": values}},
        "state": {"counter": counter},
        "attachments": {"config.json": b"%d" % counter},
    }
    return CheckpointPlan(content(counter, **{**made, **changes}))


def make(path: Path, counter: int = 1, *, minute: int | None = None, **changes: Any) -> Path:
    """Commit a `content` to `path`; `minute`: the minute of `saved_at` in the manifest, None for the real time."""
    manifest = commit(CheckpointPlan(content(counter, **changes)), path).manifest
    if minute is not None:
        write_manifest(path, dataclasses.replace(manifest, saved_at=f"2026-11-20T15:{minute:02d}:00.000000Z").to_bytes())
    return path


def write_manifest(path: Path, data: bytes) -> None:
    """Write a manifest and its digest to a checkpoint."""
    (path / MANIFEST).write_bytes(data)
    (path / DIGEST).write_bytes(digest_line(data))


def seal(path: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None, *, measure: bool = True) -> None:
    """Make manifest and digest match the files, like an attacker; `change` edits the manifest's JSON."""
    manifest = json.loads((path / MANIFEST).read_text())
    if measure:
        for name in manifest["files"]:
            data = (path / name).read_bytes()
            manifest["files"][name] = {"size": len(data), manifest["checksum"]: digest(data, manifest["checksum"])}
    change(manifest)
    write_manifest(path, json.dumps(manifest).encode())


def digest(data: bytes, checksum: str = DEFAULT_CHECKSUM) -> str:
    """The digest of the content of a file, as a manifest has it."""
    hasher = CHECKSUMS[checksum].start()
    hasher.update(memoryview(data))
    return hasher.hexdigest()


def names(folder: Path) -> list[str]:
    """The names of all files and folders in a folder."""
    return sorted(os.listdir(folder))


def verified(path: Path) -> int:
    """Check every byte of a checkpoint of `draft`; returns its counter."""
    data = (path / MANIFEST).read_bytes()
    assert (path / DIGEST).read_bytes() == digest_line(data)
    manifest = Manifest.from_bytes(data, str(path))
    for name, entry in manifest.files.items():
        written = (path / name).read_bytes()
        assert (len(written), digest(written, manifest.checksum)) == (entry.size, entry.digest), name
    assert json.loads((path / "state.json").read_bytes()) == {"counter": manifest.save_counter}
    return manifest.save_counter


def load(path: Path) -> None:
    """Open a checkpoint and read all of it."""
    open_checkpoint(path).read()


def complaint(read: Callable[[], object], name: str, limit: int = 500) -> str:
    """The message of the `CorruptCheckpointError` that `read` must raise; it must begin with the file and not be too long."""
    with pytest.raises(CorruptCheckpointError) as caught:
        read()
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert len(message) < limit
    return message
