"""Which samples form which micro-batch, with every kind of sampler, and the random state in which they are fetched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data.samples import Drawing, draw
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from trainkit.console import TrainkitWarning
from trainkit.data.keyed_sampler import KeyedBatches, make_keyed_batches
from trainkit.data.order import CYCLE, Permutation
from trainkit.rng import Purpose, Stage, mix, seed_generators

SEED, STAGE = 7, int(Stage.TRAIN)


class NumPySampler(Sampler):
    """A user's sampler: it draws from numpy in `__iter__` and from `random` for each index, and has `set_epoch`."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(self.length).tolist()
        return ((index + random.randrange(self.length)) % self.length for index in order)

    def __len__(self) -> int:
        return self.length


class Endless(Sampler):
    """An endless sampler without `__len__`."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(100, ()))


class WrongLength(SequentialSampler):
    """Yields more indices than its `len`."""

    def __len__(self) -> int:
        return 2


class Pairs(Sampler):
    """A user's batch sampler: shuffled pairs of successive indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        for first in torch.randperm(self.length // 2).tolist():
            yield [2 * first, 2 * first + 1]

    def __len__(self) -> int:
        return self.length // 2


def loader_of(length: int = 20, **options: Any) -> DataLoader:
    return DataLoader(Drawing(length), **{"batch_size": 4, **options})


def keyed(loader: DataLoader, seed: int = SEED, sequential: bool = False) -> KeyedBatches:
    return make_keyed_batches(loader, seed, STAGE, sequential)


def items(batches: KeyedBatches, epoch: int = 0, start: int = 0, limit: int | None = None) -> list[tuple[int, Any]]:
    batches.epoch, batches.start, batches.limit = epoch, start, limit
    return list(batches)


def indices(batches: KeyedBatches, epoch: int = 0, start: int = 0, limit: int | None = None) -> list[Any]:
    return [index for _, index in items(batches, epoch, start, limit)]


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


# ---------------------------------------------------------------------------------------- shuffle=True, shuffle=False


@given(
    length=st.integers(1, 60),
    size=st.integers(1, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    start=st.integers(0, 20),
    limit=st.none() | st.integers(0, 20),
    epoch=st.integers(0, 3),
)
def test_an_epoch_is_cut_out_of_its_order(
    length: int, size: int, shuffle: bool, drop_last: bool, start: int, limit: int | None, epoch: int
) -> None:
    """The micro-batches of an epoch are slices of its order, from any start to any limit."""
    loader = loader_of(length, batch_size=size, shuffle=shuffle, drop_last=drop_last)
    batches = keyed(loader)
    whole = indices(batches, epoch)
    seen = [index for batch in whole for index in batch]
    assert sorted(seen) == list(range(length)) if not drop_last else len(set(seen)) == length // size * size
    order = Permutation(length, mix(SEED, STAGE, Purpose.ORDER, epoch)).block(0, length).tolist()
    assert seen == (order if shuffle else list(range(length)))[: len(seen)]
    assert len(whole) == len(batches) == batches.length == len(loader)
    assert batches.exact
    if whole:
        assert batches.sizes == (size, len(whole[-1])) or (drop_last and batches.sizes == (size, size))
        assert {len(batch) for batch in whole[:-1]} <= {size}
    assert indices(batches, epoch, start, limit) == whole[start : limit if limit is None else max(limit, start)]
    batches.limit = limit
    assert len(batches) == min(len(whole), len(whole) if limit is None else limit)


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_a_batch_size_each_item_is_one_index(shuffle: bool) -> None:
    batches = keyed(loader_of(5, batch_size=None, shuffle=shuffle))
    found = indices(batches, 3)
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert (found == [0, 1, 2, 3, 4]) == (not shuffle)
    assert indices(batches, 3, 2) == found[2:]
    assert batches.length == 5
    assert batches.sizes is None, "only the dataset knows how many samples an item has"


def test_the_order_is_a_function_of_seed_stage_and_epoch() -> None:
    loader = loader_of(shuffle=True)
    batches = keyed(loader)
    torch.manual_seed(5)
    orders = [indices(batches, epoch) for epoch in (0, 1, 2, 1, 0)]
    assert orders[0] == orders[4]
    assert orders[1] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert indices(keyed(loader), 1) == orders[1]
    assert indices(keyed(loader, seed=8), 1) != orders[1]
    assert indices(make_keyed_batches(loader, SEED, Stage.TRAIN.of_loader(1), False), 1) != orders[1]


@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"sampler": RandomSampler(range(20))}, {"sampler": RandomSampler(range(20), num_samples=20)}],
)
def test_a_random_sampler_of_everything_is_shuffling(options: dict[str, Any]) -> None:
    assert indices(keyed(loader_of(**options))) == indices(keyed(loader_of(shuffle=True)))


