"""Iterables on several ranks: all read the same stream, or each reads its own; they end together."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.data.dealt import Given, as_lists, assert_shared_out, global_windows, heard, joined, prepared, read
from helpers.data.samples import Drawing, DrawingStream, SizedDrawingStream, collate_and_draw, draw
from helpers.worlds.worlds import run_world
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, get_worker_info

from trainkit import Accelerator, CombinedLoader
from trainkit.data.combined import MODES
from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.micro_batch import MicroBatchKind


def streamed(length: int = 29, **options: Any) -> DataLoader:
    return DataLoader(DrawingStream(length), **{"batch_size": 2, "collate_fn": collate_and_draw, **options})


class Eager(IterableDataset):
    """Shuffles with the global generators in `__iter__`, and has `set_epoch`."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([index, self.epoch]) for index in torch.randperm(13).tolist()])


class Batches:
    """A user's own loader that draws random numbers while it is iterated."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(self.length).tolist():
            yield torch.tensor([[float(index), *draw()]])


ONE_STREAM: dict[str, Callable[[], Any]] = {
    "dataset": streamed,
    "dataset, 2 workers": lambda: streamed(num_workers=2),
    "dataset, lasting workers": lambda: streamed(num_workers=1, persistent_workers=True),
    "sized": lambda: DataLoader(SizedDrawingStream(10), batch_size=4, drop_last=True),
    "one by one": lambda: DataLoader(DrawingStream(5), batch_size=None),
    "told the epoch": lambda: DataLoader(Eager(), batch_size=3),
    "any iterable": lambda: Batches(7),
    "iterator": lambda: (torch.rand(2, 1) for _ in range(5)),
    "one batch": lambda: Batches(1),
    "nothing": lambda: Batches(0),
    "cycled": lambda: CombinedLoader(
        {"a": streamed(5), "b": DataLoader(Drawing(26), batch_size=2, shuffle=True)}, "max_size_cycle"
    ),
    "shortest": lambda: CombinedLoader([streamed(), DataLoader(Drawing(13), batch_size=2, shuffle=True)], "min_size"),
    "shortest is one": lambda: CombinedLoader([DataLoader(Drawing(2), batch_size=2), streamed()], "min_size"),
    "one after the other": lambda: CombinedLoader([streamed(5), [torch.ones(1, 1)], streamed(9), streamed(4)], "sequential"),
    "batches of the user's cycled": lambda: CombinedLoader(
        [DataLoader(Drawing(6), batch_sampler=[[0, 1], [2], [3]]), DataLoader(Drawing(14), batch_size=2)]
    ),
    "streams cycled": lambda: CombinedLoader([streamed(5), streamed(13), Batches(4)], "max_size_cycle"),
}


def all_streams(window: int | None, limit: int | None) -> dict[str, list[Given]]:
    found = {}
    for kind, make in ONE_STREAM.items():
        with heard() as texts:
            loader = prepared(make(), joined(), window, limit=limit)
            for epoch in (0, 1) if kind not in ("iterator",) else (1,):
                found[kind] = [as_lists(one) for one in read(loader, epoch)]
            loader.close()
        if joined().is_main and kind == "dataset":
            assert sum("DrawingStream yields the same batches on every process" in text for text in texts) == 1, texts
        # inside a CombinedLoader only the first batches are compared
        later = [", and later ones too" in text for text in texts if "yields the same batches on every process" in text]
        assert not later or all(later) == (not isinstance(make(), CombinedLoader))
    return found


@pytest.mark.parametrize(
    "size, window, limit", [(2, 1, None), (3, 2, None), (4, 1, None), (2, None, None), (3, 1, 1), (2, 2, 2)]
)
def test_one_stream_is_sharded(size: int, window: int | None, limit: int | None) -> None:
    """Ranks that read one stream have the samples, augmentation, random numbers, windows and shares of one process."""
    by_rank = run_world(size, all_streams, window, limit)
    for kind, make in ONE_STREAM.items():
        loader = prepared(
            make(), World(), None if window is None else window * size, limit=None if limit is None else limit * size
        )
        alone = [as_lists(one) for one in read(loader, 1)]
        loader.close()
        own = [found[kind] for found in by_rank]
        assert_shared_out(own, alone, kind)
        if window is not None:
            found, expected = global_windows(own), global_windows([alone])
            assert [len(group) for group in found] == [len(group) for group in expected]
            for group, wanted in zip(found, expected, strict=True):
                assert [one.share / size for one in group] == pytest.approx([one.share for one in wanted], rel=1e-15), kind


# ---------------------------------------------------------------------------------------- a separate stream on each rank


class Part(IterableDataset):
    """Yields `lengths[rank]` numbers that only this rank has, split between its workers."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Tensor]:
        rank, info = int(os.environ["RANK"]), get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.lengths[rank], step):
            yield torch.tensor([100.0 * rank + number])


