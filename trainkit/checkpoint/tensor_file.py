"""Files of tensors in the safetensors format: planned before they are written, hashed while written, checked when read.

The package `safetensors` neither syncs nor hashes what it writes, needs the whole file in memory at once, and
rejects tensors that share storage. The format itself is simple: eight bytes with the length of a JSON header, the
header, the tensors' bytes. Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.checksum import CHECKSUMS
from trainkit.errors import ConfigurationError, CorruptCheckpointError, UnsavableError
from trainkit.tagged_json.codec import MAX_JSON_BYTES, strict_json
from trainkit.tagged_json.tensors import DTYPES, NAMES, tensor_problem

__all__ = [
    "Entry",
    "FiniteCheck",
    "TensorFile",
    "check_unchanged",
    "chunks",
    "memory_key",
    "metadata_in",
    "plan_files",
    "split_tied",
    "sync_file",
    "tensors_in",
    "write_file",
]

_ALIGNMENT_BYTES = 64  # bytes, like torch's own tensors
_CHUNK_BYTES = 2**20  # bytes read, written and hashed at a time: small enough to be hashed from the cache
_MAX_COPY_BYTES = 16 * 2**20  # bytes copied at a time of a tensor that is not contiguous or not in host memory
_MAX_CONVERT_NUMEL = 2**20  # values of float8 that are converted at a time
_JOIN_BELOW_BYTES = 64 * 2**10  # smaller pieces are joined before they are written
_MAX_DIMENSIONS = 64
_MAX_NUMEL = 2**63 - 1
_METADATA = {"format": "pt"}  # required by transformers


@dataclass(frozen=True)
class Entry:
    """The place of one tensor: bytes `start` to `end` (exclusive) of the file's data part."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """The layout of a file: its name, its first bytes (length and header), its tensors, its size in bytes."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]
    size: int


class FiniteCheck:
    """Finds the parameters that are not finite among the values that are written.

    An infinite value of a parameter that is not trained, such as a mask, is meant; NaN never is.

    Args:
        trained: The parameters, and whether each is trained; other tensors, such as buffers, are not checked.

    Attributes:
        nonfinite: The names of those that are not finite.
    """

    def __init__(self, trained: Mapping[str, bool]) -> None:
        self._trained = trained
        self.nonfinite: list[str] = []

    def add(self, name: str, values: Tensor) -> None:
        """Check values of a tensor: contiguous, in host memory, at least one."""
        if name in self._trained and name not in self.nonfinite and not _are_finite(values, self._trained[name]):
            self.nonfinite.append(name)


def _are_finite(values: Tensor, trained: bool) -> bool:
    """Whether no value is NaN or, if `trained`, infinite. `aminmax` needs no memory; `isfinite` takes 20 times as long."""
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point():
        return True
    if values.dtype.itemsize == 1:  # torch has no reductions for float8
        return all(_are_finite(part.float(), trained) for part in values.reshape(-1).split(_MAX_CONVERT_NUMEL))
    low, high = map(float, torch.aminmax(values))
    return math.isfinite(low) and math.isfinite(high) if trained else not math.isnan(low)


