"""Samplers on several ranks: how `DistributedSampler` and a user's own samplers are sharded."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data.dealt import Alike, as_lists, dealt, global_windows, heard, joined, prepared, read
from helpers.data.samples import Drawing, collate_and_draw, same
from helpers.worlds.worlds import run_world
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from trainkit.console import TrainkitWarning
from trainkit.data.keyed_sampler import make_keyed_batches
from trainkit.data.order import HASH_SORT_LIMIT, Permutation
from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.micro_batch import MicroBatchKind
from trainkit.rng import Purpose, Stage, mix

SEED, STAGE = 7, int(Stage.TRAIN)


def indices(loader: DataLoader, world: World, epoch: int = 0, start: int = 0, limit: int | None = None) -> list[Any]:
    batches = make_keyed_batches(loader, SEED, STAGE, False, world)
    batches.epoch, batches.start, batches.limit, batches.turn, batches.step = epoch, start, limit, world.rank, world.size
    return list(batches)


# ------------------------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("length", [1000, HASH_SORT_LIMIT + 12345])
@pytest.mark.parametrize("size, batch", [(2, 3), (3, 700), (64, 5)])
def test_each_process_works_out_its_own_part_of_the_order(length: int, size: int, batch: int) -> None:
    """Each rank has the samples and fetch keys of its own micro-batches."""
    order = Permutation(length, mix(SEED, STAGE, Purpose.ORDER, 1))
    loader = DataLoader(range(length), batch_size=batch, shuffle=True)
    total = -(-length // batch)
    start = max(0, total - 3 * size)
    for rank in (0, 1, size - 1):
        found = indices(loader, Alike(rank, size), 1, start)
        mine = range(start + rank, total, size)
        assert [index for _, index in found] == [order.block(m * batch, min(m * batch + batch, length)).tolist() for m in mine]
        assert [key for key, _ in found] == [mix(SEED, STAGE, Purpose.FETCH, 1, m) for m in mine]


def test_nothing_between_is_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank computes only the positions of its own micro-batches: with 512 ranks and batches of 32, 32 of 16,384."""
    asked: list[Any] = []
    plain = Permutation.at
    monkeypatch.setattr(Permutation, "at", lambda self, positions: asked.append(positions) or plain(self, positions))
    monkeypatch.setattr(Permutation, "block", None)
    length, size = 1 << 23, 512
    own = indices(DataLoader(range(length), batch_size=32, shuffle=True), Alike(3, size), 0)
    assert len(own) == length // 32 // size
    positions = np.concatenate(asked)
    assert len(positions) == length // size
    assert set((positions // 32 % size).tolist()) == {3}
    assert all(4096 // 2 < len(some) <= 4096 for some in asked[:-1]), "many at a time"


def test_without_a_batch_size() -> None:
    """Without a batch size, each sample is a micro-batch."""
    loader = DataLoader(range(7), batch_size=None, shuffle=True)
    whole = [index for _, index in indices(loader, World(), 2)]
    for rank in range(3):
        assert [index for _, index in indices(loader, Alike(rank, 3), 2)] == whole[rank::3]
        assert [index for _, index in indices(loader, Alike(rank, 3), 2, 3)] == whole[3 + rank :: 3]


# --------------------------------------------------------------------------------------------------- DistributedSampler


def sampled(rank: int, size: int, length: int = 21, **options: Any) -> DataLoader:
    dataset = Drawing(length)
    return DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, size, rank, **options))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"seed": 5}], ids=str)
def test_a_distributed_sampler_is_sharded_once(size: int, options: dict[str, Any]) -> None:
    """Each sample of a `DistributedSampler` is yielded by exactly one rank: none is repeated to make the ranks even."""
    alone = indices(sampled(0, 1, **options), World(), 2)
    found = [indices(sampled(rank, size, **options), Alike(rank, size), 2) for rank in range(size)]
    for rank in range(size):
        assert found[rank] == alone[rank::size]
    assert sorted(chain.from_iterable(index for own in found for _, index in own)) == list(range(21))


