"""A `DataLoader` over a map-style dataset: seeded in whatever process fetches, and otherwise unchanged."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from helpers.data.samples import CPU, Drawing, collate_and_draw, draw, ids, same
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler, get_worker_info

from trainkit.data.keyed_sampler import KeyedDataset
from trainkit.data.order import CYCLE
from trainkit.data.stream import LoaderStream, Stream, open_stream
from trainkit.errors import DataError
from trainkit.rng import Stage

SEED, STAGE = 7, int(Stage.TRAIN)


def stream_of(source: Any, seed: int = SEED, stage: int = STAGE, device: Any = CPU) -> Stream:
    return open_stream(source, seed, stage, device)


def loader_of(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, **{"batch_size": 4, "collate_fn": collate_and_draw, **options})


def read(stream: Stream, epoch: int = 0, start: int = 0, limit: int | None = None) -> list[Any]:
    return list(stream.batches(epoch, start, limit))


# ------------------------------------------------------------------------------------- map-style datasets, any workers

OPTIONS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "in order, whole batches": {"drop_last": True},
    "one by one": {"shuffle": True, "batch_size": None, "collate_fn": None},
    "weighted": {"sampler": WeightedRandomSampler(torch.arange(14.0), 14)},
    "batches of the user's": {"batch_size": 1, "batch_sampler": [[3, 1], [4], [1, 5, 9]]},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_samples_and_augmentation_are_the_same_wherever_they_are_fetched(kind: str) -> None:
    """Batches are the same with and without workers, for whole epochs and for starts inside an epoch.

    The dataset and `collate_fn` draw from torch, numpy and `random`.
    """
    here = stream_of(loader_of(Drawing(14), **OPTIONS[kind]))
    there = stream_of(loader_of(Drawing(14), num_workers=2, **OPTIONS[kind]))
    lasting = stream_of(loader_of(Drawing(14), num_workers=2, persistent_workers=True, **OPTIONS[kind]))
    epochs = [read(here, epoch) for epoch in (0, 1)]
    assert not same(epochs[0], epochs[1])
    for epoch, start in ((0, 0), (1, 0), (1, 2), (0, 1)):
        draw()
        expected = epochs[epoch][start:]
        assert same(read(here, epoch, start), expected)
        assert same(read(lasting, epoch, start), expected)
    assert same(read(there, 1, 1), epochs[1][1:])
    lasting.close()


def test_each_sample_has_its_own_random_numbers() -> None:
    rows = torch.cat([batch["samples"][:, 1:] for epoch in (0, 1) for batch in read(stream_of(loader_of(Drawing(14))), epoch)])
    batches = torch.stack([batch["batch"] for batch in read(stream_of(loader_of(Drawing(14))))])
    numbers = torch.cat([rows.flatten(), batches.flatten()])
    assert len(numbers.unique()) == len(numbers) == 2 * 14 * 3 + 4 * 3


@pytest.mark.parametrize("kind", OPTIONS)
def test_nothing_that_is_skipped_is_fetched(kind: str) -> None:
    dataset = Drawing(14)
    stream = stream_of(loader_of(dataset, **OPTIONS[kind]))
    whole = ids(read(stream, 3))
    for start, limit in ((0, 0), (2, None), (1, 2), (99, None), (0, 2)):
        dataset.calls.clear()
        assert ids(read(stream, 3, start, limit)) == whole[start:limit]
        assert dataset.calls == [index for batch in whole[start:limit] for index in batch]


def test_a_loader_of_the_user_is_not_touched() -> None:
    dataset, generator = Drawing(14), torch.Generator()
    loader = loader_of(dataset, shuffle=True, num_workers=1, persistent_workers=True, generator=generator)
    before = dict(vars(loader))
    stream = stream_of(loader)
    read(stream)
    assert vars(loader).keys() == before.keys()
    assert all(vars(loader)[name] is before[name] for name in before)
    assert loader._iterator is None
    assert loader.dataset is dataset
    stream.close()


def test_a_loader_that_is_being_read_can_be_prepared() -> None:
    """A stream starts its own workers. The persistent workers of the user's loader are not affected."""
    loader = loader_of(Drawing(14), num_workers=1, persistent_workers=True)
    theirs = iter(loader)
    next(theirs)
    stream = stream_of(loader)
    assert same(read(stream), read(stream_of(loader_of(Drawing(14)))))
    assert ids(list(theirs)) == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    stream.close()
    assert len(list(loader)) == 4
    theirs._shutdown_workers()


