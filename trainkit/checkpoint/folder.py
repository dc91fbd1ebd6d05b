"""A folder of checkpoints: list them, in the order to try them, find free names, point to the last one, remove them."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from trainkit.checkpoint.commit import OF_HOOKS, sync_folder
from trainkit.checkpoint.manifest import Manifest, has_checkpoint_files, is_checkpoint, make_hidden_path
from trainkit.checkpoint.pointers import POINTER, is_plain_name
from trainkit.checkpoint.reader import inspect_checkpoint
from trainkit.checkpoint.tensor_file import write_file
from trainkit.checkpoint.urls import RemoteCheckpoint, remote_sync
from trainkit.errors import CheckpointError, CheckpointWriteError
from trainkit.paths import local_path

__all__ = [
    "CHECKPOINTS",
    "ListedCheckpoint",
    "candidates",
    "check_writable",
    "checkpoints_here",
    "folders_below",
    "free_name",
    "is_abandoned",
    "list_checkpoints",
    "next_counter",
    "remove",
    "remove_leftovers",
    "write_pointer",
]


CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in the folder of a run."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint in a folder.

    Attributes:
        path: The checkpoint.
        manifest: Its manifest; `None` if that cannot be trusted.
        problem: What is wrong with it; `None` if nothing was found. Files are not read for this, only their sizes compared.
    """

    path: Path
    manifest: Manifest | None
    problem: str | None


def list_checkpoints(folder: str | os.PathLike[str]) -> list[ListedCheckpoint]:
    """List the checkpoints in `folder`: valid ones newest first, then damaged ones with their problems.

    Runs are ordered by the time of their latest checkpoint, checkpoints of a run by their save counter; those with parameters
    that are not finite (`manifest.finite` is False) come after all others of their run. Only manifests are read, and the sizes
    of the files compared; `Checkpoint.verify` reads everything. A checkpoint is a folder that has a file of a checkpoint and
    whose name does not start with `.`. If `folder` does not exist, the list is empty.

    Args:
        folder: The folder that contains the checkpoints, such as `ModelCheckpoint.dirpath`.

    Returns:
        For each checkpoint its `path`, its `manifest` (`None` if it is damaged) and its `problem` (`None` if there is
        none).

    Raises:
        CheckpointError: `folder` cannot be read.
    """
    checkpoints = candidates(local_path(folder, "folder"))
    return [one for one in checkpoints if one.problem is None] + [one for one in checkpoints if one.problem is not None]


def candidates(*folders: str | os.PathLike[str]) -> list[ListedCheckpoint]:
    """The checkpoints in the order in which to try them: the newest of the run that saved last, then older runs.

    Those of a run whose parameters are not finite come after its others.

    Damaged ones are included, so that each is reported before an older one is used: at their place in the order if their
    manifest is valid, otherwise before the newest of their folder, or first if there is none.

    Raises:
        CheckpointError: A folder cannot be read.
    """
    checkpoints = [one for folder in folders for one in _find(Path(folder))]
    latest: dict[str, str] = {}
    for one in checkpoints:
        if one.manifest is not None:
            latest[one.manifest.run_id] = max(latest.get(one.manifest.run_id, ""), one.manifest.saved_at)

    def age(one: ListedCheckpoint) -> tuple[str, str, bool, int, str, str]:
        assert one.manifest is not None
        about, finite = one.manifest, one.manifest.finite is not False
        return latest[about.run_id], about.run_id, finite, about.save_counter, about.saved_at, one.path.name

    unknown: dict[Path, list[ListedCheckpoint]] = {}
    for one in sorted((one for one in checkpoints if one.manifest is None), key=lambda one: one.path.name):
        unknown.setdefault(one.path.parent, []).append(one)
    ordered: list[ListedCheckpoint] = []
    for one in sorted((one for one in checkpoints if one.manifest is not None), key=age, reverse=True):
        ordered += [*unknown.pop(one.path.parent, []), one]
    return [one for left in unknown.values() for one in left] + ordered