def test_a_sampler_over_a_part_of_the_dataset() -> None:
    seen = indices(keyed(loader_of(20, sampler=RandomSampler(range(8)))))
    assert sorted(flat(seen)) == list(range(8))
    assert flat(indices(keyed(loader_of(20, sampler=SequentialSampler(range(6)))))) == list(range(6))


def test_the_fetch_key_is_the_micro_batchs_own() -> None:
    """The key for fetching depends on the epoch and the number of the micro-batch, not on the start."""
    batches = keyed(loader_of(shuffle=True))
    expected = [mix(SEED, STAGE, Purpose.FETCH, 2, m) for m in range(5)]
    assert [key for key, _ in items(batches, 2)] == expected
    assert [key for key, _ in items(batches, 2, start=3)] == expected[3:]
    assert [key for key, _ in items(batches, 1)] != expected


@pytest.mark.parametrize("length", [(1 << 20) - 1, 10**9])
def test_a_large_epoch_starts_anywhere(length: int) -> None:
    batches = keyed(DataLoader(range(length), batch_size=5, shuffle=True))
    start = batches.length - 3
    order = Permutation(length, mix(SEED, STAGE, Purpose.ORDER, 1))
    assert flat(indices(batches, 1, start)) == order.block(5 * start, length).tolist()
    assert indices(batches, 1, limit=1) == [order.block(0, 5).tolist()]


def test_an_empty_dataset_has_no_batches() -> None:
    batches = keyed(loader_of(0))
    assert (batches.length, indices(batches)) == (0, [])


def test_sequential_turns_shuffling_off() -> None:
    for options in ({"shuffle": True}, {"sampler": DistributedSampler(range(20), 1, 0)}):
        assert flat(indices(keyed(loader_of(**options), sequential=True), 3)) == list(range(20))


# -------------------------------------------------------------------------------------------------- DistributedSampler


def test_a_distributed_sampler_is_recognised() -> None:
    loader = loader_of(sampler=DistributedSampler(range(20), num_replicas=4, rank=1, seed=99))
    with pytest.warns(TrainkitWarning):
        batches = keyed(loader)
    assert sorted(flat(indices(batches))) == list(range(20)), "its share is ours to work out"
    assert batches.length == 5
    order = Permutation(20, mix(99, STAGE, Purpose.ORDER, 2)).block(0, 20).tolist()
    assert flat(indices(batches, 2)) == order, "its seed is taken over"
    assert next(key for key, _ in items(batches)) == mix(SEED, STAGE, Purpose.FETCH, 0, 0)


def test_a_distributed_sampler_that_does_not_shuffle() -> None:
    loader = loader_of(10, sampler=DistributedSampler(range(10), num_replicas=1, rank=0, shuffle=False))
    assert indices(keyed(loader), 1) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_distributed_sampler_for_several_processes_is_warned_of() -> None:
    loader = loader_of(sampler=DistributedSampler(range(20), num_replicas=4, rank=1, shuffle=False))
    text = r"num_replicas=4\) in a run of 1 process: the process reads all 20 samples of an epoch, not 5.*shuffle=False"
    with pytest.warns(TrainkitWarning, match=text):
        assert len(flat(indices(keyed(loader)))) == 20


