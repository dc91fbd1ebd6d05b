"""The folder of one run, `<root>/version_N`: checks of the arguments that name it, its files, and its log after a resume.

Text files survive a kill: whole lines are appended, or the file is replaced by a rename. The folder of a run may be from
elsewhere, so a link in it is not followed, and a pipe is not opened.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path, PurePath, PureWindowsPath
from typing import IO, TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

from trainkit.checkpoint.regular_file import not_regular, read_small_file
from trainkit.checkpoint.urls import remote_at, remote_sync
from trainkit.checks import is_whole
from trainkit.console import notice, quantity, warn
from trainkit.errors import ConfigurationError, CorruptCheckpointError
from trainkit.paths import local_path, url_of

if TYPE_CHECKING:
    from trainkit.loggers.base import Logger

__all__ = [
    "AppendFile",
    "LogFolder",
    "Repeats",
    "Waiting",
    "check_name",
    "check_save_dir",
    "check_version",
    "claim_folder",
    "cut_file",
    "digest",
    "find_folder",
    "folder_id",
    "folder_state",
    "has_folder",
    "has_mark",
    "is_cut_off",
    "is_given_log_of",
    "is_version",
    "mark_of",
    "one_of",
    "replace_file",
    "resume_log",
    "set_aside",
    "too_short",
]


_ID_FILE = ".log_id"
_MAX_ID = 1024  # bytes

_VERSION = re.compile(r"version_(\d+)")


class LogFolder:
    """`<root>/<version>`; without a version, the next free `version_N`, reserved by creating it."""

    def __init__(self, root: Path, version: int | str | None) -> None:
        self.root = root
        self.version = version

    @property
    def path(self) -> Path | None:
        """The folder, or None until a version is chosen."""
        if self.version is None:
            return None
        return self.root / (f"version_{self.version}" if isinstance(self.version, int) else self.version)

    def claim(self) -> Path:
        """The folder; chooses the version now if there is none. That of a URL is uploaded, and has what is there."""
        if self.version is None and (remote := remote_at(self.root)) is not None:
            remote.pull_folders()
        while self.version is None:
            candidate = _highest_version(self.root) + 1
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                (self.root / f"version_{candidate}").mkdir()
            except FileExistsError:
                continue  # another process has just created it
            self.version = candidate
        path = self.path
        assert path is not None
        remote_sync.add_log_folder(path)
        return path


def claim_folder(folder: LogFolder) -> Path:
    """The folder of a run; chooses the version now if there is none."""
    try:
        return folder.claim()
    except OSError as error:
        raise ConfigurationError(
            f"The log folder {folder.root} cannot be created: {error}. "
            "Fix: choose a folder that you can write to, save_dir='runs' or Trainer(default_root_dir='runs')"
        ) from error


def has_folder(logger: Logger) -> bool:
    """Whether a logger has a folder in `save_dir` for each run, unlike a backend with its own layout."""
    return logger._in_run_folder and logger.save_dir is not None


def folder_id(path: Path, create: bool = False) -> str | None:
    """The random id of a log folder, which identifies it before it contains a log; None if it has none.

    Args:
        create: Give it one if it exists and has none.
    """
    file = path / _ID_FILE
    try:
        if os.path.lexists(file) and (known := read_small_file(file, _MAX_ID).decode("ascii").strip()):
            return known
        if not create or not path.is_dir():
            return None
        new_id = secrets.token_hex(16)
        replace_file(file, lambda text: text.write(new_id + "\n"))
        return new_id
    except (OSError, ValueError, CorruptCheckpointError):  # a disk that is full or read-only, or a damaged file
        return None


def _highest_version(root: Path) -> int:
    if not root.is_dir():
        return -1
    return max((int(match[1]) for entry in root.iterdir() if (match := _VERSION.fullmatch(entry.name))), default=-1)


def check_save_dir(save_dir: object, owner: str | None = None) -> Path | None:
    """`save_dir` as a path with `~` expanded; None stays None. `owner` is the logger, if its files cannot be uploaded."""
    if save_dir is None:
        return None
    if not isinstance(save_dir, str | PurePath) or not str(save_dir) or "\0" in str(save_dir):
        raise ConfigurationError(f"save_dir: expected a folder, got {save_dir!r}. Fix: save_dir='runs'")
    path = local_path(save_dir, "save_dir")
    if owner is not None and (url := url_of(path)) is not None:
        raise ConfigurationError(
            f"{owner}(save_dir={url!r}): expected a local folder, because the files of this logger are not uploaded. "
            "Fix: save_dir='runs'"
        )
    return path


def one_of(owner: str, **values: Any) -> Any:
    """The value of arguments of `owner` with the same meaning: one of them, or several equal ones; None if all are None."""
    passed = {name: value for name, value in values.items() if value is not None}
    name, value = next(iter(passed.items()), ("", None))
    if any(other != value for other in passed.values()):
        raise ConfigurationError(
            f"{owner}: {' and '.join(passed)} mean the same, got {' and '.join(repr(str(one)) for one in passed.values())}. "
            f"Fix: pass only one of them, {name}={str(value)!r}"
        )
    return value


def check_name(name: object, argument: str = "name") -> str:
    """Check a relative path that stays inside its folder; None and "" mean that folder itself."""
    if name is None or name == "":
        return ""
    if not isinstance(name, str) or not _is_relative(name):
        raise ConfigurationError(
            f"{argument}: expected the name of a folder, not absolute and without '..', got {name!r}. "
            f"Fix: {argument}='my_experiment'"
        )
    return name


def check_version(version: object) -> int | str | None:
    """Check a version: a number N ≥ 0 for `version_N`, the name of a folder, or None for the next free number."""
    if version is None or is_version(version):
        return version
    raise ConfigurationError(
        f"version: expected a number ≥ 0, the name of one folder, or None for the next free number, got {version!r}. "
        "Fix: version=None"
    )


def is_version(version: object) -> TypeGuard[int | str]:
    """Whether this is a number N ≥ 0, or the name of one folder."""
    if isinstance(version, str):
        return _is_relative(version) and not set(version) & set("/\\")
    return is_whole(version) and version >= 0


def _is_relative(name: str) -> bool:
    if not name.strip() or any(ord(character) < 32 for character in name):
        return False
    paths = (PurePath(name), PureWindowsPath(name))
    return not any(path.is_absolute() or path.anchor or ".." in path.parts or not path.parts for path in paths)


_WAITING = 16 * 2**20  # bytes

Record = TypeVar("Record")


class AppendFile:
    """A file to which whole lines are appended.

    Opening it removes an incomplete last line, which a kill may leave: half a number reads like a number. `append` flushes,
    so that a kill loses no line; it does not sync to the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file = open_file(path, "ab", buffering=0)
        self._whole: int | None = None  # the size up to which the lines are whole, if part of one could not be removed

    def append(self, lines: str) -> None:
        """Write `lines`, each with its line end: all of them, or none and raise `OSError`."""
        if self._whole is not None:
            self._file.truncate(self._whole)
        before = self._whole = os.fstat(self._file.fileno()).st_size
        left = memoryview(lines.encode())
        try:
            while left:  # a raw write may take only part of it
                left = left[self._file.write(left) or 0 :]
        except OSError:  # a full disk takes what still fits
            self._file.truncate(before)
            self._whole = None
            raise
        self._whole = None

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def __del__(self) -> None:
        # Nothing is buffered here: a logger without finalize() needs no ResourceWarning.
        if hasattr(self, "_file"):
            self._file.close()


