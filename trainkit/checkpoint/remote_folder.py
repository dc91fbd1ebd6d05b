"""Checkpoints and log files at a URL, through fsspec: list, upload, download, remove.

A checkpoint at a URL is a folder with the same files as the local one. `manifest.sha256` is uploaded last and removed first, so
a folder without it is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from trainkit.checkpoint.identify import has_checkpoint_files, hidden_path, is_checkpoint, listed
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest, digest_line
from trainkit.errors import CheckpointError, CorruptCheckpointError
from trainkit.paths import url_of

__all__ = ["RemoteFolder", "fetch", "remote_at", "why_not_at_the_url"]


def remote_at(path: Path) -> RemoteFolder | None:
    """What a path in a staging folder stands for; `None` for any other path."""
    url = url_of(path)
    return None if url is None else RemoteFolder(path, url)


def fetch(path: Path) -> None:
    """Download the checkpoint that a path in a staging folder stands for, unless it is there; else the file.

    Raises:
        CorruptCheckpointError: it is damaged at the URL.
        CheckpointError: the URL cannot be read.
    """
    remote = remote_at(path)
    if remote is not None and not is_checkpoint(path):
        remote.download()


def why_not_at_the_url(path: Path) -> str | None:
    """Why there is no checkpoint at the URL of a path, with the checkpoints near it; `None` for a path without a URL."""
    remote, around = remote_at(path), remote_at(path.parent)
    if remote is None:
        return None
    if inside := sorted(remote.checkpoints()):
        fix = f"Fix: {remote.url + '/' + inside[-1]!r}."
        return f"{remote.url} is a folder of checkpoints, expected one of them: {listed(inside)}. {fix}"
    siblings = sorted(around.checkpoints()) if around is not None else []
    return f"{remote.url}: expected a checkpoint, but there is none. Checkpoints next to it: {listed(siblings) or 'none'}."


class RemoteFolder:
    """A folder at a URL, and its staging folder.

    Args:
        local: the staging folder.
        url: the URL.

    Raises:
        CheckpointError: the URL cannot be opened: of methods too.
    """

    def __init__(self, local: Path, url: str) -> None:
        from fsspec import url_to_fs

        self.local, self.url = local, url
        try:
            self._fs: Any = url_to_fs(url)[0]
            self._root: str = url_to_fs(url)[1].rstrip("/")
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.url} cannot be read: {type(error).__name__}: {error}. Check the address, the network and the credentials."
        )

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def checkpoints(self) -> dict[str, bytes]:
        """The complete checkpoints in this folder: name → the content of `manifest.sha256`."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.glob(f"{self._root}/*/{DIGEST}")
            listed = {path.rsplit("/", 2)[1]: self._fs.cat_file(path) for path in found}
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self._unreadable(error) from error
        return {name: digest for name, digest in listed.items() if not name.startswith(".")}

    def names(self) -> set[str]:
        """The names of all entries of this folder."""
        try:
            self._fs.invalidate_cache()
            return {path.rstrip("/").rsplit("/", 1)[1] for path in self._fs.ls(self._root, detail=False)}
        except FileNotFoundError:
            return set()
        except Exception as error:
            raise self._unreadable(error) from error

    def manifest(self, name: str, digest: bytes) -> tuple[Manifest | None, str | None]:
        """The manifest of a checkpoint in this folder, or `None` and what is wrong with it."""
        what = f"{self.url}/{name}"
        try:
            data = self._fs.cat_file(f"{self._root}/{name}/{MANIFEST}")
            if digest_line(data) != digest:
                return None, f"{what}/{MANIFEST} is not the one that was saved: its SHA-256 differs from {DIGEST}."
            return Manifest.from_bytes(data, what), None
        except CorruptCheckpointError as error:
            return None, str(error)
        except FileNotFoundError:
            return None, f"{what}/{MANIFEST} is missing."
        except Exception as error:
            raise self._unreadable(error) from error

    def holds(self, digest: bytes) -> bool:
        """Whether the checkpoint at the URL is complete, and has this content of `manifest.sha256`."""
        self._fs.invalidate_cache()
        try:
            return bool(self._fs.cat_file(f"{self._root}/{DIGEST}") == digest)
        except FileNotFoundError:
            return False

    def upload(self) -> None:
        """Upload the checkpoint. Files at the URL that it does not have are removed."""
        digest = (self.local / DIGEST).read_bytes()
        if self.holds(digest):
            return
        self._remove_file(DIGEST)
        names = sorted(entry.name for entry in os.scandir(self.local) if entry.is_file() and entry.name != DIGEST)
        for name in names:
            self._fs.put_file(str(self.local / name), f"{self._root}/{name}")
        self._fs.invalidate_cache()
        there = {info["name"].rsplit("/", 1)[1]: info.get("size") for info in self._fs.ls(self._root, detail=True)}
        for name in names:
            size = (self.local / name).stat().st_size
            if there.get(name) != size:
                raise OSError(f"{self.url}/{name} has {there.get(name)} bytes after the upload, expected {size}")
        for name in there.keys() - set(names):
            self._remove_file(name)
        self._fs.pipe_file(f"{self._root}/{DIGEST}", digest)

    def remove(self) -> None:
        """Remove the checkpoint from the URL."""
        self._remove_file(DIGEST)
        try:
            self._fs.rm(self._root, recursive=True)
        except FileNotFoundError:
            return

    def _remove_file(self, name: str) -> None:
        try:
            self._fs.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return

    def download(self) -> None:
        """Download the checkpoint, verified; of a path that is a file at the URL, the file. Nothing if it is neither."""
        try:
            self._fs.invalidate_cache()
            if self._fs.exists(f"{self._root}/{DIGEST}"):
                self._download_checkpoint()
            elif self._fs.isfile(self._root):
                self.local.parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(self._root, str(self.local))
        except CheckpointError:
            raise
        except Exception as error:
            raise self._unreadable(error) from error

    def _download_checkpoint(self) -> None:
        digest = self._fs.cat_file(f"{self._root}/{DIGEST}")
        parent = RemoteFolder(self.local.parent, self.url.rsplit("/", 1)[0])
        manifest, problem = parent.manifest(self.local.name, digest)
        if manifest is None:
            raise CorruptCheckpointError(str(problem))
        partial = hidden_path(self.local, f".tmp-{secrets.token_hex(8)}")
        partial.mkdir(parents=True)
        try:
            for name, entry in manifest.files.items():
                self._fs.get_file(f"{self._root}/{name}", str(partial / name))
                if _sha256(partial / name) != entry.sha256:
                    raise CorruptCheckpointError(
                        f"{self.url}/{name} is damaged: its SHA-256 differs from the one in {MANIFEST}. An older checkpoint of "
                        "the run may be good: ckpt_path='auto' uses the newest good one"
                    )
            self._fs.get_file(f"{self._root}/{MANIFEST}", str(partial / MANIFEST))
            (partial / DIGEST).write_bytes(digest)
            if self.local.is_dir() and not has_checkpoint_files(self.local):
                self.local.rmdir()  # an empty folder, of `pull_folders`
            os.rename(partial, self.local)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------ folders and files

    def pull_folders(self) -> None:
        """Create the local folders of the folders at the URL, except checkpoints, so that names are not given twice."""
        files, checkpoints = self._files()
        for path in (*files, *checkpoints):
            (self.local / path).parent.mkdir(parents=True, exist_ok=True)

    def pull_files(self) -> None:
        """Download the files below the URL that are not there and not part of a checkpoint, such as logs."""
        for path in self._files()[0]:
            target = self.local / path
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._fs.get_file(f"{self._root}/{path}", str(target))
                except Exception as error:
                    raise self._unreadable(error) from error

    def push_file(self, path: str) -> None:
        """Upload a file of the staging folder.

        Args:
            path: relative to the folder.
        """
        self._fs.put_file(str(self.local / path), f"{self._root}/{path}")

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
