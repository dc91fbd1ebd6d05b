"""Reading a checkpoint: nothing of it is used before its bytes have proved to be those that were written.

What is there to be read may come from anybody. The manifest and everything it leads to is checked before it is believed,
links, pipes and devices are never opened as files, and no content is ever code.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainkit.checkpoint.identify import (
    MAX_LISTED,
    checkpoint_identity,
    has_checkpoint_files,
    is_checkpoint,
    listed,
    why_no_checkpoint,
)
from trainkit.checkpoint.manifest import DIGEST, MANIFEST, Manifest, digest_line
from trainkit.checkpoint.regular_file import not_regular, read_file, read_small_file, regular_file
from trainkit.checkpoint.tensor_file import tensors_in
from trainkit.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError
from trainkit.paths import local_path
from trainkit.tagged_json.encode import loads
from trainkit.tagged_json.strict_json import MAX_JSON_BYTES, strict_json

__all__ = [
    "Checkpoint",
    "Loaded",
    "has_checkpoint_files",
    "inspect_checkpoint",
    "is_checkpoint",
    "open_checkpoint",
    "read_small_file",
]

STATE = "state.json"
_TENSORS = ".safetensors"
_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)
_PIECE = 4 * 2**20


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at ``path``: manifest and digest are verified, the other files are there and of the right sizes.

    Raises:
        CheckpointNotFoundError: there is none; the message names those that are near.
        CorruptCheckpointError: it is damaged; the message names the files.
        CheckpointError: it cannot be read, or a newer trainkit wrote it.
    """
    path = Path(os.path.abspath(local_path(path, "path")))
    if not is_checkpoint(path):
        raise CheckpointNotFoundError(why_no_checkpoint(path))
    manifest, problem, which = _inspect(path)
    if problem is not None:
        raise problem
    assert manifest is not None
    checkpoint = Checkpoint(path, manifest)
    checkpoint._identity = which
    return checkpoint


def inspect_checkpoint(path: Path) -> tuple[Manifest | None, str | None]:
    """What :func:`open_checkpoint` finds out: the manifest, None if it cannot be trusted, and what is wrong, if anything."""
    manifest, problem, _ = _inspect(path)
    return manifest, None if problem is None else str(problem)


