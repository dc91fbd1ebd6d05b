"""`split_batches`: each batch of a loader is split into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.worlds.worlds import run_world
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from trainkit import Accelerator
from trainkit.data.keyed_sampler import split_batches
from trainkit.errors import ConfigurationError, DataError


def numbers(samples: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), **{"batch_size": 6, **options})


class Buckets:
    """Batches of different lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[list[int]]:
        begin = 0
        for length in self.lengths:
            yield list(range(begin, begin + length))
            begin += length


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(14))


def test_the_users_loader_stays_as_it_is() -> None:
    mine = numbers(14)
    split, end = split_batches(mine, 3)
    assert (split.batch_size, mine.batch_size, end) == (2, 6, None)
    assert [x.tolist() for (x,) in split][:3] == [[0, 1], [2, 3], [4, 5]]
    assert [len(x) for (x,) in mine] == [6, 6, 2]


def test_dropping_a_short_batch_drops_all_of_it() -> None:
    split, end = split_batches(numbers(17, drop_last=True), 3)
    assert (len(split), end) == (8, 6)  # although two full micro-batches of the last batch are possible


@pytest.mark.parametrize(
    "make, fix",
    [
        (lambda: numbers(8, batch_size=7), "a batch_size of 7 cannot be divided by 2 processes. Use 6, or remove"),
        (lambda: numbers(8, batch_size=1), "a batch_size of 1 cannot be divided by 2 processes. Use 2, or remove"),
        (lambda: numbers(8, batch_size=None), "this is one with batch_size=None"),
        (lambda: [torch.zeros(2)], "this is a list"),
        (lambda: DataLoader(Counting(), 4, drop_last=True), "the last batch of a stream is not known in advance"),
    ],
)
def test_what_cannot_be_split(make: Any, fix: str) -> None:
    with pytest.raises(ConfigurationError, match=fix):
        split_batches(make(), 2)


def test_a_batch_samplers_batches_are_divided_evenly() -> None:
    split, _ = split_batches(DataLoader(list(range(12)), batch_sampler=Buckets(5, 6, 1)), 2)
    assert [x.tolist() for x in split] == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9, 10], [11]]
    split, _ = split_batches(DataLoader(list(range(12)), batch_sampler=Buckets(1, 6)), 2)
    with pytest.raises(DataError, match="Buckets yielded 1 samples for 2 processes"):
        list(split)


def read(kind: str) -> tuple[int, list[list[int]], list[int]]:
    accelerator = Accelerator(split_batches=True)
    loaders = {
        "plain": lambda: numbers(16),
        "drop": lambda: numbers(17, drop_last=True),
        "sampler": lambda: DataLoader(list(range(11)), batch_sampler=Buckets(4, 5, 2)),
        "own": lambda: DataLoader(
            list(range(16)), batch_sampler=BatchSampler(SequentialSampler(range(16)), 6, drop_last=False)
        ),
        "stream": lambda: DataLoader(Counting(), 6),
    }
    loader = accelerator.prepare(loaders[kind]())
    rows, order = [], []
    for batch in loader:
        x = batch[0] if isinstance(batch, list) else batch
        rows.append(x.tolist())
        order += accelerator.gather_for_metrics(x).tolist()
    return len(loader) if kind != "stream" else 0, rows, order


@pytest.mark.parametrize(
    "kind, first, samples",
    [
        ("plain", [[0, 1, 2], [6, 7, 8], [12, 13, 14]], 16),
        ("drop", [[0, 1, 2], [6, 7, 8]], 12),
        ("sampler", [[0, 1], [4, 5, 6], [9]], 11),
        ("own", [[0, 1, 2], [6, 7, 8], [12, 13, 14]], 16),
        ("stream", [[0, 1, 2], [6, 7, 8], [12, 13]], 14),
    ],
)
def test_each_process_works_on_its_part_of_a_batch(kind: str, first: list[list[int]], samples: int) -> None:
    ranks = run_world(2, read, kind)
    assert ranks[0][1] == first
    assert all(order == list(range(samples)) for _, _, order in ranks)
    assert {length for length, _, _ in ranks} == {0 if kind == "stream" else len(first)}
