"""Remove checkpoints from a folder, and what killed runs have left in it."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from trainkit.checkpoint.commit import sync_folder
from trainkit.checkpoint.folder import POINTER, candidates
from trainkit.checkpoint.identify import has_checkpoint_files, hidden_path, is_checkpoint
from trainkit.checkpoint.staging import staging
from trainkit.errors import CheckpointError, CheckpointWriteError

__all__ = ["is_abandoned", "remove", "remove_leftovers"]

# The names of what commit(), remove(), check_writable() and write_pointer() leave behind when they are killed.
_PARTIAL = re.compile(r"\..+\.tmp-[A-Za-z0-9_-]{1,64}", re.DOTALL)
_REMOVED = re.compile(r"\..+\.del-[0-9a-f]{16}", re.DOTALL)
_OUR_FILE = re.compile(r"\.(probe|last)\.tmp-[0-9a-f]{16}")


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed to `.<name>.del-…` first, so that no process sees an incomplete one.

    Of a link only the link is removed. A path that does not exist is not an error.

    Raises:
        CheckpointError: `path` is not a checkpoint; nothing was removed.
        CheckpointWriteError: It cannot be removed completely; what is left is removed at the next start.
    """
    if not os.path.lexists(path):
        staging.changed(path)  # it may be at the URL of a staging folder only
        return
    if not is_checkpoint(path):
        raise CheckpointError(f"{path}: expected a checkpoint to remove, but this is not one; it was not changed.")
    hidden = hidden_path(path, f".del-{secrets.token_hex(8)}")
    try:
        try:
            os.rename(path, hidden)
        except FileNotFoundError:
            return
        # Otherwise a power failure could leave a checkpoint under its old name with some files deleted.
        sync_folder(path.parent)
        _delete(hidden)
        staging.changed(path)
    except OSError as error:
        raise CheckpointWriteError(f"{path} could not be removed: {error}. Fix: make the folder writable.") from error


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove unfinished saves and removals of killed runs from `folder`. Returns what was removed.

    Only the holder of the folder's lock may call this. Similar entries (a link, a file instead of a folder, a folder that
    contains folders) are kept, and so is what cannot be removed.
    """
    removed = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    for entry in entries:
        path = folder / entry.name
        try:
            if _is_leftover(entry):
                _delete(path)
                removed.append(path)
        except OSError:
            continue
    return removed


def is_abandoned(folder: Path) -> bool:
    """Whether a run was killed before its first checkpoint was complete: `folder` has leftovers and no checkpoint."""
    try:
        with os.scandir(folder) as entries:
            leftovers = any(_is_leftover(entry) for entry in entries)
    except OSError:
        return False
    return leftovers and not candidates(folder)


def _is_leftover(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        if _REMOVED.fullmatch(entry.name):
            return True
        if not _PARTIAL.fullmatch(entry.name):
            return False
        # An unfinished save contains folders only if they were kept from the checkpoint that it replaces.
        with os.scandir(entry.path) as inside:
            return has_checkpoint_files(Path(entry.path)) or not any(inner.is_dir(follow_symlinks=False) for inner in inside)
    is_link = entry.is_symlink() and entry.name.startswith(f".{POINTER}.")  # of write_pointer
    return (is_link or entry.is_file(follow_symlinks=False)) and _OUR_FILE.fullmatch(entry.name) is not None


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
