"""What the processes of a run make sure of before they share a loader: that they have the same one."""

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

_ENDS = 64  # indices of each end of a subset that are compared


def lengths_of_parts(
    world: World, loader: DataLoader[Any], samples: int | None, length: int | None, order: Any, first: str | None
) -> list[int | None] | None:
    """`None` if the processes have the same loader. Collective.

    Args:
        world: the processes.
        loader: the user's, over a map-style dataset.
        samples: of the dataset, where it says so.
        length: micro-batches of an epoch, where they are known.
        order: what the order of an epoch depends on; `None`: on a sampler of the user's.
        first: the digest of the first micro-batch that such a sampler gives.

    Returns:
        The lengths, by rank, if the user's sampler gives each process indices of its own.

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
            f"the processes have loaders that differ ({shown}). Give every process the same DataLoader over the whole dataset: "
            "it is sharded over them."
        )
    if any(other[2] != said[0][2] for other in said):
        raise DataError(
            "each process has other samples of the dataset in its Subset. If random_split drew them, let all draw the same: "
            "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)). If each was given a part, give every "
            "process the whole dataset: it is sharded over them."
        )
    return None


def _subset(dataset: Any) -> str | None:
    """A digest of what a `Subset` takes of its dataset; `None` for other datasets, which only fetching could compare."""
    if not isinstance(dataset, Subset):
        return None
    ends = [*dataset.indices[:_ENDS], *dataset.indices[-_ENDS:]]
    return digest([*ends, _subset(dataset.dataset)])


@contextmanager
def unchanged(sampler: Any) -> Iterator[None]:
    """Afterwards the sampler, one inside it, and the random generators that are attributes of theirs are as they were before.

    One that continues where it is, or shuffles by a generator of its own, then gives the same on any number of processes.
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