class Subclass(DataLoader):
    """A `DataLoader` with its own constructor, attributes and `__iter__`."""

    def __init__(self, length: int) -> None:
        super().__init__(Drawing(length), batch_size=4, shuffle=True)
        self.offset = 1000

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch + self.offset + self.dataset.length


def test_a_subclass_stays_what_it_is() -> None:
    """A `DataLoader` subclass with an `__iter__` is iterated as it is, with the attributes that its constructor has set.

    It shuffles in an order that depends only on the seed and the epoch.
    """
    stream = stream_of(Subclass(14))
    epochs = [read(stream, epoch) for epoch in (2, 3, 2)]
    assert sorted(chain.from_iterable(ids(epochs[0]))) == list(range(1014, 1028))
    assert ids(epochs[0]) == ids(epochs[2]) != ids(epochs[1])
    assert same(epochs[0], read(stream_of(Subclass(14)), 2))


def test_every_other_option_is_kept() -> None:
    loader = loader_of(
        Drawing(5), num_workers=1, timeout=12.5, prefetch_factor=3, multiprocessing_context="spawn", pin_memory=False
    )
    stream = stream_of(loader)
    assert isinstance(stream, LoaderStream)
    copied = stream._loader
    changed = {name for name in vars(loader) if vars(copied)[name] is not vars(loader)[name]}
    assert changed == {"batch_sampler", "dataset", "worker_init_fn"}
    assert copied.multiprocessing_context is loader.multiprocessing_context


def test_what_workers_fetch_for_cuda_comes_from_pinned_memory() -> None:
    """Without workers, batches are not pinned: they may be on CUDA already, and then they cannot be pinned."""
    for workers in (0, 1):
        for device in (CPU, torch.device("cuda")):
            stream = stream_of(loader_of(Drawing(5), num_workers=workers), device=device)
            assert stream._loader.pin_memory == (workers > 0 and device.type == "cuda")
    assert stream_of(loader_of(Drawing(5), pin_memory=True))._loader.pin_memory, "the user's own wish is kept"


