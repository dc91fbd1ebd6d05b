"""One live run per folder of checkpoints: a lock that a dead process or a dead host does not keep.

The lock is the content of the file `.lock`, which names its holder and has a heartbeat. `flock` only makes
read-check-write atomic, and is released immediately: held for the whole run, as by the package filelock, it counts on one host
only on some file systems, and a forked worker keeps it for a killed run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainkit.console import notice
from trainkit.distributed.process_identity import ProcessIdentity
from trainkit.errors import (
    CheckpointError,
    CheckpointLockedError,
    CheckpointWriteError,
    ConfigurationError,
    CorruptCheckpointError,
)
from trainkit.tagged_json.codec import strict_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "FolderLock"]

LOCK = ".lock"
"""Name of the lock file in a folder of checkpoints; the file is empty if no run holds the lock."""

_MAX_BYTES = 64 * 1024
_FLOCK_TIMEOUT_S = 10.0  # another process needs microseconds for its read-check-write
_SETTLE_S = 0.25  # the time after which a claim without flock is valid, if it was not overwritten
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # a file system without flock
_LOCKED = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)
_FIX = "Fix: choose another folder: ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)."

_HELD: set[str] = set()  # tokens of the locks that this process holds


class FolderLock:
    """Keeps a second live run out of an existing folder of checkpoints; `run_id` is for the message to that run.

    A daemon thread sends a heartbeat every `interval` seconds. After `stale_after` seconds without one, another host takes over
    the lock. A forked process neither has the lock nor keeps it. A lock object that is deleted is released.
    """

    def __init__(self, folder: Path, run_id: str, *, interval: float = 10.0, stale_after: float = 60.0) -> None:
        if not 0 < interval < stale_after:
            raise ConfigurationError(
                f"FolderLock expects 0 < interval < stale_after (seconds), got interval={interval}, stale_after={stale_after}. "
                "Fix: FolderLock(folder, run_id, interval=10.0, stale_after=60.0)."
            )
        self.folder = folder
        self.run_id = run_id
        self.interval = interval
        self.stale_after = stale_after
        self._heartbeat: _Heartbeat | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def acquire(self) -> None:
        """Take the lock, unless this object has it already, and start its heartbeat.

        The lock of a dead process of this host is taken over immediately, that of another host after `stale_after` seconds.

        Raises:
            CheckpointLockedError: another live run holds the lock; the message names host, process and run.
            CheckpointWriteError: the lock file cannot be written.
        """
        if self._heartbeat is not None and not self._heartbeat.lost:
            return
        self.release()
        mine = _Holder(ProcessIdentity.this(), self.run_id, secrets.token_hex(16))
        _HELD.add(mine.token)  # before the file is written: a token that is not in _HELD is that of a dead lock
        try:
            _claim(self.folder, mine, self.stale_after)
        except BaseException:
            _HELD.discard(mine.token)
            raise
        self._heartbeat = _Heartbeat(self.folder / LOCK, mine, self.interval)
        self._end = weakref.finalize(self, self._heartbeat.end)
        self._heartbeat.start()

    def release(self) -> None:
        """Release the lock and end the heartbeat. May be called again; does nothing in a forked process."""
        if self._end is not None:
            self._end()
        self._heartbeat = self._end = None

    @property
    def lost(self) -> bool:
        """Whether another run has taken over the lock. Reads the file: a process may check right after it was suspended."""
        return self._heartbeat is not None and self._heartbeat.check()

    def check(self) -> None:
        """Raise `CheckpointLockedError`, which names the other run, if the lock is `lost`."""
        if self._heartbeat is not None and self._heartbeat.check():
            raise CheckpointLockedError(
                f"The folder {self.folder} was taken over by {self._heartbeat.taken_by}, because this run sent no heartbeat "
                f"for {self.stale_after:g} s (was it suspended?). This run must not write there anymore. Fix: resume it in "
                "another folder after the other run has ended."
            )


@dataclass(frozen=True)
class _Holder:
    """Who holds the lock. The token distinguishes several locks of one process."""

    process: ProcessIdentity
    run_id: str
    token: str

    @classmethod
    def parse(cls, data: bytes) -> _Holder | None:
        """The holder named in a lock file; `None` if the content is invalid."""
        try:
            values = strict_json(data, LOCK)
        except CorruptCheckpointError:
            return None
        process = ProcessIdentity.from_json(values) if isinstance(values, dict) else None
        if process is None or not isinstance(values.get("run_id"), str) or not isinstance(values.get("token"), str):
            return None
        return cls(process, values["run_id"], values["token"])

    def to_bytes(self, heartbeats: int) -> bytes:
        values = {**asdict(self.process), "run_id": self.run_id, "token": self.token, "beat": heartbeats}
        return json.dumps(values).encode() + b"\n"

    def __str__(self) -> str:
        return f"run {self.run_id!r} (process {self.process.pid} on host {self.process.host!r})"

    def is_in(self, data: bytes) -> bool:
        holder = _Holder.parse(data)
        return holder is not None and holder.token == self.token


class _Claim(NamedTuple):
    """What a lock file says: its bytes, who holds the lock, and whether they are alive.

    The state is `"unknown"` if only the heartbeat can show that.
    """

    data: bytes
    holder: _Holder | None
    state: Literal["live", "dying", "dead", "unknown"]


def _parse(data: bytes) -> _Claim:
    holder = _Holder.parse(data)
    if holder is None:
        return _Claim(data, None, "unknown" if data else "dead")
    if holder.process == ProcessIdentity.this():
        return _Claim(data, holder, "live" if holder.token in _HELD else "dead")
    return _Claim(data, holder, holder.process.state())


def _in_use(folder: Path, holder: _Holder | None) -> CheckpointLockedError:
    return CheckpointLockedError(
        f"The folder {folder} is in use by {holder or 'another run (its lock file is unreadable)'}, which is still running. "
        "Expected a folder that no other run writes to, since two runs would remove each other's checkpoints. Fix: end that "
        "run, or choose another folder for this one: ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)."
    )


def _take(folder: Path, file: _LockFile, mine: _Holder) -> bool:
    """Write `mine` into the open lock file; returns whether it is still there when others may have written theirs."""
    file.write(mine.to_bytes(0))
    if file.exclusive:
        return True
    time.sleep(_SETTLE_S)  # Without flock, two processes may write their claims at the same time.
    with _open(folder / LOCK) as again:
        return mine.is_in(again.read())


def _try_to_claim(folder: Path, mine: _Holder, seen: bytes, expired: bool) -> _Claim | None:
    """Write `mine` into the lock file unless a process may hold the lock; returns what holds it, `None` if `mine` does now.

    `seen` is what the file held when the wait began, empty before; `expired` says that the wait is over.
    """
    try:
        with _open(folder / LOCK) as file:
            claim = _parse(file.read())
            unchanged = claim.data == seen
            if claim.state == "live" or (claim.state == "unknown" and seen and not unchanged):  # Changed bytes are a heartbeat.
                raise _in_use(folder, claim.holder)
            if (claim.state == "dead" or (expired and unchanged)) and _take(folder, file, mine):
                return None
            return claim
    except OSError as error:
        raise CheckpointWriteError(
            f"The folder {folder} could not be locked: {error}. Expected an existing, writable folder. {_FIX}"
        ) from error


def _claim(folder: Path, mine: _Holder, stale_after: float) -> None:
    """Write `mine` into the lock file as soon as no live process holds the lock."""
    seen, since = b"", 0.0
    while claim := _try_to_claim(folder, mine, seen, time.monotonic() - since >= stale_after):
        if claim.state == "unknown" and not seen:
            seen, since = claim.data, time.monotonic()
            notice(
                f"{folder} is locked by {claim.holder or 'an unreadable lock file'}. Waiting for {stale_after:g} s: "
                "without a heartbeat, this run takes over the lock."
            )
        time.sleep(0.01 if claim.state == "dying" else min(1.0, stale_after / 20))


@dataclass
class _LockFile:
    """The open lock file; `exclusive`: it is locked against other processes, which needs a system that supports `flock`."""

    descriptor: int
    exclusive: bool

    def read(self) -> bytes:
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        return os.read(self.descriptor, _MAX_BYTES)

    def write(self, data: bytes) -> None:
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        if data and os.write(self.descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self.descriptor, len(data))


@contextmanager
def _open(path: Path, *, create: bool = True) -> Iterator[_LockFile]:
    # If the file was replaced by a link or a pipe, do not follow it, wait for it or write to it.
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | (os.O_CREAT if create else 0), 0o666)
    exclusive = False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        exclusive = fcntl is not None and _flock(descriptor, path)
        yield _LockFile(descriptor, exclusive)
    finally:
        if exclusive:  # explicitly, not by close(): a process that was forked in the meantime shares the open file
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _flock(descriptor: int, path: Path) -> bool:
    """Wait for the lock of the operating system; False if the file system does not support `flock`."""
    end = time.monotonic() + _FLOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            if error.errno not in _LOCKED:
                raise
        if time.monotonic() > end:
            raise CheckpointLockedError(
                f"Another process has held {path} for {_FLOCK_TIMEOUT_S:g} s; this normally takes microseconds. Is it "
                "suspended? Fix: end it, or choose another folder: ModelCheckpoint(dirpath=...)."
            )
        time.sleep(0.005)


class _Heartbeat(threading.Thread):
    """The heartbeat. It has no reference to its `FolderLock`, which ends it when it is deleted."""

    def __init__(self, path: Path, mine: _Holder, interval: float) -> None:
        super().__init__(name="trainkit-folder-lock", daemon=True)
        self.path = path
        self.mine = mine
        self.interval = interval
        self.count = 0
        self.lost = False
        self.taken_by = "another run"
        self._stop_event = threading.Event()

    def run(self) -> None:
        while not self._stop_event.wait(self.interval) and not self.lost:
            self.check(write=True)

    def check(self, write: bool = False) -> bool:
        """Whether another run holds the lock by now. If not, and with `write`, write a heartbeat."""
        # A file system that does not answer is no answer: a save will fail, and the next heartbeat tries again.
        with contextlib.suppress(OSError, CheckpointError):
            try:
                self._check(write)
            except FileNotFoundError:  # deleted by a user: take the lock again, unless another run was faster
                self._check(write=True, create=True)
        return self.lost

    def _check(self, write: bool, create: bool = False) -> None:
        if self.lost:
            return
        with _open(self.path, create=create) as file:
            data = file.read()
            holder = _Holder.parse(data)
            if (create and not data) or self.mine.is_in(data):
                if write:
                    self.count += 1
                    file.write(self.mine.to_bytes(self.count))
            elif not self.lost and (holder is not None or file.exclusive):
                # Without a holder it may be a partial write of another process.
                self.taken_by = str(holder or "another run, which has ended")
                self.lost = True
                notice(
                    f"the folder {self.path.parent} was taken over by {self.taken_by}. This run does not write there anymore."
                )

    def end(self) -> None:
        """Stop, and empty the lock file unless another run holds the lock by now."""
        if self.mine.process.pid != os.getpid():  # a forked process, which does not have the lock
            return
        self._stop_event.set()
        if self.is_alive() and self is not threading.current_thread():
            self.join()
        _HELD.discard(self.mine.token)
        # If this fails, the lock can be taken over anyway: its token is not in _HELD anymore.
        with contextlib.suppress(OSError, CheckpointError), _open(self.path, create=False) as file:
            if self.mine.is_in(file.read()):
                file.write(b"")
