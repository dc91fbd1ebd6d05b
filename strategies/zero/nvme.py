"""The disk for offload to NVMe: checks whether it is suitable, and manages one folder per process."""

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

__all__ = ["Folder", "check_path", "check_space"]

_PREFIX = "trainkit-swap-"
_BLOCK = 4096


def check_path(path: str | os.PathLike[str]) -> None:
    """Check that DeepSpeed can write to a folder.

    Raises:
        ConfigurationError: it is not a folder, is not writable, or is on a file system without direct I/O.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigurationError(f"nvme_path={str(path)!r} is not a folder. Create one on a local disk: mkdir -p '{path}'")
    try:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    except OSError as error:
        raise ConfigurationError(
            f"nvme_path={str(path)!r} is not writable ({error.strerror}). Use a writable folder on a local disk."
        ) from error
    os.close(descriptor)
    try:
        with mmap.mmap(-1, _BLOCK) as block:  # direct I/O needs memory that is aligned to pages
            descriptor = os.open(name, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
            try:
                os.write(descriptor, block)
            finally:
                os.close(descriptor)
    except OSError as error:
        why = "its file system has no direct I/O" if error.errno == errno.EINVAL else error.strerror
        raise ConfigurationError(
            f"DeepSpeed cannot write to nvme_path={str(path)!r}: {why}. Use a folder on a local disk (ext4, xfs)."
        ) from error
    finally:
        os.unlink(name)


def check_space(path: Path, on_disk: int, pinned: int, processes: int) -> None:
    """Check before the first write that there is enough disk space and page-locked memory.

    Args:
        path: a folder on the disk.
        on_disk: number of bytes that each process of this node writes.
        pinned: number of bytes of page-locked memory that this process needs.
        processes: number of processes of this node.

    Raises:
        ConfigurationError: there is not enough; the message has the numbers.
    """
    free = shutil.disk_usage(path).free
    if on_disk * processes > free:
        raise ConfigurationError(
            f"offload to {path.parent} needs {_size(on_disk * processes)} ({processes} processes with {_size(on_disk)} "
            f"each), but only {_size(free)} are free. Free disk space, or use nvme_path on another disk."
        )
    if not _can_lock(pinned):
        raise ConfigurationError(
            f"offload to NVMe needs {_size(pinned)} of page-locked memory in each process, but the system does not allow that "
            "much. Raise the limit (ulimit -l unlimited; in a container --ulimit memlock=-1), or use smaller buffers: "
            "ZeROStrategy(..., sub_group_size=10_000_000)."
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _can_lock(size: int) -> bool:
    """Whether `size` bytes of memory can be page-locked; if not, DeepSpeed would crash."""
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
        del held  # else the memory could not be freed
    return locked


class Folder:
    """A folder under `nvme_path` for this process only, because DeepSpeed uses the same file names in every process.

    Creating one also removes the folders of killed processes.

    Args:
        base: `nvme_path`.

    Attributes:
        path: the folder.
    """

    def __init__(self, base: str | os.PathLike[str]) -> None:
        for lock in Path(base).glob(f"{_PREFIX}*.lock"):
            _remove_abandoned(lock)
        while True:
            self._file, name = tempfile.mkstemp(prefix=_PREFIX, suffix=".lock", dir=base)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if _same_file(self._file, name):  # else another process removed the file before it was locked
                break
            os.close(self._file)
        self._lock, self._process = Path(name), os.getpid()
        self.path = self._lock.with_suffix("")
        self.path.mkdir()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the folder and its files."""
        atexit.unregister(self.close)
        if os.getpid() == self._process:  # not in a forked process
            _remove(self._lock)
            os.close(self._file)


def _same_file(descriptor: int, name: str) -> bool:
    """Whether `name` is still the path of the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(name))
    except FileNotFoundError:
        return False


def _remove_abandoned(lock: Path) -> None:
    """Remove a folder whose process has exited."""
    with suppress(OSError):  # it is in use, or belongs to another user
        descriptor = os.open(lock, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(descriptor, str(lock)):
                _remove(lock)
        finally:
            os.close(descriptor)


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
