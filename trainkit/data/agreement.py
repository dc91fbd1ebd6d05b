"""Checks that all processes of a run have the same loader, before it is sharded over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from trainkit.data.digest import digest
from trainkit.distributed.world import World
from trainkit.errors import DataError

__all__ = ["lengths_of_parts", "unchanged"]

_ENDS = 64  # indices at each end of a subset that are compared


def lengths_of_parts(
    world: World, loader: DataLoader[Any], samples: int | None, length: int | None, order: Any, first: str | None
) -> list[int | None] | None:
    """The lengths of the loaders if each process reads its own part, else `None`. Collective.

    Args:
        world: the processes.
        loader: the user's loader, over a map-style dataset.
        samples: number of samples of the dataset, if it has a length.
        length: micro-batches of an epoch, if known.
        order: what the order of an epoch depends on; `None` if a sampler of the user decides it.
        first: the digest of the first micro-batch that such a sampler yields.

    Returns:
        The lengths, by rank, if the user's sampler yields different indices on each process. `None` if the loaders are equal.

    Raises:
        DataError: the loaders differ.
    """
    if world.size == 1:
        return None
    facts = {"samples": samples, "batch_size": loader.batch_size, "batches": length, "order": order}
    said = world.exchange([first, facts, _subset(loader.dataset)])
    if any(other[0] != first for other in said):
        return [other[1]["batches"] for other in said]
    if any(other[1] != said[0][1] for other in said):
        shown = "; ".join(
            f"rank {rank}: " + ", ".join(f"{name}={value}" for name, value in its.items() if value is not None)
            for rank, (_, its, _) in enumerate(said)
        )
        raise DataError(
            f"the processes have different loaders ({shown}). Create the same DataLoader over the whole dataset on every "
            "process: it is sharded over them."
        )
    if any(other[2] != said[0][2] for other in said):
        raise DataError(
            "each process has different samples in its Subset. If random_split drew them, use the same seed on all processes: "
            "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)). If each process selects its own part, "
            "pass the whole dataset instead: it is sharded over the processes."
        )
    return None


def _subset(dataset: Any) -> str | None:
    """A digest of the indices of a `Subset`; `None` for other datasets, which could only be compared by fetching samples."""
    if not isinstance(dataset, Subset):
        return None
    ends = [*dataset.indices[:_ENDS], *dataset.indices[-_ENDS:]]
    return digest([*ends, _subset(dataset.dataset)])


@contextmanager
def unchanged(sampler: Any) -> Iterator[None]:
    """Restore a sampler, the sampler inside it, and their random generators when the block ends.

    A sampler that continues where it stopped, or that shuffles with its own generator, then yields the same indices on any
    number of processes.
    """
    found = [holder for holder in (sampler, getattr(sampler, "sampler", None)) if hasattr(holder, "__dict__")]
    before = [(vars(holder), dict(vars(holder))) for holder in found]
    states = [(value, _state_of(value)) for _, kept in before for value in kept.values()]
    try:
        yield
    finally:
        for present, kept in before:
            present.clear()
            present.update(kept)
        for value, state in states:
            if isinstance(value, torch.Generator):
                value.set_state(state)
            elif isinstance(value, random.Random):
                value.setstate(state)
            elif isinstance(value, np.random.RandomState):
                value.set_state(state)
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = state


def _state_of(value: Any) -> Any:
    """The state of a random generator; `None` for anything else."""
    if isinstance(value, torch.Generator | np.random.RandomState):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else None