def test_a_distributed_sampler_that_drops_what_is_too_much() -> None:
    """With `drop_last`, a `DistributedSampler` drops samples until all ranks have the same number."""
    for size, samples in ((2, 20), (4, 20), (3, 21)):
        found = [indices(sampled(rank, size, drop_last=True), Alike(rank, size)) for rank in range(size)]
        seen = list(chain.from_iterable(index for own in found for _, index in own))
        assert len(seen) == len(set(seen)) == samples
        batches = make_keyed_batches(sampled(0, size, drop_last=True), SEED, STAGE, False, Alike(0, size))
        assert (batches.length, batches.sizes) == (-(-samples // 2), (2, 2 - samples % 2))
    assert indices(sampled(1, 4, 3, drop_last=True), Alike(1, 4)) == []


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_distributed_sampler_for_another_number_of_processes_is_warned_of(replicas: int) -> None:
    text = (
        rf"num_replicas={replicas}\) in a run of 2 processes: they read all 21 samples of an epoch together, each about 11, "
        rf"not {-(-21 // replicas)}.*shuffle=True"
    )
    with pytest.warns(TrainkitWarning, match=text):
        found = [indices(sampled(0, replicas), Alike(rank, 2)) for rank in range(2)]
    assert sorted(chain.from_iterable(index for own in found for _, index in own)) == list(range(21))


class Named(DistributedSampler):
    """A subclass of `DistributedSampler` that yields the same indices."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch + 100)


@pytest.mark.parametrize("size", [1, 2])
def test_a_derived_distributed_sampler_is_recognised(size: int) -> None:
    for rank in range(size):
        world = World() if size == 1 else Alike(rank, size)
        loader = DataLoader(Drawing(21), batch_size=2, sampler=Named(range(21), size, rank))
        assert indices(loader, world) == indices(sampled(rank, size), world)


def test_a_batch_sampler_of_torchs_around_one_is_recognised() -> None:
    batch_sampler = BatchSampler(DistributedSampler(range(21), 2, 1), 2, False)
    assert indices(DataLoader(Drawing(21), batch_sampler=batch_sampler), Alike(1, 2)) == indices(sampled(1, 2), Alike(1, 2))


def tutorial() -> list[Any]:
    """Loads data like PyTorch's tutorials on multi-GPU training and torchrun."""
    world = joined()
    dataset = Drawing(2048 // 64)
    train_data = DataLoader(dataset, batch_size=4, pin_memory=False, shuffle=False, sampler=DistributedSampler(dataset))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = prepared(train_data, world)
    epochs = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        train_data.sampler.set_epoch(epoch)
        epochs.append([number for batch in loader for number in batch[:, 0].int().tolist()])
    return epochs


def test_the_tutorials_see_each_sample_once() -> None:
    first, second = run_world(2, tutorial)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other) == 16
        assert sorted(one + other) == list(range(32))
    assert first[0] != first[1] != first[2]


# ------------------------------------------------------------------------------------------------ a user's own samplers


class Shuffled(Sampler):
    """A user's sampler that draws from numpy while it is iterated."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return ((index + np.random.randint(3)) % self.length for index in np.random.permutation(self.length).tolist())

    def __len__(self) -> int:
        return self.length


class Pairs(Sampler):
    """A batch sampler: shuffled pairs of successive indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * first, 2 * first + 1] for first in torch.randperm(self.length // 2).tolist()])

    def __len__(self) -> int:
        return self.length // 2


class Grouped(Pairs):
    """A batch sampler that forms pairs of the indices of another sampler."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(len(sampler))
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        pending: list[int] = []
        for index in self.sampler:
            pending.append(index)
            if len(pending) == 2:
                yield pending
                pending = []


class GoesOn(Sampler):
    """Continues at the index where its last iteration stopped."""

    def __init__(self, length: int) -> None:
        self.length, self.place = length, 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def __len__(self) -> int:
        return self.length


class OwnGenerator(Sampler):
    """Shuffles with its own generator."""

    def __init__(self, length: int, generator: Any) -> None:
        self.length, self.own = length, generator

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        if isinstance(self.own, torch.Generator):
            order = torch.randperm(self.length, generator=self.own).tolist()
        else:
            self.own.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.length


CUSTOM: dict[str, Callable[[], Any]] = {
    "sampler": lambda: {"batch_size": 3, "sampler": Shuffled(20)},
    "batch sampler": lambda: {"batch_sampler": Pairs(20)},
    "generator": lambda: {"batch_size": 3, "sampler": RandomSampler(range(20), True, 31, torch.Generator())},
    "subset": lambda: {"batch_size": 3, "sampler": SubsetRandomSampler(range(4, 17))},
    "a list": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "around a random one": lambda: {"batch_sampler": Grouped(RandomSampler(range(20)))},
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", CUSTOM)
def test_a_users_sampler_is_sharded_by_position(kind: str, size: int) -> None:
    loader = DataLoader(Drawing(20), **CUSTOM[kind]())
    for epoch, start, limit in ((0, 0, None), (3, 0, None), (1, 2, None), (1, 1, 4)):
        alone = indices(loader, World(), epoch)[start:limit]
        for rank in range(size):
            assert indices(loader, Alike(rank, size), epoch, start, limit) == alone[rank::size]


KEEPING: dict[str, Callable[[], Any]] = {
    "place": lambda: {"batch_size": 3, "sampler": GoesOn(20)},
    "place of the one inside": lambda: {"batch_sampler": Grouped(GoesOn(20))},
    "torch": lambda: {"batch_size": 3, "sampler": OwnGenerator(20, torch.Generator().manual_seed(1))},
    "random": lambda: {"batch_size": 3, "sampler": OwnGenerator(20, random.Random(1))},
    "numpy": lambda: {"batch_size": 3, "sampler": OwnGenerator(20, np.random.default_rng(1))},
    "numpy of old": lambda: {"batch_sampler": Grouped(OwnGenerator(20, np.random.RandomState(1)))},
}


@pytest.mark.parametrize("kind", KEEPING)
def test_comparing_does_not_move_a_sampler_on(kind: str) -> None:
    """Comparing the samplers of all ranks does not advance a sampler that keeps a state between epochs."""
    alone = indices(DataLoader(Drawing(20), **KEEPING[kind]()), World(), 0)
    assert sorted(index for _, batch in alone for index in batch) == list(range(20))
    for rank in range(2):
        assert indices(DataLoader(Drawing(20), **KEEPING[kind]()), Alike(rank, 2), 0) == alone[rank::2]


class FailsOnce(OwnGenerator):
    """Shuffles and then raises an error until `fails` is cleared."""

    fails = True

    def __iter__(self) -> Iterator[int]:
        order = super().__iter__()
        if self.fails:
            raise OSError("the index cannot be read")
        return order


def test_a_sampler_that_fails_is_not_moved_on() -> None:
    """If a sampler raises an error, a second `fit` in a notebook has the order that the first would have had."""
    alone = indices(DataLoader(Drawing(20), batch_size=3, sampler=OwnGenerator(20, random.Random(1))), World(), 0)
    sampler = FailsOnce(20, random.Random(1))
    loader = DataLoader(Drawing(20), batch_size=3, sampler=sampler)
    with pytest.raises(OSError, match="the index cannot be read"):
        indices(loader, Alike(0, 2), 0)
    sampler.fails = False
    assert indices(loader, Alike(0, 2), 0) == alone[::2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_sampler_in_an_evaluation(workers: int) -> None:
    def make() -> DataLoader:
        return DataLoader(Drawing(20), num_workers=workers, collate_fn=collate_and_draw, **CUSTOM["sampler"]())

    (alone,) = dealt(make, 1, None)
    by_rank = dealt(make, 3, None)
    assert [one.ids for group in global_windows([alone]) for one in group] == [one.ids for one in alone]
    for rank, own in enumerate(by_rank):
        assert same([one.batch for one in own], [one.batch for one in alone[rank::3]])


class OfRank(Sampler):
    """Yields only the samples of its rank, like many distributed samplers. A higher rank has more samples."""

    def __init__(self, length: int, rank: int, size: int) -> None:
        self.own = range(rank, length + 2 * rank, size)

    def __iter__(self) -> Iterator[int]:
        return iter([self.own[place] % 20 for place in torch.randperm(len(self.own)).tolist()])

    def __len__(self) -> int:
        return len(self.own)


class Shifted(DistributedSampler):
    """A subclass of `DistributedSampler` that yields its indices in another order."""

    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__()][::-1])


def split(kind: str, start: int) -> Any:
    world = joined()
    dataset = Drawing(20)
    options: dict[str, Callable[[], Any]] = {
        "of rank": lambda: {"batch_size": 2, "sampler": OfRank(20, world.rank, world.size)},
        "derived": lambda: {"batch_size": 2, "sampler": Shifted(dataset)},
        "around": lambda: {"batch_sampler": Grouped(DistributedSampler(dataset))},
        "subset": lambda: {"batch_size": 2, "sampler": SubsetRandomSampler(range(world.rank, 20, world.size))},
    }
    with heard() as texts:
        loader = prepared(DataLoader(dataset, collate_fn=collate_and_draw, **options[kind]()), world)
        found = [as_lists(one) for one in read(loader, 1, start)]
    assert loader.position(0, 1)["splits"]
    return found, loader.length, loader.exact, " ".join(texts)


@pytest.mark.parametrize("kind", ["of rank", "derived", "around", "subset"])
def test_a_sampler_that_gives_each_process_its_part_is_not_sharded_again(kind: str) -> None:
    results = run_world(2, split, kind, 0)
    own = [found for found, *_ in results]
    seen = [[number for one in mine if not one.padding for number in one.ids] for mine in own]
    if kind == "of rank":
        assert sorted(seen[0]) == list(range(0, 20, 2))
        assert sorted(seen[1]) == sorted(number % 20 for number in range(1, 22, 2))
    else:
        assert sorted(seen[0] + seen[1]) == list(range(20))
    global_windows(own)
    assert [(length, exact) for _, length, exact, _ in results] == [(6 if kind == "of rank" else 5, False)] * 2
    assert "yields different indices on each process, which are used unchanged" in results[0][3]
    rest = run_world(2, split, kind, 2)
    for rank in range(2):
        assert [one.batch for one in rest[rank][0]] == [one.batch for one in own[rank][2:]]


# -------------------------------------------------------------------------------------- loaders that differ between ranks


def unlike(kind: str) -> str:
    """The error of loaders that differ between ranks, or an empty string."""
    world, dataset = joined(), Drawing(20)
    loaders: dict[str, Callable[[], Any]] = {
        "length": lambda: DataLoader(Drawing(14 + world.rank), batch_size=4 - world.rank),
        "seed": lambda: sampled(world.rank, 2, seed=world.rank),
        "part": lambda: DataLoader(Subset(dataset, range(world.rank, 20, 2))),
        "split": lambda: DataLoader(random_split(dataset, [10, 10], torch.Generator().manual_seed(world.rank))[0]),
        "split of a split": lambda: DataLoader(Subset(Subset(dataset, torch.arange(10) + world.rank), [0, 1, 2])),
        "length of a sampler": lambda: DataLoader(dataset, sampler=[1, 2, 3, 4][: 3 + world.rank]),
        "alike": lambda: DataLoader(Subset(Subset(dataset, torch.arange(10)), [0, 1, 2])),
        "names": lambda: DataLoader(Subset({"a": 1, "b": 2, "c": 3}, ["a", "c"])),
        "other names": lambda: DataLoader(Subset({"a": 1, "b": 2, "c": 3}, ["a", "bc"[world.rank]])),
    }
    try:
        prepared(loaders[kind](), world)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "kind, text",
    [
        (
            "length",
            "rank 0: samples=14, batch_size=4, batches=4, order=.*; rank 1: samples=15, batch_size=3, batches=5, .*whole",
        ),
        ("seed", "rank 0: .*'seed': 0.*; rank 1: .*'seed': 1"),
        ("part", "pass the whole dataset instead"),
        ("split", r"random_split\(dataset, lengths, generator=torch.Generator\(\).manual_seed\(0\)\)"),
        ("split of a split", "different samples in its Subset"),
        ("length of a sampler", "batches=3; rank 1: .*batches=4"),
        ("alike", "^$"),
        ("names", "^$"),
        ("other names", "different samples in its Subset"),
    ],
)
def test_loaders_that_differ_are_refused_by_all(kind: str, text: str) -> None:
    for found in run_world(2, unlike, kind):
        assert re.search(text, found), found


# ------------------------------------------------------------------------------------------- datasets that are not the same


class Noisy(Dataset):
    """Adds noise from a generator that no one seeds, so that a sample is never the same twice."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + random.Random().random() / 4])


class FailsInTheMiddle(Drawing):
    def __getitem__(self, index: int) -> Tensor:
        if index == 11:
            raise OSError("a broken file")
        return super().__getitem__(index)


def tensors(numbers: Any) -> TensorDataset:
    return TensorDataset(torch.tensor([[float(number)] for number in numbers]))


def unseeded() -> list[int]:
    numbers = list(range(24))
    random.Random().shuffle(numbers)
    return numbers


DATASETS: dict[str, Callable[[int], Any]] = {
    "parts": lambda rank: tensors(range(rank, 24, 2)),
    "parts of other lengths": lambda rank: tensors(range(rank, 23, 2)),
    "parts that begin alike": lambda rank: tensors([-1, *range(rank, 24, 2)]),
    "the whole": lambda rank: tensors(range(24)),
    "the whole in another order": lambda rank: tensors(unseeded()),
    "noisy": lambda rank: Noisy(),
    "sharded by the user": lambda rank: tensors(range(100 * rank, 100 * rank + 24)),
}


def datasets(workers: int, window: int | None) -> dict[str, tuple[list[list[int]], str, str]]:
    """For each kind the samples of two epochs on this rank, the notices, and the warnings."""
    found = {}
    for kind, make in DATASETS.items():
        with heard() as texts, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dataset = make(joined().rank)
            order: Any = {"sampler": DistributedSampler(dataset)} if kind == "sharded by the user" else {"shuffle": True}
            source = DataLoader(dataset, batch_size=2, num_workers=workers, **order)
            loader, epochs = prepared(source, joined(), window), []
            for epoch in (0, 1):
                given = [micro.batch for micro in loader.iterate(epoch) if micro.kind is MicroBatchKind.DATA]
                epochs.append(sorted(int(number) for batch in given for number in chain.from_iterable(batch)))
                if window is None:
                    loader.end_epoch()
            loader.close()
        found[kind] = epochs, " ".join(texts), " ".join(str(one.message) for one in caught)
    return found


@pytest.mark.parametrize("workers, window", [(0, 2), (2, None)])
def test_datasets_are_compared_by_content(workers: int, window: int | None) -> None:
    """Parts of one length look like one dataset; each process reads its own to the end, so that no sample is lost."""
    first, second = run_world(2, datasets, workers, window)
    for kind, end in (("parts", 24), ("parts of other lengths", 23)):
        assert first[kind][0] == [list(range(0, end, 2))] * 2
        assert second[kind][0] == [list(range(1, end, 2))] * 2
        assert "TensorDataset has different samples on each process" in first[kind][1]
    assert first["parts that begin alike"][0] == [[-1, *range(0, 24, 2)]] * 2
    for kind, length in (("the whole", 24), ("noisy", 23)):
        for epoch in (0, 1):
            assert sorted(first[kind][0][epoch] + second[kind][0][epoch]) == list(range(length)), "sharded, each sample once"
        assert "different samples" not in first[kind][1]
    assert first["the whole in another order"][0] == second["the whole in another order"][0] == [list(range(24))] * 2
    assert "each sample is used up to 2 times in an epoch" in first["the whole in another order"][2]
    for epoch in (0, 1):  # the dataset of PyTorch's tutorial is random on each process, and its DistributedSampler shards it
        numbers = first["sharded by the user"][0][epoch] + [number - 100 for number in second["sharded by the user"][0][epoch]]
        assert sorted(numbers) == list(range(24))
    assert "different samples" not in first["sharded by the user"][1]
    assert all(warnings == "" for kind, (*_, warnings) in first.items() if kind != "the whole in another order")


def test_a_dataset_whose_samples_cannot_be_compared() -> None:
    """An error of a sample is not one of the preparation."""
    loader = prepared(DataLoader(FailsInTheMiddle(23), batch_size=2), Alike(1, 2))
    assert next(iter(read(loader))).ids == [2, 3]
