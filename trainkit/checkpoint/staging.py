"""`staging`: the staging folders of this process, and the thread that copies what is saved in them to their URLs.

A checkpoint is complete in its staging folder before its upload begins. Everything is done in the order in which it happened
in the folder, and an upload that fails holds back what comes after it: an old checkpoint is not removed from the URL before a
newer one is there. Nothing waits for the network during training. What is missing at the URL is uploaded when a run enters the
folder again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from trainkit.checkpoint.identify import MAX_LISTED, checkpoint_identity, is_checkpoint
from trainkit.checkpoint.lock import LOCK
from trainkit.checkpoint.manifest import MANIFEST, Manifest
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.checkpoint.remote_folder import RemoteCheckpoint, remote_at
from trainkit.console import counted, notice, warn
from trainkit.errors import CheckpointError
from trainkit.paths import url_of

__all__ = ["Staging", "staging"]

_PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before an upload is tried again
_SLOW = 5.0  # seconds after which to say what the end of a run waits for
_MAX_MANIFEST = 1 << 26


@dataclass
class _Contents:
    """What is at the URL of a folder of checkpoints, apart from what this process saves there."""

    checkpoints: dict[str, RemoteCheckpoint]
    names: set[str]


class Staging:
    """What this process knows of its staging folders. All methods do nothing for paths that are not in a staging folder.

    The thread exists while there is something to upload or to remove, and the interpreter waits for it at exit.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)  # the parent uploads

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._entered: dict[Path, _Contents] = {}
        self._waiting: deque[Path] = deque()  # what was saved or removed, and folders of log files
        self._log_folders: dict[Path, dict[str, tuple[int, int]]] = {}  # → file → its size and time when it was uploaded
        self._error: tuple[Path, Exception] | None = None  # of the last try, if it failed
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------------ from the URL

    def enter(self, folder: Path, good: Iterable[Path]) -> None:
        """A run saves to a folder from now on. Its URL is listed now, and not again before `leave`.

        Args:
            folder: the folder of checkpoints.
            good: the checkpoints in it without a known problem. Those that an earlier run did not upload are uploaded.

        Raises:
            CheckpointError: the URL cannot be read.
        """
        remote = remote_at(folder)
        if remote is None:
            return
        contents = _Contents(remote.checkpoints(), remote.names())
        self._entered[folder] = contents
        for path in good:
            there = contents.checkpoints.get(path.name)
            if there is None or (there.digest != checkpoint_identity(path) and not _is_older(path, there)):
                self.changed(path)

    def leave(self, folder: Path) -> None:
        """The run no longer saves to a folder."""
        self._entered.pop(folder, None)

    def checkpoints(self, folder: Path) -> dict[str, RemoteCheckpoint]:
        """The complete checkpoints at the URL of a folder, by name, without those of this process.

        Raises:
            CheckpointError: the URL cannot be read.
        """
        if folder in self._entered:
            return dict(self._entered[folder].checkpoints)
        remote = remote_at(folder)
        return {} if remote is None else remote.checkpoints()

    def names(self, folder: Path) -> set[str]:
        """The names that are taken at the URL of a folder. Raises like `checkpoints`."""
        if folder in self._entered:
            return set(self._entered[folder].names)
        remote = remote_at(folder)
        return set() if remote is None else remote.names()

    def fetch(self, path: Path, *, again: bool = False) -> bool:
        """Download the checkpoint or the file that a path stands for, unless the local one is the same or newer.

        Args:
            path: the path.
            again: the local one is damaged: replace it if the URL has the same one or a newer one.

        Returns:
            Whether a checkpoint was downloaded.

        Raises:
            CorruptCheckpointError: it is damaged at the URL.
            CheckpointError: the URL cannot be read, and there is no local one.
        """
        remote = remote_at(path)
        if remote is None:
            return False
        here = is_checkpoint(path)
        try:
            if path.parent in self._entered:
                there = self._entered[path.parent].checkpoints.get(path.name)
            else:
                there = remote.checkpoint()
            if there is None and not here:
                remote.download_file()
        except CheckpointError as error:
            if not here:
                raise
            notice(f"{error} The copy of this machine is used, which may be older: {path}")
            return False
        if there is None or (here and there.digest == checkpoint_identity(path) and not again):
            return False
        if here and not again and not _is_older(path, there):
            return False
        remote.download(there)
        return True

    # -------------------------------------------------------------------------------------------------------- to the URL

    def changed(self, path: Path) -> None:
        """A checkpoint or the file `last` was saved or removed: the thread does the same at its URL. Never raises."""
        if url_of(path) is None:
            return
        gone = not os.path.lexists(path)
        with self._lock:
            if path.parent in self._entered:
                contents = self._entered[path.parent]
                contents.checkpoints.pop(path.name, None)
                (contents.names.discard if gone else contents.names.add)(path.name)
            if gone and path in self._waiting:
                self._waiting.remove(path)  # it is removed after what was saved meanwhile
            if path not in self._waiting:
                self._waiting.append(path)
            self._start()

    def add_log_folder(self, folder: Path) -> None:
        """Upload the files of a run's folder too, such as logs: before each checkpoint, and in `finish`."""
        if url_of(folder) is not None:
            self._log_folders.setdefault(folder, {})

    def wait(self) -> None:
        """Wait until everything is done at the URLs, or something has failed."""
        thread, noticed = self._thread, False
        while thread is not None and thread.is_alive():
            thread.join(_SLOW)
            if thread.is_alive() and not noticed:
                notice("waiting for the upload of checkpoints and logs.")
                noticed = True

    def finish(self) -> None:
        """Upload logs, try again what has failed, wait, and warn of what could not be done."""
        with self._lock:
            self._waiting.extend(folder for folder in self._log_folders if folder not in self._waiting)
            self._start()
        self.wait()
        self.report()

    def report(self) -> None:
        """Warn of what could not be done at the URLs."""
        with self._lock:
            left, error = list(self._waiting), self._error
        if error is not None and left:
            warn(_what_is_left(left, set(self._log_folders), error))

    def _start(self) -> None:
        if self._waiting and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trainkit-upload", daemon=False)
            with contextlib.suppress(RuntimeError):  # at the limit of threads: the next call tries again
                self._thread.start()
                return
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                path = self._waiting.popleft()
            error = self._try(path)
            with self._lock:
                before, self._error = self._error, None if error is None else (path, error)
                if error is not None:
                    if path not in self._waiting:
                        self._waiting.appendleft(path)
                    self._thread = None
            if error is not None:
                if before is None:
                    notice(
                        f"{url_of(path)} could not be written: {type(error).__name__}: {error}. It is tried again at the next "
                        "save and at the end of the run."
                    )
                return

    def _try(self, path: Path) -> Exception | None:
        for pause in (*_PAUSES, None):
            try:
                self._sync(path)
            except Exception as error:
                if pause is None:
                    return error
                sleep(pause)
            else:
                break
        return None

    def _sync(self, path: Path) -> None:
        """Make the URL like the path."""
        remote = remote_at(path)
        if remote is None:
            return
        if path in self._log_folders:
            self._push_logs(path)
        elif path.is_symlink():  # `last` as a link
            remote.write_file(os.fsencode(os.readlink(path)) + b"\n")
        elif path.is_file():
            remote.write_file(path.read_bytes())
        elif not os.path.lexists(path):
            remote.remove()
        else:
            for folder in list(self._log_folders):  # first: a resumed run continues them from the checkpoint
                self._push_logs(folder)
            remote.upload()

    def _push_logs(self, folder: Path) -> None:
        remote, known = remote_at(folder), self._log_folders.get(folder, {})
        if remote is None:
            return
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".") and not is_checkpoint(Path(parent, name))]
            for name in names:
                path = Path(parent, name)
                relative = path.relative_to(folder).as_posix()
                if path.is_symlink() or name == LOCK or ".tmp-" in name:
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    about = path.stat()
                    now = (about.st_size, about.st_mtime_ns)
                    if known.get(relative) != now:
                        remote.push_file(relative)
                        known[relative] = now


