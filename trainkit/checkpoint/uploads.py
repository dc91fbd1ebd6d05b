"""`uploads`: a thread that copies what is saved in staging folders to their URLs, while training continues.

The local checkpoint is complete before its upload begins, and an upload that fails is tried again, so nothing is lost: what is
still missing at the URL is uploaded when a run enters the folder again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path
from time import sleep

from trainkit.checkpoint.identify import checkpoint_identity, is_checkpoint
from trainkit.checkpoint.lock import LOCK
from trainkit.checkpoint.remote_folder import remote_at
from trainkit.console import notice, warn

__all__ = ["Uploads", "uploads"]

_PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before an upload is tried again
_SLOW = 5.0  # seconds after which to say what the end of a run waits for


class Uploads:
    """Uploads checkpoints, removes them, and uploads log files, in the order of the calls.

    The thread exists while there is something to do, and the interpreter waits for it at exit. All methods ignore paths that
    are not in a staging folder.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Path] = deque()  # checkpoints that were saved or removed, and folders of log files
        self._folders: dict[
            Path, dict[str, tuple[int, int]]
        ] = {}  # folder of log files → file → its size and time at the upload
        self._failed: dict[Path, Exception] = {}
        self._thread: threading.Thread | None = None

    def changed(self, path: Path) -> None:
        """A checkpoint was saved or removed: do the same at its URL."""
        if remote_at(path) is None:
            return
        with self._lock:
            self._waiting = deque(one for one in self._waiting if one != path)
            self._waiting.append(path)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trainkit-upload", daemon=False)
                self._thread.start()

    def with_files(self, folder: Path) -> None:
        """Upload the files of a run's folder too, such as logs: with each checkpoint, and in `finish`."""
        if remote_at(folder) is not None:
            self._folders.setdefault(folder, {})

    def missing(self, folder: Path) -> None:
        """Upload the complete checkpoints of a folder that are not at its URL: an earlier run ended before their upload."""
        remote = remote_at(folder)
        if remote is None or not folder.is_dir():
            return
        there = remote.checkpoints()
        for path in sorted(folder.iterdir()):
            if not path.is_symlink() and is_checkpoint(path) and there.get(path.name) != checkpoint_identity(path):
                self.changed(path)

    def wait(self) -> None:
        """Wait until all uploads have been made, or have failed."""
        thread, told = self._thread, False
        while thread is not None and thread.is_alive():
            thread.join(_SLOW)
            if thread.is_alive() and not told:
                notice("waiting for the upload of checkpoints and logs.")
                told = True

    def finish(self) -> None:
        """Wait until everything is uploaded; warn of what could not be. Log files are uploaded now."""
        for path in [*self._failed, *self._folders]:
            self.changed(path)
        self.wait()
        self._folders = {}
        failed, self._failed = self._failed, {}
        for path, error in failed.items():
            remote = remote_at(path)
            warn(
                f"{path} could not be uploaded to {remote.url if remote else ''}: {type(error).__name__}: {error}. It is "
                "complete at that path, and is uploaded when a run starts with the same folder again."
            )

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                path = self._waiting.popleft()
            self._failed.pop(path, None)
            try:
                self._try(path)
            except Exception as error:
                self._failed[path] = error
                notice(
                    f"the upload of {path} failed: {type(error).__name__}: {error}. It is tried again at the end of the run."
                )

    def _try(self, path: Path) -> None:
        for pause in (*_PAUSES, None):
            try:
                self._bring(path)
                return
            except Exception:
                if pause is None:
                    raise
                sleep(pause)

    def _bring(self, path: Path) -> None:
        """Make the URL like the path."""
        remote = remote_at(path)
        if remote is None:
            return
        if path in self._folders:
            self._push_files(path)
        elif not os.path.lexists(path):
            remote.remove()
        else:
            remote.upload()
            for folder in list(self._folders):
                self._push_files(folder)

    def _push_files(self, folder: Path) -> None:
        remote, known = remote_at(folder), self._folders.get(folder, {})
        if remote is None:
            return
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".") and not is_checkpoint(Path(parent, name))]
            for name in names:
                path = Path(parent, name)
                about = path.lstat()
                relative = path.relative_to(folder).as_posix()
                now = (about.st_size, about.st_mtime_ns)
                if not path.is_symlink() and name != LOCK and ".tmp-" not in name and known.get(relative) != now:
                    remote.push_file(relative)
                    known[relative] = now


uploads = Uploads()
"""The uploads of this process."""
