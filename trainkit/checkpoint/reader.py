"""Reads a checkpoint: nothing is used before its bytes are verified to be those that were written.

A checkpoint may come from anywhere. The manifest and everything that it refers to is checked before it is trusted; links, pipes
and devices are never opened as files, and no content is ever code. On several ranks, each file is verified by one of them.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.checkpoint.checksum import CHECKSUMS
from trainkit.checkpoint.manifest import (
    DIGEST,
    MANIFEST,
    MAX_LISTED,
    Manifest,
    checkpoint_identity,
    digest_line,
    is_checkpoint,
    is_pretrained_folder,
    list_names,
    why_not_a_checkpoint,
)
from trainkit.checkpoint.model_files import MODEL, model_name
from trainkit.checkpoint.pointers import resolve_pointer
from trainkit.checkpoint.ranks import SHARED_FOLDER_ADVICE, Group, assign_to_ranks, run_on_all_ranks
from trainkit.checkpoint.regular_file import hash_file, not_regular, read_file, read_small_file
from trainkit.checkpoint.state_schema import state_problem
from trainkit.checkpoint.tensor_file import tensors_in
from trainkit.checkpoint.urls import remote_sync, why_not_at_the_url
from trainkit.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, StateMismatchError
from trainkit.paths import local_path
from trainkit.tagged_json.codec import MAX_JSON_BYTES, loads, strict_json

__all__ = [
    "STATE",
    "Checkpoint",
    "LoadedCheckpoint",
    "inspect_checkpoint",
    "open_checkpoint",
    "read_on_all_ranks",
    "weights_by_hook",
]


STATE = "state.json"
_TENSORS = ".safetensors"
_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: verify its manifest, and check that the other files exist and have the right sizes.

    Args:
        path: The folder of the checkpoint, `last` in a folder of checkpoints, or a file that was made of a checkpoint.

    Returns:
        The checkpoint; its content is read by `read`.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; the message names similar paths.
        CorruptCheckpointError: It is damaged; the message names the files.
        CheckpointError: It cannot be read, or a newer trainkit wrote it.

    Example:
        ```python
        checkpoint = open_checkpoint("trainkit_runs/logs/default/version_0/checkpoints/last")
        print(checkpoint.manifest.step, checkpoint.stems)
        weights = checkpoint.read({"model"}).tensors["model"]
        ```
    """
    path = Path(os.path.abspath(local_path(path, "path")))
    remote_sync.fetch(path)
    path = resolve_pointer(path)
    if not is_checkpoint(path) or is_pretrained_folder(path):
        raise CheckpointNotFoundError(why_not_at_the_url(path) or why_not_a_checkpoint(path))
    manifest, problem, which = _inspect(path)
    if problem is not None and remote_sync.fetch(path, again=True):
        manifest, problem, which = _inspect(path)
    if problem is not None:
        raise problem
    assert manifest is not None
    checkpoint = Checkpoint(path, manifest)
    checkpoint._identity = which
    return checkpoint


def inspect_checkpoint(path: Path) -> tuple[Manifest | None, str | None]:
    """The manifest (`None` if it cannot be trusted) and what `open_checkpoint` would complain about, if anything."""
    manifest, problem, _ = _inspect(path)
    return manifest, None if problem is None else str(problem)


