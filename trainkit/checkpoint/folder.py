"""A folder of checkpoints: which there are, the order to try them in, free names, removal, and the pointer to the last."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from trainkit.checkpoint.commit import sync_folder
from trainkit.checkpoint.identify import has_checkpoint_files, is_checkpoint
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.reader import inspect_checkpoint
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.errors import CheckpointError, CheckpointWriteError, CorruptCheckpointError
from trainkit.paths import local_path

__all__ = [
    "CHECKPOINTS",
    "POINTER",
    "FoundCheckpoint",
    "candidates",
    "check_writable",
    "folders_below",
    "free_name",
    "is_abandoned",
    "list_checkpoints",
    "next_counter",
    "read_pointer",
    "remove",
    "remove_leftovers",
    "write_pointer",
]

CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in the folder of a run."""

POINTER = "last"
"""Name of the file that holds the name of the checkpoint saved last."""

_MAX_NAME = 255  # bytes, on every file system in use
# Exactly what commit(), remove(), check_writable() and write_pointer() make, and a kill leaves.
_PARTIAL = re.compile(r"\..+\.tmp-[A-Za-z0-9_-]{1,64}", re.DOTALL)
_REMOVED = re.compile(r"\..+\.del-[0-9a-f]{16}", re.DOTALL)
_OUR_FILE = re.compile(r"\.(probe|last)\.tmp-[0-9a-f]{16}")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in a folder.

    Attributes:
        path: the checkpoint.
        manifest: what it says of itself, None if that cannot be trusted.
        problem: what is wrong with it, None if nothing was found; its files have been measured then, not read.
    """

    path: Path
    manifest: Manifest | None
    problem: str | None


def list_checkpoints(folder: str | os.PathLike[str]) -> list[FoundCheckpoint]:
    """The checkpoints in ``folder``: good ones newest first, then the bad ones, each with what is wrong.

    Newer is: of a run whose latest checkpoint was saved later, in a run the one that was saved after more others. Only
    manifests are read, and the sizes of the files compared; :meth:`Checkpoint.verify` reads everything. A checkpoint is a
    folder that holds a file of a checkpoint's and whose name does not start with ``.``; a folder that is not there has none.

    Raises:
        CheckpointError: ``folder`` cannot be read.
    """
    found = candidates(local_path(folder, "folder"))
    return [one for one in found if one.problem is None] + [one for one in found if one.problem is not None]


def candidates(*folders: str | os.PathLike[str]) -> list[FoundCheckpoint]:
    """The checkpoints in the order in which to try them: of the run saved to last the newest first, then older runs.

    Bad ones are in it, so that each is named before an older one is used: those whose manifest is sound at their place,
    the others, of which nothing can be known, before the newest of their folder; first if there is none.

    Raises:
        CheckpointError: a folder cannot be read.
    """
    found = [one for folder in folders for one in _find(Path(folder))]
    latest: dict[str, str] = {}
    for one in found:
        if one.manifest is not None:
            latest[one.manifest.run_id] = max(latest.get(one.manifest.run_id, ""), one.manifest.saved_at)

    def age(one: FoundCheckpoint) -> tuple[str, str, int, str, str]:
        assert one.manifest is not None
        about = one.manifest
        return latest[about.run_id], about.run_id, about.save_counter, about.saved_at, one.path.name

    unknown: dict[Path, list[FoundCheckpoint]] = {}
    for one in sorted((one for one in found if one.manifest is None), key=lambda one: one.path.name):
        unknown.setdefault(one.path.parent, []).append(one)
    ordered: list[FoundCheckpoint] = []
    for one in sorted((one for one in found if one.manifest is not None), key=age, reverse=True):
        ordered += [*unknown.pop(one.path.parent, []), one]
    return [one for left in unknown.values() for one in left] + ordered


def folders_below(root: str | os.PathLike[str], *, deep: bool = True) -> list[Path]:
    """The folders ``checkpoints`` of the runs below ``root``, which need not exist; no other folder is read whole.

    Args:
        root: a ``default_root_dir``, the folder of an experiment, or that of a run.
        deep: as far down as loggers put their runs: ``<root>/<name>/<run>`` and ``<root>/logs/<name>/<run>``. Else:
            ``<root>`` and ``<root>/<run>`` only.
    """
    level, places = [Path(root)], [Path(root)]
    for _ in range(2 if deep else 1):
        level = [inner for folder in level for inner in _folders_in(folder)]
        places += level
    if deep:
        level = [inner for folder in level if folder.parent == Path(root, "logs") for inner in _folders_in(folder)]
        places += level
    return [folder / CHECKPOINTS for folder in places if (folder / CHECKPOINTS).is_dir()]


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:  # not there, or somebody else's
        return []
    return [folder / name for name in names if name != CHECKPOINTS]


def next_counter(folder: str | os.PathLike[str], run_id: str) -> int:
    """The save counter for the next checkpoint of a run: one more than its highest in ``folder``, 1 for the first."""
    found = [one.manifest for one in _find(Path(folder)) if one.manifest is not None]
    return 1 + max((manifest.save_counter for manifest in found if manifest.run_id == run_id), default=0)


def _find(folder: Path) -> list[FoundCheckpoint]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder}: expected a folder of checkpoints that can be read: {error}. Fix: name another folder."
        ) from error
    found = []
    here = {os.path.realpath(entry.path) for entry in entries if not entry.is_symlink()}
    for entry in entries:
        path = folder / entry.name
        if entry.is_symlink() and os.path.realpath(path) in here:
            continue  # another name of one that is here
        if is_checkpoint(path):
            one = FoundCheckpoint(path, *inspect_checkpoint(path))
            if one.problem is None or is_checkpoint(path):  # else somebody removed it meanwhile
                found.append(one)
    return found


# ---------------------------------------------------------------------------------------------------------------- names


def free_name(folder: Path, name: str, taken: Collection[str] = ()) -> str:
    """``name`` if nothing in ``folder`` has it, else the first free one of ``name-v1``, ``name-v2``, …

    Args:
        folder: where the checkpoint is to be; need not exist.
        name: how it would be called.
        taken: names that are given away although nothing is there yet, such as that of a save in flight.
    """
    number, free = 0, name
    while free == POINTER or free in taken or os.path.lexists(folder / free):
        number += 1
        free = f"{name}-v{number}"
    return free


def write_pointer(folder: Path, name: str) -> None:
    """Let the file ``last`` in ``folder`` hold ``name``, the name of a checkpoint beside it: the old one or the new one.

    Raises:
        CheckpointWriteError: it cannot be written.
        CheckpointError: ``name`` is not a plain name.
    """
    if not _is_plain(name):
        raise CheckpointError(f"expected the plain name of a checkpoint in {folder}, got {name!r}. Fix: use path.name.")
    temporary = folder / f".{POINTER}.tmp-{secrets.token_hex(8)}"
    try:
        try:
            _write_through(temporary, os.fsencode(name) + b"\n")
            os.replace(temporary, folder / POINTER)
        except BaseException:
            _discard(temporary)
            raise
        sync_folder(folder)
    except OSError as error:
        raise CheckpointWriteError(
            f"{folder / POINTER} could not be written: {error}. Fix: make the folder writable, or remove what is there."
        ) from error


def read_pointer(folder: Path) -> str | None:
    """The name that :func:`write_pointer` wrote, None if there is no such file. The checkpoint itself is not looked at.

    Raises:
        CorruptCheckpointError: the file ``last`` does not hold a plain name.
    """
    path = folder / POINTER
    if not os.path.lexists(path) or is_checkpoint(path):  # a checkpoint may have any name
        return None
    data = read_small_file(path, _MAX_NAME + 1)
    name = os.fsdecode(data[:-1])
    if not data.endswith(b"\n") or not _is_plain(name):
        raise CorruptCheckpointError(
            f"{path}: expected the name of a checkpoint and a line end, got {data[:80]!r}. Fix: remove this file."
        )
    return name


def _is_plain(name: str) -> bool:
    """Whether a text is the name of something in a folder, and of nothing that is elsewhere or hidden."""
    return (
        0 < len(os.fsencode(name)) <= _MAX_NAME
        and not name.startswith(".")
        and not any(character in "/\\:" or ord(character) < 32 or ord(character) == 127 for character in name)
    )


# -------------------------------------------------------------------------------------------------------------- removal


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed to ``.<name>.del-…`` first, so that nobody ever sees one that is half there.

    Of a link only the link is removed. One that is gone already is no error.

    Raises:
        CheckpointError: ``path`` is not a checkpoint; nothing was removed.
        CheckpointWriteError: it cannot be removed, or not all of it: what is left is removed at the next start.
    """
    if not os.path.lexists(path):
        return
    if not is_checkpoint(path):
        raise CheckpointError(f"{path}: expected a checkpoint to remove; this is none, and is left alone.")
    mark = f".del-{secrets.token_hex(8)}"
    name = os.fsencode(path.name)[: _MAX_NAME - 1 - len(mark)]
    hidden = path.with_name(f".{os.fsdecode(name)}{mark}")
    try:
        try:
            os.rename(path, hidden)
        except FileNotFoundError:
            return
        # After a power cut the files must not be gone while the rename is not.
        sync_folder(path.parent)
        _delete(hidden)
    except OSError as error:
        raise CheckpointWriteError(f"{path} could not be removed: {error}. Fix: make the folder writable.") from error


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what killed runs have left in ``folder``: unfinished saves and removals; returns what was removed.

    Only for the holder of the folder's lock. What merely resembles them (a link, a file where there would be a folder, a
    folder that has folders in it) is left alone, and so is what cannot be removed.
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
    """Whether a run was killed before its first checkpoint was complete: the folder has leftovers, and no checkpoint."""
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
        # Other people's folders are no unfinished save, unless they were carried over from the checkpoint to be replaced.
        with os.scandir(entry.path) as inside:
            return has_checkpoint_files(Path(entry.path)) or not any(inner.is_dir(follow_symlinks=False) for inner in inside)
    return entry.is_file(follow_symlinks=False) and _OUR_FILE.fullmatch(entry.name) is not None


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# -------------------------------------------------------------------------------------------------------------- writing


def check_writable(folder: Path) -> None:
    """Make ``folder``, with those above it, and write and remove a small file in it.

    Raises:
        CheckpointWriteError: that cannot be done.
    """
    probe = folder / f".probe.tmp-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _write_through(probe, b"trainkit\n")
        finally:
            _discard(probe)
    except OSError as error:
        raise CheckpointWriteError(
            f"Checkpoints cannot be written to {folder}: {error}. Expected a folder that can be made and written to. Fix: "
            "choose another, ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...), or "
            "Trainer(enable_checkpointing=False)."
        ) from error


def _write_through(path: Path, data: bytes) -> None:
    """A new file with ``data`` that has reached the disk."""
    with path.open("xb", buffering=0) as file:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(file.fileno())


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):  # a folder that has become read-only: the next start tries again
        path.unlink(missing_ok=True)
