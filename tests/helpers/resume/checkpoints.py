"""Small checkpoints that no training has made, and what is done to them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.support import ROOT, STARTUP, TESTS

from trainkit.checkpoint import open_checkpoint
from trainkit.checkpoint.commit import commit
from trainkit.checkpoint.draft import Content, Draft
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest, digest_line
from trainkit.errors import CorruptCheckpointError

__all__ = [
    "IMPORTABLE",
    "about",
    "complaint",
    "content",
    "draft",
    "load",
    "make",
    "names",
    "seal",
    "verified",
    "write_manifest",
]

# For the environment of another process: it can import trainkit and what tests share.
IMPORTABLE = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS), str(STARTUP)])}


def about(**changes: Any) -> dict[str, Any]:
    """The fields of a manifest that the one who saves gives."""
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


def content(counter: int = 1, *, step: int = 10, **changes: Any) -> Content:
    """A little of everything that training leaves; its tensors and state tell the step.

    Args:
        counter: its `save_counter`.
        step: its `step`.
        changes: of what `Content` is made of, or of the fields of the manifest.
    """
    made: dict[str, Any] = {
        "tensors": {
            "model": {"first.weight": torch.arange(12.0).view(3, 4) + step, "steps": torch.tensor(step)},
            "optimizer": {"0/first.weight/exp_avg": torch.full((3, 4), 0.25), "0/first.weight/step": torch.tensor(float(step))},
        },
        "state": {"loop": {"global_step": step, "betas": (0.9, 0.95)}, "best": torch.tensor(0.5)},
        "attachments": {"config.json": b'{"model_type": "tiny"}'},
        "max_shard_size": 5 * 10**9,
    }
    fields: dict[str, Any] = {
        "position": {"samples": 40},
        "aliases": {} if "tensors" in changes else {"model": {"tied.weight": "first.weight"}},
        "metrics": {"val_loss": 0.5, "broken": float("nan")},
        **{name: value for name, value in changes.items() if name not in made},
    }
    made.update({name: value for name, value in changes.items() if name in made})
    return Content(**made, about=about(save_counter=counter, step=step, **fields))


def draft(counter: int = 1, *, size: int = 4000, **changes: Any) -> Draft:
    """A checkpoint whose every file tells its counter; `size` in bytes of its tensors, `changes` as in `content`."""
    values = torch.full((size // 8,), float(counter))
    made: dict[str, Any] = {
        "step": counter,
        "metrics": {},
        "tensors": {"model": {"weight": values}, "optimizer": {"0/weight/exp_avg": values}},
        "state": {"counter": counter},
        "attachments": {"config.json": b"%d" % counter},
    }
    return Draft(content(counter, **{**made, **changes}))


def make(path: Path, counter: int = 1, *, minute: int | None = None, **changes: Any) -> Path:
    """Commit a `content`; `minute`: of the hour in which it is said to have been saved, now if None."""
    manifest = commit(Draft(content(counter, **changes)), path)
    if minute is not None:
        write_manifest(path, dataclasses.replace(manifest, saved_at=f"2026-11-20T15:{minute:02d}:00.000000Z").to_bytes())
    return path


def write_manifest(path: Path, data: bytes) -> None:
    """Put a manifest there, and its digest."""
    (path / MANIFEST).write_bytes(data)
    (path / DIGEST).write_bytes(digest_line(data))


def seal(path: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None, *, measure: bool = True) -> None:
    """Make manifest and digest agree with what is there, as an attacker would; `change` edits the manifest's JSON."""
    manifest = json.loads((path / MANIFEST).read_text())
    if measure:
        for name in manifest["files"]:
            data = (path / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    write_manifest(path, json.dumps(manifest).encode())


def names(folder: Path) -> list[str]:
    """Of all that lies in a folder."""
    return sorted(os.listdir(folder))


def verified(path: Path) -> int:
    """The counter of a `draft` whose every byte is as it was written."""
    data = (path / MANIFEST).read_bytes()
    assert (path / DIGEST).read_bytes() == digest_line(data)
    manifest = Manifest.from_bytes(data, str(path))
    for name, entry in manifest.files.items():
        written = (path / name).read_bytes()
        assert (len(written), hashlib.sha256(written).hexdigest()) == (entry.size, entry.sha256), name
    assert json.loads((path / "state.json").read_bytes()) == {"counter": manifest.save_counter}
    return manifest.save_counter


def load(path: Path) -> None:
    """Everything that can be done with a checkpoint."""
    open_checkpoint(path).read()


def complaint(read: Callable[[], object], name: str, limit: int = 500) -> str:
    """What the `CorruptCheckpointError` says that `read` raises; it begins with the file, and is not endless."""
    with pytest.raises(CorruptCheckpointError) as caught:
        read()
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert len(message) < limit
    return message
