"""Writes a checkpoint to the disk: completely under its name, or not at all."""

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
from collections.abc import Collection, Iterator
from pathlib import Path

from trainkit.checkpoint.all_ranks import SHARED_FOLDER_ADVICE, Group, run_on_all_ranks, wait_for_path
from trainkit.checkpoint.draft import Draft
from trainkit.checkpoint.identify import hidden_path
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest, digest_line
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.checkpoint.tensor_file import write_file
from trainkit.distributed.world import ThreadExchange
from trainkit.errors import CheckpointError, CheckpointWriteError, CorruptCheckpointError
from trainkit.tagged_json.strict_json import MAX_JSON_BYTES

__all__ = ["check_target", "commit", "sync_folder"]

_ALONE = ThreadExchange()
_ABANDONED = 3600.0  # seconds without a change, after which an unfinished save is removed
_FOLDER_BYTES = 2 * 4096  # what a folder and its entry in the parent may need in addition to its files
_DIGEST_LINE = re.compile(rb"[0-9a-f]{64}  manifest\.json\n")
# The files of a checkpoint whose manifest cannot be read.
_OUR_NAMES = re.compile(r"manifest\.(json|sha256)|state\.json|.*\.safetensors(\.index\.json)?", re.DOTALL)


def _numbers(*names: str) -> set[int]:
    return {getattr(errno, name) for name in names if hasattr(errno, name)}


_NOT_SUPPORTED = _numbers("EINVAL", "ENOSYS", "ENOTSUP", "EOPNOTSUPP")
_FULL = _numbers("ENOSPC", "EDQUOT")
_FORBIDDEN = _numbers("EACCES", "EPERM", "EROFS")


def commit(draft: Draft, target: Path, *, replace: bool = False, team: Group = _ALONE) -> Manifest | None:
    """Write a checkpoint so that `target` is never incomplete, not even after a power failure.

    All files are written to `.<name>.tmp-<run_id>` next to `target` and synced, the manifest's digest last; then that
    folder is renamed. Parents of `target` are created. `target` may be an empty folder.

    With several ranks each writes and syncs the files of its own `Draft`; the main process does the rest. Collective.

    Args:
        draft: what to write.
        target: the folder of the checkpoint, as given on the main process. A link is followed.
        replace: replace an existing checkpoint once the new one is complete, so that one of them is there at any time. If the
            file system cannot exchange two folders, the old one is called `<name>.replaced` for a moment. Files in it that
            do not belong to the checkpoint are kept.
        team: the ranks that write.

    Returns:
        The manifest as written, on the main process; `None` on other ranks.

    Raises:
        CheckpointWriteError: it could not be written. What was written is removed; what was at `target` is unchanged.
        CheckpointError: `target` exists and is not a checkpoint, or `replace` is False. An error on one rank is raised on
            all ranks and names the rank.
    """
    work = _Commit(draft, target, replace, team.rank == 0)
    try:
        opened = run_on_all_ranks(team, work.open, CheckpointWriteError)
        _compare([layout for _, layout in opened])
        work.partial = Path(opened[0][0])
        files = run_on_all_ranks(team, work.write, CheckpointWriteError)
        run_on_all_ranks(team, lambda: work.close(files), CheckpointWriteError)
    except BaseException:
        work.undo()
        raise
    work.tidy()
    return work.manifest


def check_target(target: Path) -> None:
    """Check that a `commit` with `replace` would accept the target.

    Raises:
        CheckpointError: `target` exists and is not a checkpoint.
    """
    _occupant(_followed(target), replace=True)


class _Commit:
    """The part of one rank in a commit.

    Attributes:
        partial: the folder to which the checkpoint is written.
        manifest: as written, on the main process.
    """

    def __init__(self, draft: Draft, target: Path, replace: bool, main: bool) -> None:
        target = _followed(target) if main else target
        self._draft, self._target, self._replace, self._main = draft, target, replace, main
        self._old: set[str] | None = None
        self._begun = False
        self.partial = hidden_path(target, f".tmp-{draft.run_id}")
        self.manifest: Manifest | None = None

    def open(self) -> tuple[str, str]:
        """Create the folder to write to. Returns its path and the layout of the draft."""
        if self._main:
            with self._explained():
                self._old = _occupant(self._target, self._replace)
                _make_folder(self._target.parent)
                _remove(self.partial)  # left behind when this run was killed
                _remove_abandoned(self._target)
                _check_space(self._draft, self._target)
                self._begun = True
                self.partial.mkdir()
                if self._old is not None:
                    _carry_over(self._target, self.partial, self._old | set(self._draft.sizes))
        return str(self.partial), self._draft.layout

    def write(self) -> dict[str, str]:
        """Write the files of this rank. Returns their digests."""
        with self._explained():
            if not self._main and not wait_for_path(self.partial):
                raise CheckpointWriteError(f"{self.partial}, created by the main process, is not here. {SHARED_FOLDER_ADVICE}")
            digests = _write(self._draft, self.partial)
            if not self._main:
                sync_folder(self.partial)
            return digests

    def close(self, files: list[dict[str, str]]) -> None:
        """After all ranks have written their files: write the manifest and rename the folder."""
        if not self._main:
            return
        with self._explained():
            self.manifest = self._draft.manifest({name: digest for own in files for name, digest in own.items()})
            _write_manifest(self.partial, self.manifest.to_bytes())
            _put_in_place(self.partial, self._target, exchange=self._old is not None)
            self._begun = False  # what is at partial now, if anything, is the old checkpoint
            sync_folder(self._target.parent)

    def undo(self) -> None:
        """After an error: remove what was written."""
        if self._begun:
            _remove(self.partial)

    def tidy(self) -> None:
        """After success: remove the checkpoint that was replaced."""
        if self._old is not None:
            _remove(self.partial)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointWriteError(
                f"{self._target}: the checkpoint could not be written: {error}. Fix: {_fix(error, self._draft, self._target)}"
            ) from error


