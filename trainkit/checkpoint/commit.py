"""Writes a checkpoint to disk so that its folder is either complete or absent."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.checkpoint.checkpoint_plan import CheckpointPlan
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest, digest_line, make_hidden_path
from trainkit.checkpoint.ranks import SHARED_FOLDER_ADVICE, Group, run_on_all_ranks, wait_for_path
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.checkpoint.tensor_file import write_file
from trainkit.checkpoint.urls import remote_sync
from trainkit.console import join_names
from trainkit.distributed.world import ThreadExchange
from trainkit.errors import CheckpointError, CheckpointWriteError, CorruptCheckpointError
from trainkit.tagged_json.codec import MAX_JSON_BYTES

__all__ = ["NONFINITE", "OF_HOOKS", "CommitResult", "check_target", "commit", "make_hook_folder", "replacing", "sync_folder"]

OF_HOOKS = "-files"
"""What the name of a folder into which hooks write ends with."""

NONFINITE = "-nonfinite"
"""What is appended to the name of a checkpoint that is not finite and would have replaced one that is."""

_SINGLE_RANK = ThreadExchange()
_ABANDONED_AFTER_SECONDS = 3600.0  # seconds without a change, after which an unfinished save is removed
_FOLDER_BYTES = 2 * 4096  # A folder and its entry in the parent need space too.
_MAX_NAMES_PER_RANK = 5  # parameters that are not finite that each rank tells the others
_DIGEST_LINE = re.compile(rb"[0-9a-f]{64}  manifest\.json\n")
# The files of a checkpoint whose manifest cannot be read.
_OUR_NAMES = re.compile(r"manifest\.(json|sha256)|state\.json|.*\.safetensors(\.index\.json)?", re.DOTALL)


def _numbers(*names: str) -> set[int]:
    return {getattr(errno, name) for name in names if hasattr(errno, name)}


_NOT_SUPPORTED = _numbers("EINVAL", "ENOSYS", "ENOTSUP", "EOPNOTSUPP")
_FULL = _numbers("ENOSPC", "EDQUOT")
_FORBIDDEN = _numbers("EACCES", "EPERM", "EROFS")


@dataclass(frozen=True)
class CommitResult:
    """A checkpoint that was written; the same on all ranks except for `manifest`.

    Attributes:
        path: Its folder.
        nonfinite: Parameters that are not finite: the first few of each rank. Empty if all are finite.
        kept: The checkpoint with finite parameters that it would have replaced otherwise; `None` if there was none.
        manifest: As written, on the main process; `None` on other ranks.
    """

    path: Path
    nonfinite: tuple[str, ...]
    kept: Path | None
    manifest: Manifest | None

    @property
    def finite(self) -> bool:
        """Whether all parameters are finite."""
        return not self.nonfinite

    @property
    def text(self) -> str:
        """What is not finite, for messages."""
        kept = "" if self.kept is None else f" {self.kept} is finite, so it was not replaced."
        return f"parameters in {self.path} are not finite: {join_names(self.nonfinite)}.{kept}"


def commit(plan: CheckpointPlan, target: Path, *, replace: bool = False, group: Group = _SINGLE_RANK) -> CommitResult:
    """Write a checkpoint so that `target` is never incomplete, not even after a power failure.

    All files are written to `.<name>.tmp-<run_id>` next to `target` and synced, the manifest's digest last; then that
    folder is renamed. Parents of `target` are created. `target` may be an empty folder.

    With several ranks, each writes and syncs the files of its `CheckpointPlan`, and the main process does the rest. Collective.

    Args:
        plan: What to write.
        target: The folder of the checkpoint, as given on the main process. A link is followed.
        replace: Replace an existing checkpoint once the new one is complete, so that one of the two exists at any time. If the
            file system cannot exchange two folders, the old one is renamed to `<name>.replaced` for a moment. Its files that
            do not belong to the checkpoint are kept. One whose parameters are finite, or that does not say, is not replaced
            by one that has others: the new one becomes `<name>-nonfinite`.
        group: The ranks that write.

    Returns:
        What was written, and where.

    Raises:
        CheckpointWriteError: It could not be written. What was written is removed; `target` is unchanged.
        CheckpointError: `target` exists and is not a checkpoint, or `replace` is False. An error on one rank is raised on
            all ranks and names the rank.
    """
    work = _Commit(plan, target, replace, group.rank == 0)
    try:
        partial, work.checksum, others = run_on_all_ranks(group, work.open, CheckpointWriteError, _compare_layouts)
        _check_same_layout(others)
        work.partial = Path(partial)
        path, kept, nonfinite = run_on_all_ranks(group, work.write, CheckpointWriteError, work.close)
    except BaseException:
        work.undo()
        raise
    work.tidy()
    return CommitResult(Path(path), tuple(nonfinite), None if kept is None else Path(kept), work.manifest)


def check_target(target: Path) -> None:
    """Check that a `commit` with `replace` would accept the target.

    Raises:
        CheckpointError: `target` exists and is not a checkpoint.
    """
    _existing_files(_resolve_link(target), replace=True)


def make_hook_folder(target: Path, run_id: str) -> Path:
    """Create an empty folder for the files that hooks add to the next checkpoint of a run, on its main process.

    It is next to `target`, on the same file system, and has a name that readers ignore.

    Raises:
        CheckpointError: `target` exists and is not a checkpoint.
        CheckpointWriteError: It cannot be created.
    """
    check_target(target)
    target = _resolve_link(target)
    folder = make_hidden_path(target, f".tmp-{run_id}{OF_HOOKS}")
    try:
        _make_folder(target.parent)
        _remove(folder)  # left behind when this run was killed
        folder.mkdir()
    except OSError as error:
        raise CheckpointWriteError(
            f"{target}: the checkpoint could not be written: {error}. Fix: make the folder writable, or save to another folder"
        ) from error
    return folder


class _Commit:
    """The part of one rank in a commit.

    Attributes:
        partial: The folder to which the checkpoint is written.
        checksum: The algorithm for the digests of the files.
        manifest: As written, on the main process.
    """

    def __init__(self, plan: CheckpointPlan, target: Path, replace: bool, main: bool) -> None:
        target = _resolve_link(target) if main else target
        self._plan = plan
        self._target = target
        self._replace = replace
        self._main = main
        self._old: set[str] | None = None
        self._begun = False
        self.partial = make_hidden_path(target, f".tmp-{plan.run_id}")
        self.checksum = plan.checksum
        self.manifest: Manifest | None = None

    def open(self) -> tuple[str, str, str]:
        """Create the folder to write to. Returns its path, the layout of the plan, and the algorithm for the digests."""
        if self._main:
            with self._explain_errors():
                self._old = _existing_files(self._target, self._replace)
                _make_folder(self._target.parent)
                _remove(self.partial)  # left behind when this run was killed
                _remove_abandoned(self._target)
                _check_space(self._plan, self._target)
                self._begun = True
                self.partial.mkdir()
                if self._old is not None:
                    _keep_other_files(self._target, self.partial, self._old | self._plan.names)
        return str(self.partial), self._plan.layout, self.checksum

    def write(self) -> list[Any]:
        """Write the files of this rank. Returns their digests, and the first parameters in them that are not finite."""
        with self._explain_errors():
            if not self._main and not wait_for_path(self.partial):
                raise CheckpointWriteError(
                    f"this process cannot see the folder {self.partial}, which the main process created. {SHARED_FOLDER_ADVICE}"
                )
            digests = _write(self._plan, self.partial, self.checksum)
            if self._main and self._plan.hook_files is not None:
                digests |= self._plan.hook_files.move(self.partial, self.checksum)
                for folder in self._plan.hook_files.folders(self.partial):
                    sync_folder(folder)
            if not self._main:
                sync_folder(self.partial)
            return [digests, self._plan.nonfinite[:_MAX_NAMES_PER_RANK]]

    def close(self, written: list[Any]) -> list[Any]:
        """On the main process, after all ranks have written their files: write the manifest and rename the folder.

        Args:
            written: What `write` returned on each rank.

        Returns:
            `path`, `kept` and `nonfinite` of the result.
        """
        nonfinite = [name for _, names in written for name in names]
        digests = {name: digest for digests, _ in written for name, digest in digests.items()}
        finite, kept = not nonfinite, None
        with self._explain_errors():
            self.manifest = self._plan.manifest(digests, finite)
            _write_manifest(self.partial, self.manifest.to_bytes())
            if not finite and self._old is not None and not _is_nonfinite(self._target):
                kept, self._target = str(self._target), self._target.with_name(self._target.name + NONFINITE)
                self._old = _existing_files(self._target, replace=_is_nonfinite(self._target))
            _put_in_place(self.partial, self._target, exchange=self._old is not None)
            self._begun = False  # the folder at partial, if any, is the old checkpoint now
            sync_folder(self._target.parent)
        return [str(self._target), kept, nonfinite]

    def undo(self) -> None:
        """After an error: remove what was written."""
        if self._begun:
            _remove(self.partial)
        self._remove_hook_folder()

    def _remove_hook_folder(self) -> None:
        if self._plan.hook_files is not None:
            self._plan.hook_files.remove()

    def tidy(self) -> None:
        """After success: remove the checkpoint that was replaced, and upload the new one if its folder has a URL."""
        if self._old is not None:
            _remove(self.partial)
        self._remove_hook_folder()
        if self._main:
            remote_sync.note_change(self._target)

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointWriteError(
                f"{self._target}: the checkpoint could not be written: {error}. Fix: {_fix(error, self._plan, self._target)}"
            ) from error


def _compare_layouts(opened: list[Any]) -> list[Any]:
    """The folder to write to, the algorithm for the digests, and the ranks that have another layout than the main process."""
    partial, expected, checksum = opened[0]
    return [partial, checksum, [str(rank) for rank, (_, layout, _) in enumerate(opened) if layout != expected]]


def _check_same_layout(others: list[str]) -> None:
    """Check that all ranks have planned the same files, since each writes only its own."""
    if others:
        raise CheckpointWriteError(
            f"the tensors on rank {', '.join(others)} differ from those on rank 0 in name, dtype or shape, so they cannot "
            "be saved as one checkpoint. Fix: build the same model and optimizer on all ranks"
        )


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure, if the system can; an `OSError` if the disk fails."""
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