def _is_older(path: Path, there: RemoteCheckpoint) -> bool:
    """Whether the checkpoint at a path was saved before the one at its URL, or cannot be read."""
    if there.manifest is None:
        return False
    try:
        data = read_small_file(path / MANIFEST, _MAX_MANIFEST)
        return Manifest.from_bytes(data, str(path)).saved_at < there.manifest.saved_at
    except (CheckpointError, OSError):
        return True


def _what_is_left(left: list[Path], log_folders: set[Path], error: tuple[Path, Exception]) -> str:
    logs = [path for path in left if path in log_folders]
    saved = [path for path in left if path not in log_folders and os.path.lexists(path)]
    removed = [path for path in left if path not in log_folders and not os.path.lexists(path)]
    lines = [f"{url_of(error[0])} could not be written: {type(error[1]).__name__}: {error[1]}."]
    if saved:
        names = ", ".join(str(path) for path in saved[-MAX_LISTED:])
        lines.append(f"Not uploaded, but complete here: {names}. A run that starts with the same folder uploads them.")
    if removed:
        names = ", ".join(str(url_of(path)) for path in removed[-MAX_LISTED:])
        lines.append(f"{counted(len(removed), 'old checkpoint')} not removed: {names}.")
    if logs:
        lines.append(f"Not uploaded: the logs in {', '.join(map(str, logs))}.")
    return " ".join(lines)


staging = Staging()
"""The staging folders of this process."""
