"""Continuing the log of a resumed run: find its folder, and cut its files at the position of the checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.console import notice, warn
from trainkit.loggers.log_folder import LogFolder, has_folder

if TYPE_CHECKING:
    from trainkit.loggers.base import Logger

__all__ = ["cut_file", "digest", "find_folder", "folder_state", "is_same_file", "mark_of", "resume_log", "too_short"]

_TAIL = 4096  # bytes at the end of a file that identify it


def digest(data: bytes) -> str:
    """A short digest, to identify a file by a part of it."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def mark_of(path: Path) -> dict[str, Any] | None:
    """The size of a file of lines, and digests that identify it; None if it is empty."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return None
            first = digest(file.readline(_TAIL))
            file.seek(max(0, size - _TAIL))
            return {"bytes": size, "first": first, "last": digest(file.read(min(size, _TAIL)))}
    except FileNotFoundError:
        return None


def is_same_file(path: Path, mark: Mapping[str, Any]) -> bool:
    """Whether a file continues from a mark, or is a shorter part of such a file; True if it does not exist."""
    size = int(mark["bytes"])
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < size:
                line = file.readline(_TAIL)
                return not line.endswith(b"\n") or digest(line) == str(mark["first"])
            file.seek(max(0, size - _TAIL))
            return digest(file.read(min(size, _TAIL))) == str(mark["last"])
    except FileNotFoundError:
        return True


def cut_file(path: Path, size: int) -> str | None:
    """Cut a file to a size, 0 to remove it; returns a message if it is shorter."""
    if size == 0:
        path.unlink(missing_ok=True)
        return None
    found = path.stat().st_size if path.is_file() else 0
    if found < size:
        return too_short(path, f"{found} bytes", str(size))
    if found > size:
        with path.open("r+b") as file:
            file.truncate(size)
    return None


def too_short(path: Path, found: str, expected: str) -> str:
    """The message for a file that is shorter than expected."""
    has = f"has {found}" if path.is_file() else "is not there"
    return f"{path} {has}; when the checkpoint was made it had {expected}"


def folder_state(logger: Logger) -> dict[str, Any]:
    """The folder of a logger and the position in its files; empty if it has none yet."""
    folder = logger._folder
    if folder is None or folder.path is None or not has_folder(logger):
        return {}
    state = {"folder": os.path.abspath(folder.path), "version": folder.version, "name": logger._name}
    if not logger.is_main_process:
        return state
    try:
        logger.save()
    except OSError as error:  # the log lacks something, but the checkpoint can be saved
        warn(f"{type(logger).__name__} could not flush to {folder.path}: {error}. Fix: free some space")
    return {**state, "files": logger.mark_files(folder.path)}


def resume_log(logger: Logger, state: Mapping[str, Any]) -> None:
    """Let a logger continue in the folder of its state, and remove what was written there later."""
    found, logger._found = logger._found, None
    path = found[1] if found is not None and found[0] == state else find_folder(logger, state)
    if path is None or not logger.is_main_process:
        return
    try:
        missing = logger.cut_files(path, state.get("files", {}))
    except OSError as error:
        missing = [f"what was logged after the checkpoint could not be removed and appears twice: {error}"]
    if missing:
        warn(f"{type(logger).__name__}: the log continues, but {'; '.join(missing)}")


def find_folder(logger: Logger, state: Mapping[str, Any]) -> Path | None:
    """Set the folder of a logger to that of its state; None, with a message, if it has to start another.

    The folder is searched where the logger writes now, because runs are moved, and then where it was. `save_dir`, `name`
    and `version` given by the user take precedence. A folder that contains another run's files is not used.
    """
    recorded, version, files = Path(state["folder"]), state["version"], state.get("files", {})
    kind, root = type(logger).__name__, Path(logger.root_dir)
    here = root / recorded.name
    if logger._name != state["name"] or logger._version not in (None, version):
        notice(f"{kind} has another name or version than in the run that is resumed: a new log begins; {recorded} stays.")
        return None
    for path in (here,) if logger._save_dir is not None else (here, recorded):
        if path.is_dir() and (not logger.is_main_process or logger.is_log_of(path, files)):
            logger._folder = LogFolder(path.parent, version)
            return path
    if recorded.is_dir() and logger._save_dir is not None and recorded != here.absolute():
        notice(f"{kind} logs to {root}, not to where the resumed run logged: a new log begins; {recorded} stays.")
    elif files and logger.is_main_process:
        what = "holds the log of another run" if recorded.is_dir() else "is not there"
        warn(
            f"{kind}: the log folder {recorded} of the run that is resumed {what}, so that what was logged before is missing "
            "and a new log begins. Fix: put the folder back and resume again"
        )
    if not here.exists():
        logger._folder = LogFolder(root, version)
    return None
