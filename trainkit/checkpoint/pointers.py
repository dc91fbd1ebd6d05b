"""Which checkpoint a path means: `last`, or a file that was made of a checkpoint, such as `x.ckpt`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainkit.checkpoint.manifest import MAX_NAME, checkpoint_identity, is_checkpoint
from trainkit.checkpoint.regular_file import read_small_file
from trainkit.checkpoint.torch_file import note_in
from trainkit.checkpoint.urls import remote_sync
from trainkit.console import notice
from trainkit.errors import CorruptCheckpointError

__all__ = ["POINTER", "checkpoint_of", "is_ours", "is_plain_name", "note_of", "own_folder", "read_pointer", "resolve_pointer"]

POINTER = "last"
"""Name of the file that contains the name of the checkpoint saved last."""

_NOTE = "trainkit checkpoint "


def resolve_pointer(path: Path) -> Path:
    """The checkpoint that a path means: `last` is the one that the pointer names.

    `x.ckpt` is `x` if only `x` exists, or if the file was made of it. A notice names a newer `x`.

    Raises:
        CorruptCheckpointError: The file `last` does not contain a plain name.
    """
    if path.name == POINTER and path.is_symlink():  # the checkpoint is named in messages, not the link
        return path.parent / os.readlink(path)
    if path.name == POINTER and path.is_file():
        return path.parent / (read_pointer(path.parent) or POINTER)
    if path.suffix == ".ckpt" and not path.exists() and os.path.lexists(path.with_suffix("")):
        return resolve_pointer(path.with_suffix(""))  # the name that Lightning would have given it
    found, newer = checkpoint_of(path), path.with_suffix("") if path.suffix else path
    if found is None and newer != path and is_checkpoint(newer) and is_ours(path):
        notice(
            f"{path} was not made of the checkpoint {newer} next to it, which is newer or another one: what is in the file is "
            f"used. For the checkpoint, pass {str(newer)!r}"
        )
    return found or path


def read_pointer(folder: Path) -> str | None:
    """The name that `write_pointer` wrote to a file; `None` if there is no such file. The checkpoint need not exist.

    Raises:
        CorruptCheckpointError: The file `last` does not contain a plain name.
    """
    path = folder / POINTER
    if not os.path.lexists(path) or is_checkpoint(path):  # a checkpoint may have any name
        return None
    data = read_small_file(path, MAX_NAME + 1)
    name = os.fsdecode(data[:-1])
    if not data.endswith(b"\n") or not is_plain_name(name):
        raise CorruptCheckpointError(
            f"{path}: expected the name of a checkpoint and a newline, got {data[:80]!r}. Fix: remove this file."
        )
    return name


def is_plain_name(name: str) -> bool:
    """Whether a text is the name of an entry of a folder: not a path, and not hidden."""
    return (
        0 < len(os.fsencode(name)) <= MAX_NAME
        and not name.startswith(".")
        and not any(character in "/\\:" or ord(character) < 32 or ord(character) == 127 for character in name)
    )


def checkpoint_of(file: Path) -> Path | None:
    """The checkpoint that a file was made of, if it is still next to it or at the URL of the folder; their names do not matter.

    Raises:
        CheckpointError: The URL cannot be read.
    """
    if not file.is_file():
        return None
    while file.is_symlink():
        file = file.parent / os.readlink(file)
    note = note_in(file)
    if not note.startswith(_NOTE) or note == note_of(b""):
        return None
    here = next((folder for folder in _folders_next_to(file) if note == note_of(checkpoint_identity(folder) or b"")), None)
    if here is not None:
        return here
    there = remote_sync.checkpoints(file.parent)
    return next((file.parent / name for name in sorted(there) if note == note_of(there[name].digest)), None)


def _folders_next_to(file: Path) -> Iterator[Path]:
    """The folders that may be the checkpoint of a file: first those that are named like it, links last."""
    yield from (folder for folder in (file.with_suffix(""), own_folder(file)) if not folder.is_symlink())
    with suppress(OSError), os.scandir(file.parent) as entries:  # a folder that cannot be listed may still be read
        found = sorted((entry.is_symlink(), entry.name) for entry in entries if entry.is_dir())
        yield from (file.parent / name for _, name in found if not name.startswith("."))


def own_folder(file: Path) -> Path:
    """A folder for a checkpoint whose name no other file has."""
    return file.with_name(f"{file.name}.folder")


def is_ours(file: Path) -> bool:
    """Whether a file, here or else at its URL, was made of a checkpoint, or is a link to such a file."""
    if not os.path.lexists(file):
        return remote_sync.read_end(file, len(note_of(b"0" * 64))).startswith(_NOTE.encode())
    return note_in(file).startswith(_NOTE)


def note_of(identity: bytes) -> str:
    """The note in a file that was made of a checkpoint; empty bytes: in one that does not stand for the checkpoint."""
    return _NOTE + identity.partition(b" ")[0].decode("ascii", "replace")
