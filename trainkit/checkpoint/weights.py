"""Writes folders of plain weights, for `save_model` and exports; `from_pretrained` and `safetensors` can read them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from trainkit.checkpoint.gather_order import GatherOrder
from trainkit.checkpoint.tensor_file import FiniteCheck, TensorFile, chunks, plan_files, write_file
from trainkit.checks import is_whole
from trainkit.errors import CheckpointWriteError, ConfigurationError

__all__ = ["replace_file", "shard_size", "write_weights"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def shard_size(size: int | str) -> int:
    """Bytes of a size such as `"5GB"` or `5_000_000_000`.

    Raises:
        ConfigurationError: it is neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", str(size))
    if match and match[2].upper() in _UNITS and float(match[1]) > 0:
        return int(float(match[1]) * _UNITS[match[2].upper()])
    if is_whole(size) and size > 0:
        return size
    raise ConfigurationError(f"max_shard_size must be a size such as '5GB' or '500MB', or a number of bytes, not {size!r}.")


def write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    attachments: Mapping[str, bytes],
    *,
    max_shard_size: int = 5 * 10**9,
    stem: str = "model",
    rank: int = 0,
    check: FiniteCheck | None = None,
) -> list[Path]:
    """Write tensors as `<stem>.safetensors`, or as several files with an index above a size, and other files.

    Each file is replaced atomically. Files of an earlier call with the same stem are replaced or removed.

    The main process writes, and passes the tensors to `check`. If tensors are sharded, all ranks must call this, since they are
    gathered.

    Returns:
        The paths of the written files.

    Raises:
        CheckpointWriteError: the folder cannot be written, or the disk is full.
        UnsavableError: the format does not support a tensor.
    """
    files, index = plan_files(stem, tensors, max_shard_size)
    gathers = GatherOrder(rank, [[tensors[entry.name] for file in files for entry in file.entries]])
    try:
        return _write(folder, files, index, tensors, attachments, stem, gathers, check) if rank == 0 else []
    finally:
        gathers.finish()


def _write(
    folder: Path,
    files: list[TensorFile],
    index: bytes | None,
    tensors: Mapping[str, Tensor],
    attachments: Mapping[str, bytes],
    stem: str,
    gathers: GatherOrder,
    check: FiniteCheck | None,
) -> list[Path]:
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            each = (chunks(entry, gathers.values_of(tensors[entry.name]), check) for entry in file.entries)
            pieces = (piece for own in each for piece in own)
            written.append(replace_file(folder / file.name, [file.header], pieces))
        others = dict(attachments) if index is None else {f"{stem}.safetensors.index.json": index, **attachments}
        written += [replace_file(folder / name, [content], ()) for name, content in others.items()]
        names = {path.name for path in written}
        pattern = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
        for path in folder.iterdir():
            if pattern.fullmatch(path.name) and path.name not in names:
                path.unlink()
    except OSError as error:
        raise CheckpointWriteError(f"weights could not be written to {folder}: {error}. Fix: choose another folder.") from error
    return written


def replace_file(path: Path, head: Iterable[bytes], pieces: Iterable[memoryview]) -> Path:
    """Replace a file atomically: write a temporary one in the same folder, sync and rename it.

    Raises:
        OSError: it cannot be written; `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left behind by a killed process
        write_file(temporary, (part for group in (head, pieces) for part in group))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
