"""`CheckpointPlan`: the files of a checkpoint before it is written, with their exact sizes, and memory for its copies."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from trainkit._version import __version__
from trainkit.checkpoint.checksum import CHECKSUMS, DEFAULT_CHECKSUM
from trainkit.checkpoint.hook_files import HookFiles
from trainkit.checkpoint.manifest import (
    DIGEST,
    MANIFEST,
    FileEntry,
    Manifest,
    digest_line,
    format_version,
    is_file_name,
    name_clash,
)
from trainkit.checkpoint.model_files import MODEL, ModelFiles, split_names
from trainkit.checkpoint.ranks import GatherOrder, assign_to_ranks
from trainkit.checkpoint.state_schema import state_problem
from trainkit.checkpoint.tensor_file import FiniteCheck, TensorFile, check_unchanged, chunks, plan_files
from trainkit.errors import CheckpointError, UnsavableError
from trainkit.tagged_json.codec import dumps
from trainkit.tagged_json.tensors import tensor_problem

__all__ = ["SPLIT_ABOVE_BYTES", "CheckpointContent", "CheckpointPlan", "HostBuffers", "sizes_to_copy"]


SPLIT_ABOVE_BYTES = 16 * 2**20
"""The tensors of a larger stem are distributed over the ranks; each rank writes its own files."""

_STATE = "state"
# state.json refers to a single file of tensors, which is therefore never split.
_NEVER_SPLIT = 2**63
_CHUNK_BYTES = 4 * 2**20
_PAGE_BYTES = 4096  # the smallest page of the systems in use


@dataclass
class CheckpointContent:
    """The content of a checkpoint to be saved. The tensors are those of the training, not copies.

    Attributes:
        tensors: Stem of the file ("model", "model_1", "optimizer") → name → tensor.
        state: Everything else, for `state.json` and `state.safetensors`; see `trainkit.tagged_json.codec` for the
            supported types.
        about: The fields of `Manifest` except `trainkit_version`, `saved_at`,
            `format_version`, `checksum` and `files`.
        attachments: Further files by name, such as `config.json`.
        max_shard_size: Maximum bytes of a file of tensors.
        parameters: Stem of the file → name of a parameter → whether it is trained; the manifest says whether they are finite.
        checksum: The algorithm for the digests of the files, of `CHECKSUMS`; on several ranks that of the main process.
        hook_files: Files that hooks have written, on the main process. They replace attachments of the same name.
        by_hook: Stems of models whose weights are not stored, since a hook has saved them itself; the same on all ranks.
        model_files: The files for the tensors of "model" if other programs open them, and their names there; the same on all
            ranks. Empty: `model.safetensors`, by the names in `tensors`.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    about: dict[str, Any]
    attachments: dict[str, bytes] = field(default_factory=dict)
    max_shard_size: int = 5 * 10**9
    parameters: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    checksum: str = DEFAULT_CHECKSUM
    hook_files: HookFiles | None = None
    by_hook: Collection[str] = ()
    model_files: ModelFiles = field(default_factory=dict)


