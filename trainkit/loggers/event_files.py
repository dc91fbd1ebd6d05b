"""TensorBoard's event files as files: which belong to a run, how to cut them, and the steps in them.

An event file is a sequence of records: the length (8 bytes, little-endian), a checksum (4), an ``Event`` in protobuf's
encoding, a checksum (4). Nothing of tensorboard is needed to walk through it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from trainkit.loggers.resumed_logs import cut_file

__all__ = ["cut_event_files", "event_files", "last_step_in", "quiet_writers"]

_NAME = re.compile(r"events\.out\.tfevents\.\d+\.(.+\.\d+)\.\d+(?!\d)")  # seconds, then host and process, then a number
_WRITERS = "tensorboard.summary.writer.event_file_writer"
_START = 32  # bytes of an event that hold its time and its step


def event_files(folder: Path, sub_dir: str = "") -> dict[str, int]:
    """The event files of one logger in ``folder``, by name relative to it, with their sizes in bytes.

    They lie in ``folder / sub_dir``; those below it count if the same process wrote both (``add_scalars`` makes such).
    """
    top = folder / sub_dir
    found: dict[str, int] = {}
    processes: set[str] = set()
    for path, _, names in os.walk(top):
        for name in sorted(names):
            match = _NAME.match(name)
            if match is None:
                continue
            if Path(path) == top:
                processes.add(match[1])
            if match[1] in processes:
                file = Path(path, name)
                found[file.relative_to(folder).as_posix()] = file.stat().st_size
    return found


def cut_event_files(folder: Path, sub_dir: str, sizes: Mapping[str, int]) -> list[str]:
    """Cut event files to the sizes that they had, remove those that came later; in words, what is missing."""
    missing: list[str] = []
    for name in event_files(folder, sub_dir):
        if name not in sizes:
            (folder / name).unlink()
    for name, size in sizes.items():
        problem = cut_file(folder / name, size)
        if problem is not None:
            missing.append(problem)
    return missing


def last_step_in(path: Path) -> int:
    """The highest step of the events in a file; -1 without any, and of what is no event file."""
    highest = -1
    if not path.is_file():
        return highest
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            length = int.from_bytes(head[:8], "little")
            event = file.read(min(length, _START))
            file.seek(length - len(event) + 4, os.SEEK_CUR)
            highest = max(highest, _step_of(event))
    return highest


def _step_of(event: bytes) -> int:
    """Field 2 of an ``Event``, a variable-length integer; it stands behind field 1, the time, and is omitted where it is 0."""
    position = 9 if event[:1] == b"\x09" else 0
    if event[position : position + 1] != b"\x10":
        return 0
    value = shift = 0
    for byte in event[position + 1 : position + 11]:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value - 2**64 if value >= 2**63 else value


class _Quiet:
    """A hook for errors of threads that passes on all but those that a logger reports."""

    def __init__(self) -> None:
        self._before = threading.excepthook

    def __call__(self, arguments: threading.ExceptHookArgs) -> None:
        ours = type(arguments.thread).__module__ == _WRITERS and isinstance(arguments.exc_value, OSError)
        if not ours:
            self._before(arguments)


def quiet_writers() -> None:
    """Let the thread of an event file that cannot be written print no traceback: its next use raises the same error."""
    if not isinstance(threading.excepthook, _Quiet):
        threading.excepthook = _Quiet()