class Checkpoint:
    """A checkpoint whose manifest and digest verify and whose files are there with the right sizes; see ``open_checkpoint``.

    Attributes:
        path: the folder.
        manifest: what the checkpoint says of itself.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._identity = checkpoint_identity(path)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    @property
    def stems(self) -> list[str]:
        """What it has tensors or state of, for ``read``: ``"model"``, ``"optimizer"``, ``"state"``, …"""
        return sorted({*self._stems(), "state"})

    def read(self, stems: Collection[str] | None = None, *, mapped: bool = False, unregistered: bool = False) -> Loaded:
        """The content. Every file is read once and verified, all of them before anything is returned.

        Memory: that of the tensors, and while ``state.json`` is decoded up to 40 times its size.

        Args:
            stems: what to read, of ``stems``; everything if None, which verifies the attachments too.
            mapped: leave the values of models and optimizers on the disk until they are used, which needs no memory of their
                size. They must not be kept: as long as they are used their files must stay as they are.
            unregistered: return a value of a registered type as a tuple of the type's name and what ``encode`` returned, so
                that this program need not have registered the type.

        Raises:
            StateMismatchError: a stem that the checkpoint has not.
            CorruptCheckpointError: a file is damaged; the message names it.
            CheckpointError: it was replaced or removed meanwhile; or it holds a value of a type that is not registered.
        """
        requested = self._requested(stems)
        with self._unchanged():
            loaded = self._load(requested, self._mapped if mapped else self._content, unregistered)
            if stems is None:
                self._check_attachments()
        return loaded

    def verify(self) -> None:
        """Find out whether ``read`` would succeed, in pieces of a few MiB and so with little memory.

        Raises:
            CorruptCheckpointError: a file is damaged; the message names it.
            CheckpointError: it was replaced or removed meanwhile.
        """
        with self._unchanged():
            self._load({*self._stems(), "state"}, self._outline, unregistered=True)
            self._check_attachments()

    def attachment(self, name: str) -> bytes:
        """The verified content of a file that is neither tensors nor state, such as ``config.json``.

        Raises:
            CheckpointNotFoundError: the checkpoint has no such file.
            CorruptCheckpointError: the file is damaged.
        """
        if name not in self.manifest.files:
            raise CheckpointNotFoundError(f"{self.path} has no {name!r}; it has {', '.join(sorted(self.manifest.files))}.")
        with self._unchanged():
            return bytes(self._content(name))

    def _requested(self, stems: Collection[str] | None) -> set[str]:
        requested = set(self.stems) if stems is None else set(stems)
        if unknown := sorted(requested.difference(self.stems)):
            raise StateMismatchError(
                f"{self.path}: expected a checkpoint with {', '.join(unknown)}, this one has {', '.join(self.stems)}. "
                f"Fix: read what it has: checkpoint.read({self.stems})"
            )
        return requested

    def _files_of(self, stems: Collection[str] | None) -> list[str]:
        """The files that :meth:`read` reads."""
        if stems is None:
            return list(self.manifest.files)
        of_stems = {name for stem, names in self._stems().items() if stem in stems for name in [*names, stem + _INDEX]}
        return [name for name in self.manifest.files if name in of_stems or (name == STATE and "state" in stems)]

    def _what(self, name: str) -> str:
        return str(self.path / name)

    def _stems(self) -> dict[str, list[str]]:
        return _stems(self.manifest, self._what(MANIFEST))

    def _load(self, requested: Collection[str], fetch: Callable[[str], memoryview], unregistered: bool = False) -> Loaded:
        """The content of the stems ``wanted``; ``fetch`` gives the verified content of a file."""
        tensors = {stem: self._tensors(stem, names, fetch) for stem, names in self._stems().items() if stem in requested}
        for_state = tensors.pop("state", {})
        state: Any = {}
        if "state" in requested:
            files = {f"state{_TENSORS}": for_state}
            state = loads(fetch(STATE), files, self._what(STATE), unregistered=unregistered)
            if not isinstance(state, dict):
                raise CorruptCheckpointError(f"{self._what(STATE)}: expected a map, got {type(state).__name__}")
        return Loaded(self.manifest, tensors, state, self)

    def _tensors(self, stem: str, names: list[str], fetch: Callable[[str], memoryview]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        places: dict[str, str] = {}
        for name in names:
            for key, tensor in tensors_in(fetch(name), self._what(name)).items():
                if key in places:
                    raise CorruptCheckpointError(f"{self._what(name)}: the tensor {key!r:.200} is in {places[key]} too")
                tensors[key], places[key] = tensor, name
        index = stem + _INDEX
        if index in self.manifest.files:
            value = strict_json(fetch(index), self._what(index))
            if not isinstance(value, dict) or value.get("weight_map") != places:
                raise CorruptCheckpointError(f"{self._what(index)}: it does not say where the tensors are")
        for alias, stored in self.manifest.aliases.get(stem, {}).items():
            if stored not in tensors or alias in tensors:
                raise CorruptCheckpointError(
                    f"{self._what(MANIFEST)}: {alias!r:.200} is said to be stored as {stored!r:.200}; {names[0]} does not agree"
                )
        return tensors

    def _content(self, name: str, verified: bool = False, mapped: bool = False) -> memoryview:
        """The bytes of a file. ``verified``: another process has hashed it."""
        entry = self.manifest.files[name]
        return read_file(self.path / name, entry.size, None if verified else entry.sha256, self._what(name), mapped)

    def _mapped(self, name: str, verified: bool = False) -> memoryview:
        """The same, without the values of a model or an optimizer in memory."""
        return self._content(name, verified, mapped=name.endswith(_TENSORS) and not name.startswith("state"))

    def _outline(self, name: str) -> memoryview:
        """The same for who wants no values: of a file of tensors the header alone, before memory that nobody has touched."""
        if not name.endswith(_TENSORS):
            return self._content(name)
        head = self._check(name)
        try:
            outline = np.zeros(self.manifest.files[name].size, np.uint8).data
        except MemoryError:
            return self._content(name)
        outline[: len(head)] = head
        return outline

    def _check(self, name: str) -> bytearray:
        """Verify a file in pieces, as it may be larger than the memory; its first bytes, to the end of a tensor header."""
        entry = self.manifest.files[name]
        digest, size, head, requested = hashlib.sha256(), 0, bytearray(), 8
        piece = memoryview(bytearray(_PIECE))
        with regular_file(self.path / name) as file:
            while count := file.readinto(piece):
                digest.update(piece[:count])
                size += count
                head += piece[: min(count, max(requested - len(head), 0))]
                if requested == len(head) == 8:
                    requested += min(int.from_bytes(head, "little"), MAX_JSON_BYTES)
                    head += piece[8 : min(count, requested)]
        if size != entry.size:
            raise CorruptCheckpointError(_other_size(self._what(name), entry.size, size))
        if digest.hexdigest() != entry.sha256:
            raise CorruptCheckpointError(
                f"{self._what(name)}: its SHA-256 is {digest.hexdigest()}, but what was written had {entry.sha256}"
            )
        return head

    def _check_attachments(self) -> None:
        for name in self.manifest.files:
            if name != STATE and not name.endswith((_TENSORS, _INDEX)):
                self._check(name)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Tell damage from a folder that another process has replaced or removed meanwhile."""
        try:
            yield
        except CorruptCheckpointError as error:
            now = checkpoint_identity(self.path)
            if now in (self._identity, b""):
                raise
            raise CheckpointError(
                f"{self.path} was {'removed' if now is None else 'replaced by another checkpoint'} while it was read. "
                "Fix: open it again, or another one."
            ) from error


