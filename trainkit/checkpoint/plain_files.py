"""Files outside of checkpoints: folders of weights for `save_model` and exports, one object in a file for `Accelerator.save`.

`from_pretrained` and `safetensors` can read weights. An object that is tensors by name is a plain safetensors file. Any other
is tagged JSON (see `trainkit.tagged_json.codec`); if there are tensors in it, a safetensors file with the JSON in its metadata.
A tensor with several names is stored once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.checksum import CHECKSUMS
from trainkit.checkpoint.commit import replacing, sync_folder
from trainkit.checkpoint.ranks import GatherOrder
from trainkit.checkpoint.regular_file import read_file
from trainkit.checkpoint.tensor_file import (
    FiniteCheck,
    TensorFile,
    chunks,
    metadata_in,
    plan_files,
    split_tied,
    tensors_in,
    write_file,
)
from trainkit.checks import is_whole
from trainkit.distributed.requested_devices import find_device
from trainkit.errors import (
    CheckpointNotFoundError,
    CheckpointWriteError,
    ConfigurationError,
    CorruptCheckpointError,
    UnsavableError,
)
from trainkit.nested import map_tensors
from trainkit.tagged_json.codec import MAX_JSON_BYTES, dumps, loads, strict_json

__all__ = ["is_pickle", "load", "read_tensors", "replace_file", "shard_size", "write_object", "write_weights"]


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def shard_size(size: int | str) -> int:
    """Bytes of a size such as `"5GB"` or `5_000_000_000`.

    Raises:
        ConfigurationError: It is neither.
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
    checksum: str | None = None,
) -> list[Path]:
    """Write tensors as `<stem>.safetensors`, or as several files with an index above a size, and other files.

    Each file is replaced atomically. Files of an earlier call with the same stem are replaced or removed. With a `checksum`,
    the digests of all these files are written last, to `<stem>.<checksum>`, one line each.

    The main process writes, and passes the tensors to `check`. If tensors are sharded, all ranks must call this, since they are
    gathered.

    Returns:
        The paths of the written files.

    Raises:
        CheckpointWriteError: The folder cannot be written, or the disk is full.
        UnsavableError: The format does not support a tensor.
    """
    files, index = plan_files(stem, tensors, max_shard_size)
    gathers = GatherOrder(rank, [[tensors[entry.name] for file in files for entry in file.entries]])
    try:
        return _write(folder, files, index, tensors, attachments, stem, gathers, check, checksum) if rank == 0 else []
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
    checksum: str | None,
) -> list[Path]:
    digests: dict[str, str] = {}
    of_digests = re.compile(rf"{re.escape(stem)}\.({'|'.join(map(re.escape, CHECKSUMS))})")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(folder, of_digests)  # they would be wrong from the first file on that is replaced
        for file in files:
            tensor_chunks = (chunks(entry, gathers.values_of(tensors[entry.name]), check) for entry in file.entries)
            pieces = (chunk for tensor in tensor_chunks for chunk in tensor)
            digests[file.name] = replace_file(folder / file.name, [file.header], pieces, checksum)
        others = dict(attachments) if index is None else {f"{stem}.safetensors.index.json": index, **attachments}
        for name, content in others.items():
            digests[name] = replace_file(folder / name, [content], (), checksum)
        pattern = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
        _remove(folder, pattern, digests)
        written = [folder / name for name in digests]
        if checksum is not None:
            written.append(folder / f"{stem}.{checksum}")
            lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
            replace_file(written[-1], [lines.encode()], ())
    except OSError as error:
        raise CheckpointWriteError(f"weights could not be written to {folder}: {error}. Fix: choose another folder.") from error
    return written


def _remove(folder: Path, pattern: re.Pattern[str], keep: Container[str] = ()) -> None:
    for path in list(folder.iterdir()):
        if pattern.fullmatch(path.name) and path.name not in keep:
            path.unlink()


def replace_file(path: Path, head: Iterable[bytes], pieces: Iterable[memoryview], checksum: str | None = None) -> str:
    """Replace a file atomically: write a temporary one in the same folder, sync and rename it. Returns its digest.

    Raises:
        OSError: It cannot be written; `path` is unchanged.
    """
    with replacing(path) as temporary:
        _, digest = write_file(temporary, (part for group in (head, pieces) for part in group), checksum)
    return digest


_ALIASES, _VALUE = "trainkit_aliases", "trainkit_value"
_THIS_FILE = ""  # the file name in the references of the JSON
_ONE_FILE = 2**63 - 1


def write_object(path: Path, value: Any) -> None:
    """Write an object to a file, atomically. Parents of the file are created.

    Raises:
        UnsavableError: Something in the object cannot be stored; names the path to it.
        CheckpointWriteError: The file cannot be written; an existing file is unchanged.
    """
    metadata: dict[str, str] = {}
    if _is_flat(value):
        tensors = {name: tensor.detach() for name, tensor in value.items()}
        head = b""
    else:
        tensors = {}
        head = dumps(value, tensors, file=_THIS_FILE, where="object")
        metadata[_VALUE] = head.decode("ascii")
    pieces: Iterable[memoryview] = ()
    if tensors:
        head, pieces = _plan(path, tensors, metadata)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [head], pieces)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointWriteError(f"{path} could not be written: {error}. Fix: choose another path.") from error


