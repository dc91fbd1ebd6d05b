"""Reads the files in the folder of a run, which may be a stranger's: regular files, with limits of size, depth and count.

Everything that a subcommand reads from the folder of a run, except its checkpoints, is read here.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.checkpoint.regular_file import not_regular, read_small_file, regular_file
from trainkit.errors import CorruptCheckpointError, TrainkitError

__all__ = ["MAX_FILE", "MAX_STEP", "MAX_VALUES", "folders_in", "is_step", "lines_in", "regular_size", "stream", "yaml_in"]

MAX_FILE = 2**30  # bytes of a file of metrics, or of all event files of a folder
MAX_VALUES = 20_000_000  # of all metrics in a file
MAX_STEP = 2**53  # larger whole numbers are not exact in a chart
_MAX_LINE = 8 * 2**20  # bytes
_MAX_YAML = 4 * 2**20  # bytes
_MAX_NODES = 100_000  # values in a YAML file, each as often as it is referred to
_MAX_DEPTH = 100
_MAX_BITS = 2048  # of a whole number; Python does not print numbers of more than 4,300 digits
_MAX_FOLDERS = 100_000
_MAX_LEVELS = 16  # of folders


def stream(path: Path, most: int = MAX_FILE) -> io.BufferedReader:
    """Open a regular file of at most `most` bytes; the caller closes it.

    Raises:
        TrainkitError: It is a link, a pipe, a device or too large, or it cannot be read.
    """
    regular_size(path, most)
    try:
        with regular_file(path) as file:
            return io.BufferedReader(io.FileIO(os.dup(file.fileno())))
    except CorruptCheckpointError as error:
        raise TrainkitError(f"{error}. Fix: replace it by a regular file, or remove it") from error


def regular_size(path: Path, most: int = MAX_FILE) -> int:
    """The size of a regular file in bytes; raises like `stream`, and opens nothing."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise TrainkitError(f"{path} cannot be read: {error.strerror or error}. Fix: remove it") from error
    if (problem := not_regular(found.st_mode)) is not None:
        raise TrainkitError(f"{path}: {problem}. Fix: replace it by a regular file, or remove it")
    if found.st_size > most:
        raise TrainkitError(f"{path}: expected at most {most:,} bytes, found {found.st_size:,}. Fix: remove it")
    return found.st_size


def lines_in(path: Path, most: int = MAX_FILE) -> Iterator[str]:
    """The lines of a text file with their ends, without an incomplete last line, which a killed process leaves.

    Raises:
        TrainkitError: As for `stream`, or a line is too long or not UTF-8.
    """
    with stream(path, most) as file:
        for number in range(1, most):
            line = file.readline(_MAX_LINE + 1)
            if len(line) > _MAX_LINE:
                raise TrainkitError(f"{path}, line {number}: expected at most {_MAX_LINE:,} bytes. Fix: remove the line")
            if not line.endswith(b"\n"):
                return
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise TrainkitError(
                    f"{path}, line {number}: expected UTF-8, got {line[:40]!r}. Fix: remove the line"
                ) from error


def yaml_in(path: Path) -> Any:
    """The plain values of a YAML file; `None` if there is no file.

    Raises:
        TrainkitError: As for `stream`; it is not YAML, contains tags of Python objects, or is nested or expanded too far.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        os.lstat(path)
    except OSError:
        return None
    regular_size(path, _MAX_YAML)
    try:
        text = read_small_file(path, _MAX_YAML).decode("utf-8")
        _check_events(yaml.parse(text, Loader=loader))
        reader = loader(text)
        try:
            value = reader.get_single_data()  # as yaml.safe_load does, whose loader is slow for a large file
        finally:
            reader.dispose()
        _check_values(value)
    except (OSError, ValueError, OverflowError, AttributeError, TypeError, yaml.YAMLError, TrainkitError) as error:
        # the constructors of dates and numbers raise any of these
        raise TrainkitError(f"{path} could not be read: {' '.join(str(error).split())}. Fix: remove it") from error
    return value


def _check_events(events: Iterator[Any]) -> None:
    """Nested values and merge keys are refused before anything is built, because building them takes recursion and memory."""
    depth = count = 0
    for event in events:
        kind, count = type(event).__name__, count + 1
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        if depth > _MAX_DEPTH + 2 or count > 4 * _MAX_NODES:  # the stream and the document are levels, too
            raise TrainkitError(f"expected at most {_MAX_DEPTH} levels and {_MAX_NODES:,} values")
        if kind == "ScalarEvent" and event.value == "<<":
            raise TrainkitError("expected no merge key '<<'")


def _check_values(value: Any) -> None:
    """An anchor may be referred to often, also in itself: count what a reader of the value would visit."""
    left, visited = [(value, 0)], 0
    while left:
        item, depth = left.pop()
        visited += 1
        if depth > _MAX_DEPTH or visited > _MAX_NODES:
            raise TrainkitError(f"expected at most {_MAX_DEPTH} levels and {_MAX_NODES:,} values, each as often as it is used")
        if isinstance(item, int) and item.bit_length() > _MAX_BITS:
            raise TrainkitError(f"expected whole numbers of at most {_MAX_BITS} bits")
        inside: Sequence[Any] = ()
        if isinstance(item, Mapping):
            inside = [part for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple | set):
            inside = list(item)
        left += [(part, depth + 1) for part in inside]


def is_step(value: object) -> bool:
    """Whether this is a whole number that can be a step."""
    return type(value) is int and -MAX_STEP <= value <= MAX_STEP


def folders_in(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """A folder and those below it, without links, at most `_MAX_LEVELS` deep: the folder, its folders, its files.

    Raises:
        TrainkitError: There are too many.
    """
    level, count = [root], 0
    for _ in range(_MAX_LEVELS):
        below = []
        for folder in level:
            count += 1
            if count > _MAX_FOLDERS:
                raise TrainkitError(f"{root} contains more than {_MAX_FOLDERS:,} folders. Fix: pass the folder of a run")
            try:
                with os.scandir(folder) as entries:
                    found = sorted(entries, key=lambda entry: entry.name)
            except OSError:  # not readable, or removed meanwhile
                continue
            folders = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
            yield folder, folders, [entry.name for entry in found if not entry.is_dir(follow_symlinks=False)]
            below += [folder / name for name in folders]
        level = below
