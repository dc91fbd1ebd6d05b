"""Checks that all processes of a run have the same loader, before it is sharded over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from trainkit.data.digest import digest
from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.rng import RandomState

__all__ = ["OwnParts", "parts_of", "unchanged"]

_ENDS = 64  # indices at each end of a subset that are compared


class OwnParts(NamedTuple):
    """Each process reads its own part of the data.

    Attributes:
        batches: the stated lengths of the loaders, by rank.
        of_dataset: the datasets differ; otherwise the user's sampler yields different indices on each process.
    """

    batches: list[int | None]
    of_dataset: bool


def parts_of(
    world: World,
    loader: DataLoader[Any],
    samples: int | None,
    length: int | None,
    order: Any,
    first: str | None,
    whole: bool = False,
) -> OwnParts | None:
    """Whether each process reads its own part, else `None`. Collective.

    Args:
        world: the processes.
        loader: the user's loader, over a map-style dataset.
        samples: number of samples of the dataset, if it has a length.
        length: micro-batches of an epoch, if known.
        order: what the order of an epoch depends on; `None` if a sampler of the user decides it.
        first: the digest of the first micro-batch that such a sampler yields.
        whole: the user's sampler says that the dataset is to be sharded, so its samples are not compared.

    Raises:
        DataError: the loaders differ.
    """
    if world.size == 1:
        return None
    facts = {"samples": samples, "batch_size": loader.batch_size, "batches": length, "order": order}
    content = None if whole else _content(loader, samples)
    said = world.exchange([first, facts, _subset(loader.dataset), content])
    lengths = [facts["batches"] for _, facts, *_ in said]
    firsts, _, subsets, contents = zip(*said, strict=True)
    if set(firsts) != {first}:
        return OwnParts(lengths, of_dataset=False)
    if len(set(subsets)) > 1:
        raise DataError(
            "each process has different samples in its Subset. If random_split drew them, use the same seed on all processes: "
            "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)). If each process selects its own part, "
            "pass the whole dataset instead: it is sharded over the processes."
        )
    alike = _equal_but_for_lengths([facts for _, facts, *_ in said])
    # samples that are random in themselves, from a generator that is not seeded, are other ones when they are fetched again
    if alike and _differ(list(contents)) and all(world.exchange(_content(loader, samples) == content)):
        return OwnParts(lengths, of_dataset=True)
    if any(other[1] != said[0][1] for other in said):
        raise _different_loaders([facts for _, facts, *_ in said])
    return None


def _equal_but_for_lengths(facts: list[dict[str, Any]]) -> bool:
    lengths = {"samples": None, "batches": None}
    return all({**its, **lengths} == {**facts[0], **lengths} for its in facts)


def _different_loaders(facts: list[dict[str, Any]]) -> DataError:
    shown = "; ".join(
        f"rank {rank}: " + ", ".join(f"{name}={value}" for name, value in its.items() if value is not None)
        for rank, its in enumerate(facts)
    )
    return DataError(
        f"the processes have different loaders ({shown}). Create the same DataLoader over the whole dataset on every "
        "process: it is sharded over them."
    )


def _differ(contents: list[Any]) -> bool:
    """Whether datasets of one length have different samples at one place, or those of other lengths begin differently."""
    known = [content for content in contents if content is not None]
    if len(known) < len(contents):
        return False
    if len({samples for samples, _ in known}) > 1:
        return len({digests[0] for _, digests in known}) == len(known)
    return any(digests != known[0][1] for _, digests in known)


class _Digests(Dataset[str]):
    """The digests of the samples of a dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> str:
        return str(RandomState.keyed(0, lambda: digest(self._dataset[index])))


def _content(loader: DataLoader[Any], samples: int | None) -> list[Any] | None:
    """The number of samples, and the digests of the first, the middle and the last; `None` if they cannot be fetched.

    If the loader has workers, a worker fetches them: a dataset may open its files where it is first used.
    """
    if not samples:
        return None
    places = sorted({0, samples // 2, samples - 1})
    fetching: DataLoader[str] = DataLoader(
        _Digests(loader.dataset),
        batch_size=None,
        sampler=places,
        num_workers=min(loader.num_workers, 1),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    try:
        return [samples, list(fetching)]
    except Exception:
        return None  # training will show the error, where the user expects it


def _subset(dataset: Any) -> str | None:
    """A digest of the indices of a `Subset`; `None` for other datasets."""
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
