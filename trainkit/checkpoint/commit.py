"""A draft on the disk: all of it under its name, or nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Collection
from pathlib import Path

from trainkit.checkpoint.draft import Draft
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest, digest_line
from trainkit.checkpoint.reader import read_small_file
from trainkit.checkpoint.tagged import MAX_JSON_BYTES
from trainkit.checkpoint.tensor_file import write_file
from trainkit.errors import CheckpointError, CheckpointWriteError, CorruptCheckpointError

__all__ = ["commit", "sync_folder"]

_MAX_NAME = 255  # bytes, on every file system in use
_ABANDONED = 3600.0  # seconds without a change
_FOLDER_BYTES = 2 * 4096  # what a folder and its entry in the parent may take beside its files
_DIGEST_LINE = re.compile(rb"[0-9a-f]{64}  manifest\.json\n")
# What a checkpoint is made of, for one whose manifest cannot be read.
_OUR_NAMES = re.compile(r"manifest\.(json|sha256)|state\.json|.*\.safetensors(\.index\.json)?", re.DOTALL)


def _numbers(*names: str) -> set[int]:
    return {getattr(errno, name) for name in names if hasattr(errno, name)}


_NOT_SUPPORTED = _numbers("EINVAL", "ENOSYS", "ENOTSUP", "EOPNOTSUPP")
_FULL = _numbers("ENOSPC", "EDQUOT")
_FORBIDDEN = _numbers("EACCES", "EPERM", "EROFS")


def commit(draft: Draft, target: Path, *, replace: bool = False) -> Manifest:
    """Write a checkpoint so that ``target`` is never half there, not even after a power cut.

    Everything goes to ``.<name>.tmp-<run_id>`` beside ``target``, the manifest's digest last, each file synced; then that
    folder is renamed. Folders above ``target`` are made. An empty folder at ``target`` is used.

    Args:
        draft: what to write.
        target: the folder that the checkpoint will be. A link is followed.
        replace: if a checkpoint is there already, put the new one in its place once it is complete: at each moment there is
            the one or the other. Where the file system cannot exchange two folders, the old one is called
            ``<name>.replaced`` for a moment. Files in it that are not the checkpoint's are carried over.

    Returns:
        The manifest as written.

    Raises:
        CheckpointWriteError: it could not be written; what was written is removed again, what was there is untouched.
        CheckpointError: something else is at ``target``, or anything if ``replace`` is False.
    """
    if os.path.islink(target) or target.name in ("", ".."):
        target = Path(os.path.realpath(target))
    partial = _partial_of(target, draft.run_id)
    try:
        old = _occupant(target, replace)
        _make_folder(target.parent)
        _remove(partial)  # left by a kill of this very run
        _remove_abandoned(target)
        _check_space(draft, target)
        try:
            partial.mkdir()
            if old is not None:
                _carry_over(target, partial, old | set(draft.sizes))
            manifest = _write(draft, partial)
            _put_in_place(partial, target, exchange=old is not None)
        except BaseException:
            _remove(partial)
            raise
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointWriteError(
            f"{target}: the checkpoint could not be written: {error}. Fix: {_fix(error, draft, target)}"
        ) from error
    if old is not None:
        _remove(partial)  # that is the old one now
    return manifest


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the system can.

    Raises:
        OSError: the disk failed.
    """
    if os.name == "nt":  # a folder cannot be opened there
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # one may write to it but not list it
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def _partial_of(target: Path, run_id: str) -> Path:
    mark = f".tmp-{run_id}"
    name, room = target.name, _MAX_NAME - 1 - len(mark)
    if len(os.fsencode(name)) > room:
        name = os.fsencode(name)[:room].decode("utf-8", "ignore")
    return target.parent / f".{name}{mark}"


def _occupant(target: Path, replace: bool) -> set[str] | None:
    """The names of the files that make the checkpoint at ``target``; None if nothing or an empty folder is there."""
    if target.name.startswith("."):
        raise CheckpointError(f"{target}: a folder whose name starts with '.' is no checkpoint. Fix: choose another name")
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(mode):
        raise CheckpointError(f"{target}: expected a folder or nothing, but a file is there. Fix: choose another path")
    names = os.listdir(target)
    if not names:
        return None
    if not replace:
        raise CheckpointError(f"{target}: expected nothing there, but the folder is not empty. Fix: choose another path")
    ours = _files_of_checkpoint(target, names)
    if ours is None:
        raise CheckpointError(
            f"{target}: expected a checkpoint to replace, an empty folder or nothing, but the folder holds something else "
            f"({', '.join(sorted(map(repr, names))[:3])}{', …' if len(names) > 3 else ''}). Fix: choose another path"
        )
    return ours


