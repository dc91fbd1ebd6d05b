"""The disk that ZeRO offloads to: whether it will do, and a folder of each process's own, which goes with the process."""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from trainkit.errors import ConfigurationError

__all__ = ["Folder", "check_path", "check_room"]

_PREFIX = "trainkit-swap-"
_BLOCK = 4096


def check_path(path: str | os.PathLike[str]) -> None:
    """Refuse a folder in which DeepSpeed could not write.

    Raises:
        ConfigurationError: it is none, cannot be written to, or lies on a file system without direct input and output.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigurationError(f"nvme_path={str(path)!r} is no folder. Make it on a fast local disk: mkdir -p '{path}'")
    try:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    except OSError as error:
        raise ConfigurationError(
            f"nvme_path={str(path)!r} cannot be written to ({error.strerror}). Give a folder on a local disk that is yours."
        ) from error
    os.close(descriptor)
    try:
        with mmap.mmap(-1, _BLOCK) as block:  # direct writes are from memory at the beginning of a page
            descriptor = os.open(name, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
            try:
                os.write(descriptor, block)
            finally:
                os.close(descriptor)
    except OSError as error:
        why = "its file system has no direct I/O" if error.errno == errno.EINVAL else error.strerror
        raise ConfigurationError(
            f"nvme_path={str(path)!r} cannot be written to by DeepSpeed: {why}. Give a folder on a local disk (ext4, xfs)."
        ) from error
    finally:
        os.unlink(name)


def check_room(path: Path, on_disk: int, pinned: int, processes: int) -> None:
    """Refuse before the first write what the disk or the memory has no room for.

    Args:
        path: a folder on the disk.
        on_disk: bytes that each process of this machine writes.
        pinned: bytes of page-locked memory that this process takes.
        processes: of this machine.

    Raises:
        ConfigurationError: too much, with the figures.
    """
    free = shutil.disk_usage(path).free
    if on_disk * processes > free:
        raise ConfigurationError(
            f"the offload to {path.parent} needs {_size(on_disk * processes)} ({processes} processes with {_size(on_disk)} "
            f"each), and {_size(free)} are free there. Free some, or give nvme_path on another disk."
        )
    if not _can_lock(pinned):
        raise ConfigurationError(
            f"the offload to NVMe needs {_size(pinned)} of page-locked memory in each process, and the system does not give "
            "that much. Raise the limit (ulimit -l unlimited; in a container --ulimit memlock=-1), or make the buffers smaller "
            "by a smaller sub_group_size."
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _can_lock(size: int) -> bool:
    """Whether so much memory can be page-locked: DeepSpeed's code crashes where it cannot."""
    system = ctypes.CDLL(None, use_errno=True)
    try:
        memory = mmap.mmap(-1, max(size, _BLOCK))
    except OSError:
        return False
    with memory:
        held = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(held))
        locked: bool = system.mlock(address, ctypes.c_size_t(size)) == 0
        if locked:
            system.munlock(address, ctypes.c_size_t(size))
        del held  # else the memory could not be given back
    return locked


class Folder:
    """A folder under ``nvme_path`` that only this process uses: DeepSpeed's names of files begin anew in each process.

    What processes have left that were killed is removed when another one makes its folder.

    Args:
        base: ``nvme_path``.

    Attributes:
        path: the folder.
    """

    def __init__(self, base: str | os.PathLike[str]) -> None:
        for lock in Path(base).glob(f"{_PREFIX}*.lock"):
            _remove_abandoned(lock)
        while True:
            self._file, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".lock", dir=base)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if _is(self._file, name):  # else another process has removed it before it was locked
                break
            os.close(self._file)
        self._lock, self._process = Path(name), os.getpid()
        self.path = self._lock.with_suffix("")
        self.path.mkdir()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove it, with what is in it."""
        atexit.unregister(self.close)
        if os.getpid() == self._process:  # not one that was forked from it
            _remove(self._lock)
            os.close(self._file)


def _is(descriptor: int, name: str) -> bool:
    """Whether a file is still to be found under its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(name))
    except FileNotFoundError:
        return False


def _remove_abandoned(lock: Path) -> None:
    """Remove a folder whose process has gone."""
    with suppress(OSError):  # it is in use, or somebody else's
        descriptor = os.open(lock, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(descriptor, str(lock)):
                _remove(lock)
        finally:
            os.close(descriptor)


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
