"""Reads a checkpoint on several ranks: each file is verified by one rank, and all ranks get the same result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from trainkit.checkpoint.all_ranks import SHARED_FOLDER_ADVICE, Group, run_on_all_ranks
from trainkit.checkpoint.identify import checkpoint_identity
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.rank_assignment import assign_to_ranks
from trainkit.checkpoint.reader import Checkpoint, Loaded, open_checkpoint
from trainkit.checkpoint.staging import staging
from trainkit.errors import CheckpointError, CorruptCheckpointError

__all__ = ["read_on_all_ranks"]


def read_on_all_ranks(
    path: str | os.PathLike[str],
    group: Group,
    choose: Callable[[Manifest], Collection[str] | None] = lambda manifest: None,
    *,
    mapped: bool = False,
) -> Loaded:
    """`Checkpoint.read` on all ranks of a group: the content on each rank, or the same error on all. Collective.

    Each file is hashed by one rank. After all files are verified, each rank reads those that it has not read yet, without
    hashing them again.

    Args:
        path: the checkpoint, as given on the main process.
        group: the ranks.
        choose: returns the stems to read, given the manifest; `None` for everything. It may raise.
        mapped: see `Checkpoint.read`.

    Raises:
        CheckpointError: like `open_checkpoint` and `Checkpoint.read`, or the ranks see different checkpoints.
    """
    if group.size == 1:
        checkpoint = open_checkpoint(path)
        return checkpoint.read(choose(checkpoint.manifest), mapped=mapped)

    def fetched() -> str:
        found = os.path.abspath(path)
        if group.rank == 0:  # the folder is shared
            staging.fetch(Path(found))
        return found

    path = run_on_all_ranks(group, fetched)[0]
    found: list[Checkpoint] = []
    requested: set[str] = set()
    contents: dict[str, memoryview] = {}
    loaded: list[Loaded] = []

    def verify() -> str:
        checkpoint = open_checkpoint(path)
        found.append(checkpoint)
        stems = choose(checkpoint.manifest)
        requested.update(checkpoint._requested(stems))
        sizes = {name: checkpoint.manifest.files[name].size for name in checkpoint._files_of(stems)}
        own = assign_to_ranks(sizes, [0] * group.size).get(group.rank, [])
        with checkpoint._unchanged():
            fetch = checkpoint._mapped if mapped else checkpoint._content
            contents.update({name: fetch(name) for name in own})
        return hashlib.sha256(checkpoint._identity or b"").hexdigest()

    def fetch(name: str) -> memoryview:
        if name in contents:
            return contents.pop(name)
        return found[0]._mapped(name, verified=True) if mapped else found[0]._content(name, verified=True)

    def load() -> None:
        with found[0]._unchanged():
            content = found[0]._load(requested, fetch)
            # otherwise the files that another rank hashed may belong to another checkpoint
            if checkpoint_identity(found[0].path) != found[0]._identity:
                raise CorruptCheckpointError(f"{path}: changed while it was read")
            loaded.append(content)

    digests = run_on_all_ranks(group, verify)
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"{path}: rank {', '.join(others)} sees a different checkpoint than rank 0. {SHARED_FOLDER_ADVICE}"
        )
    run_on_all_ranks(group, load)
    return loaded[0]
