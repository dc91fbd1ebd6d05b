"""Only regular files are read: completely, once, and only if their size and digest are those of the file that was written."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resume.checkpoints import complaint
from helpers.resume.checkpoints import digest as digest_of

from trainkit.checkpoint.regular_file import _NORESERVE, read_file
from trainkit.errors import CheckpointError

NAME = "the checkpoint/file"
map_file = partial(read_file, mapped=True)


def refused(path: str, size: int = 4, digest: str = digest_of(b"data")) -> str:
    """Return the error for a file, which must be the same for reading and mapping it."""
    said = {complaint(lambda way=way: way(Path(path), size, digest, NAME), NAME) for way in (read_file, map_file)}  # type: ignore[misc]
    assert len(said) == 1
    return said.pop()


@pytest.mark.parametrize("way", [read_file, map_file])
def test_a_file_is_read_whole(way: Callable[..., memoryview]) -> None:
    for size in (0, 1, 100, 2**20, 3 * 2**20 + 1):
        data = os.urandom(size)
        Path("file").write_bytes(data)
        assert bytes(way(Path("file"), size, digest_of(data), "x")) == data
        assert bytes(way(Path("file"), size, hashlib.sha256(data).hexdigest(), "x", checksum="sha256")) == data


def test_what_is_written_into_a_mapped_file_is_not_on_the_disk() -> None:
    Path("file").write_bytes(b"data")
    mapped = map_file(Path("file"), 4, None, "x")
    mapped[:2] = b"--"
    assert Path("file").read_bytes() == b"data"
    Path("file").unlink()
    assert bytes(mapped) == b"--ta"


@pytest.mark.skipif(not _NORESERVE, reason="the system's number for it is not known")
def test_a_file_larger_than_the_memory_can_be_mapped() -> None:
    size = 2**42
    Path("file").touch()
    os.truncate("file", size)  # a sparse file
    mapped = map_file(Path("file"), size, None, "x")
    mapped[size - 1] = 1
    assert mapped[size - 2 :] == b"\0\1"


def test_what_is_not_the_file_that_was_written_is_refused() -> None:
    """A file with another size or digest than expected is refused, and so is a missing one."""
    Path("file").write_bytes(b"data")
    assert bytes(read_file(Path("file"), 4, digest_of(b"data"), "x")) == b"data"
    assert "expected 5 bytes, found 4" in refused("file", 5)
    assert "expected 3 bytes, found 4" in refused("file", 3)
    assert f"expected {10**18:,} bytes, found 4" in refused("file", 10**18)  # no memory is allocated for it
    assert f"its XXH3-128 is {digest_of(b'data')}, expected {'0' * 32}" in refused("file", digest="0" * 32)
    sha256 = "its SHA-256 is 3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"
    for way in (read_file, map_file):
        assert sha256 in complaint(lambda way=way: way(Path("file"), 4, "0" * 64, NAME, checksum="sha256"), NAME)  # type: ignore[misc]
    assert "missing" in refused("absent")
    Path("file").write_bytes(b"")
    assert "expected 4 bytes, found 0" in refused("file")


def test_a_file_that_does_not_fit_into_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    Path("file").write_bytes(b"data")
    monkeypatch.setattr(torch, "empty", lambda size, **kwargs: empty(2**60, **kwargs))
    with pytest.raises(CheckpointError, match="^f: not enough memory for 4 bytes"):
        read_file(Path("file"), 4, "0" * 64, "f")


@pytest.mark.parametrize("way", [read_file, map_file])
def test_what_another_process_has_verified_is_not_hashed_again(way: Callable[..., memoryview]) -> None:
    """Without a digest, only the size of the file is checked: another process has checked the content."""
    Path("file").write_bytes(b"data")
    assert bytes(way(Path("file"), 4, None, "x")) == b"data"
    with pytest.raises(CheckpointError, match="^f: expected 3 bytes, found 4"):
        way(Path("file"), 3, None, "f")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_only_a_regular_file_is_read() -> None:
    """Links, pipes, folders, sockets and devices are refused: a pipe blocks, and a device may never end."""
    Path("file").write_bytes(b"data")
    Path("link").symlink_to("file")
    Path("dangling").symlink_to("nowhere")
    os.mkfifo("pipe")
    Path("folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    for name, kind in [
        ("link", "a link"),
        ("dangling", "a link"),
        ("pipe", "a pipe"),
        ("folder", "a folder"),
        ("socket", "a socket"),
        (os.devnull, "a device"),
        ("/dev/zero", "a device"),
    ]:
        assert f"expected a regular file, found {kind}" in refused(name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_an_exchange_between_looking_and_opening_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced between `lstat` and `open` is refused."""
    Path("file").write_bytes(b"data")
    Path("other").write_bytes(b"data")
    lstat = os.lstat

    def exchange(path: Any, **kwargs: Any) -> os.stat_result:
        found = lstat(path, **kwargs)
        os.unlink(path)
        os.mkfifo(path) if kind == "pipe" else os.symlink("other", path)
        return found

    monkeypatch.setattr(os, "lstat", exchange)
    message = complaint(lambda: read_file(Path("file"), 4, digest_of(b"data"), NAME), NAME)
    assert ("was replaced while it was opened" if kind == "pipe" else "cannot be read") in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named() -> None:
    Path("file").write_bytes(b"data")
    os.chmod("file", 0)
    assert "cannot be read" in refused("file")
