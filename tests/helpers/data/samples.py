"""Samples that contain random numbers of the dataset: `from helpers.data.samples import Drawing, prepare, whole_epoch`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from trainkit.data import PreparedLoader
from trainkit.rng import Stage

__all__ = [
    "CPU",
    "Drawing",
    "DrawingStream",
    "SizedDrawingStream",
    "collate_and_draw",
    "draw",
    "ids",
    "prepare",
    "same",
    "whole_epoch",
]

CPU = torch.device("cpu")


def draw() -> list[float]:
    """One number from each of the three global generators."""
    return [torch.rand((), dtype=torch.float64).item(), np.random.random(), random.random()]


def collate_and_draw(samples: list[Tensor]) -> dict[str, Tensor]:
    """A batch of the samples of a `Drawing`, with three random numbers that were drawn while collating."""
    return {"samples": torch.stack(samples), "batch": torch.tensor(draw(), dtype=torch.float64)}


class Drawing(Dataset):
    """Sample i is i and a random number from each generator; `calls` has the indices that this process fetched."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.calls: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.calls.append(index)
        return torch.tensor([index, *draw()], dtype=torch.float64)


class DrawingStream(IterableDataset):
    """The same samples as an IterableDataset; each DataLoader worker reads its shard."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.length, step):
            yield torch.tensor([index, *draw()], dtype=torch.float64)


class SizedDrawingStream(DrawingStream):
    """A `DrawingStream` with a length."""

    def __len__(self) -> int:
        return self.length


def prepare(source: Any, seed: int = 7, **options: Any) -> PreparedLoader:
    """Prepare the source as a training loader on the CPU."""
    return PreparedLoader(source, seed=seed, device=CPU, **{"stage": Stage.TRAIN, **options})


def whole_epoch(loader: PreparedLoader, epoch: int = 0, start: int = 0) -> list[Any]:
    """The batches of an epoch, from `start` on."""
    return [micro.batch for micro in loader.iterate(epoch, start)]


def ids(batches: list[Any]) -> list[list[int]]:
    """The indices of the samples in each batch."""
    return [_samples(batch)[:, 0].int().tolist() for batch in batches]


def _samples(batch: Any) -> Tensor:
    tensor = batch["samples"] if isinstance(batch, dict) else batch
    return tensor if tensor.ndim > 1 else tensor[None]


def same(first: Any, second: Any) -> bool:
    """Whether two nested structures hold the same values, bit for bit."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
