"""Checkpoints and log files at a URL, through fsspec: `RemoteFolder`, and `remote_sync`, whose thread uploads what is saved.

A checkpoint at a URL is a folder with the same files as the local one. `manifest.sha256` is uploaded last and removed first, so
a folder without it is not a checkpoint.

A checkpoint is complete in its staging folder before its upload begins. Everything is done in the order in which it happened
in the folder, and an upload that fails holds back what comes after it: an old checkpoint is not removed from the URL before a
newer one is there. Nothing waits for the network during training. What is missing at the URL is uploaded when a run enters the
folder again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

from trainkit.checkpoint.checksum import CHECKSUMS
from trainkit.checkpoint.lock import LOCK
from trainkit.checkpoint.manifest import (
    DIGEST,
    MANIFEST,
    MAX_LISTED,
    Manifest,
    checkpoint_identity,
    describe_siblings,
    digest_line,
    has_checkpoint_files,
    is_checkpoint,
    list_names,
    make_hidden_path,
    weight_files,
)
from trainkit.checkpoint.regular_file import hash_file, read_small_file
from trainkit.console import notice, quantity, warn
from trainkit.errors import CheckpointError, CorruptCheckpointError
from trainkit.paths import remote_url, url_of
from trainkit.tagged_json.codec import MAX_JSON_BYTES

__all__ = ["RemoteCheckpoint", "RemoteFolder", "RemoteSync", "remote_at", "remote_sync", "why_not_at_the_url"]


def remote_at(path: Path) -> RemoteFolder | None:
    """What a path in a staging folder stands for; `None` for any other path."""
    url = url_of(path)
    return None if url is None else RemoteFolder(path, url)


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A complete checkpoint at a URL.

    Attributes:
        digest: The content of its `manifest.sha256`.
        manifest: Its manifest; `None` if that cannot be trusted.
        problem: What is wrong with it; `None` if nothing was found.
    """

    digest: bytes
    manifest: Manifest | None
    problem: str | None


def why_not_at_the_url(path: Path) -> str | None:
    """Why there is no checkpoint at the URL of a path, with the checkpoints near it; `None` for a path without a URL."""
    remote, around = remote_at(path), remote_at(path.parent)
    if remote is None:
        return None
    if inside := sorted(remote.checkpoints()):
        fix = f"Fix: {remote.url + '/' + inside[-1]!r}."
        return f"{remote.url} is a folder of checkpoints, expected one of them: {list_names(inside)}. {fix}"
    siblings = sorted(around.checkpoints()) if around is not None else []
    files = weight_files(around.names()) if around is not None else []
    near = describe_siblings(path, remote.url.rpartition("/")[0], siblings, files)
    fix = "Fix: pass the URL of one of them, or of another folder"
    return f"{remote.url}: expected a checkpoint, but there is none. {near} {fix}"


