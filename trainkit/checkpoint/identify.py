"""Recognizes checkpoints by the names of their files, and explains why a path is not a checkpoint."""

from __future__ import annotations

import errno
import os
import re
from difflib import get_close_matches
from pathlib import Path

from trainkit.checkpoint.manifest import DIGEST
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.errors import CorruptCheckpointError

__all__ = [
    "MAX_LISTED",
    "MAX_NAME",
    "checkpoint_identity",
    "has_checkpoint_files",
    "hidden_path",
    "is_checkpoint",
    "listed",
    "why_not_a_checkpoint",
]

MAX_NAME = 255
"""Bytes of a file name on every file system in use."""

MAX_LISTED = 10
"""The number of names that a message lists."""

_RESERVED = re.compile(
    r"manifest\.json|manifest\.sha256|state\.json|(model(_\d+)?|optimizer|state)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
)

# Files and folders in checkpoints of Hugging Face's Trainer, Accelerate and DeepSpeed.
_OF_OTHERS = ("trainer_state.json", "optimizer.bin", "pytorch_model.bin", "pytorch_model.bin.index.json", "zero")


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, valid or damaged: a folder that has a file with a name of a checkpoint's files.

    A folder whose name starts with `.` is not one: it is not finished, or is being removed.
    """
    return not path.name.startswith(".") and has_checkpoint_files(path)


def hidden_path(path: Path, mark: str) -> Path:
    """`.<name><mark>` in the same folder, which readers ignore; a long name is cut."""
    name, room = path.name, MAX_NAME - 1 - len(mark)
    if len(os.fsencode(name)) > room:
        name = os.fsencode(name)[:room].decode("utf-8", "ignore")
    return path.parent / f".{name}{mark}"


def has_checkpoint_files(folder: Path) -> bool:
    """Whether a folder has a file with a name of a checkpoint's files, regardless of its own name."""
    for _ in range(10):
        before = checkpoint_identity(folder)
        if _lists_checkpoint_files(folder):
            return True
        # otherwise the listed folder was replaced, and is being removed
        if checkpoint_identity(folder) == before:
            return False
    return True


def _lists_checkpoint_files(folder: Path) -> bool:
    try:
        return any(map(_RESERVED.fullmatch, os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError as error:  # a failing disk must not look like a folder without checkpoints
        return error.errno != errno.ELOOP


def checkpoint_identity(path: Path) -> bytes | None:
    """The digest of the checkpoint at `path`, empty if it has none; `None` if there is no folder.

    The folder's inode is no identity: a new folder may get the same one.
    """
    try:
        return read_small_file(path / DIGEST, 1024)
    except CorruptCheckpointError:
        return b"" if path.is_dir() else None


def why_not_a_checkpoint(path: Path) -> str:
    """Why there is no checkpoint at `path`, with the checkpoints next to it."""
    if (foreign := _of_another_program(path)) is not None:
        return foreign
    inside = _checkpoints_in(path)
    if inside:
        return f"{path} is a folder of checkpoints, expected one of them: {listed(inside)}. Fix: {str(path / inside[-1])!r}."
    if not os.path.lexists(path):
        reason = "this path does not exist"
    elif path.name.startswith(".") and has_checkpoint_files(path):
        reason = "a name that starts with '.' marks one that is incomplete or being removed"
    elif path.is_dir():
        readable = os.access(path, os.R_OK | os.X_OK)
        reason = "the folder contains no checkpoint files" if readable else "the folder cannot be read"
    elif is_checkpoint(path.parent):
        return f"{path} is a file in a checkpoint; expected the folder. Fix: {str(path.parent)!r}."
    else:
        reason = "this is a file; a checkpoint is a folder"
    siblings = _checkpoints_in(path.parent)
    close = get_close_matches(path.name, siblings, n=1)
    near = f"Checkpoints in {path.parent}: {listed(siblings) or 'none'}."
    return f"{path}: expected a checkpoint, but {reason}. {near}" + (f" Did you mean {close[0]!r}?" if close else "")


def _of_another_program(path: Path) -> str | None:
    """How to convert another program's checkpoint; `None` if it does not look like one."""
    name = path.stem if path.suffix else f"{path.name}-imported"
    fix = f"Convert it: trainkit checkpoint import {path} {name} (docs/moving-over/import-a-checkpoint.md)"
    expected = "expected a trainkit checkpoint, which is a folder"
    if path.suffix == ".ckpt" and path.is_file():
        return f"{path} is a Lightning checkpoint, which is a file; {expected}. {fix}"
    if path.suffix in (".pt", ".pth", ".bin") and path.is_file():
        return f"{path} is a file written by torch.save; {expected}. {fix}"
    if path.suffix == ".safetensors" and path.is_file() and not is_checkpoint(path.parent):
        return f"{path} is a file of weights; {expected}. {fix}"
    if path.suffix == ".ckpt" and path.is_dir():
        return (
            f"{path} is a sharded Lightning checkpoint (FSDP or DeepSpeed); expected a trainkit checkpoint. Convert it "
            "to a single file with Lightning, then import it: docs/moving-over/import-a-checkpoint.md"
        )
    if path.is_dir() and any((path / mark).exists() for mark in _OF_OTHERS):
        return f"{path} is a checkpoint of another program; expected one of trainkit. {fix}"
    return None


def _checkpoints_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if is_checkpoint(folder / name))
    except OSError:
        return []


def listed(names: list[str]) -> str:
    """The last names of a list, for a message."""
    return ", ".join(repr(name) for name in names[-MAX_LISTED:]) + (" and others" if len(names) > MAX_LISTED else "")