class Checkpoint:
    """A checkpoint with a verified manifest, whose files exist with the right sizes; created by `open_checkpoint`.

    Attributes:
        path: The folder.
        manifest: Its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._identity = checkpoint_identity(path)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    @property
    def identity(self) -> bytes:
        """The digest of the manifest, which no other checkpoint has."""
        return self._identity or b""

    @property
    def stems(self) -> list[str]:
        """The names of the parts of the checkpoint, for `read`: `"model"`, `"optimizer"`, `"state"`, …"""
        return sorted({*self._stems(), "state"})

    def names_in_files(self, stem: str) -> dict[str, Callable[[str], str]]:
        """The files of tensors of a part, and the function from a name in the file to the tensor's name in the module."""
        renamed, files = self.manifest.files_of(stem), self._stems().get(stem, {})
        return {name: partial(model_name, renamed[one]) for one, names in files.items() for name in names}

    def read(
        self, stems: Collection[str] | None = None, *, mapped: bool = False, unregistered: bool = False
    ) -> LoadedCheckpoint:
        """Read the content. Each file is read once; all files are verified before anything is returned.

        It needs memory for the tensors, and up to 40 times the size of `state.json` while that is decoded.

        Args:
            stems: The parts to read; `None`: all of `stems`, and verify the attachments, too.
            mapped: Leave the values of models and optimizers on the disk until they are used, which needs no memory for
                them. Do not keep these tensors: their files must not change while they are used.
            unregistered: Return a value of a registered type as a tuple of the type's name and what `encode` returned, so
                that this program need not have registered the type.

        Returns:
            An object with `tensors` (part → name → tensor, on the CPU), `state` (everything else) and `manifest`.

        Raises:
            StateMismatchError: The checkpoint does not have one of the stems.
            CorruptCheckpointError: A file is damaged; the message names it.
            CheckpointError: The checkpoint was replaced or removed while it was read, or has a value of a type that is not
                registered.
        """
        requested = self._select_stems(stems)
        with self._detect_replacement():
            loaded = self._load(requested, self._map_content if mapped else self._content, unregistered)
            if stems is None:
                self._check_attachments()
        return loaded

    def state_dict(self, model: int = 0) -> dict[str, Any]:
        """The weights by the names of the module's `state_dict()`, verified; tied names have the same tensor.

        A checkpoint of `save="trainable"` has no frozen parameters: load it with `strict=False`.

        Args:
            model: Which one, if your own training loop saved several: 0, 1, …

        Raises:
            StateMismatchError: The checkpoint has no such model.
            CorruptCheckpointError: A file is damaged; the message names it.
        """
        return self.read({f"model_{model}" if model else "model", "state"}).state_dict(model)

    def verify(self) -> None:
        """Check that `read` would succeed, with little memory: files are hashed in pieces, and mapped instead of loaded.

        Raises:
            CorruptCheckpointError: A file is damaged; the message names it.
            CheckpointError: The checkpoint was replaced or removed while it was read.
        """
        with self._detect_replacement():
            self._load({*self._stems(), "state"}, partial(self._content, mapped=True), unregistered=True)
            self._check_attachments()

    def attachment(self, name: str) -> bytes:
        """Return the verified content of a file that is neither tensors nor state, such as `config.json`.

        Raises:
            CheckpointNotFoundError: The checkpoint has no such file.
            CorruptCheckpointError: The file is damaged.
        """
        if name not in self.manifest.all_files:
            raise CheckpointNotFoundError(
                f"{self.path} has no {name!r}. Its files are {', '.join(sorted(self.manifest.all_files))}."
            )
        with self._detect_replacement():
            return bytes(self._content(name))

    def _select_stems(self, stems: Collection[str] | None) -> set[str]:
        requested = set(self.stems) if stems is None else set(stems)
        if unknown := sorted(requested.difference(self.stems)):
            if set(unknown) <= set(self.manifest.by_hook):
                raise StateMismatchError(weights_by_hook(str(self.path), unknown[0]))
            raise StateMismatchError(
                f"{self.path}: expected a checkpoint with {', '.join(unknown)}, but this one has {', '.join(self.stems)}. "
                f"Fix: checkpoint.read({self.stems})"
            )
        return requested

    def _files_of(self, stems: Collection[str] | None) -> list[str]:
        """The files that `read` reads or verifies for these stems."""
        if stems is None:
            return list(self.manifest.all_files)
        files = {one: names for stem, by_file in self._stems().items() if stem in stems for one, names in by_file.items()}
        of_stems = {name for one, names in files.items() for name in [*names, one + _INDEX]}
        return [name for name in self.manifest.files if name in of_stems or (name == STATE and "state" in stems)]

    def _what(self, name: str) -> str:
        return str(self.path / name)

    def _stems(self) -> dict[str, dict[str, list[str]]]:
        """Each part → stem of its files → their names."""
        files = _file_stems(self.manifest, self._what(MANIFEST))
        of_model = self.manifest.model_files
        parts = {stem: {stem: names} for stem, names in files.items() if stem not in of_model}
        return {MODEL: {stem: files[stem] for stem in of_model}, **parts} if of_model else parts

    def _load(
        self, requested: Collection[str], fetch: Callable[[str], memoryview], unregistered: bool = False
    ) -> LoadedCheckpoint:
        """The content of the requested stems; `fetch` returns the verified content of a file."""
        tensors = {stem: self._tensors(stem, files, fetch) for stem, files in self._stems().items() if stem in requested}
        for_state = tensors.pop("state", {})
        state: Any = {}
        if "state" in requested:
            files = {f"state{_TENSORS}": for_state}
            state = loads(fetch(STATE), files, self._what(STATE), unregistered=unregistered)
            if (problem := state_problem(state)) is not None:
                raise CorruptCheckpointError(f"{self._what(STATE)}: {problem}. Fix: use another checkpoint.")
            for number in range(len(state.get("models", ()))):
                if (stem := f"model_{number}" if number else "model") not in {*self._stems(), *self.manifest.by_hook}:
                    raise CorruptCheckpointError(f"{self._what(STATE)}: models[{number}]: there is no file {stem}{_TENSORS}")
        return LoadedCheckpoint(self.manifest, tensors, state, self)

    def _tensors(self, stem: str, files: Mapping[str, list[str]], fetch: Callable[[str], memoryview]) -> dict[str, Tensor]:
        """The tensors of a part by the module's names; `files`: stem of the files → their names."""
        tensors: dict[str, Tensor] = {}
        renamed = self.manifest.files_of(stem)
        for one, names in files.items():
            for key, tensor in self._tensors_in_files(one, names, fetch).items():
                name = model_name(renamed[one], key)
                if name in tensors:
                    raise CorruptCheckpointError(f"{self._what(names[0])}: the tensor {name!r:.200} is in two files")
                tensors[name] = tensor
        for alias, stored in self.manifest.aliases.get(stem, {}).items():
            if stored not in tensors or alias in tensors:
                raise CorruptCheckpointError(
                    f"{self._what(MANIFEST)}: the alias {alias!r:.200} of {stored!r:.200} does not match "
                    f"{', '.join(names[0] for names in files.values())}"
                )
        return tensors

    def _tensors_in_files(self, stem: str, names: list[str], fetch: Callable[[str], memoryview]) -> dict[str, Tensor]:
        """The tensors in the files of one stem, by the names there."""
        tensors: dict[str, Tensor] = {}
        file_of: dict[str, str] = {}
        for name in names:
            for key, tensor in tensors_in(fetch(name), self._what(name)).items():
                if key in file_of:
                    raise CorruptCheckpointError(f"{self._what(name)}: the tensor {key!r:.200} is also in {file_of[key]}")
                tensors[key], file_of[key] = tensor, name
        index = stem + _INDEX
        if index in self.manifest.files:
            value = strict_json(fetch(index), self._what(index))
            if not isinstance(value, dict) or value.get("weight_map") != file_of:
                raise CorruptCheckpointError(f"{self._what(index)}: its weight_map does not match the files of tensors")
        return tensors

    def _content(self, name: str, verified: bool = False, mapped: bool = False) -> memoryview:
        """The bytes of a file. `verified`: another rank has hashed it."""
        entry = self.manifest.all_files[name]
        digest = None if verified else entry.digest
        return read_file(self.path / name, entry.size, digest, self._what(name), mapped, checksum=self.manifest.checksum)

    def _map_content(self, name: str, verified: bool = False) -> memoryview:
        """The bytes of a file like `_content`; files of models and optimizers are memory-mapped."""
        return self._content(name, verified, mapped=name.endswith(_TENSORS) and not name.startswith("state"))

    def _check_attachments(self) -> None:
        for name in self.manifest.files:
            if name != STATE and not name.endswith((_TENSORS, _INDEX)):
                self._content(name, mapped=True)
        for name in self.manifest.hook_files:
            self._check_hook_file(name)

    def _check_hook_file(self, name: str) -> None:
        """Check the size and the digest of a file that a hook has written, which may be of any size."""
        entry, title = self.manifest.hook_files[name], CHECKSUMS[self.manifest.checksum].title
        size, digest = hash_file(self.path / name, self.manifest.checksum, self._what(name))
        if size != entry.size:
            raise CorruptCheckpointError(f"{self._what(name)}: expected {entry.size:,} bytes, found {size:,}")
        if digest != entry.digest:
            raise CorruptCheckpointError(f"{self._what(name)}: its {title} is {digest}, expected {entry.digest}")

    @contextmanager
    def _detect_replacement(self) -> Iterator[None]:
        """Distinguish damage from a checkpoint that was replaced or removed while it was read."""
        try:
            yield
        except CorruptCheckpointError as error:
            now = checkpoint_identity(self.path)
            if now in (self._identity, b""):
                raise
            raise CheckpointError(
                f"{self.path} was {'removed' if now is None else 'replaced by another checkpoint'} while it was read. "
                "Fix: open it again, or open another checkpoint."
            ) from error


