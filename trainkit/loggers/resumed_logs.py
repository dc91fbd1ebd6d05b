"""Continue the log of a resumed run: find its folder, and truncate its files at the position of the checkpoint."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.checks import is_whole
from trainkit.console import notice, warn
from trainkit.errors import ConfigurationError
from trainkit.loggers.files import is_regular, open_file
from trainkit.loggers.log_folder import LogFolder, folder_id, has_folder, is_version

if TYPE_CHECKING:
    from trainkit.loggers.base import Logger

__all__ = [
    "cut_file",
    "digest",
    "find_folder",
    "folder_state",
    "has_mark",
    "is_cut_off",
    "is_given_log_of",
    "mark_of",
    "resume_log",
    "set_aside",
    "too_short",
]

_TAIL = 4096  # number of bytes at the end of a file that identify it


def digest(data: bytes) -> str:
    """A short digest, to identify a file by a part of it."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def mark_of(path: Path) -> dict[str, Any] | None:
    """The size of a file of lines, and digests that identify it; None if it is empty, or if it is a link."""
    if not is_regular(path):
        return None
    with open_file(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return None
        first = digest(file.readline(_TAIL))
        file.seek(max(0, size - _TAIL))
        return {"bytes": size, "first": first, "last": digest(file.read(min(size, _TAIL)))}


def has_mark(path: Path, mark: Mapping[str, Any]) -> bool:
    """Whether a file continues from a mark: the lines up to its position are those that the mark identifies."""
    size = mark["bytes"]
    if not is_whole(size) or size < 1:
        return False
    try:
        with open_file(path, "rb") as file:
            file.seek(max(0, size - _TAIL))
            tail = file.read(min(size, _TAIL))
            return file.tell() == size and tail.endswith(b"\n") and digest(tail) == mark["last"]
    except FileNotFoundError:
        return False


def is_cut_off(path: Path, mark: Mapping[str, Any]) -> bool:
    """Whether a file is missing, or is a shorter part of the file that a mark identifies."""
    try:
        with open_file(path, "rb") as file:
            if os.fstat(file.fileno()).st_size >= mark["bytes"]:
                return False
            line = file.readline(_TAIL)
            return not line.endswith(b"\n") or digest(line) == mark["first"]
    except FileNotFoundError:
        return True


def cut_file(path: Path, size: int) -> str | None:
    """Truncate a file to a size; returns a message if it is shorter."""
    found = 0
    with suppress(FileNotFoundError), open_file(path, "r+b") as file:
        found = file.seek(0, os.SEEK_END)
        if found > size:
            file.truncate(size)
    return too_short(path, f"{found} bytes", str(size)) if found < size else None


def too_short(path: Path, found: str, expected: str) -> str:
    """The message for a file that is shorter than expected."""
    has = f"has {found}" if path.is_file() else "does not exist"
    return f"{path} {has}; when the checkpoint was saved, it had {expected}"


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
        logger._note_failure_to(f"flush to {folder.path}", error)
    files = logger.mark_files(folder.path)
    if not files and (own_id := folder_id(folder.path, create=True)):  # no file could identify the log
        state["folder_id"] = own_id
    return {**state, "files": files}


def resume_log(logger: Logger, state: Mapping[str, Any]) -> None:
    """Let a logger continue in the folder of its state, and remove what was written there later."""
    found, logger._found = logger._found, None
    path = found[1] if found is not None and found[0] == state else find_folder(logger, state)
    if path is None or not logger.is_main_process:
        return
    logger._had_log = False  # it is the log of this run
    try:
        missing = logger.cut_files(path, state.get("files", {}))
    except OSError as error:
        missing = [f"what was logged after the checkpoint could not be removed and appears twice: {error}"]
    if missing:
        warn(f"{type(logger).__name__}: the log continues, but {'; '.join(missing)}")


def set_aside(loggers: Iterable[Logger]) -> None:
    """Move the logs of other runs away from where these loggers begin new ones, so that no file has the steps of two runs.

    From `version_0` they go to `version_0-v1`. Loggers of one folder share the new one.

    Raises:
        ConfigurationError: They cannot be moved.
    """
    moved: dict[Path, Path] = {}
    for logger in loggers:
        had_log, logger._had_log = logger._had_log, False
        folder = logger._run_folder().path if had_log else None
        if folder is None:
            continue
        if logger._experiment is not None:
            logger.finalize("success")
        try:
            for name in [*logger._log_files(folder), os.path.relpath(Path(logger.log_dir or folder, "hparams.yaml"), folder)]:
                if os.path.lexists(folder / name):
                    target = moved[folder] = moved.get(folder) or _new_sibling(folder)
                    (target / name).parent.mkdir(parents=True, exist_ok=True)
                    os.rename(folder / name, target / name)
        except OSError as error:
            raise ConfigurationError(
                f"{type(logger).__name__}: {folder} contains the log of another run, which cannot be moved: {error}. "
                "Fix: let the run have a new folder, version=None"
            ) from error
    for folder, target in moved.items():
        notice(f"{folder} contained the log of another run, which is in {target} now. This run begins a new log.")


def _new_sibling(folder: Path) -> Path:
    """Create `<folder>-v1`, or the first of `<folder>-v2`, … that does not exist."""
    for number in itertools.count(1):
        sibling = folder.with_name(f"{folder.name}-v{number}")
        with suppress(FileExistsError):
            sibling.mkdir()
            break
    return sibling


def is_given_log_of(logger: Logger, state: Mapping[str, Any]) -> bool:
    """Whether a logger was given the log of a state: its folder by `version`, or its run at a tracker by the id."""
    if not has_folder(logger):
        return logger.version is not None and logger.version in (state.get(key) for key in ("id", "run_id", "key"))
    here = _folder_here(logger, state) if "folder" in state else None
    return here is not None and here.is_dir() and here == logger._run_folder().path and _is_log(logger, here, state)


def find_folder(logger: Logger, state: Mapping[str, Any]) -> Path | None:
    """Set the folder of a logger to that of its state; None, with a message, if it has to start a new log.

    The folder is searched where the logger writes now, because runs are moved, and then where it was. `save_dir`, `name`
    and `version` given by the user take precedence. Anyone may have written the state: it can only name a folder inside
    `save_dir`, or inside the Trainer's `default_root_dir`, whose files are those that it describes.
    """
    if not has_folder(logger):
        return None
    kind, recorded = type(logger).__name__, Path(state["folder"])
    here = _folder_here(logger, state)
    if here is None:
        notice(f"{kind} has another name or version than in the resumed run. It starts a new log; {recorded} is not changed.")
        return None
    places = _allowed_folders(logger, here, recorded)
    for path in places:
        if _is_log(logger, path, state):
            logger._folder = LogFolder(path.parent, state["version"])
            return path
    if recorded.is_dir() and not any(path.samefile(recorded) for path in places):
        notice(
            f"{kind} logs to {here.parent}. The checkpoint names a log in another place, {recorded}. The logger starts a new "
            f"log; {recorded} is not changed."
        )
    elif logger.is_main_process:
        _report_new_log(kind, places[0] if places else recorded, state.get("files", {}))
    if not here.exists():
        logger._folder = LogFolder(here.parent, state["version"])
    return None


def _folder_here(logger: Logger, state: Mapping[str, Any]) -> Path | None:
    """The folder of a state's version where the logger writes now; None if the logger has another name or version."""
    version = state["version"]
    if not is_version(version) or logger._name != state["name"] or logger._version not in (None, version):
        return None
    return LogFolder(Path(logger.root_dir), version).path


def _allowed_folders(logger: Logger, here: Path, recorded: Path) -> list[Path]:
    """Those of the two folders that exist and lie where the logger may write."""
    allowed = {here: here.parent}
    if logger._save_dir is None and recorded.name == here.name:
        allowed.setdefault(recorded, logger._default_root or Path("trainkit_runs"))
    return [path for path, root in allowed.items() if path.is_dir() and _is_inside(path, root)]


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a path lies inside a folder, after resolving symbolic links."""
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def _is_log(logger: Logger, path: Path, state: Mapping[str, Any]) -> bool:
    """Whether a folder contains the log that a state describes; only the main process, which writes, reads the files."""
    if not logger.is_main_process:
        return True
    files, own_id = state.get("files", {}), state.get("folder_id")
    if not files and own_id is not None:
        return bool(own_id == folder_id(path))
    try:
        return logger.is_log_of(path, files)
    except OSError:  # a file that is damaged, or is none
        return False


def _report_new_log(kind: str, folder: Path, files: Mapping[str, Any]) -> None:
    """Say that the log in a folder is not continued."""
    if files:
        what = "contains the log of another run" if folder.is_dir() else "does not exist"
        warn(
            f"{kind}: the log folder {folder} of the resumed run {what}. It starts a new log, without the earlier metrics. "
            "Fix: restore the folder and resume again"
        )
    elif folder.is_dir():
        notice(
            f"{kind}: nothing in {folder} shows that it is the log of the resumed run. It starts a new log; {folder} is not "
            "changed."
        )