class SizedPart(Part):
    def __len__(self) -> int:
        return self.lengths[int(os.environ["RANK"])]


def parts(lengths: list[int], workers: int, window: int | None, limit: int | None) -> Any:
    with heard() as texts:
        loader = prepared(DataLoader(Part(lengths), batch_size=2, num_workers=workers), joined(), window, limit=limit)
        epochs = [[as_lists(one) for one in read(loader, epoch)] for epoch in (0, 1)]
    return *epochs, loader.position(0, 1)["splits"], " ".join(texts)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("lengths", [[4, 9], [7, 0], [1, 1, 8]])
def test_each_process_reads_its_own_stream_and_all_end_together(lengths: list[int], window: int, workers: int) -> None:
    results = run_world(len(lengths), parts, lengths, workers, window, None)
    for epoch in (0, 1):
        own = [result[epoch] for result in results]
        groups = global_windows(own)
        for rank, length in enumerate(lengths):
            seen = [number for one in own[rank] if not one.padding for (number,) in one.batch]
            assert sorted(seen) == [100.0 * rank + number for number in range(length)]
        rows = max(-(-length // 2) for length in lengths)
        assert len(groups) == -(-rows // window)
        for group in groups:
            samples = [len(one.batch) for one in group]
            assert [one.share / len(lengths) for one in group] == pytest.approx([n / sum(samples) for n in samples])
    assert [splits for *_, splits, _ in results] == [True] * len(lengths)
    assert results[0][3].count("Part yields different batches on each process") == 1
    assert "gives each process" not in results[1][3], "one speaks for all"


class FirstWorker(IterableDataset):
    """A stream that only the first worker has a part of, as one file of `datasets` in several workers."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        return iter(torch.arange(0.0 if info is not None and info.id else 24.0)[:, None])


def first_worker(workers: int) -> list[Given]:
    return [as_lists(one) for one in read(prepared(DataLoader(FirstWorker(), batch_size=2, num_workers=workers), joined()))]


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_without_a_part_of_the_stream(workers: int) -> None:
    """They end while the ranks compare the first batches; the loader's iterator keeps counting what they were asked for."""
    found = run_world(2, first_worker, workers)
    numbers = [number for own in found for one in own if not one.padding for (number,) in one.batch]
    assert sorted(numbers) == list(range(24))


def test_the_work_on_each_batch_is_random_in_its_own_way() -> None:
    """With separate streams, the random numbers of each forward pass are those of the micro-batch with the same number."""
    results = run_world(2, parts, [4, 4], 0, 1, None)
    (alone,) = [list(read(prepared([torch.zeros(1, 1)] * 4, World())))]
    assert [one.drawn for one in results[0][0]] == [alone[0].drawn, alone[2].drawn]
    assert [one.drawn for one in results[1][0]] == [alone[1].drawn, alone[3].drawn]


def test_an_evaluation_just_ends() -> None:
    """Without accumulation windows, as in an evaluation, each rank ends with its own stream."""
    results = run_world(2, parts, [9, 3], 0, None, None)
    assert [len(epoch) for epoch, *_ in results] == [5, 2]


@pytest.mark.parametrize("window", [None, 1])
def test_a_limit_of_rows_holds_for_each(window: int | None) -> None:
    """A limit holds for the micro-batches of each rank."""
    results = run_world(2, parts, [9, 3], 0, window, 3)
    assert [len([one for one in epoch if not one.padding]) for epoch, *_ in results] == [3, 2]


def empty_part(kind: str) -> list[float]:
    """What an own loop of rank 0 or 1 trains on, of which only rank 0 has data: a stream, or a list of batches."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    batches = [torch.tensor([[1.0]]), torch.tensor([[2.0]])] if rank == 0 else []
    source = batches if kind == "list" else DataLoader(Part([2, 0]), batch_size=1)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), source)
    found = []
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            found.append(float(batch))
    return found


@pytest.mark.parametrize("kind", ["list", "stream"])
def test_a_process_without_a_batch_takes_part_in_an_own_loop(kind: str) -> None:
    """Its padding is a batch of another process."""
    first, second = run_world(2, empty_part, kind)
    assert first == ([1.0, 2.0] * 2 if kind == "list" else [0.0, 1.0] * 2)
    assert second == [first[0]] * 4


# ------------------------------------------------------------------------------------------------- what is read is compared


class Compared(IterableDataset):
    """Yields numbers from `draw(rank)`, and counts nothing from a size."""

    def __init__(self, numbers: Callable[[int], list[float]]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[float]:
        return iter(self.numbers(int(os.environ["RANK"])))


def without_broken(samples: list[float]) -> Tensor | None:
    """A collate function that drops what is broken, and returns `None` where nothing is left."""
    good = [sample for sample in samples if sample >= 0]
    return torch.tensor(good)[:, None] if good else None


def unseeded(numbers: list[float]) -> list[float]:
    random.Random().shuffle(numbers)
    return numbers


def own_part(rank: int) -> list[float]:
    return [float(number) for number in range(rank, 24, 2)]


COMPARED: dict[str, Callable[[int], list[float]]] = {
    "parts that begin alike": lambda rank: [0.5, 0.5, *own_part(rank)],
    "parts that begin with what is broken": lambda rank: [-1.0, -1.0, *own_part(rank)],
    "one part begins with what is broken": lambda rank: [*[-1.0, -1.0] * rank, *own_part(rank)],
    "the whole begins with what is broken": lambda rank: [-1.0] * 6 + [float(number) for number in range(24)],
    "parts that begin alike for long": lambda rank: [0.5] * 10 + own_part(rank),
    "shuffled without a seed": lambda rank: unseeded([float(number) for number in range(24)]),
    "labels": lambda rank: [float(number % 3) for number in own_part(rank)],
}


def compared(window: int | None) -> dict[str, tuple[Any, list[str], list[str]]]:
    """Of each stream the numbers that this rank has got or the error, the notices, and the warnings."""
    found: dict[str, tuple[Any, list[str], list[str]]] = {}
    for kind, numbers in COMPARED.items():
        with heard() as texts, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = prepared(DataLoader(Compared(numbers), batch_size=2, collate_fn=without_broken), joined(), window)
            own: Any = []
            try:
                for epoch in (0, 1):
                    given = [micro.batch for micro in loader.iterate(epoch) if micro.kind is MicroBatchKind.DATA]
                    own.append([float(number) for batch in given if batch is not None for number in batch])
                    if window is None:
                        loader.end_epoch()
            except DataError as error:
                own = str(error)
            found[kind] = own, list(texts), [str(one.message) for one in caught]
    return found


@pytest.mark.parametrize("window", [1, 2, None])
def test_streams_are_compared_by_content(window: int | None) -> None:
    """Equal first batches, or none at all, decide nothing: every sample counts once, or there is an error or a warning."""
    found = run_world(2, compared, window)
    for kind in ("parts that begin alike", "parts that begin with what is broken", "one part begins with what is broken"):
        for rank in range(2):
            for epoch in (0, 1):
                assert [n for n in found[rank][kind][0][epoch] if n != 0.5] == own_part(rank), kind
        assert "different batches on each process" in " ".join(found[0][kind][1])
        assert found[0][kind][2] == []
    whole = [result["the whole begins with what is broken"] for result in found]
    assert sorted(n for own, *_ in whole for n in own[0]) == list(range(24))
    assert "uses one in 2" in " ".join(whole[0][1])
    for result in found:
        assert "different ones later" in result["parts that begin alike for long"][0]
        assert [sorted(own) for own in result["shuffled without a seed"][0]] == [list(range(24))] * 2
    (warning,) = found[0]["shuffled without a seed"][2]
    assert "of the compared samples are equal" in warning
    assert "that is the same on all processes" in warning
    assert "get_rank" in warning
    assert found[1]["shuffled without a seed"][2] == found[0]["labels"][2] == []


# ---------------------------------------------------------------------------------------------------------- lengths, lists


def lengths(kind: str) -> Any:
    world = joined()
    sources: dict[str, Callable[[], Any]] = {
        "sized": lambda: DataLoader(SizedDrawingStream(10), batch_size=4),
        "parts": lambda: DataLoader(SizedPart([8, 4]), batch_size=2),
        "one list": lambda: [torch.full((1, 1), n) for n in range(5)],
        "lists": lambda: [torch.full((1, 1), 10 * world.rank + n) for n in range(3 + world.rank)],
        "one empty": lambda: [torch.zeros(1, 1)] * world.rank,
    }
    loader = prepared(sources[kind](), world)
    before = loader.length, loader.exact
    own = [one.batch.flatten().tolist() for one in read(loader) if not one.padding]
    return before, loader.length, own


def test_a_stream_that_says_its_length() -> None:
    assert [found[:2] for found in run_world(2, lengths, "sized")] == [((2, False), 2)] * 2, "3 batches, 2 rows"
    before, after, _ = zip(*run_world(2, lengths, "parts"), strict=True)
    assert set(before) == {(2, False)}
    assert after == (4, 4), "when it is known that each has its own; the longest counts"


def test_lists_of_ready_batches() -> None:
    assert run_world(2, lengths, "one list") == [((3, True), 3, [[0], [2], [4]]), ((3, True), 3, [[1], [3]])]
    assert run_world(2, lengths, "lists") == [((4, True), 4, [[0], [1], [2]]), ((4, True), 4, [[10], [11], [12], [13]])]
    assert run_world(2, lengths, "one empty") == [((1, True), 1, []), ((1, True), 1, [[0]])]


# -------------------------------------------------------------------------------------------------------------- combined


def combined_parts(mode: str) -> Any:
    parts = [
        DataLoader(Part([6, 2]), batch_size=2),
        DataLoader(Drawing(8), batch_size=2),
        DataLoader(Part([2, 4]), batch_size=2),
    ]
    loader = prepared(CombinedLoader(parts, mode), joined())
    found = []
    for one in read(loader):
        pieces = [one.batch] if mode == "sequential" else one.batch
        found.append(None if one.padding else [piece if piece is None else piece[:, 0].int().tolist() for piece in pieces])
    return found


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("min_size", [[[[0, 1], [0, 1], [0, 1]]], [[[100, 101], [2, 3], [100, 101]]]]),
        (
            "max_size",
            [
                [[[0, 1], [0, 1], [0, 1]], [[2, 3], [4, 5], None], [[4, 5], None, None]],
                [[[100, 101], [2, 3], [100, 101]], [None, [6, 7], [102, 103]], None],
            ],
        ),
        (
            "sequential",
            [
                [[[0, 1]], [[2, 3]], [[4, 5]], [[0, 1]], [[4, 5]], [[0, 1]]],
                [[[100, 101]], [[2, 3]], [[6, 7]], [[100, 101]], [[102, 103]], None],
            ],
        ),
    ],
)
def test_separate_streams_next_to_a_dataset(mode: str, expected: Any) -> None:
    assert run_world(2, combined_parts, mode) == expected


def test_streams_of_their_own_in_a_cycle() -> None:
    """Separate streams in a combination: shorter ones start again until the longest loader of the rank has ended."""
    first, second = run_world(2, combined_parts, "max_size_cycle")
    assert [[piece[0][0], piece[2][0]] for piece in first] == [[0, 0], [2, 0], [4, 0]]
    assert [piece[1] for piece in first if piece] == [[0, 1], [4, 5], [0, 1]]
    assert [None if piece is None else [piece[0][0], piece[2][0]] for piece in second] == [[100, 100], [100, 102], None]
    assert [piece[1] for piece in second if piece] == [[2, 3], [6, 7]]


def sampled_parts(mode: str) -> Any:
    """Combine two datasets with a loader whose sampler yields different samples on each rank."""
    part = DataLoader(Drawing(12), batch_size=2, sampler=SubsetRandomSampler(range(joined().rank, 5 + joined().rank, 2)))
    loaders = [DataLoader(Drawing(4), batch_size=2), part, DataLoader(Drawing(10), batch_size=2)]
    loader = prepared(CombinedLoader(loaders, mode), joined(), None)
    return [one.ids for one in read(loader)]


def test_a_sampler_that_yields_parts_next_to_datasets() -> None:
    first, second = run_world(2, sampled_parts, "sequential")
    assert (first[0], second[0]) == ([0, 1], [2, 3])
    assert sorted([*first[1], *first[2]]) == [0, 2, 4]
    assert sorted([*second[1], *second[2]]) == [1, 3, 5]
    assert (first[3:], second[3:]) == ([[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]])
    first, second = run_world(2, sampled_parts, "max_size_cycle")
    for rank, own in enumerate((first, second)):
        assert [piece[0] for piece in own] == [[2 * rank, 2 * rank + 1]] * len(own)
        assert [piece[2] for piece in own] == [[2 * m, 2 * m + 1] for m in range(rank, 5, 2)]
        assert sorted(own[0][1] + own[1][1]) == list(range(rank, 5 + rank, 2))


def test_the_modes_are_all_looked_at() -> None:
    """This fails if a mode is added that this file does not test."""
    assert set(MODES) == {"min_size", "max_size_cycle", "max_size", "sequential"}
