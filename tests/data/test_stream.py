"""One source of batches: a ``DataLoader`` under control in whatever process it fetches, or any iterable as it is."""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from samples import CPU, Drawing, DrawingStream, SizedDrawingStream, collate_and_draw, draw, ids, same
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, get_worker_info

from trainkit.console import TrainkitWarning
from trainkit.data.sampling import CYCLE, KeyedDataset
from trainkit.data.stream import IterableStream, LoaderStream, Stream, open_stream
from trainkit.errors import DataError, EmptyLoaderError
from trainkit.rng import Purpose, RandomState, Stage, mix, seed_generators

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
    """Drawn by the dataset and in ``collate_fn``, from torch, numpy and ``random``; for whole epochs and for their ends."""
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


def test_each_sample_is_drawn_for_anew() -> None:
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


class Subclass(DataLoader):
    """With a constructor, attributes and an ``__iter__`` of its own."""

    def __init__(self, length: int) -> None:
        super().__init__(Drawing(length), batch_size=4, shuffle=True)
        self.offset = 1000

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch + self.offset + self.dataset.length


def test_a_subclass_stays_what_it_is() -> None:
    plain = read(stream_of(DataLoader(Drawing(14), batch_size=4, shuffle=True)), 2)
    assert same(read(stream_of(Subclass(14)), 2), [batch + 1014 for batch in plain])


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
    assert stream_of(loader, device=torch.device("cuda"))._loader.pin_memory, "copies to CUDA come from pinned memory"


class Told(Drawing):
    """A dataset that its workers set up, and that knows the epoch."""

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
    assert [set(rows[:, 1].tolist()) for rows in found] == [{0}, {5}, {0}, {5}], "the epoch that the dataset is told"
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
    """Otherwise the micro-batch that has the key m would not be the m-th, and the short one not the last."""
    loader = loader_of(Drawing(14), num_workers=2, in_order=False)
    assert same(read(stream_of(loader)), read(stream_of(loader_of(Drawing(14)))))
    assert "in_order=False is not used" in caplog.text
    assert not loader.in_order


@pytest.mark.parametrize("persistent", [True, False])
def test_closing_ends_the_workers(persistent: bool) -> None:
    """Also those of an epoch that an error has left, whose traceback still holds it."""
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
    """What goes to the workers pickles, as Windows and macOS need it."""
    spawned = loader_of(Drawing(6), shuffle=True, num_workers=1, multiprocessing_context="spawn", worker_init_fn=number)
    assert same(read(stream_of(spawned), 1), read(stream_of(loader_of(Drawing(6), shuffle=True)), 1))


def number(worker_id: int) -> None:
    """Does nothing, and can be pickled."""


def test_starting_an_epoch_does_not_depend_on_what_was_drawn() -> None:
    """The workers' base seed is drawn from the global generator, which user code may have left anywhere."""
    stream = stream_of(DataLoader(Told(2), num_workers=1))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(read(stream, 4))
    assert same(*found)


# ------------------------------------------------------------------------------------------------- iterable datasets


def test_a_stream_of_samples_is_batched_and_keyed() -> None:
    stream = stream_of(loader_of(DrawingStream(10)))
    first, second = read(stream, 0), read(stream, 1)
    assert ids(first) == ids(second) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert same(read(stream, 0), first)
    assert not same(first, second)
    seed_generators(mix(SEED, STAGE, Purpose.FETCH, 1, 2))
    assert same(second[2]["samples"][0, 1:].tolist(), draw()), "the key of the micro-batch"
    assert (stream.length, stream.sizes, stream.exact) == (None, None, False)


@pytest.mark.parametrize("size", [4, None])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_end_of_a_streams_epoch_is_the_end_of_the_whole_one(size: int | None, workers: int) -> None:
    collate = None if size is None else collate_and_draw
    stream = stream_of(loader_of(DrawingStream(13), batch_size=size, collate_fn=collate, num_workers=workers))
    whole = read(stream, 2)
    draw()
    assert same(read(stream, 2), whole)
    assert sorted(index for batch in ids(whole) for index in batch) == list(range(13))
    assert same(read(stream, 2, 3), whole[3:])
    assert same(read(stream, 2, 1, 3), whole[1:3])


def test_a_short_last_batch_of_a_stream_may_be_dropped() -> None:
    assert ids(read(stream_of(loader_of(DrawingStream(10), drop_last=True)))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Eager(IterableDataset):
    """Shuffles when it is started, and not when it is first asked; knows the epoch and how often it was started."""

    def __init__(self) -> None:
        self.epoch = self.starts = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        self.starts += 1
        order = torch.randperm(50).tolist() + np.random.permutation(50).tolist() + random.sample(range(50), 50)
        return iter([torch.tensor([index, self.epoch, self.starts]) for index in order])


@pytest.mark.parametrize("size", [50, None])
def test_what_workers_have_seen_of_earlier_epochs_does_not_matter(size: int | None) -> None:
    """Persistent workers would keep their generators, their dataset's state and its epoch; a resumed run has none."""
    lasting = stream_of(DataLoader(Eager(), batch_size=size, num_workers=1, persistent_workers=True))
    once = stream_of(DataLoader(Eager(), batch_size=size, num_workers=1))
    epochs = [read(lasting, epoch) for epoch in (0, 1, 2)]
    lasting.close()
    assert same(read(once, 2), epochs[2])
    assert not same(ids(epochs[0]), ids(epochs[1]))
    assert {row[1].item() for batch in epochs[2] for row in batch.view(-1, 3)} == {2}


def test_a_stream_may_say_its_length() -> None:
    """It is believed for show only: more may come than it says, and torch's warning about it is not caused by us."""
    stream = stream_of(loader_of(SizedDrawingStream(10), num_workers=2))
    assert (stream.length, stream.exact) == (3, False)
    assert ids(read(stream)) == [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9]]
    sized = SizedDrawingStream(10)
    stream = stream_of(loader_of(sized, batch_size=None, collate_fn=None))
    assert stream.length == 10
    sized.length = 12
    assert len(read(stream)) == 12
    assert stream_of(loader_of(SizedDrawingStream(10), drop_last=True)).length == 2