# ------------------------------------------------------------------------------------------------ a user's own samplers


def custom(kind: str) -> DataLoader:
    weights = torch.arange(20.0)
    return {
        "weighted": lambda: loader_of(sampler=WeightedRandomSampler(weights, 30)),
        "weighted, own generator": lambda: loader_of(sampler=WeightedRandomSampler(weights, 30, generator=torch.Generator())),
        "replacement": lambda: loader_of(sampler=RandomSampler(range(20), replacement=True)),
        "some samples": lambda: loader_of(sampler=RandomSampler(range(20), num_samples=11)),
        "more samples": lambda: loader_of(sampler=RandomSampler(range(20), num_samples=50)),
        "replacement, own generator": lambda: loader_of(
            sampler=RandomSampler(range(20), True, 70, generator=torch.Generator()), batch_size=6
        ),
        "subset": lambda: loader_of(sampler=SubsetRandomSampler(range(5, 18))),
        "subset, drop last": lambda: loader_of(sampler=SubsetRandomSampler(range(5, 18)), drop_last=True),
        "numpy": lambda: loader_of(sampler=NumPySampler(20)),
        "a list": lambda: loader_of(sampler=[3, 1, 4, 1, 5]),
        "pairs": lambda: loader_of(batch_size=1, batch_sampler=Pairs(20)),
        "a list of batches": lambda: loader_of(batch_size=1, batch_sampler=[[1, 2], [3], [4, 5, 6]]),
        "batches of batches": lambda: loader_of(batch_size=None, sampler=BatchSampler(NumPySampler(20), 6, False)),
        "no batches": lambda: loader_of(batch_size=None, sampler=NumPySampler(20)),
    }[kind]()


KINDS = [
    "weighted",
    "weighted, own generator",
    "replacement",
    "some samples",
    "more samples",
    "replacement, own generator",
    "subset",
    "subset, drop last",
    "numpy",
    "pairs",
    "batches of batches",
    "no batches",
]
FIXED = ["a list", "a list of batches"]


@pytest.mark.parametrize("kind", [*KINDS, *FIXED])
def test_a_users_sampler_is_a_function_of_seed_and_epoch(kind: str) -> None:
    batches = keyed(custom(kind))
    torch.manual_seed(1)
    orders = []
    for epoch in (0, 1, 0):
        orders.append(indices(batches, epoch))
        draw()  # other draws have no effect
    assert orders[0] == orders[2]
    assert (orders[0] == orders[1]) == (kind in FIXED)
    assert indices(keyed(custom(kind)), 1) == orders[1], "nor does what was drawn before"
    assert (indices(keyed(custom(kind), seed=8)) == orders[0]) == (kind in FIXED)
    assert len(orders[0]) == batches.length
    for start in range(len(orders[1]) + 1):
        assert indices(batches, 1, start) == orders[1][start:]


@pytest.mark.parametrize("kind", [*KINDS, *FIXED])
def test_the_end_of_a_users_sampler_leaves_the_generators_alone(kind: str) -> None:
    """After the last micro-batch nothing seeds the generators, so what a hook draws must not depend on who read to the end."""
    batches = keyed(custom(kind))
    seed_generators(123)
    expected = draw()
    for _ in batches:
        seed_generators(123)  # as the forward does
    assert draw() == expected


def test_a_users_sampler_is_not_disturbed_between_its_batches() -> None:
    batches = keyed(custom("numpy"))
    whole = indices(batches)
    found = []
    for _, index in batches:
        seed_generators(1)  # as fetching and the forward do
        found.append(index)
    assert found == whole


