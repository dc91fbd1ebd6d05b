"""`private_folder`: a temporary folder for the processes that this one starts; it does not outlive a killed process for long.

A process that is killed cannot remove its folder, which may lie in memory or hold the arguments of a user's function. So each
folder names its process, and the next process that needs one removes the folders of those that no longer exist.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from trainkit.distributed.process_identity import ProcessIdentity
from trainkit.launch.placeholder import LOCK_PREFIX, WORKERS

__all__ = ["MEMORY", "private_folder", "remove_leftovers"]

MEMORY = "/dev/shm"  # On Linux this is a file system in memory, which a full disk does not affect.
_PREFIX = "trainkit-"
_OWNER = "owner.json"  # the file that names the process
_MAX_OWNER = 4096  # bytes
_PLACEHOLDER_TIMEOUT_S = 1.0  # seconds to wait for placeholders of a killed launcher


@contextmanager
def private_folder(name: str = "", *, in_memory: bool = False) -> Iterator[str]:
    """A new folder that only this user can read; removed at the end, or by the next call of any process.

    Args:
        name: the beginning of its name, after "trainkit-".
        in_memory: create it in memory where that is possible.
    """
    remove_leftovers()
    place = MEMORY if in_memory and os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=_PREFIX + name, dir=place, ignore_cleanup_errors=True) as folder:
        with contextlib.suppress(OSError):  # a full disk: the first write to the folder raises an error
            Path(folder, _OWNER).write_text(json.dumps(asdict(ProcessIdentity.this())))
        yield folder


def remove_leftovers() -> None:
    """Remove the folders of this user's processes that were killed on this host. Never follows a link.

    The placeholders of a killed launcher end its workers, whose process IDs they read from the folder. It stays until then.
    """
    if os.name != "posix":
        return
    for place in {MEMORY, tempfile.gettempdir()}:
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith(_PREFIX) and _is_left_over(entry.path):
                    deadline = time.monotonic() + _PLACEHOLDER_TIMEOUT_S
                    while (needed := _is_needed(Path(entry.path))) and time.monotonic() < deadline:
                        time.sleep(0.01)
                    if not needed:
                        shutil.rmtree(entry.path, ignore_errors=True)


def _is_needed(folder: Path) -> bool:
    """Whether a placeholder still has to end the workers whose process IDs are in a folder."""
    return any(any(_is_locked(path) for path in file.parent.glob(f"{LOCK_PREFIX}*")) for file in folder.glob(f"*/{WORKERS}"))


def _is_locked(path: Path) -> bool:
    import fcntl

    try:
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the placeholder has just removed it
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def _is_left_over(path: str) -> bool:
    """Whether it is a folder of this user that only they can change, and its process has ended."""
    kind = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        folder = os.open(path, kind | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        about = os.fstat(folder)
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
            return False
        with open(os.open(_OWNER, kind, dir_fd=folder), "rb") as file:
            values = json.loads(file.read(_MAX_OWNER)) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except (OSError, ValueError, RecursionError):
        return False
    finally:
        os.close(folder)
    owner = ProcessIdentity.from_json(values) if isinstance(values, dict) else None
    return owner is not None and owner.state() == "dead"
