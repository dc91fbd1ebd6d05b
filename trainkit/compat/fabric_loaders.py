"""Loaders of `Fabric.setup_dataloaders`: a plain `DataLoader`, whose samples torch's sampler shards over the processes.

A file of its own because it is about the order of data: `fabric_names` is about verbs, which know nothing of samplers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from trainkit.errors import ConfigurationError
from trainkit.rng import seed_process

__all__ = ["FabricLoader", "shard"]


class FabricLoader:
    """A `DataLoader` with its attributes, whose batches are on the device, and whose sampler gets the number of the epoch.

    Args:
        loader: The loader.
        move: Moves a batch to the device; `None`: batches stay as they are.
    """

    def __init__(self, loader: DataLoader[Any], move: Callable[[Any], Any] | None) -> None:
        self.loader = loader
        self._move = move
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for sampler in (self.loader.sampler, getattr(self.loader.batch_sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
        self._epoch += 1
        yield from self.loader if self._move is None else map(self._move, self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # an object that is being copied has no loader yet
            raise AttributeError(name)
        return getattr(self.loader, name)


def shard(loader: DataLoader[Any], rank: int, size: int, seed: int) -> DataLoader[Any]:
    """A copy of a loader that yields this process's samples, in the order of torch's `DistributedSampler`.

    Raises:
        ConfigurationError: The user's sampler decides the order.
    """
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    plain = type(loader.batch_sampler) is BatchSampler or loader.batch_sampler is None
    if not plain or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        odd = loader.sampler if plain else loader.batch_sampler
        raise ConfigurationError(
            f"setup_dataloaders: a loader has {type(odd).__name__}, which yields the same samples on each process. Use "
            "torch's DistributedSampler, or one that shards by itself, and setup_dataloaders(loader, "
            "use_distributed_sampler=False)"
        )
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, size, rank, shuffle, seed=seed)
    sharded = copy.copy(loader)
    # A DataLoader refuses to have these assigned; a copy keeps its class and all other options.
    vars(sharded)["sampler"] = sampler
    if loader.batch_sampler is not None:
        vars(sharded)["batch_sampler"] = BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
    if loader.num_workers and loader.worker_init_fn is None:
        sharded.worker_init_fn = partial(_seed_worker, rank)
    return sharded


def _seed_worker(rank: int, worker: int) -> None:
    """Give the workers of each process other random numbers: their seeds come from the main generator, the same on all."""
    seed_process(torch.initial_seed() + (rank << 32))
