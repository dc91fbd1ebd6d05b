"""A checkpoint before it is written: laid out as files whose sizes are known exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from torch import Tensor

from trainkit._version import __version__
from trainkit.checkpoint import tagged
from trainkit.checkpoint.host_copy import HostBuffers
from trainkit.checkpoint.manifest import DIGEST, FORMAT_VERSION, MANIFEST, FileEntry, Manifest, digest_line, is_file_name
from trainkit.checkpoint.tensor_file import TensorFile, chunks, plan_files
from trainkit.errors import CheckpointError

__all__ = ["Content", "Draft"]

_STATE = "state"
# References in state.json name the one file of tensors that belongs to it, so it is never divided.
_NEVER_DIVIDED = 2**63
_PIECE = 4 * 2**20
_ANY_DIGEST = "0" * 64


@dataclass
class Content:
    """What a checkpoint is made of; the tensors are still the process's own.

    Attributes:
        tensors: stem of the file ("model", "model_1", "optimizer") → name → tensor.
        state: the rest, for ``state.json`` and ``state.safetensors``; see :mod:`trainkit.checkpoint.tagged` for what may
            be in it.
        about: the fields of :class:`~trainkit.checkpoint.manifest.Manifest` but for ``trainkit_version``, ``saved_at``,
            ``format_version`` and ``files``.
        attachments: further files by name, such as ``config.json``.
        max_shard_size: bytes above which the file of a stem is divided.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    about: dict[str, Any]
    attachments: dict[str, bytes] = field(default_factory=dict)
    max_shard_size: int = 5 * 10**9


class Draft:
    """A :class:`Content` laid out as files, not yet written.

    State and manifest are taken here and now: what happens later to objects in ``content.state`` and ``content.about``
    changes nothing. The tensors are read when the files are, unless :meth:`detach` has copied them before.

    Args:
        content: what to lay out.

    Attributes:
        sizes: name of the file → bytes; manifest and digest included.
        size: bytes of all files together.

    Raises:
        UnsavableError: something in the content cannot be stored.
        CheckpointError: two files would have one name, or one that not every system allows.
    """

    def __init__(self, content: Content) -> None:
        self._bytes: dict[str, bytes] = {}
        self._tensors: dict[str, tuple[TensorFile, Mapping[str, Tensor]]] = {}
        self._copies: Mapping[str, memoryview] | None = None
        self._add_state(content.state)
        for stem, tensors in content.tensors.items():
            self._add_tensors(stem, tensors, content.max_shard_size)
        for name, data in content.attachments.items():
            self._add_bytes(name, bytes(data))
        self.sizes = {name: len(data) for name, data in self._bytes.items()}
        self.sizes |= {name: file.size for name, (file, _) in self._tensors.items()}
        self._manifest = Manifest(
            **content.about,
            saved_at=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            trainkit_version=__version__,
            format_version=FORMAT_VERSION,
            files={name: FileEntry(size, _ANY_DIGEST) for name, size in self.sizes.items()},
        )
        # A digest is as long as any other, so this manifest is as long as the one to come. Read back, it shares nothing.
        data = self._manifest.to_bytes()
        self._manifest = Manifest.from_bytes(data, MANIFEST)
        self.sizes |= {MANIFEST: len(data), DIGEST: len(digest_line(data))}
        self.size = sum(self.sizes.values())

    @property
    def run_id(self) -> str:
        """The run that saves it."""
        return self._manifest.run_id

    def manifest(self, digests: Mapping[str, str]) -> Manifest:
        """The manifest of the written files; ``digests`` has the SHA-256 of each that :meth:`files` gave."""
        return replace(
            self._manifest, files={name: replace(entry, sha256=digests[name]) for name, entry in self._manifest.files.items()}
        )

    def detach(self, buffers: HostBuffers) -> None:
        """Copy every tensor: afterwards changing the process's tensors changes nothing here.

        The copies lie in ``buffers``: the draft is of use until the next one is detached into them.
        """
        self._copies = buffers.copy(self._tensors)
        self._tensors = {name: (file, {}) for name, (file, _) in self._tensors.items()}

    def release(self) -> None:
        """Let tensors and copies go, after which there is nothing left to write: whoever keeps a draft keeps little."""
        self._copies = {}
        self._tensors = {}

    def files(self) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
        """Every file but manifest and digest: its name, and its content piece by piece, to be read once."""
        for name, data in self._bytes.items():
            yield name, [data]
        for name, (file, tensors) in self._tensors.items():
            if self._copies is None:
                yield name, _streamed(file, tensors)
            else:
                yield name, _copied(file, self._copies[name])

    def _add_state(self, state: dict[str, Any]) -> None:
        tensors: dict[str, Tensor] = {}
        self._add_bytes("state.json", tagged.dumps(state, tensors, file="state.safetensors", where=_STATE))
        if tensors:
            self._add_tensors(_STATE, tensors, _NEVER_DIVIDED)

    def _add_tensors(self, stem: str, tensors: Mapping[str, Tensor], max_shard_size: int) -> None:
        files, index = plan_files(stem, tensors, max_shard_size)
        for file in files:
            self._check_name(file.name)
            self._tensors[file.name] = file, {entry.name: tensors[entry.name] for entry in file.entries}
        if index is not None:
            self._add_bytes(f"{stem}.safetensors.index.json", index)

    def _add_bytes(self, name: str, data: bytes) -> None:
        self._check_name(name)
        self._bytes[name] = data

    def _check_name(self, name: str) -> None:
        if not is_file_name(name):
            raise CheckpointError(
                f"{name!r}: expected a name of letters, digits, '.', '_' and '-' that every system allows for a file, and "
                "not the manifest's. Fix: use another name"
            )
        if name.lower() in {known.lower() for known in (*self._bytes, *self._tensors)}:
            raise CheckpointError(f"two files of the checkpoint would be called {name!r}. Fix: rename one of them")


def _streamed(file: TensorFile, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield file.header
    for entry in file.entries:
        yield from chunks(entry, tensors[entry.name])


def _copied(file: TensorFile, data: memoryview) -> Iterator[bytes | memoryview]:
    yield file.header
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]