@dataclass
class LoadedCheckpoint:
    """The content of a checkpoint.

    Attributes:
        manifest: Its manifest.
        tensors: Stem → name → tensor, on the CPU; they share the memory of the files' content, and may be changed.
        state: Everything else, with its types; empty if it was not requested.
        checkpoint: The checkpoint that it was read from.
    """

    manifest: Manifest
    tensors: dict[str, dict[str, Tensor]] = field(repr=False)
    state: dict[str, Any] = field(repr=False)
    checkpoint: Checkpoint

    def state_dict(self, model: int = 0) -> dict[str, Any]:
        """The state dict of a model; see `Checkpoint.state_dict`. The model and the state must have been read."""
        stem = f"model_{model}" if model else "model"
        tensors, aliases = self.tensors[stem], self.manifest.aliases.get(stem, {})
        extra = self.state["models"][model].get("extra", {})
        return {**extra, **tensors, **{alias: tensors[stored] for alias, stored in aliases.items()}}

    def attachments(self, name: str) -> bytes:
        """The content of a further file, such as `config.json`; see `Checkpoint.attachment`."""
        return self.checkpoint.attachment(name)


def weights_by_hook(what: str, stem: str) -> str:
    """The message that a checkpoint does not have the weights of a model, since a hook has saved them itself."""
    return (
        f"{what} has no weights of {stem!r}: a hook of save_state has saved them in files of its own. Expected a hook that "
        "loads them. Fix: before load_state, call accelerator.register_load_state_pre_hook(load_model_hook), where "
        "load_model_hook(models, input_dir) loads the model and removes it from the list: models.pop(). Without an "
        "Accelerator, read the files with the library that has written them"
    )