class CheckpointPlan:
    """The plan of the files for a `CheckpointContent`, not yet written.

    State and manifest are encoded immediately, so later changes to `content.state` and `content.about` have no effect. The
    tensors are read when the files are written, unless `detach` copies them before.

    The files of tensors are distributed over the ranks, which all have the tensors: each rank writes and copies only its own
    files. Everything else is written by the main process; other ranks only need the tensors and `about["run_id"]`.

    Args:
        content: The content.
        rank: The rank of this process.
        ranks: The world size.

    Attributes:
        run_id: The run that saves it.
        checksum: The algorithm for the digests of the files.
        sizes: Name of the file → bytes. On the main process all files, manifest and digest included; on other ranks all files
            of tensors.
        size: The sum of `sizes`. The manifest has one byte more if a parameter is not finite.
        layout: A digest of the layout of all files of tensors, to compare the ranks; "" if there is a single rank.
        hook_files: Those of the content.

    Raises:
        UnsavableError: Something in the content cannot be stored.
        CheckpointError: Two files would have the same name, or a name is not allowed on every system.
    """

    def __init__(self, content: CheckpointContent, *, rank: int = 0, ranks: int = 1) -> None:
        self._bytes: dict[str, bytes] = {}
        self._tensors: dict[str, tuple[TensorFile, Mapping[str, Tensor]]] = {}
        self._copies: Mapping[str, memoryview] | None = None
        self._checks: dict[str, FiniteCheck] = {}
        self._full_names: dict[str, Mapping[str, str]] = {}  # Stem of the file → name in it → name in the content.
        self._stems: dict[str, str] = {}  # Name of a file → its stem.
        self._owned: list[list[Tensor]] = [[] for _ in range(ranks)]  # Index: the rank that writes the tensors.
        self._rank = rank
        self.run_id = str(content.about["run_id"])
        self.checksum = content.checksum
        self.sizes: dict[str, int] = {}
        self.layout = ""
        self.hook_files = content.hook_files
        if rank == 0:
            self._add_state(content.state)
        stems = self._add_parts(content, ranks)
        self._checks[_STATE] = FiniteCheck(content.parameters.get(_STATE, {}))
        if rank == 0:
            written = {} if self.hook_files is None else self.hook_files.sizes
            for name, data in content.attachments.items():
                if name not in written:
                    self._add_bytes(name, bytes(data))
            self._check_hook_names(written)
            model_files = {stem: dict(file) for stem, file in content.model_files.items() if stem in stems}
            self._describe(content.about, written, model_files)
        self.size = sum(self.sizes.values())

    def _add_parts(self, content: CheckpointContent, ranks: int) -> list[str]:
        """Plan the files of all tensors but those of the state. Returns their stems."""
        loads, layout = [0] * ranks, hashlib.sha256()
        stems: list[str] = []
        for part, stem, names in _by_file(content.tensors, content.model_files):
            tensors = {name: content.tensors[part][full] for name, full in names.items()}
            trained = content.parameters.get(part, {})
            self._checks[stem] = FiniteCheck({name: trained[full] for name, full in names.items() if full in trained})
            self._full_names[stem] = names
            if part in content.by_hook:
                self._check_finite(stem, tensors)
                continue
            stems.append(stem)
            files = self._add_tensors(stem, tensors, content.max_shard_size, _divide(tensors, loads))
            if ranks == 1:
                continue
            for file in files:
                kinds = sorted((entry.name, str(entry.dtype), entry.shape) for entry in file.entries)
                layout.update(f"{file.name} {file.size} {kinds}\n".encode())
            self.layout = layout.hexdigest()
        return stems

    def _describe(self, about: Mapping[str, Any], written: Mapping[str, int], model_files: dict[str, dict[str, Any]]) -> None:
        digest = "0" * CHECKSUMS[self.checksum].digits
        self._manifest = Manifest(
            **about,
            saved_at=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            trainkit_version=__version__,
            format_version=format_version(
                hooks=bool(written or about["contents"].get("by_hook")), model_files=bool(model_files)
            ),
            checksum=self.checksum,
            files={name: FileEntry(size, digest) for name, size in self.sizes.items()},
            hook_files={name: FileEntry(size, digest) for name, size in written.items()},
            model_files=model_files,
            finite=True,
        )
        # All digests have the same length, so the final manifest has this size. Decoding makes a copy that shares nothing.
        data = self._manifest.to_bytes()
        self._manifest = Manifest.from_bytes(data, MANIFEST)
        self.sizes |= {MANIFEST: len(data), DIGEST: len(digest_line(data))}

    def _check_finite(self, stem: str, tensors: Mapping[str, Tensor]) -> None:
        """Check the parameters of a model that is not written, on the main process."""
        if self._rank == 0:
            for name, tensor in tensors.items():
                if tensor.numel():
                    self._checks[stem].add(name, tensor.detach().cpu().contiguous())

    def _check_hook_names(self, written: Collection[str]) -> None:
        """Refuse a file of a hook that has the name of another file.

        Raises:
            CheckpointError: Names it.
        """
        if (name := name_clash([*self.sizes, *written])) is not None:
            raise CheckpointError(
                f"a hook of save_state has written {name!r}, the name of another file of the checkpoint. Fix: write to a "
                "folder in it, os.path.join(output_dir, 'unet'); or, if it has the weights of a model, remove those from the "
                "list that the hook gets: weights.pop()"
            )

    def manifest(self, digests: Mapping[str, str], finite: bool = True) -> Manifest:
        """The manifest of the written files, on the main process.

        Args:
            digests: That of each file in `sizes` except manifest and digest, and of each file of hooks.
            finite: Whether no rank has found a parameter that is not finite.
        """
        files, hook_files = (
            {name: replace(entry, digest=digests[name]) for name, entry in entries.items()}
            for entries in (self._manifest.files, self._manifest.hook_files)
        )
        return replace(self._manifest, files=files, hook_files=hook_files, finite=finite)

    @property
    def names(self) -> set[str]:
        """On the main process, the names of all files, with those of hooks."""
        return {*self.sizes, *(() if self.hook_files is None else self.hook_files.sizes)}

    @property
    def nonfinite(self) -> list[str]:
        """After the files have been read: the parameters in files of this rank that are not finite."""
        found = [(stem, name) for stem, check in self._checks.items() for name in check.nonfinite]
        return [self._full_names.get(stem, {}).get(name, name) for stem, name in found]

    def detach(self, buffers: HostBuffers) -> None:
        """Copy all tensors of this rank, so that the training can change them. Collective: sharded tensors are gathered.

        The copies are stored in `buffers`: the plan is valid until the next one is detached into them.
        """
        gathers = GatherOrder(self._rank, self._owned)
        try:
            self._copies = buffers.copy(self._tensors, gathers.values_of)
        finally:
            gathers.finish()
        self._owned = []
        self._tensors = {name: (file, {}) for name, (file, _) in self._tensors.items()}

    def release(self) -> None:
        """Release tensors and copies. Afterwards the plan needs little memory and cannot be written."""
        self._copies = {}
        self._tensors = {}
        self._owned = []

    def files(self) -> Generator[tuple[str, Iterable[bytes | memoryview]], None, None]:
        """The files of this rank except manifest and digest: name, and content in pieces. Each can be read once.

        If tensors are sharded, all ranks read them at the same time, to the end or until this generator is closed.
        """
        gathers = GatherOrder(self._rank, self._owned)
        try:
            for name, data in self._bytes.items():
                yield name, [data]
            for name, (file, tensors) in self._tensors.items():
                check = self._checks[self._stems[name]]
                if self._copies is None:
                    yield name, _stream_tensors(file, tensors, gathers, check)
                else:
                    yield name, _stream_copy(file, self._copies[name], check)
        finally:
            gathers.finish()

    def _add_state(self, state: dict[str, Any]) -> None:
        if (problem := state_problem(state)) is not None:
            raise UnsavableError(f"{_STATE}: {problem}")
        tensors: dict[str, Tensor] = {}
        self._add_bytes("state.json", dumps(state, tensors, file="state.safetensors", where=_STATE))
        if tensors:
            self._add_tensors(_STATE, tensors, _NEVER_SPLIT, {0: list(tensors)})

    def _add_tensors(
        self, stem: str, tensors: Mapping[str, Tensor], max_shard_size: int, groups: Mapping[int, list[str]]
    ) -> list[TensorFile]:
        """Plan the files of a stem; `groups`: rank → names of the tensors that it writes."""
        files, index = plan_files(stem, tensors, max_shard_size, groups.values())
        own_names = set(groups.get(self._rank, ()))
        owners = {name: rank for rank, names in groups.items() for name in names}
        for file in files:
            self._check_name(file.name)
            self._stems[file.name] = stem
            if file.entries:
                self._owned[owners[file.entries[0].name]] += [tensors[entry.name] for entry in file.entries]
            self.sizes[file.name] = file.size
            if file.entries[0].name in own_names if file.entries else self._rank in groups:
                self._tensors[file.name] = file, {entry.name: tensors[entry.name] for entry in file.entries}
        if index is not None and self._rank == 0:
            self._add_bytes(f"{stem}.safetensors.index.json", index)
        return files

    def _add_bytes(self, name: str, data: bytes) -> None:
        self._check_name(name)
        self._bytes[name] = data
        self.sizes[name] = len(data)

    def _check_name(self, name: str) -> None:
        if not is_file_name(name):
            raise CheckpointError(
                f"{name!r} cannot be a file name in a checkpoint: expected letters, digits, '.', '_' and '-', a name that "
                "is valid on all operating systems and does not start with 'manifest.'. Fix: use another name"
            )
        if name.lower() in {known.lower() for known in self.sizes}:
            raise CheckpointError(f"two files of the checkpoint would have the same name, {name!r}. Fix: rename one of them")