def folders_below(root: str | os.PathLike[str], *, deep: bool = True) -> list[Path]:
    """The folders `checkpoints` of the runs below `root`, which need not exist.

    Args:
        root: A `default_root_dir`, the folder of an experiment or of a run.
        deep: Search to the depth at which loggers create runs: `<root>/<name>/<run>` and `<root>/logs/<name>/<run>`.
            False: search `<root>` and `<root>/<run>` only.
    """
    level, folders = [Path(root)], [Path(root)]
    for _ in range(2 if deep else 1):
        level = [inner for folder in level for inner in _folders_in(folder)]
        folders += level
    if deep:
        level = [inner for folder in level if folder.parent == Path(root, "logs") for inner in _folders_in(folder)]
        folders += level
    return [folder / CHECKPOINTS for folder in folders if (folder / CHECKPOINTS).is_dir()]


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:  # it does not exist, or is not readable
        return []
    return [folder / name for name in names if name != CHECKPOINTS]


def next_counter(folder: str | os.PathLike[str], run_id: str) -> int:
    """The save counter of the next checkpoint of a run: its highest in `folder` plus 1; 1 for the first."""
    manifests = [one.manifest for one in _find(Path(folder)) if one.manifest is not None]
    return 1 + max((manifest.save_counter for manifest in manifests if manifest.run_id == run_id), default=0)


