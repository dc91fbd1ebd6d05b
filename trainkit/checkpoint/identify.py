"""What is a checkpoint and what is none, told by names; and what to say where there is none."""

from __future__ import annotations

import errno
import os
import re
from difflib import get_close_matches
from pathlib import Path

from trainkit.checkpoint.manifest import DIGEST
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.errors import CorruptCheckpointError

__all__ = ["MAX_LISTED", "checkpoint_identity", "has_checkpoint_files", "is_checkpoint", "listed", "why_no_checkpoint"]

MAX_LISTED = 10
"""Of many names a message has so many."""

_RESERVED = re.compile(
    r"manifest\.json|manifest\.sha256|state\.json|(model(_\d+)?|optimizer|state)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
)


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint, sound or not: a folder that holds a file named like one of a checkpoint's.

    One whose name starts with ``.`` is none: it is not finished, or being removed.
    """
    return not path.name.startswith(".") and has_checkpoint_files(path)


def has_checkpoint_files(folder: Path) -> bool:
    """Whether a folder holds a file named like one of a checkpoint's, whatever its own name is."""
    for _ in range(10):
        before = checkpoint_identity(folder)
        if _lists_checkpoint_files(folder):
            return True
        if (
            checkpoint_identity(folder) == before
        ):  # else what was listed is the old one, which was replaced and is being removed
            return False
    return True


def _lists_checkpoint_files(folder: Path) -> bool:
    try:
        return any(map(_RESERVED.fullmatch, os.listdir(folder)))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError as error:  # a disk that fails must not make a run start anew as if nothing had been saved
        return error.errno != errno.ELOOP


def checkpoint_identity(path: Path) -> bytes | None:
    """Which checkpoint is at ``path``: its digest, or nothing if it has none; None if there is no folder any more.

    Not the folder's inode: the next one may get the same.
    """
    try:
        return read_small_file(path / DIGEST, 1024)
    except CorruptCheckpointError:
        return b"" if path.is_dir() else None


def why_no_checkpoint(path: Path) -> str:
    """Why there is no checkpoint at ``path``, and which are near."""
    if path.name.startswith("."):
        return f"{path} is no checkpoint: a name that starts with '.' is that of one that is not finished or being removed."
    if (foreign := _of_another_program(path)) is not None:
        return foreign
    inside = _checkpoints_in(path)
    if inside:
        return f"{path} is a folder of checkpoints, expected one of them: {listed(inside)}. Fix: {str(path / inside[-1])!r}."
    if not os.path.lexists(path):
        reason = "there is nothing"
    elif path.is_dir():
        readable = os.access(path, os.R_OK | os.X_OK)
        reason = "the folder holds none of a checkpoint's files" if readable else "the folder cannot be read"
    elif is_checkpoint(path.parent):
        return f"{path} is a file of a checkpoint; a checkpoint is its folder. Fix: {str(path.parent)!r}."
    else:
        reason = "this is a file, and a checkpoint is a folder"
    beside = _checkpoints_in(path.parent)
    close = get_close_matches(path.name, beside, n=1)
    near = f"In {path.parent} there are: {listed(beside)}." if beside else f"There is none in {path.parent} either."
    return f"{path}: expected a checkpoint, but {reason}. {near}" + (f" Did you mean {close[0]!r}?" if close else "")


def _of_another_program(path: Path) -> str | None:
    """What a checkpoint of another program is, and how its weights are loaded; None if it does not look like one."""
    only = "Optimizers, schedules and the position in the data are not converted: docs/from-lightning.md#checkpoints"
    load = f"module.load_state_dict(torch.load({str(path)!r}, map_location='cpu', weights_only=True)"
    if path.suffix == ".ckpt" and path.is_file():
        return (
            f"{path} is a Lightning checkpoint, which is a file; expected a trainkit checkpoint, which is a folder. Load its "
            f"weights into the module instead: {load}['state_dict']). {only}"
        )
    if path.suffix in (".pt", ".pth", ".bin") and path.is_file():
        return (
            f"{path} is a file written by torch.save; expected a trainkit checkpoint, which is a folder. Load its weights "
            f"into the module instead: {load}). {only}"
        )
    if path.suffix == ".ckpt" and path.is_dir():
        return (
            f"{path} is a sharded Lightning checkpoint (FSDP or DeepSpeed); expected a trainkit checkpoint. Let Lightning "
            "make one file of it, and load its weights into the module: docs/from-lightning.md#checkpoints has both lines."
        )
    return None


def _checkpoints_in(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if is_checkpoint(folder / name))
    except OSError:
        return []


def listed(names: list[str]) -> str:
    """The last of some names, for a message."""
    return ", ".join(repr(name) for name in names[-MAX_LISTED:]) + (" and others" if len(names) > MAX_LISTED else "")