# ---------------------------------------------------------------------------------------------------- manifest and files


def _inspect(path: Path) -> tuple[Manifest | None, CheckpointError | None, bytes | None]:
    """The manifest, the problem, and the identity of the checkpoint at `path`."""
    while True:
        manifest, problem, before = None, None, checkpoint_identity(path)
        try:
            manifest = _read_manifest(path)
            _file_stems(manifest, str(path / MANIFEST))
            _measure(path, manifest)
        except CheckpointError as error:
            problem = error
        if checkpoint_identity(path) == before:
            return manifest, problem, before
        # It was replaced while it was read, so this may be a mix of two checkpoints: read it again.


def _read_manifest(path: Path) -> Manifest:
    digest = read_small_file(path / DIGEST, 1024)
    data = read_small_file(path / MANIFEST, MAX_JSON_BYTES)
    if digest != digest_line(data):
        raise CorruptCheckpointError(
            f"{path / MANIFEST}: its content does not match {DIGEST}; one of the two was changed or is incomplete"
        )
    return Manifest.from_bytes(data, str(path / MANIFEST))


def _measure(path: Path, manifest: Manifest) -> None:
    problems = []
    for name, entry in manifest.all_files.items():
        what = str(path / name)
        try:
            if "/" in name and not stat.S_ISDIR(os.lstat((path / name).parent).st_mode):
                problems.append(f"{what}: {(path / name).parent} is not a folder")
                continue
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
            problems.append(f"{what}: expected {entry.size:,} bytes, found {info.st_size:,}")
    if problems:
        more = len(problems) - MAX_LISTED
        raise CorruptCheckpointError("\n".join(problems[:MAX_LISTED]) + (f"\nand {more} more" if more > 0 else ""))