def test_workers_of_a_stream_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    stream_of(loader_of(DrawingStream(10), num_workers=1))
    assert caplog.text == ""
    stream_of(loader_of(DrawingStream(10), num_workers=2))
    assert "get_worker_info()" in caplog.text


# ------------------------------------------------------------------------------------------------------ any iterable

READY = [torch.full((2,), float(n)) for n in range(6)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_ready_batches_are_given_as_they_are(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    stream = stream_of(kind(READY))
    assert isinstance(stream, IterableStream)
    assert (stream.length, stream.sizes, stream.exact) == (6, None, True)
    for epoch in (0, 3):
        assert all(found is batch for found, batch in zip(read(stream, epoch), READY, strict=True))
        assert read(stream, epoch, 2, 4)[0] is READY[2]
        assert len(read(stream, epoch, 2, 4)) == 2
    assert caplog.text == ""


def test_ready_batches_are_not_seeded_for() -> None:
    seed_generators(3)
    expected = draw()
    seed_generators(3)
    read(stream_of(READY))
    assert draw() == expected


class Batches:
    """A user's own loader: what it gives was drawn when it was asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.given = 0
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[list[float]]:
        order = torch.randperm(self.length).tolist()
        for index in order:
            self.given += 1
            yield [float(index), *draw()]


class SizedBatches(Batches):
    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_any_iterable_is_iterated_under_its_keys(caplog: pytest.LogCaptureFixture) -> None:
    source = Batches(5)
    stream = stream_of(source)
    assert (stream.length, stream.exact) == (None, False)
    assert "Batches is iterated as it is" in caplog.text
    whole = read(stream, 2)
    assert sorted(batch[0] for batch in whole) == [0, 1, 2, 3, 4]
    draw()
    assert same(read(stream, 2), whole)
    assert not same(read(stream, 1), whole)
    assert same(read(stream, 2, 3), whole[3:])
    source.given = 0
    assert same(read(stream, 2, 1, 3), whole[1:3])
    assert source.given == 3, "nothing after the limit is asked for"
    seed_generators(mix(SEED, STAGE, Purpose.FETCH, 2, 4))
    assert same(whole[4][1:], draw())


def test_an_iterable_may_have_a_length_and_an_epoch() -> None:
    source = SizedBatches(5)
    stream = stream_of(source)
    assert (stream.length, stream.exact) == (5, False)
    read(stream, 4)
    read(stream, 4 + 3 * CYCLE)
    assert source.epochs == [4, 4]


def test_the_batches_of_a_sequence_that_is_no_list_may_be_drawn_when_asked_for() -> None:
    stream = stream_of(deque(READY))
    state = RandomState()
    assert len(read(stream, 0, 1)) == 5
    assert not same(draw(), RandomState.keyed(0, draw))
    state.restore()
    assert stream.length == 6


@pytest.mark.parametrize("epoch", [0, 3])
def test_an_iterator_is_read_once_in_whatever_epoch(epoch: int) -> None:
    """A run that is resumed, or asks for its loader anew, brings a fresh one into a later epoch."""
    stream = stream_of(batch for batch in READY)
    assert len(read(stream, epoch)) == 6
    for again in (epoch, epoch + 1):
        with pytest.raises(EmptyLoaderError, match=rf"generator can be iterated only once.*epoch {again}.*max_epochs=1"):
            read(stream, again)


def test_an_iterator_that_was_started_is_read_on() -> None:
    iterator = iter(READY)
    next(iterator)
    assert len(read(stream_of(iterator))) == 5


class Unknown(Batches):
    def __init__(self, error: Exception) -> None:
        super().__init__(3)
        self.error = error

    def __len__(self) -> int:
        raise self.error


def test_a_length_that_is_not_known() -> None:
    assert stream_of(Unknown(NotImplementedError())).length is None
    assert stream_of(Unknown(TypeError("no length"))).length is None
    with pytest.warns(
        TrainkitWarning, match=r"len\(\) of Unknown failed \(KeyError\('cache'\)\); its length counts as unknown"
    ):
        assert stream_of(Unknown(KeyError("cache"))).length is None


class OnlyDataset(Dataset):
    """A dataset alone is no loader."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("source", [5, None, OnlyDataset()], ids=repr)
def test_what_cannot_be_iterated_is_refused(source: Any) -> None:
    with pytest.raises(DataError, match=rf"not {type(source).__name__}. .*DataLoader\(dataset, batch_size=32"):
        stream_of(source)


def test_closing_an_iterable_does_nothing() -> None:
    stream = stream_of(READY)
    stream.close()
    assert len(read(stream)) == 6


def test_the_wrapper_is_not_seen_by_the_users_dataset() -> None:
    stream = stream_of(loader_of(Drawing(3)))
    assert isinstance(stream._loader.dataset, KeyedDataset)
    assert isinstance(stream._source.dataset, Drawing)