def _compare(layouts: list[str]) -> None:
    """Check that all ranks have laid out the same files, since each writes only its own."""
    others = [str(rank) for rank, layout in enumerate(layouts) if layout != layouts[0]]
    if others:
        raise CheckpointWriteError(
            f"the tensors of rank {', '.join(others)} are not those of rank 0 (their names, dtypes or shapes differ), so there "
            "is no checkpoint of all of them. Fix: build the same model and optimizer on every process"
        )


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure, if the system can.

    Raises:
        OSError: the disk failed.
    """
    if os.name == "nt":  # a folder cannot be opened there
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # it may be writable but not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


def _followed(target: Path) -> Path:
    """The target of a link, and any other path unchanged."""
    return Path(os.path.realpath(target)) if os.path.islink(target) or target.name in ("", "..") else target


def _occupant(target: Path, replace: bool) -> set[str] | None:
    """The names of the files of the checkpoint at `target`; `None` if nothing or an empty folder is there."""
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
    """The `names` that belong to a checkpoint, which may be damaged; `None` if the folder is not a checkpoint."""
    by_name = {name for name in names if _OUR_NAMES.fullmatch(name)}
    try:
        data = read_small_file(folder / MANIFEST, MAX_JSON_BYTES)
        return {MANIFEST, DIGEST, *Manifest.from_bytes(data, str(folder / MANIFEST)).files}
    except CorruptCheckpointError:
        pass
    except CheckpointError:  # of a later version
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
    if total and needed > free:  # some file systems report 0 of 0
        raise CheckpointWriteError(
            f"{target}: too little space: the checkpoint needs {needed} bytes, {free} are free. Nothing was written. "
            "Fix: free some, keep fewer checkpoints, or save to another file system."
        )


def _write(draft: Draft, partial: Path) -> dict[str, str]:
    """Write the files of a draft. Returns their digests."""
    digests = {}
    with contextlib.closing(draft.files()) as files:
        for name, pieces in files:
            with _named(partial / name):
                size, digests[name] = write_file(partial / name, pieces)
            if size != draft.sizes[name]:
                raise CheckpointWriteError(
                    f"{partial / name}: laid out with {draft.sizes[name]} bytes, but {size} were written. Fix: leave the "
                    "tensors as they are until the save has returned"
                )
    return digests


def _write_manifest(partial: Path, data: bytes) -> None:
    for name, content in ((MANIFEST, data), (DIGEST, digest_line(data))):
        with _named(partial / name):
            write_file(partial / name, [content])
    with _named(partial):
        sync_folder(partial)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the name of the file to an error of writing, which does not have it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _carry_over(old: Path, new: Path, without: Collection[str]) -> None:
    """Add the other files in `old` to `new`, as hard links where possible."""
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
    except OSError:  # a file system without hard links
        pass
    shutil.copy2(source, copy, follow_symlinks=False)


def _put_in_place(partial: Path, target: Path, *, exchange: bool) -> None:
    """Rename `partial` to `target`, and what was at `target`, if anything, to `partial`."""
    if not exchange or not os.path.lexists(target):  # it may have been removed meanwhile
        if os.name == "nt" and target.is_dir():  # where a rename replaces no folder, not even an empty one
            target.rmdir()
        os.rename(partial, target)
    elif not _exchange(partial, target):
        _exchange_by_renames(partial, target)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; False if the system or the file system cannot."""
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
    """The same in three steps; meanwhile the old checkpoint has a name that is found by a reader of the folder."""
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
    """Remove a file or folder as far as possible: the name of what is left is ignored by readers."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_abandoned(target: Path) -> None:
    """Remove unfinished saves of killed runs at this path. A save in progress has changed more recently."""
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