def _resolve_link(target: Path) -> Path:
    """The target of a link, and any other path unchanged."""
    return Path(os.path.realpath(target)) if os.path.islink(target) or target.name in ("", "..") else target


def _existing_files(target: Path, replace: bool) -> set[str] | None:
    """The names of the files of the checkpoint at `target`; `None` if nothing or an empty folder is there."""
    if target.name.startswith("."):
        raise CheckpointError(f"{target}: the name of a checkpoint cannot start with '.'. Fix: choose another name")
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(mode):
        raise CheckpointError(f"{target}: expected a folder or an unused path, but found a file. Fix: choose another path")
    names = os.listdir(target)
    if not names:
        return None
    if not replace:
        raise CheckpointError(
            f"{target}: expected an unused path or an empty folder, but the folder is not empty. Fix: choose another path"
        )
    ours = _files_of_checkpoint(target, names)
    if ours is None:
        raise CheckpointError(
            f"{target}: expected a checkpoint to replace, an empty folder or an unused path, but the folder has other files "
            f"({', '.join(sorted(map(repr, names))[:3])}{', …' if len(names) > 3 else ''}). Fix: choose another path"
        )
    return ours


def _files_of_checkpoint(folder: Path, names: Collection[str]) -> set[str] | None:
    """The `names` that belong to a checkpoint, which may be damaged; `None` if the folder is not a checkpoint."""
    by_name = {name for name in names if _OUR_NAMES.fullmatch(name)}
    try:
        data = read_small_file(folder / MANIFEST, MAX_JSON_BYTES)
        return {MANIFEST, DIGEST, *Manifest.from_bytes(data, str(folder / MANIFEST)).all_files}
    except CorruptCheckpointError:
        pass
    except CheckpointError:  # written by a later version
        return by_name
    try:
        return by_name if _DIGEST_LINE.fullmatch(read_small_file(folder / DIGEST, 1024)) else None
    except CorruptCheckpointError:
        return None