def _files_of_checkpoint(folder: Path, names: Collection[str]) -> set[str] | None:
    """Which of the ``names`` make a checkpoint, a damaged one too; None if the folder is none."""
    by_name = {name for name in names if _OUR_NAMES.fullmatch(name)}
    try:
        data = read_small_file(folder / MANIFEST, MAX_JSON_BYTES)
        return {MANIFEST, DIGEST, *Manifest.from_bytes(data, str(folder / MANIFEST)).files}
    except CorruptCheckpointError:
        pass
    except CheckpointError:  # a later version's
        return by_name
    try:
        return by_name if _DIGEST_LINE.fullmatch(read_small_file(folder / DIGEST, 1024)) else None
    except CorruptCheckpointError:
        return None


def _make_folder(folder: Path) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _check_space(draft: Draft, target: Path) -> None:
    total, _, free = shutil.disk_usage(target.parent)
    block = os.statvfs(target.parent).f_frsize if hasattr(os, "statvfs") else 4096
    needed = sum(-(-size // block) * block for size in draft.sizes.values()) + _FOLDER_BYTES
    if total and needed > free:  # some file systems do not tell: 0 of 0
        raise CheckpointWriteError(
            f"{target}: too little space: the checkpoint needs {needed} bytes, {free} are free. Nothing was written. "
            "Fix: free some, keep fewer checkpoints, or save to another file system"
        )


def _write(draft: Draft, partial: Path) -> Manifest:
    digests = {}
    path = partial
    try:
        for name, pieces in draft.files():
            path = partial / name
            size, digests[name] = write_file(path, pieces)
            if size != draft.sizes[name]:
                raise CheckpointWriteError(
                    f"{path}: laid out with {draft.sizes[name]} bytes, but {size} were written. Fix: leave the tensors as "
                    "they are until the save has returned"
                )
        manifest = draft.manifest(digests)
        data = manifest.to_bytes()
        for path, content in ((partial / MANIFEST, data), (partial / DIGEST, digest_line(data))):
            write_file(path, [content])
        path = partial
        sync_folder(partial)
    except OSError as error:
        if error.filename is None:  # a failed write does not know the name
            error.filename = str(path)
        raise
    return manifest


def _carry_over(old: Path, new: Path, without: Collection[str]) -> None:
    """Put what else lies in ``old`` into ``new`` too, as further names of the same files where the system has such."""
    known = {name.lower() for name in without}
    for name in os.listdir(old):
        if name.lower() in known:
            continue
        if (old / name).is_dir() and not (old / name).is_symlink():
            shutil.copytree(old / name, new / name, symlinks=True, copy_function=_link)
        else:
            _link(old / name, new / name)


def _link(source: str | Path, copy: str | Path) -> None:
    try:
        if not os.path.islink(source):
            os.link(source, copy)
            return
    except OSError:  # a file system without them
        pass
    shutil.copy2(source, copy, follow_symlinks=False)


def _put_in_place(partial: Path, target: Path, *, exchange: bool) -> None:
    """``partial`` becomes ``target``; what was there before, if anything, becomes ``partial``."""
    if not exchange or not os.path.lexists(target):  # somebody may have removed it meanwhile
        if os.name == "nt" and target.is_dir():  # there a rename replaces no folder, not even an empty one
            target.rmdir()
        os.rename(partial, target)
    elif not _exchange(partial, target):
        _exchange_by_renames(partial, target)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change their names in one step; False where the system or the file system cannot."""
    first, second = os.fsencode(one), os.fsencode(other)
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        result = None if rename is None else rename(here, first, here, second, exchange)
    elif sys.platform == "darwin":
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renamex_np", None)
        result = None if rename is None else rename(first, second, 2)  # RENAME_SWAP
    else:
        return False
    if result == 0:
        return True
    number = ctypes.get_errno()
    if result is None or number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _exchange_by_renames(partial: Path, target: Path) -> None:
    """The same in three steps; in between the old checkpoint is there under a name that a reader of the folder finds."""
    aside = target.with_name(f"{target.name}.replaced")
    number = 0
    while os.path.lexists(aside):
        number += 1
        aside = target.with_name(f"{target.name}.replaced-v{number}")
    try:
        os.rename(target, aside)
        os.rename(partial, target)
    except BaseException:
        if os.path.lexists(aside) and not os.path.lexists(target):
            os.rename(aside, target)
        raise
    os.rename(aside, partial)


def _remove(path: Path) -> None:
    """Remove a file or folder as far as it goes: what cannot be removed has a name that nobody reads."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_abandoned(target: Path) -> None:
    """Remove what killed runs have left of checkpoints at this very path; one that is being written is younger."""
    for path in target.parent.glob(glob.escape(f".{target.name}.tmp-") + "*"):
        with contextlib.suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
            if time.time() - newest > _ABANDONED:
                _remove(path)


def _fix(error: OSError, draft: Draft, target: Path) -> str:
    if error.errno in _FULL:
        free = shutil.disk_usage(target.parent).free if target.parent.is_dir() else 0
        return f"it needs {draft.size} bytes, and {free} are free. Free some, keep fewer checkpoints, or save elsewhere"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of a file (ulimit -f)"
    if error.errno in _FORBIDDEN:
        return "make the folder writable, or save to another one"
    return "see what that folder and its disk have"
