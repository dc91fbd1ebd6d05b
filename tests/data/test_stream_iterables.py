"""Streams whose length is unknown until they end: iterable datasets, lists of ready batches, and any other iterable."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data.samples import CPU, DrawingStream, SizedDrawingStream, collate_and_draw, draw, ids, same
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainkit.console import TrainkitWarning
from trainkit.data.order import CYCLE
from trainkit.data.stream import IterableStream, Stream, open_stream
from trainkit.errors import DataError, EmptyLoaderError
from trainkit.rng import Purpose, RandomState, Stage, mix, seed_generators

SEED, STAGE = 7, int(Stage.TRAIN)


def stream_of(source: Any, seed: int = SEED, stage: int = STAGE) -> Stream:
    return open_stream(source, seed, stage, CPU)


def loader_of(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, **{"batch_size": 4, "collate_fn": collate_and_draw, **options})


def read(stream: Stream, epoch: int = 0, start: int = 0, limit: int | None = None) -> list[Any]:
    return list(stream.batches(epoch, start, limit))


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
    """An epoch that starts at a later batch has the same batches as the end of the whole epoch."""
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
    """Shuffles in `__iter__`, before the first sample is requested, and counts its iterations."""

    def __init__(self) -> None:
        self.epoch = self.starts = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.starts += 1
        order = torch.randperm(50).tolist() + np.random.permutation(50).tolist() + random.sample(range(50), 50)
        return iter([torch.tensor([index, self.epoch, self.starts]) for index in order])


class EagerAndTold(Eager):
    """`Eager` with `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("kind", [Eager, EagerAndTold])
@pytest.mark.parametrize("size", [50, None])
def test_what_workers_have_seen_of_earlier_epochs_does_not_matter(size: int | None, kind: type[Eager]) -> None:
    """An epoch is the same with persistent workers and with new ones, which a resumed run has.

    Persistent workers would otherwise keep the state of their generators, of the dataset, and its epoch.
    """
    lasting = stream_of(DataLoader(kind(), batch_size=size, num_workers=1, persistent_workers=True))
    once = stream_of(DataLoader(kind(), batch_size=size, num_workers=1))
    epochs = [read(lasting, epoch) for epoch in (0, 1, 2)]
    lasting.close()
    assert same(read(once, 2), epochs[2])
    assert not same(ids(epochs[0]), ids(epochs[1]))
    assert {row[1].item() for batch in epochs[2] for row in batch.view(-1, 3)} == {2 if kind is EagerAndTold else 0}


def test_a_stream_may_say_its_length() -> None:
    """A stream ends after the samples that its `len` states: its workers may yield more batches, if some are short.

    The warning that torch gives for this does not appear.
    """
    stream = stream_of(loader_of(SizedDrawingStream(10), num_workers=2))
    assert (stream.length, stream.exact) == (3, False)
    assert ids(read(stream)) == [[0, 2, 4, 6], [1, 3, 5, 7], [8], [9]]
    sized = SizedDrawingStream(10)
    stream = stream_of(loader_of(sized, batch_size=None, collate_fn=None))
    assert stream.length == 10
    sized.length = 12
    assert len(read(stream)) == 10
    assert stream_of(loader_of(SizedDrawingStream(10), drop_last=True)).length == 2


def test_workers_of_a_stream_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    """A notice says that several workers must split an iterable dataset themselves."""
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
    """Reading a list of batches does not seed the generators, because nothing is drawn."""
    seed_generators(3)
    expected = draw()
    seed_generators(3)
    read(stream_of(READY))
    assert draw() == expected


class Batches:
    """A user's own loader that draws random numbers when a batch is requested."""

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
    """Each batch of an iterable is requested under its own key, so that an epoch is the same from any start."""
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
    """Unlike a list, another sequence is seeded, because its batches may be drawn when they are requested."""
    stream = stream_of(deque(READY))
    state = RandomState()
    assert len(read(stream, 0, 1)) == 5
    assert not same(draw(), RandomState.draw_with_key(0, draw))
    state.restore()
    assert stream.length == 6


@pytest.mark.parametrize("epoch", [0, 3])
def test_an_iterator_is_read_once_in_whatever_epoch(epoch: int) -> None:
    """An iterator can be read in any epoch, but only once: a resumed run may get a new iterator for a later epoch."""
    stream = stream_of(batch for batch in READY)
    assert len(read(stream, epoch)) == 6
    for again in (epoch, epoch + 1):
        with pytest.raises(EmptyLoaderError, match=rf"generator can be iterated only once.*epoch {again}.*max_epochs=1"):
            read(stream, again)


def test_an_iterator_that_was_started_is_read_on() -> None:
    """An iterator that has been read in part continues where it is."""
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
        TrainkitWarning, match=r"len\(\) of Unknown failed \(KeyError\('cache'\)\); treating its length as unknown"
    ):
        assert stream_of(Unknown(KeyError("cache"))).length is None


class OnlyDataset(Dataset):
    """A map-style dataset, which is not a loader."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("source", [5, None, OnlyDataset()], ids=lambda s: type(s).__name__)
def test_what_cannot_be_iterated_is_refused(source: Any) -> None:
    with pytest.raises(DataError, match=rf"not {type(source).__name__}. .*DataLoader\(dataset, batch_size=32"):
        stream_of(source)


def test_closing_an_iterable_does_nothing() -> None:
    stream = stream_of(READY)
    stream.close()
    assert len(read(stream)) == 6