def plan_files(
    stem: str,
    tensors: Mapping[str, Tensor],
    max_shard_size: int,
    groups: Iterable[Iterable[str]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[list[TensorFile], bytes | None]:
    """Plan one file of tensors, or several and an index.

    Args:
        stem: The file is `stem.safetensors`; several are `stem-00001-of-0000n.safetensors`.
        tensors: On any device, with any strides. Their values are not read.
        max_shard_size: Maximum bytes of a file. A larger tensor gets its own file.
        groups: Groups of names; tensors of different groups do not share a file. Default: a single group.
        metadata: Strings to store in each file, by name; see `metadata_in`.

    Returns:
        The layouts of the files, and the content of `stem.safetensors.index.json` if there are several.

    Raises:
        UnsavableError: The format does not support a tensor; the message names it.
    """
    if max_shard_size < 1:
        raise ConfigurationError(f"max_shard_size must be a positive number of bytes, got {max_shard_size!r}")
    for name, tensor in tensors.items():
        if problem := tensor_problem(tensor) or _name_problem(name):
            raise UnsavableError(f"{stem}: the tensor {name!r} cannot be stored: {problem}")
    shards = [shard for group in ([tensors] if groups is None else groups) for shard in _shards(tensors, group, max_shard_size)]
    strings = _METADATA | dict(metadata or {})
    if len(shards) == 1:
        return [_layout(f"{stem}.safetensors", tensors, shards[0], strings)], None
    count = len(shards)
    files = [
        _layout(f"{stem}-{i:05d}-of-{count:05d}.safetensors", tensors, names, strings) for i, names in enumerate(shards, 1)
    ]
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    return files, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("ascii")


def _shards(tensors: Mapping[str, Tensor], names: Iterable[str], max_shard_size: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    data = header = 0
    for name in names:
        # `part` is an upper bound.
        size, part = tensors[name].nbytes, len(json.dumps(name)) + 24 * tensors[name].dim() + 120
        if shards[-1] and (data + header + size + part + 200 > max_shard_size or header + part > MAX_JSON_BYTES // 2):
            shards.append([])
            data = header = 0
        shards[-1].append(name)
        data += size
        header += part
    return shards


def _name_problem(name: str) -> str | None:
    if name == "__metadata__":
        return "the name is reserved by the safetensors format"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "its name is not valid Unicode"
    return None


def _layout(file: str, tensors: Mapping[str, Tensor], names: list[str], metadata: Mapping[str, str]) -> TensorFile:
    """The layout of one file.

    The widest dtypes come first, like in safetensors, so that each tensor is aligned without gaps, which are not allowed.
    Within a dtype width, tensors of whole cache lines come first: nearly all are then aligned like torch's own, and can be
    used in place.
    """
    entries, position = [], 0
    table: dict[str, Any] = {"__metadata__": metadata}
    for name in sorted(names, key=lambda name: (-tensors[name].element_size(), tensors[name].nbytes % _ALIGNMENT_BYTES != 0)):
        tensor = tensors[name]
        end = position + tensor.nbytes
        entry = Entry(name, tensor.dtype, tuple(tensor.shape), position, end)
        table[name] = {"dtype": NAMES[entry.dtype], "shape": entry.shape, "data_offsets": (entry.start, entry.end)}
        entries.append(entry)
        position = end
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    return TensorFile(file, len(text).to_bytes(8, "little") + text, tuple(entries), 8 + len(text) + position)


def check_unchanged(entry: Entry, tensor: Tensor) -> None:
    """Raise `UnsavableError` if a tensor no longer has the dtype and shape of its place in the file."""
    if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
        raise UnsavableError(
            f"the tensor {entry.name!r} was {entry.dtype} {entry.shape} when the save began "
            f"and is {tensor.dtype} {tuple(tensor.shape)} now. Fix: do not change it while it is saved"
        )


def chunks(entry: Entry, tensor: Tensor, check: FiniteCheck | None = None) -> Iterator[memoryview]:
    """The bytes of one tensor as they are in the file, in pieces of at most 1 MiB.

    A contiguous tensor in host memory is not copied: the pieces are its own memory. Any other is copied 16 MiB at a time.
    `check` gets all values.
    """
    check_unchanged(entry, tensor)
    for part in _contiguous(tensor.detach()):
        if part.numel():
            if check is not None:
                check.add(entry.name, part)
            # a contiguous single value may have any stride, but view() needs 1
            yield from _cut(part.as_strided((part.numel(),), (1,)).view(torch.uint8).numpy().data)


def _contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """The values in order, as contiguous tensors in host memory."""
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if plain and tensor.device.type == "cpu":
        yield tensor
    elif tensor.nbytes <= _MAX_COPY_BYTES or not tensor.dim():
        yield tensor.to("cpu").resolve_conj().resolve_neg().contiguous()
    elif plain and tensor.dim() > 1:
        yield from _contiguous(tensor.reshape(-1))
    elif rows := _MAX_COPY_BYTES * len(tensor) // tensor.nbytes:
        for start in range(0, len(tensor), rows):
            yield from _contiguous(tensor[start : start + rows])
    else:
        for row in range(len(tensor)):
            yield from _contiguous(tensor[row])


def _cut(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


def _blocks(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces of suitable size: small ones are joined, large ones are cut."""
    small = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        if len(view) < _JOIN_BELOW_BYTES:
            small += view
            if len(small) < _CHUNK_BYTES // 4:
                continue
            view = memoryview(b"")
        if small:
            yield memoryview(small)
            small = bytearray()
        yield from _cut(view)
        piece = view = memoryview(b"")  # frees its memory before the next piece is created
    if small:
        yield memoryview(small)


def write_file(path: Path, pieces: Iterable[bytes | memoryview], checksum: str | None = None) -> tuple[int, str]:
    """Write a new file and sync it to the disk. Returns its size in bytes and its digest; "" without a `checksum`.

    Raises:
        FileExistsError: The path exists.
        OSError: The file cannot be written; a part of it may be left behind.
    """
    # Hashed in this thread, where each piece is in the cache; another thread was slower on two busy cores.
    size, hasher = 0, None if checksum is None else CHECKSUMS[checksum].start()
    with path.open("xb", buffering=0) as file:
        for block in _blocks(pieces):
            if hasher is not None:
                hasher.update(block)
            size += len(block)
            while block:  # a raw write may write only part of it
                block = block[file.write(block) or 0 :]
            block = memoryview(b"")  # frees its memory before the next one is created
        _sync(file.fileno())
    return size, "" if hasher is None else hasher.hexdigest()


def _sync(descriptor: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        try:  # macOS's fsync does not flush the drive's cache
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError:  # Not every file system supports it.
            pass
    os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """Sync a file that another program has written to the disk."""
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows syncs what is open for writing
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def tensors_in(buffer: bytes | bytearray | memoryview, what: str) -> dict[str, Tensor]:
    """The tensors in the content of a file, as views into `buffer`. The header is not trusted.

    A tensor is copied only if it is not aligned, which does not happen in files of trainkit, or if the buffer is read-only.

    Raises:
        CorruptCheckpointError: The header is malformed or does not match the file.
    """
    view = memoryview(buffer).cast("B")
    header, _, length = _header(view, what)
    data = view[8 + length :]
    entries = [_entry(name, described, len(data), what) for name, described in header.items()]
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if gap := entry.start - position:
            problem = f"leaves a gap of {gap:,} bytes" if gap > 0 else "overlaps another tensor"
            raise CorruptCheckpointError(f"{what}: the tensor {entry.name!r:.200} {problem}")
        position = entry.end
    if position != len(data):
        raise CorruptCheckpointError(f"{what}: {len(data) - position:,} bytes belong to no tensor")
    return {entry.name: _tensor(entry, data, what) for entry in entries}


def metadata_in(buffer: bytes | bytearray | memoryview, what: str) -> dict[str, str]:
    """The strings in the header of a file of tensors; raises like `tensors_in`."""
    return _header(memoryview(buffer).cast("B"), what)[1]


def _header(view: memoryview, what: str) -> tuple[dict[str, Any], dict[str, str], int]:
    """The header without its metadata, the metadata, and the length of the header."""
    if len(view) < 8:
        raise CorruptCheckpointError(f"{what}: {len(view)} bytes; a file of tensors has at least 8")
    length = int.from_bytes(view[:8], "little")
    if length > len(view) - 8:
        raise CorruptCheckpointError(f"{what}: a header of {length:,} bytes in a file of {len(view):,} bytes")
    header = strict_json(view[8 : 8 + length], f"{what}: header")
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{what}: header: expected a JSON object, got {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptCheckpointError(f"{what}: header: __metadata__ must map strings to strings")
    return header, metadata, length


def _entry(name: str, described: Any, size: int, what: str) -> Entry:
    """One tensor of the header. Its offsets are not compared with those of other tensors."""
    where = f"{what}: header: the tensor {name!r:.200}"
    if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptCheckpointError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CorruptCheckpointError(f"{where} has the unknown dtype {dtype!r:.200}")
    if not _are_integers(shape) or len(shape) > _MAX_DIMENSIONS or any(n < 0 for n in shape):
        raise CorruptCheckpointError(f"{where} has the malformed shape {shape!r:.200}")
    if not _are_integers(offsets) or len(offsets) != 2:
        raise CorruptCheckpointError(f"{where} has malformed data_offsets {offsets!r:.200}")
    width = DTYPES[dtype].itemsize
    if math.prod(max(n, 1) for n in shape) > _MAX_NUMEL // width:  # torch's strides would overflow even if one n is 0
        raise CorruptCheckpointError(f"{where} has the shape {shape!r:.200}, which is too large")
    start, end = offsets
    if not 0 <= start <= end <= size:
        raise CorruptCheckpointError(f"{where} has data_offsets {start:,} to {end:,} in {size:,} bytes of data")
    if end - start != math.prod(shape) * width:
        raise CorruptCheckpointError(
            f"{where} has {end - start:,} bytes, but {dtype} {shape!r:.200} needs {math.prod(shape) * width:,}"
        )
    return Entry(name, DTYPES[dtype], tuple(shape), start, end)


def _are_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int for n in value)  # For isinstance, a bool would be an int.


def _tensor(entry: Entry, data: memoryview, what: str) -> Tensor:
    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    part: bytearray | memoryview = data[entry.start : entry.end]
    if data.readonly:
        part = bytearray(part)
    flat = torch.frombuffer(part, dtype=torch.uint8)
    if flat.data_ptr() % entry.dtype.itemsize:
        flat = flat.clone()
    if entry.dtype is torch.bool and bool((flat > 1).any()):  # other bytes are undefined in C
        raise CorruptCheckpointError(f"{what}: the tensor {entry.name!r:.200} of dtype bool has bytes other than 0 and 1")
    return flat.view(entry.dtype).view(entry.shape)


def memory_key(tensor: Tensor) -> Any:
    """A key that two tensors share exactly if they are the same elements in memory, in the same order."""
    layout = (tensor.dtype, tuple(tensor.shape))
    try:
        layout = (*layout, tensor.stride(), tensor.device)  # type: ignore[assignment]
        pointer = tensor.data_ptr()
        if pointer and tensor.numel():
            return (*layout, pointer)
        # An empty tensor has no address.
        return (*layout, tensor.untyped_storage()._cdata, tensor.storage_offset())
    except (NotImplementedError, RuntimeError):  # sparse or quantized: no memory to compare
        return (*layout, id(tensor))


def split_tied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tied tensors once, by their first name, and the others of their names → that one."""
    first: dict[Any, str] = {}
    names = {name: first.setdefault(memory_key(tensor), name) for name, tensor in tensors.items()}
    return {name: tensors[name] for name in first.values()}, {name: one for name, one in names.items() if one != name}