class Waiting(Generic[Record]):
    """Records that are not in their file yet. After a write that fails, the newest of about 16 MB are kept.

    Attributes:
        records: The records, the oldest first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: deque[Record] = deque()
        self._sizes: deque[int] = deque()
        self._size = 0
        self._dropped = 0

    def add(self, record: Record, size: int) -> None:
        """Add a record of about this number of bytes."""
        self.records.append(record)
        self._sizes.append(size)
        self._size += size

    @contextmanager
    def writing(self) -> Iterator[None]:
        """In this context the records are written: all, or none and it raises `OSError`."""
        try:
            yield
        except OSError:
            self._drop_oldest()
            raise
        self.records.clear()
        self._sizes.clear()
        dropped, self._size, self._dropped = self._dropped, 0, 0
        if dropped:
            warn(f"{self.path} is written again, without {quantity(dropped, 'record')} that did not fit into memory.")

    def _drop_oldest(self) -> None:
        before = self._dropped
        while self._size > _WAITING and len(self.records) > 1:
            self.records.popleft()
            self._size -= self._sizes.popleft()
            self._dropped += 1
        if self._dropped and not before:
            warn(f"{self.path}: {_WAITING >> 20} MB wait to be written. From now on the oldest records are dropped.")

    def loss_error(self, error: OSError) -> OSError:
        """The error of a file that cannot be written to its end."""
        number = len(self.records) + self._dropped
        return OSError(error.errno, f"{error.strerror}; {quantity(number, 'record is', 'records are')} missing", str(self.path))


def _cut_torn_line(path: Path, block: int = 65536) -> None:
    try:
        file = open_file(path, "r+b")
    except FileNotFoundError:
        return
    with file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - block)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)


def is_regular(path: Path) -> bool:
    """Whether there is a regular file, and not a link to one."""
    try:
        return not_regular(os.lstat(path).st_mode) is None
    except OSError:
        return False


def open_file(path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    """Open a regular file in a mode of bytes; one that is missing is created in mode "ab".

    Raises:
        OSError: It is a link, a pipe or a device, or it cannot be opened.
    """
    return open(path, mode, buffering, opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    with suppress(FileNotFoundError):
        _check_regular(path, os.lstat(path).st_mode)  # before it is opened, which may have side effects
    descriptor = os.open(path, flags | sum(getattr(os, name, 0) for name in ("O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK")), 0o666)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str, mode: int) -> None:
    if problem := not_regular(mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, problem, path)


def replace_file(path: Path, write: Callable[[TextIOWrapper], object]) -> None:
    """Replace a file atomically by one that `write` fills.

    The new file is synced before the rename, because some file systems otherwise keep the rename and lose the content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # A killed process may have left it; a link there is not followed.
        with temporary.open("x", encoding="utf-8", newline="") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# --------------------------------------------------------------------------------------------- the log of a resumed run


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
    length = 0
    with suppress(FileNotFoundError), open_file(path, "r+b") as file:
        length = file.seek(0, os.SEEK_END)
        if length > size:
            file.truncate(size)
    return too_short(path, f"{length} bytes", str(size)) if length < size else None