@dataclass
class Loaded:
    """What was read from a checkpoint.

    Attributes:
        manifest: what the checkpoint says of itself.
        tensors: stem → name → tensor, on the CPU; they share the memory of the files' content, and may be changed.
        state: everything else, with its types; empty if it was not asked for.
        checkpoint: where it was read from.
    """

    manifest: Manifest
    tensors: dict[str, dict[str, Tensor]] = field(repr=False)
    state: dict[str, Any] = field(repr=False)
    checkpoint: Checkpoint

    def attachments(self, name: str) -> bytes:
        """The content of a further file, such as ``config.json``, read and verified now; see ``Checkpoint.attachment``."""
        return self.checkpoint.attachment(name)


# ---------------------------------------------------------------------------------------------------- manifest and files


def _inspect(path: Path) -> tuple[Manifest | None, CheckpointError | None, bytes | None]:
    """Manifest, problem, and which checkpoint it was that ``path`` led to."""
    while True:
        manifest, problem, before = None, None, checkpoint_identity(path)
        try:
            manifest = _read_manifest(path)
            _stems(manifest, str(path / MANIFEST))
            _measure(path, manifest)
        except CheckpointError as error:
            problem = error
        if checkpoint_identity(path) == before:
            return manifest, problem, before
        # Replaced in between: what was seen may be half of one and half of another.


def _read_manifest(path: Path) -> Manifest:
    digest = read_small_file(path / DIGEST, 1024)
    data = read_small_file(path / MANIFEST, MAX_JSON_BYTES)
    if digest != digest_line(data):
        raise CorruptCheckpointError(
            f"{path / MANIFEST}: its content is not what {DIGEST} says; one of the two was changed or is incomplete"
        )
    return Manifest.from_bytes(data, str(path / MANIFEST))


def _measure(path: Path, manifest: Manifest) -> None:
    problems = []
    for name, entry in manifest.files.items():
        what = str(path / name)
        try:
            info = os.lstat(path / name)
        except FileNotFoundError:
            problems.append(f"{what}: missing")
            continue
        except OSError as error:
            problems.append(f"{what}: cannot be read: {error.strerror}")
            continue
        if (problem := not_regular(info.st_mode)) is not None:
            problems.append(f"{what}: {problem}")
        elif info.st_size != entry.size:
            problems.append(_other_size(what, entry.size, info.st_size))
    if problems:
        more = len(problems) - MAX_LISTED
        raise CorruptCheckpointError("\n".join(problems[:MAX_LISTED]) + (f"\nand {more} more files" if more > 0 else ""))


def _stems(manifest: Manifest, what: str) -> dict[str, list[str]]:
    """Which files make which stem, in order; CorruptCheckpointError if some cannot be all of them."""
    if STATE not in manifest.files:
        raise CorruptCheckpointError(f"{what}: it lists no {STATE}")
    for name, entry in manifest.files.items():
        if (name == STATE or name.endswith(_INDEX)) and entry.size > MAX_JSON_BYTES:
            raise CorruptCheckpointError(f"{what}: {name} has {entry.size:,} bytes, and none is written with more than 64 MiB")
    stems: dict[str, list[str]] = {}
    for name in sorted(manifest.files):
        if name.endswith(_TENSORS):
            shard = _SHARD.fullmatch(name.removesuffix(_TENSORS))
            stems.setdefault(shard[1] if shard else name.removesuffix(_TENSORS), []).append(name)
    for stem, names in stems.items():
        count = len(names)
        if names not in ([f"{stem}{_TENSORS}"], [f"{stem}-{k:05d}-of-{count:05d}{_TENSORS}" for k in range(1, count + 1)]):
            raise CorruptCheckpointError(f"{what}: the files of {stem} are not complete: it lists {listed(names)}")
    return stems


def _other_size(what: str, expected: int, found: int) -> str:
    return f"{what}: {found:,} bytes, but {expected:,} were written"