def _is_nonfinite(target: Path) -> bool:
    """Whether the checkpoint at `target` has parameters that are not finite, or cannot be read."""
    try:
        return Manifest.from_bytes(read_small_file(target / MANIFEST, MAX_JSON_BYTES), str(target)).finite is False
    except CorruptCheckpointError:
        return True
    except CheckpointError:  # written by a later version
        return False


def _make_folder(folder: Path) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _check_space(plan: CheckpointPlan, target: Path) -> None:
    total, _, free = shutil.disk_usage(target.parent)
    block = os.statvfs(target.parent).f_frsize if hasattr(os, "statvfs") else 4096
    needed = sum(-(-size // block) * block for size in plan.sizes.values()) + _FOLDER_BYTES
    if total and needed > free:  # Some file systems report 0 of 0 bytes.
        raise CheckpointWriteError(
            f"{target}: not enough disk space: the checkpoint needs {needed} bytes, but only {free} are free. Nothing was "
            "written. Fix: free disk space, keep fewer checkpoints, or save to another file system."
        )


def _write(plan: CheckpointPlan, partial: Path, checksum: str) -> dict[str, str]:
    """Write the files of a plan. Returns their digests."""
    digests = {}
    with contextlib.closing(plan.files()) as files:
        for name, pieces in files:
            with _with_file_name(partial / name):
                size, digests[name] = write_file(partial / name, pieces, checksum)
            if size != plan.sizes[name]:
                raise CheckpointWriteError(
                    f"{partial / name}: expected to write {plan.sizes[name]} bytes, but wrote {size}. A tensor changed during "
                    "the save. Fix: do not change tensors until the save has returned"
                )
    return digests


def _write_manifest(partial: Path, data: bytes) -> None:
    for name, content in ((MANIFEST, data), (DIGEST, digest_line(data))):
        with _with_file_name(partial / name):
            write_file(partial / name, [content])
    with _with_file_name(partial):
        sync_folder(partial)


@contextlib.contextmanager
def _with_file_name(path: Path) -> Iterator[None]:
    """Add the file name to an `OSError` of a write, which does not have it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _keep_other_files(old: Path, new: Path, without: Collection[str]) -> None:
    """Add the other files in `old` to `new`, as hard links where possible."""
    known = {name.lower() for name in without}
    folders = {name.partition("/")[0] for name in known if "/" in name}  # of the hooks' files

    def skip(folder: str, names: list[str]) -> list[str]:
        inside = os.path.relpath(folder, old)
        return [name for name in names if f"{inside}/{name}".lower() in known]

    for name in os.listdir(old):
        if name.lower() in known:
            continue
        if (old / name).is_dir() and not (old / name).is_symlink():
            shutil.copytree(old / name, new / name, symlinks=True, copy_function=_link, ignore=skip)
            if name.lower() in folders:
                with contextlib.suppress(OSError):  # it had nothing but files of hooks
                    os.rmdir(new / name)
        elif name.lower() not in folders:
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
    if not exchange or not os.path.lexists(target):  # it may have been removed in the meantime
        if os.name == "nt" and target.is_dir():  # a rename cannot replace a folder there, not even an empty one
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
    """Exchange the names in three steps. In between, the old checkpoint has a name that readers of the folder recognize."""
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
    """Remove a file or folder as far as possible. Readers ignore what is left, because of its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context with the path of a new file, which replaces the one at `path` at its end; after an error it is removed.

    No two have the same, so that processes that write one file at the same time do not mix what they write.

    Raises:
        OSError: The file cannot be replaced.
    """
    _remove_abandoned(path)
    temporary = make_hidden_path(path, f".tmp-{secrets.token_hex(8)}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _remove_abandoned(target: Path) -> None:
    """Remove unfinished saves of killed processes at this path. A save in progress has changed more recently."""
    for path in target.parent.glob(glob.escape(f".{target.name}.tmp-") + "*"):
        with contextlib.suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (path, *(path.iterdir() if path.is_dir() else ())))
            if time.time() - newest > _ABANDONED_AFTER_SECONDS:
                _remove(path)


def _fix(error: OSError, plan: CheckpointPlan, target: Path) -> str:
    if error.errno in _FULL:
        free = shutil.disk_usage(target.parent).free if target.parent.is_dir() else 0
        return (
            f"free disk space (the checkpoint needs {plan.size} bytes, {free} are free), keep fewer checkpoints, or save to "
            "another file system"
        )
    if error.errno == errno.EFBIG:
        return "raise the file size limit (ulimit -f)"
    if error.errno in _FORBIDDEN:
        return "make the folder writable, or save to another folder"
    return "check the folder and its disk"