def too_short(path: Path, length: str, expected: str) -> str:
    """The message for a file that is shorter than expected."""
    has = f"has {length}" if path.is_file() else "does not exist"
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
    searched, logger._found = logger._found, None
    path = searched[1] if searched is not None and searched[0] == state else find_folder(logger, state)
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
    folders = _find_allowed_folders(logger, here, recorded)
    for path in folders:
        if _is_log(logger, path, state):
            logger._folder = LogFolder(path.parent, state["version"])
            return path
    if recorded.is_dir() and not any(path.samefile(recorded) for path in folders):
        notice(
            f"{kind} logs to {here.parent}. The checkpoint names a log in another place, {recorded}. The logger starts a new "
            f"log; {recorded} is not changed."
        )
    elif logger.is_main_process:
        _report_new_log(kind, folders[0] if folders else recorded, state.get("files", {}))
    if not here.exists():
        logger._folder = LogFolder(here.parent, state["version"])
    return None


def _folder_here(logger: Logger, state: Mapping[str, Any]) -> Path | None:
    """The folder of a state's version where the logger writes now; None if the logger has another name or version."""
    version = state["version"]
    if not is_version(version) or logger._name != state["name"] or logger._version not in (None, version):
        return None
    return LogFolder(Path(logger.root_dir), version).path


def _find_allowed_folders(logger: Logger, here: Path, recorded: Path) -> list[Path]:
    """Those of the two folders that exist and lie where the logger may write."""
    allowed = {here: here.parent}
    if logger._save_dir is None and recorded.name == here.name:
        allowed.setdefault(recorded, logger._default_root or Path("trainkit_runs"))
    return [path for path, root in allowed.items() if path.is_dir() and _lies_in(path, root)]


def _lies_in(path: Path, folder: Path) -> bool:
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


class Repeats:
    """For services that cannot remove records: after a resume, each record is logged once.

    A checkpoint contains the number of records of each metric. The killed process may have logged more: if the resumed run
    logs a record with the same metric and step again, it is skipped.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._later: dict[str, list[int]] | None = None  # Metric → steps of the records after the position.

    def new_run(self) -> None:
        """Start without records."""
        self.counts = {}
        self._later = None

    def resume(self, counts: Mapping[str, int]) -> None:
        """Continue a run after this number of records of each metric."""
        self.counts = dict(counts)
        self._later = {}

    def has(self, key: str, step: int, steps_of: Callable[[str], list[int]]) -> bool:
        """Whether the service has the record from before the resume. If so, the position moves past it.

        Args:
            steps_of: Called once for each metric; returns the steps of all its records, in the order of logging.
        """
        if self._later is None:
            return False
        if key not in self._later:
            steps = steps_of(key)
            at = min(self.counts.get(key, 0), len(steps))
            self.counts[key], self._later[key] = at, steps[at:]
        later = self._later[key]
        if step not in later:
            return False
        passed = later.index(step) + 1
        del later[:passed]
        self.counts[key] += passed
        return True

    def note(self, key: str) -> None:
        """Count a record that was logged."""
        self.counts[key] = self.counts.get(key, 0) + 1
