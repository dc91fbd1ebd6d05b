"""Checkpoints and log files at a URL, through fsspec: list, upload, download, remove.

A checkpoint at a URL is a folder with the same files as the local one. `manifest.sha256` is uploaded last and removed first, so
a folder without it is not a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.checkpoint.identify import checkpoint_identity, has_checkpoint_files, hidden_path, listed
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest, digest_line
from trainkit.errors import CheckpointError, CorruptCheckpointError
from trainkit.paths import remote_url, url_of

__all__ = ["RemoteCheckpoint", "RemoteFolder", "remote_at", "why_not_at_the_url"]


def remote_at(path: Path) -> RemoteFolder | None:
    """What a path in a staging folder stands for; `None` for any other path."""
    url = url_of(path)
    return None if url is None else RemoteFolder(path, url)


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A complete checkpoint at a URL.

    Attributes:
        digest: the content of its `manifest.sha256`.
        manifest: its manifest; `None` if that cannot be trusted.
        problem: what is wrong with it; `None` if nothing was found.
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
        return f"{remote.url} is a folder of checkpoints, expected one of them: {listed(inside)}. {fix}"
    siblings = sorted(around.checkpoints()) if around is not None else []
    return (
        f"{remote.url}: expected a checkpoint, but there is none. Checkpoints next to it: {listed(siblings) or 'none'}. "
        "Fix: pass the URL of one of them, or of another folder"
    )


class RemoteFolder:
    """A folder at a URL, and its staging folder.

    Args:
        local: the staging folder.
        url: the URL, for messages.

    Raises:
        CheckpointError: the URL cannot be opened: of methods too.
    """

    def __init__(self, local: Path, url: str) -> None:
        from fsspec import url_to_fs

        self.local, self.url = local, url
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
            found = [path.rsplit("/", 2)[1] for path in self._fs.glob(f"{self._root}/*/{DIGEST}")]
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self._unreadable(error) from error
        inside = {name: self._checkpoint(name) for name in found if not name.startswith(".")}
        return {name: one for name, one in inside.items() if one is not None}

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
            Exception: an error of the file system.
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
        names = sorted(entry.name for entry in os.scandir(self.local) if entry.is_file() and entry.name != DIGEST)
        for name in names:
            self._fs.put_file(str(self.local / name), f"{self._root}/{name}")
        self._fs.invalidate_cache()
        found = {info["name"].rsplit("/", 1)[1]: info.get("size") for info in self._fs.ls(self._root, detail=True)}
        for name in names:
            size = (self.local / name).stat().st_size
            if found.get(name) != size:
                raise OSError(f"{self.url}/{name} has {found.get(name)} bytes after the upload, expected {size}")
        for name in found.keys() - set(names):
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
            CorruptCheckpointError: it is damaged.
            CheckpointError: it cannot be read.
        """
        if there.manifest is None:
            raise CorruptCheckpointError(str(there.problem))
        partial = hidden_path(self.local, f".tmp-{secrets.token_hex(8)}")
        partial.mkdir(parents=True)
        try:
            for name, entry in there.manifest.files.items():
                self._get(name, partial / name)
                if _sha256(partial / name) != entry.sha256:
                    raise CorruptCheckpointError(
                        f"{self.url}/{name} is damaged: its SHA-256 differs from the one in {MANIFEST}. An older checkpoint of "
                        "the run may be good: ckpt_path='auto' uses the newest good one"
                    )
            self._get(MANIFEST, partial / MANIFEST)
            (partial / DIGEST).write_bytes(there.digest)
            self._put_in_place(partial, there.digest)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _put_in_place(self, partial: Path, digest: bytes) -> None:
        old = hidden_path(self.local, f".del-{secrets.token_hex(8)}")
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
            CheckpointError: it cannot be read.
        """
        try:
            self._fs.invalidate_cache()
            there = self._fs.isfile(self._root)
        except Exception as error:
            raise self._unreadable(error) from error
        if there:
            self._get("", self.local)

    def _get(self, name: str, target: Path) -> None:
        """Download a file, complete or not at all."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = hidden_path(target, f".tmp-{secrets.token_hex(8)}")
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

    def push_file(self, path: str) -> None:
        """Upload a file of the staging folder.

        Args:
            path: relative to the folder.
        """
        self._fs.put_file(str(self.local / path), f"{self._root}/{path}")

    def write_file(self, data: bytes) -> None:
        """Write a file at the URL."""
        self._fs.pipe_file(self._root, data)

    def _files(self) -> tuple[list[str], set[str]]:
        """The files below the URL that are not in a checkpoint, and the checkpoints; relative to the URL."""
        try:
            self._fs.invalidate_cache()
            found = [path.removeprefix(f"{self._root}/") for path in self._fs.find(self._root)]
        except FileNotFoundError:
            return [], set()
        except Exception as error:
            raise self._unreadable(error) from error
        checkpoints = {path.rpartition("/")[0] for path in found if path.rpartition("/")[2] in (DIGEST, MANIFEST)}
        return [path for path in found if path.rpartition("/")[0] not in checkpoints], checkpoints


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