def _divide(tensors: Mapping[str, Tensor], loads: list[int]) -> dict[int, list[str]]:
    """Rank → names of the tensors that it writes; `loads`: bytes that each rank writes already, updated."""
    if len(loads) == 1:
        return {0: list(tensors)}
    sizes = {name: 0 if tensor_problem(tensor) else tensor.nbytes for name, tensor in tensors.items()}
    return assign_to_ranks(sizes, loads, SPLIT_ABOVE_BYTES)


def _by_file(tensors: Mapping[str, Mapping[str, Tensor]], model_files: ModelFiles) -> Iterator[tuple[str, str, dict[str, str]]]:
    """For each file of tensors: the part that it belongs to, its stem, and name in it → name in the part."""
    for part, named in tensors.items():
        if part == MODEL:
            yield from ((part, stem, names) for stem, names in split_names(named, model_files).items())
        else:
            yield part, part, {name: name for name in named}


def sizes_to_copy(
    tensors: Mapping[str, Mapping[str, Tensor]],
    *,
    model_files: ModelFiles | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> dict[str, int]:
    """What a `CheckpointPlan` of such tensors will copy, for `HostBuffers.reserve`: file of this rank → bytes of its tensors.

    Args:
        tensors: As in `CheckpointContent`.
        model_files: As in `CheckpointContent`.
        rank: The rank of this process.
        ranks: The world size.

    Raises:
        UnsavableError: The format does not support a tensor.
    """
    sizes: dict[str, int] = {}
    loads = [0] * ranks
    for part, stem, names in _by_file(tensors, model_files or {}):
        named = {name: tensors[part][full] for name, full in names.items()}
        groups = _divide(named, loads)
        own_names = set(groups.get(rank, ()))
        for file in plan_files(stem, named, CheckpointContent.max_shard_size, groups.values())[0]:
            if file.entries and file.entries[0].name in own_names:
                sizes[file.name] = file.size - len(file.header)
    return sizes


def _stream_tensors(
    file: TensorFile, tensors: Mapping[str, Tensor], gathers: GatherOrder, check: FiniteCheck
) -> Iterator[bytes | memoryview]:
    yield file.header
    for entry in file.entries:
        yield from chunks(entry, gathers.values_of(tensors[entry.name]), check)


def _stream_copy(file: TensorFile, data: memoryview, check: FiniteCheck) -> Iterator[bytes | memoryview]:
    yield file.header
    for entry in file.entries:
        if entry.start < entry.end:
            check.add(entry.name, torch.frombuffer(data[entry.start : entry.end], dtype=entry.dtype))
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


class HostBuffers:
    """Copies of tensors in host memory, in the layout of the files that will contain them.

    A first copy of some gigabytes spends most of its time on allocating memory; a copy into memory that was used before runs
    at the speed of the memory. For tensors on a CUDA device the memory is page-locked, so that all copies run without a wait
    after each.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._locked: dict[str, weakref.finalize[[Tensor], HostBuffers]] = {}  # file name → function that unlocks its buffer

    @property
    def nbytes(self) -> int:
        """Bytes of allocated host memory."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @torch.no_grad()
    def copy(
        self,
        files: Mapping[str, tuple[TensorFile, Mapping[str, Tensor]]],
        take: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> Mapping[str, memoryview]:
        """Copy every tensor of every file.

        Args:
            files: File name → its layout, and its tensors by name.
            take: Returns the values of a tensor; called for all tensors in the order of the files.

        Returns:
            file name → the bytes of its data part, in the memory of this object: valid until the next `copy` or `free`. A
            call for files of the same names and sizes allocates nothing.

        Raises:
            UnsavableError: A tensor does not have the dtype or shape for which its file was planned.
        """
        sizes = {name: file.size - len(file.header) for name, (file, _) in files.items()}
        devices = {t.device for _, tensors in files.values() for t in tensors.values() if t.device.type == "cuda"}
        self._make_room(sizes, lock=bool(devices))
        for name, (file, tensors) in files.items():
            buffer = self._buffers[name]
            for entry in file.entries:
                source = take(tensors[entry.name]).detach()
                check_unchanged(entry, source)  # copy_ would cast and broadcast
                if entry.start < entry.end:
                    target = buffer[entry.start : entry.end].view(entry.dtype).view(entry.shape)
                    target.copy_(source, non_blocking=source.device.type == "cuda")
        for device in devices:  # One wait is enough for all copies; the tensors were written on this stream, too.
            torch.cuda.current_stream(device).synchronize()
        return {name: self._buffers[name].numpy().data[:size] for name, size in sizes.items()}

    def reserve(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """Allocate the memory for a `copy` before it is needed, and touch it: most of the cost of new memory is its first use.

        Args:
            sizes: File name → bytes of its tensors.
            device: That of the tensors.
        """
        cuda = device.type == "cuda"
        with torch.cuda.device(device) if cuda else contextlib.nullcontext():  # a thread begins with the first device
            for name in self._make_room(sizes, lock=cuda):
                self._buffers[name].numpy()[::_PAGE_BYTES] = 0

    def free(self) -> None:
        """Free the memory. Views returned by `copy` must not be used any more."""
        self._drop(list(self._buffers))

    def _make_room(self, sizes: Mapping[str, int], lock: bool) -> list[str]:
        """Allocate a buffer for every file that has none, or one that is too small. Returns the names of these files."""
        small = [name for name, size in sizes.items() if name not in self._buffers or self._buffers[name].nbytes < size]
        if not small:
            return small
        # Files that are not part of this save may never be written again: free their memory.
        self._drop([name for name in self._buffers if name not in sizes])
        for name in small:
            # State that has grown will probably grow again: allocate a little more.
            spare = sizes[name] // 32 if name in self._buffers else 0
            self._drop([name])
            buffer = torch.empty(sizes[name] + spare, dtype=torch.uint8)
            # torch's own page-locked memory comes in powers of two, up to twice what is needed. If the system does not
            # allow that much locked memory, the copies are slower.
            if lock and buffer.nbytes and int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
                self._locked[name] = weakref.finalize(self, _unlock, buffer)
            self._buffers[name] = buffer
        return small

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._locked:
                self._locked.pop(name)()
            self._buffers.pop(name, None)


def _unlock(buffer: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
