"""TensorBoard's event files: find those of a logger, cut them, and read the times and steps of their events.

An event file is a sequence of records: the length (8 bytes, little-endian), a checksum (4), an `Event` in protobuf's
encoding, a checksum (4). tensorboard's own reader computes each checksum in Python, too slowly for large files.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit.checks import is_whole
from trainkit.loggers.resumed_logs import cut_file
from trainkit.loggers.run_files import MAX_FILE, regular_size, stream

__all__ = ["cut_event_files", "event_files", "event_times", "last_step_in", "quiet_writers", "sizes_in"]

_NAME = re.compile(r"events\.out\.tfevents\.\d+\.(.+\.\d+)\.\d+(?!\d)")  # seconds, then host and process, then a number
_WRITERS = "tensorboard.summary.writer.event_file_writer"
_START = 32  # bytes of an event that hold its time and its step


def event_files(folder: Path, sub_dir: str = "") -> dict[str, int]:
    """The event files of one logger: name relative to `folder` → size in bytes.

    They are in `folder / sub_dir`, and in its subfolders if the same process wrote both, as `add_scalars` does.
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
                found[file.relative_to(folder).as_posix()] = os.lstat(file).st_size
    return found


def sizes_in(folder: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of event files that lie in a folder; anyone may have written `sizes`, so others are ignored."""
    top = Path(os.path.realpath(folder))
    return {
        name: size
        for name, size in sizes.items()
        if _NAME.match(Path(name).name) and top in Path(os.path.realpath(folder / name)).parents and is_whole(size) and size > 0
    }


def cut_event_files(folder: Path, sub_dir: str, sizes: Mapping[str, int]) -> list[str]:
    """Truncate event files to these sizes and remove others; returns messages about what is missing."""
    for name in event_files(folder, sub_dir).keys() - sizes.keys():
        (folder / name).unlink()
    problems = [cut_file(folder / name, size) for name, size in sizes.items()]
    return [problem for problem in problems if problem is not None]


def last_step_in(path: Path) -> int:
    """The highest step of the events in a file; -1 if it has none or is not an event file."""
    return max((step for _, step in event_times(path, sys.maxsize)), default=-1)


def event_times(path: Path, most: int = MAX_FILE) -> Iterator[tuple[float, int]]:
    """The time (seconds since 1970) and the step of each event in a file of at most `most` bytes, in the order of writing.

    Raises:
        TrainkitError: It is a link, a pipe or too large.
    """
    if not os.path.lexists(path):
        return
    size = regular_size(path, most)
    with stream(path, most) as file:
        while len(head := file.read(12)) == 12:
            length = int.from_bytes(head[:8], "little")
            if not 0 < length <= size:  # an event has a time at least
                return
            event = file.read(min(length, _START))
            file.seek(length - len(event) + 4, os.SEEK_CUR)
            yield _time_of(event), _step_of(event)


def _time_of(event: bytes) -> float:
    """Field 1 of an `Event`, a double; omitted if it is 0."""
    return struct.unpack_from("<d", event, 1)[0] if event[:1] == b"\x09" and len(event) >= 9 else 0.0


def _step_of(event: bytes) -> int:
    """Field 2 of an `Event`, a variable-length integer after field 1, the time; omitted if it is 0."""
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


class _QuietHook:
    """A `threading.excepthook` that ignores errors that a logger reports."""

    def __init__(self) -> None:
        self._before = threading.excepthook

    def __call__(self, arguments: threading.ExceptHookArgs) -> None:
        if type(arguments.thread).__module__ != _WRITERS or not isinstance(arguments.exc_value, OSError):
            self._before(arguments)


def quiet_writers() -> None:
    """Print no traceback if the thread of an event file cannot write: its next use raises the same error."""
    if not isinstance(threading.excepthook, _QuietHook):
        threading.excepthook = _QuietHook()
