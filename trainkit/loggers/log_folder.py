"""The folder of one run, `<root>/version_N`, and checks of the arguments that name it."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path, PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any, TypeGuard

from trainkit.checkpoint.regular_file import read_small_file
from trainkit.checkpoint.remote_folder import remote_at
from trainkit.checkpoint.staging import staging
from trainkit.checks import is_whole
from trainkit.errors import ConfigurationError, CorruptCheckpointError
from trainkit.loggers.files import replace_file
from trainkit.paths import local_path, url_of

if TYPE_CHECKING:
    from trainkit.loggers.base import Logger

__all__ = [
    "LogFolder",
    "check_name",
    "check_save_dir",
    "check_version",
    "claimed",
    "folder_id",
    "has_folder",
    "is_version",
    "one_of",
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
        staging.add_log_folder(path)
        return path


def claimed(folder: LogFolder) -> Path:
    """The folder of a run; chooses the version now if there is none.

    Raises:
        ConfigurationError: it cannot be created.
    """
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
        path: the folder of a run.
        create: give it one if it exists and has none.
    """
    file = path / _ID_FILE
    try:
        if os.path.lexists(file) and (found := read_small_file(file, _MAX_ID).decode("ascii").strip()):
            return found
        if not create or not path.is_dir():
            return None
        made = secrets.token_hex(16)
        replace_file(file, lambda text: text.write(made + "\n"))
        return made
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
    given = {name: value for name, value in values.items() if value is not None}
    name, value = next(iter(given.items()), ("", None))
    if any(other != value for other in given.values()):
        raise ConfigurationError(
            f"{owner}: {' and '.join(given)} mean the same, got {' and '.join(repr(str(one)) for one in given.values())}. "
            f"Fix: pass only one of them, {name}={str(value)!r}"
        )
    return value


def check_name(name: object, argument: str = "name") -> str:
    """Check a relative path that stays inside its folder; None and "" mean that folder itself."""
    if name is None or name == "":
        return ""
    if not isinstance(name, str) or not _is_inside(name):
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
        return _is_inside(version) and not set(version) & set("/\\")
    return is_whole(version) and version >= 0


def _is_inside(name: str) -> bool:
    if not name.strip() or any(ord(character) < 32 for character in name):
        return False
    paths = (PurePath(name), PureWindowsPath(name))
    return not any(path.is_absolute() or path.anchor or ".." in path.parts or not path.parts for path in paths)