class Told(Drawing):
    """A dataset that shows its epoch, and what the worker process has set."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.number = self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        own = info is None or info.dataset is self
        seed = 0 if info is None else info.seed
        return torch.tensor([index, self.epoch, self.number, own, seed % 2**50], dtype=torch.float64)


def number_the_dataset(worker_id: int) -> None:
    get_worker_info().dataset.number = worker_id


@pytest.mark.parametrize("persistent", [True, False])
def test_a_worker_knows_its_dataset_and_the_epoch(persistent: bool) -> None:
    dataset, generator = Told(4), torch.Generator()
    loader = DataLoader(
        dataset,
        num_workers=1,
        worker_init_fn=number_the_dataset,
        persistent_workers=persistent,
        generator=generator,
    )
    stream = stream_of(loader)
    found = [torch.cat(read(stream, epoch)) for epoch in (0, 5, 0, 5 + CYCLE)]
    stream.close()
    assert [set(rows[:, 1].tolist()) for rows in found] == [{0}, {5}, {0}, {5}], "the epoch given to the dataset"
    assert all((rows[:, 2] == 0).all() for rows in found), "worker_init_fn reaches the user's own dataset"
    assert all((rows[:, 3] == 1).all() for rows in found)
    assert dataset.number == -1, "the one in this process is another"
    assert torch.equal(found[0], found[2]), "the seed of a worker is a function of the epoch, whatever drew from its generator"
    assert not torch.equal(found[0][:, 4], found[1][:, 4])


class Broken(Drawing):
    def __getitem__(self, index: int) -> Tensor:
        if index == 2:
            raise KeyError("sample 2 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_comes_through(workers: int) -> None:
    stream = stream_of(loader_of(Broken(8), batch_size=2, num_workers=workers))
    for _ in range(2):
        batches = stream.batches(0, 0, None)
        next(batches)
        with pytest.raises(KeyError, match="sample 2 is broken"):
            next(batches)


@pytest.mark.parametrize("persistent", [True, False])
def test_an_epoch_that_is_left_early_leaves_nothing_behind(persistent: bool) -> None:
    """After an epoch that was not read to its end, the next epochs are complete and correct."""
    expected = [read(stream_of(loader_of(Drawing(14), shuffle=True)), epoch) for epoch in (0, 1)]
    stream = stream_of(loader_of(Drawing(14), shuffle=True, num_workers=2, persistent_workers=persistent))
    for _ in range(2):
        batches = stream.batches(0, 0, None)
        assert same(next(batches), expected[0][0])
        batches.close()
    assert same(read(stream, 1), expected[1])
    stream.close()


def test_two_epochs_side_by_side_do_not_disturb_each_other() -> None:
    stream = stream_of(loader_of(Drawing(14), shuffle=True))
    pairs = list(zip(stream.batches(0, 0, None), stream.batches(1, 0, None), strict=True))
    assert same([first for first, _ in pairs], read(stream, 0))
    assert same([second for _, second in pairs], read(stream, 1))


def test_batches_come_in_order_whatever_the_loader_says(caplog: pytest.LogCaptureFixture) -> None:
    """`in_order=False` is ignored: micro-batch m must have the key of m, and the short micro-batch must be the last."""
    loader = loader_of(Drawing(14), num_workers=2, in_order=False)
    assert same(read(stream_of(loader)), read(stream_of(loader_of(Drawing(14)))))
    assert "in_order=False is ignored" in caplog.text
    assert not loader.in_order


@pytest.mark.parametrize("persistent", [True, False])
def test_closing_ends_the_workers(persistent: bool) -> None:
    """Closing a stream also ends the workers of an unfinished epoch, which the traceback of an error may keep alive."""
    stream = stream_of(loader_of(Drawing(14), num_workers=1, persistent_workers=persistent))
    batches = stream.batches(0, 0, None)
    next(batches)
    workers = multiprocessing.active_children()
    assert workers
    stream.close()
    stream.close()
    assert not any(worker.is_alive() for worker in workers)
    batches.close()


def test_a_closed_stream_says_so() -> None:
    stream = stream_of(loader_of(Drawing(14)))
    stream.close()
    with pytest.raises(DataError, match=r"has been closed.*prepare\(loader\)"):
        read(stream)


def test_spawned_workers_fetch_the_same() -> None:
    """Everything that is sent to workers can be pickled, as spawned workers on Windows and macOS need it."""
    spawned = loader_of(Drawing(6), shuffle=True, num_workers=1, multiprocessing_context="spawn", worker_init_fn=number)
    assert same(read(stream_of(spawned), 1), read(stream_of(loader_of(Drawing(6), shuffle=True)), 1))


def number(worker_id: int) -> None:
    """Does nothing, and can be pickled."""


def test_starting_an_epoch_does_not_depend_on_what_was_drawn() -> None:
    """The seeds of workers do not depend on the state of torch's global generator, from which torch draws their base seed."""
    stream = stream_of(DataLoader(Told(2), num_workers=1))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(read(stream, 4))
    assert same(*found)


def test_the_wrapper_is_not_seen_by_the_users_dataset() -> None:
    stream = stream_of(loader_of(Drawing(3)))
    assert isinstance(stream._loader.dataset, KeyedDataset)
    assert isinstance(stream._source.dataset, Drawing)