def checkpoints_here(folder: Path) -> list[ListedCheckpoint]:
    """The checkpoints in a local folder, in the order of their names, without what is at its URL.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder}: expected a folder of checkpoints, but it cannot be read: {error}. Fix: pass a readable folder."
        ) from error
    checkpoints = []
    here = {os.path.realpath(entry.path) for entry in entries if not entry.is_symlink()}
    for entry in entries:
        path = folder / entry.name
        if entry.is_symlink() and os.path.realpath(path) in here:
            continue  # a link to a checkpoint in this folder
        if is_checkpoint(path):
            one = ListedCheckpoint(path, *inspect_checkpoint(path))
            if one.problem is None or is_checkpoint(path):  # otherwise it was removed in the meantime
                checkpoints.append(one)
    return checkpoints


def _find(folder: Path) -> list[ListedCheckpoint]:
    """The checkpoints in a folder and at its URL, if it is a staging folder; of two with one name the newer good one."""
    by_name = {one.path.name: one for one in checkpoints_here(folder)}
    for name, there in sorted(remote_sync.checkpoints(folder).items()):
        if name not in by_name or _is_better(there, by_name[name]):
            by_name[name] = ListedCheckpoint(folder / name, there.manifest, there.problem)
    return list(by_name.values())


def _is_better(there: RemoteCheckpoint, here: ListedCheckpoint) -> bool:
    """Whether a checkpoint at the URL is to be used instead of the local one, as in `remote_sync.fetch`."""
    if there.manifest is None:
        return False
    return here.problem is not None or here.manifest is None or here.manifest.saved_at < there.manifest.saved_at


# ---------------------------------------------------------------------------------------------------------------- names


def free_name(folder: Path, name: str, taken: Collection[str] = ()) -> str:
    """`name` if it is free in `folder`, else the first free one of `name-v1`, `name-v2`, …

    Args:
        folder: The folder for the checkpoint; need not exist.
        name: The preferred name.
        taken: Names that are reserved although they do not exist yet, such as that of a save in progress.
    """
    number, free = 0, name
    taken = {*taken, *remote_sync.names(folder)}
    while free == POINTER or free in taken or os.path.lexists(folder / free):
        number += 1
        free = f"{name}-v{number}"
    return free


def write_pointer(folder: Path, name: str, *, link: bool = False) -> None:
    """Replace the content of the file `last` in `folder` atomically by `name`, the name of a checkpoint in it.

    Args:
        folder: The folder of the checkpoint.
        name: The name of the checkpoint.
        link: Make `last` a relative symbolic link to the checkpoint instead of a file. Where links cannot be created, such as
            on Windows without that right, it is a file.

    Raises:
        CheckpointWriteError: It cannot be written.
        CheckpointError: `name` is not a plain name.
    """
    if not is_plain_name(name):
        raise CheckpointError(
            f"expected the name of a checkpoint in {folder} without a path, got {name!r}. Fix: use path.name."
        )
    temporary = folder / f".{POINTER}.tmp-{secrets.token_hex(8)}"
    try:
        try:
            if not link or not _create_link(temporary, name):
                write_file(temporary, [os.fsencode(name) + b"\n"])
            os.replace(temporary, folder / POINTER)
            remote_sync.note_change(folder / POINTER)
        except BaseException:
            _discard(temporary)
            raise
        sync_folder(folder)
    except OSError as error:
        raise CheckpointWriteError(
            f"{folder / POINTER} could not be written: {error}. Fix: make the folder writable, or remove what is at this path."
        ) from error


def _create_link(path: Path, target: str) -> bool:
    """Create a symbolic link to a folder; returns whether this is possible here."""
    try:
        os.symlink(target, path, target_is_directory=True)
    except (NotImplementedError, OSError):
        return False
    return True


# -------------------------------------------------------------------------------------------------------------- writing


def check_writable(folder: Path) -> None:
    """Create `folder` with its parents, and write and remove a small file in it.

    Raises:
        CheckpointWriteError: One of these fails.
    """
    probe = folder / f".probe.tmp-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_file(probe, [b"trainkit\n"])
        finally:
            _discard(probe)
    except OSError as error:
        raise CheckpointWriteError(
            f"Checkpoints cannot be written to {folder}: {error}. Expected a writable folder, or a path where one can be "
            "created. Fix: choose another folder with ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...), or save "
            "no checkpoints: Trainer(enable_checkpointing=False)."
        ) from error


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):  # if the folder has become read-only, the next start tries again
        path.unlink(missing_ok=True)


# The names of what commit(), remove(), check_writable(), write_pointer() and replacing() leave behind when they are killed.
_PARTIAL = re.compile(r"\..+\.tmp-[A-Za-z0-9_-]{1,64}", re.DOTALL)
_REMOVED = re.compile(r"\..+\.del-[0-9a-f]{16}", re.DOTALL)
_OUR_FILE = re.compile(r"\.(probe|last|.+\.ckpt)\.tmp-[0-9a-f]{16}", re.DOTALL)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed to `.<name>.del-…` first, so that no process sees an incomplete one.

    Of a link only the link is removed. A path that does not exist is not an error.

    Raises:
        CheckpointError: `path` is not a checkpoint; nothing was removed.
        CheckpointWriteError: It cannot be removed completely; what is left is removed at the next start.
    """
    if not os.path.lexists(path):
        remote_sync.note_change(path)  # it may be at the URL of a staging folder only
        return
    if not is_checkpoint(path):
        raise CheckpointError(f"{path}: expected a checkpoint to remove, but this is not one; it was not changed.")
    hidden = make_hidden_path(path, f".del-{secrets.token_hex(8)}")
    try:
        try:
            os.rename(path, hidden)
        except FileNotFoundError:
            return
        # Otherwise a power failure could leave a checkpoint under its old name with some files deleted.
        sync_folder(path.parent)
        _delete(hidden)
        remote_sync.note_change(path)
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
        if entry.name.endswith(OF_HOOKS):
            return True
        # An unfinished save contains folders only if they were kept from the checkpoint that it replaces.
        with os.scandir(entry.path) as inside:
            return has_checkpoint_files(Path(entry.path)) or not any(inner.is_dir(follow_symlinks=False) for inner in inside)
    is_link = entry.is_symlink() and entry.name.startswith(f".{POINTER}.")  # `write_pointer` and `link_last` create such links
    return (is_link or entry.is_file(follow_symlinks=False)) and _OUR_FILE.fullmatch(entry.name) is not None


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