class RemoteFolder:
    """A folder at a URL, and its staging folder.

    Args:
        local: The staging folder.
        url: The URL, for messages.

    Raises:
        CheckpointError: The URL cannot be opened: of methods too.
    """

    def __init__(self, local: Path, url: str) -> None:
        from fsspec import url_to_fs

        self.local = local
        self.url = url
        try:
            self._fs: Any
            self._fs, root = url_to_fs(remote_url(local) or url)
            self._root: str = root.rstrip("/")
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.url} cannot be read: {type(error).__name__}: {error}. Check the address, the network and the credentials."
        )

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def checkpoints(self) -> dict[str, RemoteCheckpoint]:
        """The complete checkpoints in this folder, by name."""
        try:
            self._fs.invalidate_cache()
            names = [path.rsplit("/", 2)[1] for path in self._fs.glob(f"{self._root}/*/{DIGEST}")]
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self._unreadable(error) from error
        by_name = {name: self._checkpoint(name) for name in names if not name.startswith(".")}
        return {name: one for name, one in by_name.items() if one is not None}

    def checkpoint(self) -> RemoteCheckpoint | None:
        """The checkpoint at this URL; `None` if there is no complete one."""
        self._fs.invalidate_cache()
        return self._checkpoint("")

    def _checkpoint(self, name: str) -> RemoteCheckpoint | None:
        folder = f"{self._root}/{name}".rstrip("/")
        what = f"{self.url}/{name}".rstrip("/")
        try:
            digest: bytes = self._fs.cat_file(f"{folder}/{DIGEST}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            raise self._unreadable(error) from error
        try:
            data = self._fs.cat_file(f"{folder}/{MANIFEST}")
            if digest_line(data) != digest:
                problem = f"{what}/{MANIFEST} is not the one that was saved: its SHA-256 differs from {DIGEST}."
                return RemoteCheckpoint(digest, None, problem)
            return RemoteCheckpoint(digest, Manifest.from_bytes(data, what), None)
        except CorruptCheckpointError as error:
            return RemoteCheckpoint(digest, None, str(error))
        except FileNotFoundError:
            return RemoteCheckpoint(digest, None, f"{what}/{MANIFEST} is missing.")
        except Exception as error:
            raise self._unreadable(error) from error

    def names(self) -> set[str]:
        """The names of all entries of this folder."""
        try:
            self._fs.invalidate_cache()
            return {path.rstrip("/").rsplit("/", 1)[1] for path in self._fs.ls(self._root, detail=False)}
        except FileNotFoundError:
            return set()
        except Exception as error:
            raise self._unreadable(error) from error

    def upload(self) -> None:
        """Upload the checkpoint. Files at the URL that it does not have are removed.

        If it is replaced or removed meanwhile, the upload is not completed: that change is uploaded next.

        Raises:
            Exception: An error of the file system.
        """
        digest = checkpoint_identity(self.local)
        there = self.checkpoint()
        if not digest or (there is not None and there.digest == digest):
            return
        self._remove_file(DIGEST)
        try:
            self._upload_files()
        except FileNotFoundError:
            if checkpoint_identity(self.local) == digest:
                raise
        if checkpoint_identity(self.local) == digest:  # otherwise the files may be of two checkpoints
            self._fs.pipe_file(f"{self._root}/{DIGEST}", digest)

    def _upload_files(self) -> None:
        """Upload all files but the digest, compare their sizes, and remove other files from the URL."""
        names = [entry.name for entry in os.scandir(self.local) if entry.is_file() and entry.name != DIGEST]
        names = sorted({*names, *_names_in_folders(self.local)})
        for name in names:
            self._fs.put_file(str(self.local / name), f"{self._root}/{name}")
        self._fs.invalidate_cache()
        there = self._fs.find(self._root, detail=True)
        uploaded = {path.removeprefix(f"{self._root}/"): info.get("size") for path, info in there.items()}
        for name in names:
            size = (self.local / name).stat().st_size
            if uploaded.get(name) != size:
                raise OSError(f"{self.url}/{name} has {uploaded.get(name)} bytes after the upload, expected {size}")
        for name in uploaded.keys() - set(names):
            self._remove_file(name)

    def remove(self) -> None:
        """Remove the checkpoint, complete or not, or the file from the URL; nothing if there is neither."""
        self._fs.invalidate_cache()
        if self._fs.isfile(self._root):
            self._fs.rm_file(self._root)
        elif any(self._fs.exists(f"{self._root}/{name}") for name in (DIGEST, MANIFEST)):
            self._remove_file(DIGEST)
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._root, recursive=True)

    def _remove_file(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def download(self, there: RemoteCheckpoint) -> None:
        """Download the checkpoint, verified, in place of the local one, if there is one.

        Raises:
            CorruptCheckpointError: It is damaged.
            CheckpointError: It cannot be read.
        """
        if there.manifest is None:
            raise CorruptCheckpointError(str(there.problem))
        partial = make_hidden_path(self.local, f".tmp-{secrets.token_hex(8)}")
        partial.mkdir(parents=True)
        try:
            title = CHECKSUMS[there.manifest.checksum].title
            for name, entry in there.manifest.all_files.items():
                self._get(name, partial / name)
                if hash_file(partial / name, there.manifest.checksum)[1] != entry.digest:
                    raise CorruptCheckpointError(
                        f"{self.url}/{name} is damaged: its {title} differs from the one in {MANIFEST}. An older checkpoint of "
                        "the run may be good: ckpt_path='auto' uses the newest good one"
                    )
            self._get(MANIFEST, partial / MANIFEST)
            (partial / DIGEST).write_bytes(there.digest)
            self._put_in_place(partial, there.digest)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _put_in_place(self, partial: Path, digest: bytes) -> None:
        old = make_hidden_path(self.local, f".del-{secrets.token_hex(8)}")
        try:
            if has_checkpoint_files(self.local):
                os.rename(self.local, old)
            elif self.local.is_dir():
                self.local.rmdir()  # an empty folder, of `pull_folders`
            os.rename(partial, self.local)
        except OSError:
            if checkpoint_identity(self.local) != digest:  # otherwise another process has downloaded it
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)

    def download_file(self) -> None:
        """Download the file at the URL; nothing if there is none.

        Raises:
            CheckpointError: It cannot be read.
        """
        try:
            self._fs.invalidate_cache()
            there = self._fs.isfile(self._root)
        except Exception as error:
            raise self._unreadable(error) from error
        if there:
            self._get("", self.local)

    def read_end(self, count: int) -> bytes:
        """The last bytes of the file at the URL; fewer if it is shorter.

        Raises:
            CheckpointError: The URL cannot be read.
        """
        try:
            data: bytes = self._fs.cat_file(self._root, start=-count)
        except Exception as error:
            raise self._unreadable(error) from error
        return data

    def _get(self, name: str, target: Path) -> None:
        """Download a file, complete or not at all."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = make_hidden_path(target, f".tmp-{secrets.token_hex(8)}")
        try:
            self._fs.get_file(f"{self._root}/{name}".rstrip("/"), str(partial))
            os.replace(partial, target)
        except Exception as error:
            raise self._unreadable(error) from error
        finally:
            partial.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------------ folders and files

    def pull_folders(self) -> None:
        """Create the local folders of the folders at the URL, except checkpoints, so that names are not given twice."""
        files, checkpoints = self._files()
        for path in (*files, *checkpoints):
            (self.local / path).parent.mkdir(parents=True, exist_ok=True)

    def pull_files(self) -> None:
        """Download the files below the URL that are not there and not part of a checkpoint, such as logs."""
        for path in self._files()[0]:
            if not (self.local / path).exists():
                self._get(path, self.local / path)

    def push_file(self, path: str = "") -> None:
        """Upload a file of the staging folder, or the file that it is.

        Args:
            path: Relative to the folder.
        """
        self._fs.put_file(str(self.local / path), f"{self._root}/{path}".rstrip("/"))

    def write_file(self, data: bytes) -> None:
        """Write a file at the URL."""
        self._fs.pipe_file(self._root, data)

    def _files(self) -> tuple[list[str], set[str]]:
        """The files below the URL that are not in a checkpoint, and the checkpoints; relative to the URL."""
        try:
            self._fs.invalidate_cache()
            paths = [path.removeprefix(f"{self._root}/") for path in self._fs.find(self._root)]
        except FileNotFoundError:
            return [], set()
        except Exception as error:
            raise self._unreadable(error) from error
        checkpoints = {path.rpartition("/")[0] for path in paths if path.rpartition("/")[2] in (DIGEST, MANIFEST)}
        return [path for path in paths if checkpoints.isdisjoint(_parents(path))], checkpoints


def _parents(path: str) -> Iterator[str]:
    """The folders of a file: its own, the one around it, … to the outermost, which is `""`."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def _names_in_folders(checkpoint: Path) -> list[str]:
    """The files in folders that hooks have added to a checkpoint."""
    try:
        manifest = Manifest.from_bytes(read_small_file(checkpoint / MANIFEST, MAX_JSON_BYTES), str(checkpoint))
    except CheckpointError:  # it was removed meanwhile, or is damaged
        return []
    return [name for name in manifest.hook_files if "/" in name]