def _is_flat(value: Any) -> bool:
    """Whether the object consists of tensors by name, as a file of tensors does."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(type(name) is str and isinstance(tensor, Tensor) for name, tensor in value.items())
    )


def _plan(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> tuple[bytes, Iterator[memoryview]]:
    """The header of a file of tensors, and the rest of its bytes."""
    stored, aliases = split_tied(tensors)
    if aliases:
        metadata[_ALIASES] = json.dumps(aliases)
    files, _ = plan_files("object", stored, _ONE_FILE, metadata=metadata)
    if len(files) > 1 or len(files[0].header) > MAX_JSON_BYTES:
        raise UnsavableError(
            f"{path} cannot be written: the header for {len(stored):,} tensors and the other values is larger than "
            f"{MAX_JSON_BYTES // 2**20} MiB. Fix: save the object in several files, or store long lists of numbers as tensors."
        )
    return files[0].header, (piece for entry in files[0].entries for piece in chunks(entry, stored[entry.name]))


def load(f: str | os.PathLike[str], map_location: str | torch.device | None = None) -> Any:
    """Read a file written by `Accelerator.save`, or any safetensors file. No content is ever code.

    Args:
        f: The file. A link is followed.
        map_location: The device for its tensors; default: the CPU.

    Returns:
        The object. Any mapping of names to tensors is returned as a dict. Tied names have the same tensor.

    Raises:
        CheckpointNotFoundError: There is no such file.
        CorruptCheckpointError: The file has another format or is damaged.
        ConfigurationError: The device is not available.
    """
    device = None if map_location is None else find_device(map_location)
    path, what = _existing(f), str(f)
    data = read_file(path, os.path.getsize(path), None, what)
    if _is_of_tensors(data, what):
        tensors, aliases, metadata = _parts(data, what)
        value: Any = tensors | {name: tensors[stored] for name, stored in aliases.items()}
        if _VALUE in metadata:
            value = loads(metadata[_VALUE].encode(), {_THIS_FILE: value}, what)
    else:
        value = loads(data, {}, what)
    return value if device is None else map_tensors(value, lambda tensor: tensor.to(device))


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and the names of tied tensors. They stay on the disk until they are used.

    Do not keep the tensors: the file must not change while they are used.

    Raises:
        CheckpointNotFoundError: There is no such file.
        CorruptCheckpointError: The file has another format or is damaged.
    """
    file, what = _existing(path), str(path)
    data = read_file(file, os.path.getsize(file), None, what, mapped=True)
    if not _is_of_tensors(data, what):
        raise CorruptCheckpointError(f"{what}: expected a safetensors file.")
    tensors, aliases, metadata = _parts(data, what)
    if _VALUE in metadata:
        raise CorruptCheckpointError(
            f"{what}: expected tensors by name, found another object of Accelerator.save. Fix: trainkit.utils.load({what!r})"
        )
    return tensors, aliases


def _existing(path: str | os.PathLike[str]) -> Path:
    if not os.path.isfile(path):
        reason = "it is a folder" if os.path.isdir(path) else "there is no such file"
        raise CheckpointNotFoundError(f"{path} cannot be read: {reason}.")
    return Path(os.path.realpath(path))


def _is_of_tensors(data: memoryview, what: str) -> bool:
    """Whether a file is a safetensors file, which begins with the length of its header: JSON has no zero bytes.

    Raises:
        CorruptCheckpointError: The file is a pickle.
    """
    if is_pickle(bytes(data[:16])):
        raise CorruptCheckpointError(
            f"{what} looks like a pickle, which can run code, so it is not read. If you trust it, convert it to a safetensors "
            "file: safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
        )
    return 0 in bytes(data[:8])


def is_pickle(head: bytes) -> bool:
    """Whether a file with these first bytes is a pickle, or one of `torch.save`. A safetensors file may begin similarly."""
    return head.startswith((b"PK\x03\x04", b"\x80")) and head[8:9] != b"{"


def _parts(data: memoryview, what: str) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    """The tensors of a file, the names of tied tensors, and the strings in the header."""
    tensors, metadata = tensors_in(data, what), metadata_in(data, what)
    aliases: Any = strict_json(metadata[_ALIASES].encode(), f"{what}: {_ALIASES}") if _ALIASES in metadata else {}
    sound = isinstance(aliases, dict) and not aliases.keys() & tensors.keys()
    if not sound or not all(isinstance(stored, str) and stored in tensors for stored in aliases.values()):
        raise CorruptCheckpointError(f"{what}: {_ALIASES} must map names to the names of stored tensors")
    return tensors, aliases, metadata