@pytest.mark.parametrize(
    "kind, counts, sizes, exact",
    [
        ("weighted", [4] * 7 + [2], (4, 2), True),
        ("replacement", [4] * 5, (4, 4), True),
        ("some samples", [4, 4, 3], (4, 3), True),
        ("more samples", [4] * 12 + [2], (4, 2), True),
        ("subset", [4, 4, 4, 1], (4, 1), True),
        ("subset, drop last", [4, 4, 4], (4, 4), True),
        ("numpy", [4] * 5, None, False),
        ("pairs", [2] * 10, None, False),
        ("a list of batches", [2, 1, 3], None, False),
        ("batches of batches", [6, 6, 6, 2], None, False),
    ],
)
def test_what_is_known_of_a_users_sampler(kind: str, counts: list[int], sizes: Any, exact: bool) -> None:
    """The numbers of samples are known in advance only for torch's samplers.

    For other samplers, the samples are counted when a batch is fetched.
    """
    batches = keyed(custom(kind))
    assert [len(index) for index in indices(batches)] == counts
    assert (batches.length, batches.sizes, batches.exact) == (len(counts), sizes, exact)


def test_samplers_draw_what_their_kind_promises() -> None:
    """Torch's samplers keep their properties: weights, subsets, and draws without replacement."""
    assert 0 not in flat(indices(keyed(custom("weighted")))), "its weight is 0"
    assert sorted(flat(indices(keyed(custom("subset"))))) == list(range(5, 18))
    once = flat(indices(keyed(custom("some samples"))))
    assert len(set(once)) == len(once) == 11
    assert sorted(flat(indices(keyed(custom("pairs"))))) == list(range(20))


def test_an_endless_sampler_needs_a_limit() -> None:
    batches = keyed(loader_of(100, sampler=Endless()))
    assert batches.length is None
    with pytest.raises(TypeError, match="no length"):
        len(batches)
    found = indices(batches, limit=6)
    assert len(found) == 6
    assert indices(batches, start=4, limit=9)[:2] == found[4:]


def test_a_length_that_is_wrong_ends_the_epoch() -> None:
    batches = keyed(loader_of(10, sampler=WrongLength(range(10))))
    assert flat(indices(batches)) == list(range(4))
    assert batches.last_length == 1
    assert (batches.length, batches.sizes, batches.exact) == (1, None, False)


def test_a_sampler_gets_the_epoch() -> None:
    sampler = NumPySampler(20)
    for batches in (
        keyed(loader_of(sampler=sampler)),
        keyed(loader_of(batch_size=1, batch_sampler=type("Own", (BatchSampler,), {})(sampler, 4, False))),
    ):
        indices(batches, 3)
        indices(batches, 3 + 2 * CYCLE)  # the third cycle of the loader in epoch 3
        assert sampler.epochs == [3, 3]
        sampler.epochs.clear()


def test_a_generator_that_is_not_torchs_is_left_alone() -> None:
    sampler = NumPySampler(20)
    sampler.generator = np.random.default_rng(0)
    assert len(indices(keyed(loader_of(sampler=sampler)))) == 5


def test_an_error_in_a_sampler_leaves_the_generators_alone() -> None:
    def failing() -> Iterator[int]:
        yield int(torch.randint(5, ()))
        raise KeyError("lost")

    batches = keyed(loader_of(batch_size=1, sampler=failing()))
    seed_generators(3)
    expected = draw()
    seed_generators(3)
    with pytest.raises(KeyError, match="lost"):
        indices(batches)
    assert draw() == expected


@pytest.mark.parametrize("kind", [*KINDS, *FIXED])
def test_sequential_gives_a_users_samples_in_the_same_order_each_epoch(kind: str) -> None:
    """With `sequential`, as for `overfit_batches`, a user's sampler gives the order of epoch 0 in every epoch."""
    batches = keyed(custom(kind), sequential=True)
    assert indices(batches, 0) == indices(batches, 1) == indices(keyed(custom(kind)), 0)