def _file_stems(manifest: Manifest, what: str) -> dict[str, list[str]]:
    """The files of each stem, in order; `CorruptCheckpointError` if some are missing."""
    if STATE not in manifest.files:
        raise CorruptCheckpointError(f"{what}: {STATE} is not listed")
    for name, entry in manifest.files.items():
        if (name == STATE or name.endswith(_INDEX)) and entry.size > MAX_JSON_BYTES:
            raise CorruptCheckpointError(f"{what}: {name} has {entry.size:,} bytes, expected at most 64 MiB")
    stems: dict[str, list[str]] = {}
    for name in sorted(manifest.files):
        if name.endswith(_TENSORS):
            shard = _SHARD.fullmatch(name.removesuffix(_TENSORS))
            stems.setdefault(shard[1] if shard else name.removesuffix(_TENSORS), []).append(name)
    for stem, names in stems.items():
        count = len(names)
        if names not in ([f"{stem}{_TENSORS}"], [f"{stem}-{k:05d}-of-{count:05d}{_TENSORS}" for k in range(1, count + 1)]):
            raise CorruptCheckpointError(f"{what}: the files of {stem} are incomplete; listed: {list_names(names)}")
    _check_model_files(manifest, stems, what)
    return stems


def _check_model_files(manifest: Manifest, stems: Collection[str], what: str) -> None:
    named = manifest.model_files
    unmatched = [stem for stem in (MODEL, *named) if (stem in stems) != (stem in named)] if named else []
    if unmatched:
        raise CorruptCheckpointError(f"{what}: model_files does not match the files of {unmatched[0]}")


def read_on_all_ranks(
    path: str | os.PathLike[str],
    group: Group,
    choose: Callable[[Manifest], Collection[str] | None] = lambda manifest: None,
    *,
    mapped: bool = False,
) -> LoadedCheckpoint:
    """`Checkpoint.read` on all ranks of a group: the content on each rank, or the same error on all. Collective.

    Each file is hashed by one rank. After all files are verified, each rank reads those that it has not read yet, without
    hashing them again.

    Args:
        path: The checkpoint, as given on the main process.
        group: The ranks.
        choose: Returns the stems to read, given the manifest; `None` for everything. It may raise.
        mapped: See `Checkpoint.read`.

    Raises:
        CheckpointError: Like `open_checkpoint` and `Checkpoint.read`, or the ranks see different checkpoints.
    """
    if group.size == 1:
        checkpoint = open_checkpoint(path)
        return checkpoint.read(choose(checkpoint.manifest), mapped=mapped)

    def fetch_folder() -> str:
        absolute = os.path.abspath(path)
        if group.rank == 0:  # the folder is shared
            remote_sync.fetch(Path(absolute))
        return absolute

    path = run_on_all_ranks(group, fetch_folder)
    opened: list[Checkpoint] = []
    requested: set[str] = set()
    contents: dict[str, memoryview] = {}
    loaded: list[LoadedCheckpoint] = []

    def verify() -> str:
        checkpoint = open_checkpoint(path)
        opened.append(checkpoint)
        stems = choose(checkpoint.manifest)
        requested.update(checkpoint._select_stems(stems))
        sizes = {name: checkpoint.manifest.all_files[name].size for name in checkpoint._files_of(stems)}
        names = assign_to_ranks(sizes, [0] * group.size).get(group.rank, [])
        with checkpoint._detect_replacement():
            fetch = checkpoint._map_content if mapped else checkpoint._content
            contents.update({name: fetch(name) for name in names if name in checkpoint.manifest.files})
            for name in checkpoint.manifest.hook_files.keys() & set(names):
                checkpoint._check_hook_file(name)
        return hashlib.sha256(checkpoint._identity or b"").hexdigest()

    def fetch(name: str) -> memoryview:
        if name in contents:
            return contents.pop(name)
        return opened[0]._map_content(name, verified=True) if mapped else opened[0]._content(name, verified=True)

    def load() -> None:
        with opened[0]._detect_replacement():
            content = opened[0]._load(requested, fetch)
            # otherwise the files that another rank hashed may belong to another checkpoint
            if checkpoint_identity(opened[0].path) != opened[0]._identity:
                raise CorruptCheckpointError(f"{path}: changed while it was read")
            loaded.append(content)

    def differing(digests: list[str]) -> list[str]:
        return [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]

    others = run_on_all_ranks(group, verify, answer=differing)
    if others:
        raise CheckpointError(
            f"{path}: rank {', '.join(others)} sees a different checkpoint than rank 0. {SHARED_FOLDER_ADVICE}"
        )
    run_on_all_ranks(group, load)
    return loaded[0]
