"""One live run per folder of checkpoints: a lock that neither a dead process nor a dead host keeps.

The lock is the content of the file ``.lock``, which names its holder and has a heartbeat. ``flock`` only makes
read-check-write atomic, and is released at once.

Why not the package filelock (tried: 4.2.12), which torch depends on, and which would replace this file:

- ``FileLock`` holds ``flock`` for the whole run. BeeGFS, Lustre with ``localflock`` and FUSE file systems apply ``flock`` to
  one host only: runs on two hosts would both save. NFSv3 keeps the lock of a dead host until that host starts again. A forked
  DataLoader worker keeps the lock of a killed run, unless filelock is recent enough to close it; torch requires no version. It
  also truncates the file, so that the error could not name host, process and run.
- ``SoftFileLease`` (3.30 and newer) has a heartbeat. But a killed run that its parent has not waited for blocks the folder for
  the whole lease, the file has no room for the run, a ``.lock`` of an earlier trainkit counts as malformed and is removed, and
  a process that was suspended learns of a takeover only at its next heartbeat, which may be after its next save.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainkit.checkpoint.process_identity import ProcessIdentity
from trainkit.console import notice
from trainkit.errors import (
    CheckpointError,
    CheckpointLockedError,
    CheckpointWriteError,
    ConfigurationError,
    CorruptCheckpointError,
)
from trainkit.tagged_json.strict_json import strict_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "FolderLock"]

LOCK = ".lock"
"""Name of the lock file in a folder of checkpoints; empty when nobody holds it."""

_MAX_BYTES = 64 * 1024
_PATIENCE = 10.0  # seconds for another process to end its read-check-write, which takes microseconds
_SETTLE = 0.25  # seconds after which a claim that nothing serialised counts, if it still stands

_HELD: set[str] = set()  # tokens of the locks that this process holds


class FolderLock:
    """Keeps a second live run out of a folder of checkpoints.

    Args:
        folder: the folder; it must exist.
        run_id: the run that is to have it, for the message to others.
        beat: seconds between two heartbeats of a daemon thread, which show other hosts that the holder lives.
        stale_after: seconds without a heartbeat after which another host's lock is taken over.

    A process that is forked does not have the lock, nor keep it. A lock that is dropped without ``release`` is released.
    """

    def __init__(self, folder: Path, run_id: str, *, beat: float = 10.0, stale_after: float = 60.0) -> None:
        if not 0 < beat < stale_after:
            raise ConfigurationError(
                f"FolderLock expects 0 < beat < stale_after (seconds), got beat={beat}, stale_after={stale_after}. "
                "Fix: FolderLock(folder, run_id, beat=10.0, stale_after=60.0)."
            )
        self.folder = folder
        self.run_id = run_id
        self.beat = beat
        self.stale_after = stale_after
        self._heart: _Heart | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def acquire(self) -> None:
        """Take the lock, and start its heartbeat; nothing happens if this object has it already.

        A dead process of this host is followed at once, another host's when its heartbeat has not changed for
        ``stale_after`` seconds; that wait is said in a notice.

        Raises:
            CheckpointLockedError: another live run has it; the message names host, process and run.
            CheckpointWriteError: the lock file cannot be written.
        """
        if self._heart is not None and not self._heart.lost:
            return
        self.release()
        path = self.folder / LOCK
        mine = _Holder(ProcessIdentity.this(), self.run_id, secrets.token_hex(16))
        _HELD.add(mine.token)  # before it can be read: a token that this process does not hold counts as a dead one's
        try:
            _claim(path, mine, self.folder, self.stale_after)
        except BaseException:
            _HELD.discard(mine.token)
            raise
        self._heart = _Heart(path, mine, self.beat)
        self._end = weakref.finalize(self, self._heart.end)
        self._heart.start()

    def release(self) -> None:
        """Give the lock back and end the heartbeat; may be called again, and in a forked process does nothing."""
        if self._end is not None:
            self._end()
        self._heart = self._end = None

    @property
    def lost(self) -> bool:
        """Whether another run has taken the lock since ``acquire``: this one must not write to the folder any more.

        It happens to a process that was suspended, or cut off from the file system, for longer than ``stale_after``.
        The file is read each time, as a process that wakes up may ask before its heartbeat does.
        """
        return self._heart is not None and self._heart.check()

    def check(self) -> None:
        """Raise ``CheckpointLockedError``, which names the run that has taken the lock, if it is ``lost``."""
        if self.lost:
            assert self._heart is not None
            raise CheckpointLockedError(
                f"The folder {self.folder} was taken over by {self._heart.taken_by}, because this run showed no sign of life "
                f"for {self.stale_after:g} s (was it suspended?). It must not write there any more. Fix: resume it in "
                "another folder once that run has ended."
            )


# ------------------------------------------------------------------------------------------------------------ the holder


@dataclass(frozen=True)
class _Holder:
    """Who has the lock. The token tells it from another lock of the same process."""

    process: ProcessIdentity
    run_id: str
    token: str

    @classmethod
    def parse(cls, data: bytes) -> _Holder | None:
        """The holder that a lock file names, None if it makes no sense."""
        try:
            values = strict_json(data, LOCK)
        except CorruptCheckpointError:
            return None
        process = ProcessIdentity.from_json(values) if isinstance(values, dict) else None
        if process is None or not isinstance(values.get("run_id"), str) or not isinstance(values.get("token"), str):
            return None
        return cls(process, values["run_id"], values["token"])

    def to_bytes(self, beat: int) -> bytes:
        return json.dumps({**self.process.to_json(), "run_id": self.run_id, "token": self.token, "beat": beat}).encode() + b"\n"

    def __str__(self) -> str:
        return f"run {self.run_id!r} (process {self.process.pid} on host {self.process.host!r})"

    def state(self) -> Literal["live", "dying", "dead", "unknown"]:
        """Whether it lives; ``"unknown"`` where only its heartbeat can tell."""
        if self.process == ProcessIdentity.this():
            return "live" if self.token in _HELD else "dead"
        return self.process.state()


# ----------------------------------------------------------------------------------------------------------- taking it


def _claim(path: Path, mine: _Holder, folder: Path, stale_after: float) -> None:
    """Write ``mine`` into the lock file as soon as nobody who lives is in it."""
    seen, since = b"", 0.0
    while True:
        try:
            with _LockFile.open(path) as file:
                data = file.read()
                holder = _Holder.parse(data)
                state = "dead" if not data else "unknown" if holder is None else holder.state()
                if state == "live" or (state == "unknown" and seen and data != seen):  # its heart beats
                    raise _refusal(folder, holder)
                if state == "dead" or (data == seen and time.monotonic() - since >= stale_after):
                    file.write(mine.to_bytes(0))
                    if file.serialised or _stands(path, mine):
                        return
        except OSError as error:
            raise CheckpointWriteError(
                f"The lock of {folder} could not be taken: {error}. Expected a folder that is there and can be written to. "
                "Fix: choose another, ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)."
            ) from error
        if state == "unknown" and not seen:
            seen, since = data, time.monotonic()
            notice(
                f"{folder} is locked by {holder or 'an unreadable lock file'}; it is taken over if there is no heartbeat for "
                f"{stale_after:g} s."
            )
        time.sleep(0.01 if state == "dying" else min(1.0, stale_after / 20))


def _stands(path: Path, mine: _Holder) -> bool:
    """Whether a claim still stands after a while, for where two may have written theirs at the same moment."""
    time.sleep(_SETTLE)
    with _LockFile.open(path) as file:
        holder = _Holder.parse(file.read())
    return holder is not None and holder.token == mine.token


def _refusal(folder: Path, holder: _Holder | None) -> CheckpointLockedError:
    return CheckpointLockedError(
        f"The folder {folder} is in use by {holder or 'a run that could not be made out'}, which is alive: expected a folder "
        "that no other live run writes to, as two would remove each other's checkpoints. Fix: end that run, or choose "
        "another folder for this one: ModelCheckpoint(dirpath=...) or Trainer(default_root_dir=...)."
    )


class _LockFile:
    """The lock file, open, and where the system can do that with no other process in it."""

    def __init__(self, descriptor: int, serialised: bool) -> None:
        self._descriptor = descriptor
        self.serialised = serialised

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, create: bool = True) -> Iterator[_LockFile]:
        # Neither a link nor a pipe put in its place is followed, waited for, or written to.
        flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags | (os.O_CREAT if create else 0), 0o666)
        serialised = False
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))
            serialised = _flock(descriptor, path)
            yield cls(descriptor, serialised)
        finally:
            if serialised:
                # Said, not left to close(): a process forked meanwhile has the same open file.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def read(self) -> bytes:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return os.read(self._descriptor, _MAX_BYTES)

    def write(self, data: bytes) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        written = os.write(self._descriptor, data) if data else 0
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._descriptor, len(data))


def _flock(descriptor: int, path: Path) -> bool:
    """Wait for the lock of the operating system; False where there is none."""
    if fcntl is None:
        return False
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
                return False  # a file system without it
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                raise
        if time.monotonic() > end:
            raise CheckpointLockedError(
                f"Another process has kept {path} open for {_PATIENCE:g} s, which takes microseconds: is it stopped? "
                "Fix: end it, or choose another folder: ModelCheckpoint(dirpath=...)."
            )
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------------------- keeping it


class _Heart(threading.Thread):
    """The heartbeat. It does not know the ``FolderLock``, so that one nobody has any more ends it."""

    def __init__(self, path: Path, mine: _Holder, beat: float) -> None:
        super().__init__(name="trainkit-folder-lock", daemon=True)
        self.path, self.mine, self.beat = path, mine, beat
        self.beats = 0
        self.lost = False
        self.taken_by = "another run"
        self._stop_beating = threading.Event()

    def run(self) -> None:
        while not self._stop_beating.wait(self.beat) and not self.lost:
            self.check(beat=True)

    def check(self, beat: bool = False) -> bool:
        """Whether the lock is another's by now; if not, and ``beat``, show that this process lives."""
        if self.lost:
            return True
        try:
            try:
                with _LockFile.open(self.path, create=False) as file:
                    self._look(file, beat)
            except FileNotFoundError:  # deleted by a user: taken again, unless somebody was faster
                with _LockFile.open(self.path) as file:
                    self._look(file, beat, deleted=True)
        except (OSError, CheckpointError):
            pass  # a file system that does not answer: whoever saves will find out, and the next beat tries again
        return self.lost

    def _look(self, file: _LockFile, beat: bool, deleted: bool = False) -> None:
        data = file.read()
        holder = _Holder.parse(data)
        if (deleted and not data) or (holder is not None and holder.token == self.mine.token):
            if beat or deleted:
                self.beats += 1
                file.write(self.mine.to_bytes(self.beats))
        elif not self.lost and (holder is not None or file.serialised):  # else it may be half of somebody's write
            self.taken_by = str(holder or "another run, which has ended")
            self.lost = True
            notice(f"the folder {self.path.parent} was taken over by {self.taken_by}: this run writes no more there.")

    def end(self) -> None:
        """Stop, and empty the lock file unless it is another's by now."""
        if self.mine.process.pid != os.getpid():  # in a forked process, where nobody gave it the lock
            return
        self._stop_beating.set()
        if self.is_alive() and self is not threading.current_thread():
            self.join()
        _HELD.discard(self.mine.token)
        try:
            with _LockFile.open(self.path, create=False) as file:
                holder = _Holder.parse(file.read())
                if holder is not None and holder.token == self.mine.token:
                    file.write(b"")
        except (OSError, CheckpointError):
            pass  # it is taken over all the same: this process will be gone, and holds the token no more