_RETRY_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0)  # seconds before an upload is tried again
_NOTICE_AFTER_SECONDS = 5.0  # seconds after which to say what the end of a run waits for


@dataclass
class _RemoteListing:
    """What is at the URL of a folder of checkpoints, apart from what this process saves there."""

    checkpoints: dict[str, RemoteCheckpoint]
    names: set[str]


class RemoteSync:
    """What this process knows of its staging folders. All methods do nothing for paths that are not in a staging folder.

    The thread exists while there is something to upload or to remove, and the interpreter waits for it at exit.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)  # the parent uploads

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._entered: dict[Path, _RemoteListing] = {}
        self._waiting: deque[Path] = deque()  # Paths that were saved or removed, and folders of log files.
        self._changed: set[Path] = set()  # All that were saved or removed so far: these are no log files.
        # Folder → file → its size and time when it was uploaded.
        self._log_folders: dict[Path, dict[str, tuple[int, int]]] = {}
        self._error: tuple[Path, Exception] | None = None  # The error of the last try, if it failed.
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------------------ from the URL

    def enter(self, folder: Path, good: Iterable[Path]) -> None:
        """A run saves to a folder from now on. Its URL is listed now, and not again before `leave`.

        Args:
            folder: The folder of checkpoints.
            good: The checkpoints in it without a known problem. Those that an earlier run did not upload are uploaded.

        Raises:
            CheckpointError: The URL cannot be read.
        """
        remote = remote_at(folder)
        if remote is None:
            return
        listing = _RemoteListing(remote.checkpoints(), remote.names())
        self._entered[folder] = listing
        for path in good:
            there = listing.checkpoints.get(path.name)
            if there is None or (there.digest != checkpoint_identity(path) and not _is_older(path, there)):
                self.note_change(path)

    def leave(self, folder: Path) -> None:
        """The run no longer saves to a folder."""
        self._entered.pop(folder, None)

    def checkpoints(self, folder: Path) -> dict[str, RemoteCheckpoint]:
        """The complete checkpoints at the URL of a folder, by name, without those of this process.

        Raises:
            CheckpointError: The URL cannot be read.
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

    def read_end(self, file: Path, count: int) -> bytes:
        """The last bytes of the file at the URL of a path; nothing if there is none, or if it cannot be read now."""
        remote = remote_at(file) if file.name in self.names(file.parent) else None
        try:
            return b"" if remote is None else remote.read_end(count)
        except CheckpointError:
            return b""

    def fetch(self, path: Path, *, again: bool = False) -> bool:
        """Download the checkpoint or the file that a path stands for, unless the local one is the same or newer.

        Args:
            path: The path.
            again: The local one is damaged: replace it if the URL has the same one or a newer one.

        Returns:
            Whether a checkpoint was downloaded.

        Raises:
            CorruptCheckpointError: It is damaged at the URL.
            CheckpointError: The URL cannot be read, and there is no local one.
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

    def note_change(self, path: Path) -> None:
        """A checkpoint or a file next to it was saved or removed: the thread does the same at its URL. Never raises."""
        if url_of(path) is None:
            return
        gone = not os.path.lexists(path)
        with self._lock:
            if path.parent in self._entered:
                listing = self._entered[path.parent]
                listing.checkpoints.pop(path.name, None)
                (listing.names.discard if gone else listing.names.add)(path.name)
            if gone and path in self._waiting:
                self._waiting.remove(path)  # it is removed after what was saved meanwhile
            if path not in self._waiting:
                self._waiting.append(path)
            self._changed.add(path)
            self._start()

    def add_log_folder(self, folder: Path) -> None:
        """Upload the files of a run's folder too, such as logs: before each checkpoint, and in `finish`."""
        if url_of(folder) is not None:
            self._log_folders.setdefault(folder, {})

    def wait(self) -> None:
        """Wait until everything is done at the URLs, or something has failed."""
        thread, noticed = self._thread, False
        while thread is not None and thread.is_alive():
            thread.join(_NOTICE_AFTER_SECONDS)
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
            warn(_describe_pending(left, set(self._log_folders), error))

    def _start(self) -> None:
        if self._waiting and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trainkit-upload", daemon=False)
            with contextlib.suppress(RuntimeError):  # At the limit of threads, the next call tries again.
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
        for pause in (*_RETRY_PAUSES_SECONDS, None):
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
        elif path.is_file():  # or a link to one: `last.ckpt`
            remote.push_file()
        elif path.is_symlink():  # `last` as a link
            remote.write_file(os.fsencode(os.readlink(path)) + b"\n")
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
                unfinished = ".tmp-" in name or (name.startswith(".") and name.endswith(".tmp"))
                if path.is_symlink() or name == LOCK or unfinished or path in self._changed:
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
        data = read_small_file(path / MANIFEST, MAX_JSON_BYTES)
        return Manifest.from_bytes(data, str(path)).saved_at < there.manifest.saved_at
    except (CheckpointError, OSError):
        return True


def _describe_pending(left: list[Path], log_folders: set[Path], error: tuple[Path, Exception]) -> str:
    logs = [path for path in left if path in log_folders]
    saved = [path for path in left if path not in log_folders and os.path.lexists(path)]
    removed = [path for path in left if path not in log_folders and not os.path.lexists(path)]
    lines = [f"{url_of(error[0])} could not be written: {type(error[1]).__name__}: {error[1]}."]
    if saved:
        names = ", ".join(str(path) for path in saved[-MAX_LISTED:])
        lines.append(f"Not uploaded, but complete here: {names}. A run that starts with the same folder uploads them.")
    if removed:
        names = ", ".join(str(url_of(path)) for path in removed[-MAX_LISTED:])
        lines.append(f"{quantity(len(removed), 'old checkpoint')} not removed: {names}.")
    if logs:
        lines.append(f"Not uploaded: the logs in {', '.join(map(str, logs))}.")
    return " ".join(lines)


remote_sync = RemoteSync()
"""The staging folders of this process."""
