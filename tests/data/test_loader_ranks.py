"""`PreparedLoader` on several ranks: together they yield the micro-batches and shares of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.data.dealt import Alike, Given, as_lists, assert_shared_out, dealt, global_windows, joined, prepared, read
from helpers.data.samples import Drawing, collate_and_draw, ids, same
from helpers.worlds.worlds import run_world
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from trainkit import CombinedLoader
from trainkit.distributed.world import World
from trainkit.errors import DataError
from trainkit.micro_batch import NO_BATCH, MicroBatchKind


def shuffled(length: int = 14, **options: Any) -> DataLoader:
    return DataLoader(Drawing(length), **{"batch_size": 4, "shuffle": True, "collate_fn": collate_and_draw, **options})


def one_by_one(length: int = 7) -> DataLoader:
    return DataLoader(Drawing(length), batch_size=None, shuffle=True)


def weighted(length: int = 14) -> DataLoader:
    return shuffled(length, shuffle=False, sampler=WeightedRandomSampler(torch.arange(1.0, length + 1), length + 3))


# -------------------------------------------------------------------------------------- the same batches on 1 to 4 ranks

SOURCES: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "in order": lambda: shuffled(shuffle=False),
    "whole batches": lambda: shuffled(drop_last=True),
    "weighted": weighted,
    "many": lambda: shuffled(61, batch_size=2),
    "two samples": lambda: shuffled(2, batch_size=1),
    "one sample": lambda: shuffled(1),
    "combined": lambda: CombinedLoader({"a": shuffled(16), "b": shuffled(8, batch_size=2)}, "max_size_cycle"),
}


@pytest.mark.parametrize("window", [None, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("source", SOURCES)
def test_rows_are_what_one_process_is_given(source: str, size: int, window: int | None) -> None:
    """Rank r of W yields micro-batches r, r + W, ... of one process: the same samples, augmentation and random numbers."""
    make = SOURCES[source]
    (alone,) = dealt(make, 1, None, epoch=2)
    by_rank = dealt(make, size, window, epoch=2)
    for rank, own in enumerate(by_rank):
        mine = [one for one in own if not one.padding]
        assert same([one.batch for one in mine], [one.batch for one in alone[rank::size]])
        assert [one.drawn for one in mine] == [one.drawn for one in alone[rank::size]]


@given(
    length=st.integers(1, 50),
    batch=st.integers(1, 5),
    window=st.integers(1, 4),
    size=st.integers(2, 5),
    limit=st.none() | st.integers(0, 6),
    micro_limit=st.none() | st.integers(0, 12),
)
def test_windows_and_shares(
    length: int, batch: int, window: int, size: int, limit: int | None, micro_limit: int | None
) -> None:
    """Windows are those of one process with the same global batch size, and the shares give the mean over the global batch."""

    def of(world: World, rows: int, end: int | None) -> list[Given]:
        loader = prepared(shuffled(length, batch_size=batch), world, rows)
        loader.limit, loader.micro_limit = end, micro_limit
        return list(read(loader, 1))

    alone = of(World(), window * size, None if limit is None else limit * size)
    expected = global_windows([alone])
    found = global_windows([of(Alike(rank, size), window, limit) for rank in range(size)])
    assert [[one.ids for one in group] for group in found] == [[one.ids for one in group] for group in expected]
    for group, wanted in zip(found, expected, strict=True):
        assert [one.share / size for one in group] == pytest.approx([one.share for one in wanted], rel=1e-15)
        assert not group[0].empty
    if found and length % batch == 0 and not found[0][0].uneven:
        assert {one.share for one in found[0]} == {size / len(found[0])}, "to the bit where all count the same"


def test_fewer_samples_than_processes() -> None:
    """If only rank 0 has a micro-batch, the other ranks take part in training with padding. An evaluation has no padding."""
    first, *others = dealt(lambda: shuffled(1), 4)
    assert [(one.ids, one.share, one.uneven, one.padding) for one in first] == [([0], 4.0, True, False)]
    for own in others:
        assert [(one.batch, one.share, one.uneven, one.padding) for one in own] == [(NO_BATCH, 0.0, True, True)]
        assert own[0].first
        assert own[0].full
    assert [len(own) for own in dealt(lambda: shuffled(1), 4, None)] == [1, 0, 0, 0], "an evaluation has no padding"
    assert dealt(lambda: shuffled(0, shuffle=False), 3) == [[], [], []]


def test_a_short_last_batch_counts_less_than_the_one_next_to_it() -> None:
    """14 samples in batches of 4 on 2 ranks: the last optimizer step has 4 samples on rank 0 and 2 on rank 1."""
    rows = [[one.share for one in own] for own in dealt(shuffled, 2)]
    assert rows == [[1.0, 2 * 4 / 6], [1.0, 2 * 2 / 6]]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_change_nothing(workers: int, persistent: bool) -> None:
    def make() -> DataLoader:
        return shuffled(22, num_workers=workers, persistent_workers=persistent)

    for rank in range(3):
        loader = prepared(make(), Alike(rank, 3), 2)
        for epoch in (0, 1):
            expected = list(read(prepared(shuffled(22), Alike(rank, 3), 2), epoch))
            assert same([tuple(one) for one in read(loader, epoch)], [tuple(one) for one in expected])
        loader.close()


def test_nothing_of_others_is_fetched() -> None:
    """A rank fetches only the samples of its own micro-batches, and three to compare its dataset with those of others."""
    for rank in range(3):
        source = shuffled(22)
        own = list(read(prepared(source, Alike(rank, 3), 2)))
        assert source.dataset.calls == [0, 11, 21] + [number for one in own if not one.padding for number in one.ids]


def test_a_rank_without_any_batch_has_a_micro_batch_of_kind_none() -> None:
    [micro] = prepared(shuffled(1), Alike(1, 2)).iterate(0)
    assert (micro.batch, micro.kind, micro.first, micro.last, micro.share) == (NO_BATCH, MicroBatchKind.NONE, True, True, 0.0)
    assert micro.uneven


# ----------------------------------------------------------------------------------------------------- lengths and limits


@pytest.mark.parametrize("size, rows, micro_batches", [(1, 4, 4), (2, 2, 4), (3, 2, 4), (4, 1, 4), (5, 1, 4)])
def test_a_length_is_in_rows(size: int, rows: int, micro_batches: int) -> None:
    # `len` is the number of micro-batches of each rank, padding included; `micro_batches` is the number on all ranks together.
    for rank in range(size):
        loader = prepared(shuffled(), Alike(rank, size))
        assert (len(loader), loader.length, loader.micro_batches) == (rows, rows, micro_batches)


def test_limits() -> None:
    """`limit` counts the micro-batches of each rank, `micro_limit` those of all ranks together."""
    loader = prepared(shuffled(40), Alike(1, 2))
    loader.limit = 3
    assert (loader.length, loader.micro_batches) == (3, 6)
    assert len(list(read(loader))) == 3
    loader.limit, loader.micro_limit = None, 5
    assert (loader.length, loader.micro_batches) == (3, 5)
    assert [one.padding for one in read(loader)] == [False, False, True]
    loader.limit = 1
    assert (loader.length, loader.micro_batches) == (1, 2)
    loader.limit = 0
    assert loader.length == len(list(read(loader))) == 0


def test_a_limit_of_micro_batches_on_one_process() -> None:
    loader = prepared(shuffled(40), World(), 2)
    loader.micro_limit = 3
    assert loader.length == 3
    assert [one.full for one in read(loader)] == [False, True, True]


# ------------------------------------------------------------------------------------------------ padding micro-batches


@pytest.mark.parametrize("workers", [0, 1])
def test_padding_may_be_the_last_batch_again(workers: int) -> None:
    make = lambda: shuffled(10, num_workers=workers)  # noqa: E731 - 3 micro-batches
    loader = prepared(make(), Alike(1, 2), pads=True)
    own = list(read(loader))
    assert [one.padding for one in own] == [False, True]
    assert_same_tensors(own[1].batch, own[0].batch)
    assert (own[1].share, own[1].first, own[1].full) == (0.0, True, True)
    loader.close()


def assert_same_tensors(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The containers are different objects, because a training loop may change them; the tensors are the same objects."""
    assert one is not other
    assert one.keys() == other.keys()
    assert all(one[name] is other[name] for name in one)


@pytest.mark.parametrize("count", range(1, 8))
def test_with_padding_all_processes_have_the_same_number(count: int) -> None:
    """With padding, all 3 ranks yield the same number of micro-batches, so that your own loop can gather after each.

    Accumulation windows have 2 micro-batches per rank.
    """
    (alone,) = dealt(lambda: shuffled(count, batch_size=1), 1)
    by_rank = dealt(lambda: shuffled(count, batch_size=1), 3, 2, pads=True)
    rows = -(-count // 3)
    for rank, own in enumerate(by_rank):
        assert [one.ids for one in own if not one.padding] == [one.ids for one in alone[rank::3]]
        assert [one.given for one in own] == list(range(1, rows + 1))
        assert [(one.first, one.full) for one in own] == [
            (row % 2 == 0, row % 2 == 1 or row == rows - 1) for row in range(rows)
        ]
        assert [one.padding for one in own] == [row * 3 + rank >= count for row in range(rows)]
        assert all(one.share == 0.0 for one in own if one.padding)
        assert [one.uneven for one in own] == [
            (count - row // 2 * 6) % 3 != 0 and row // 2 * 6 + 6 > count for row in range(rows)
        ]
        assert len({tuple(one.drawn) for one in own}) == rows, "each in a random state of its own"
    for row in range(0, rows, 2):
        shares = [one.share for own in by_rank for one in own[row : row + 2]]
        assert sum(shares) == pytest.approx(3)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_that_has_had_none_is_given_the_first_batch(workers: int) -> None:
    """A rank without any micro-batch gets the first one of the epoch as padding, in the random state of that micro-batch.

    Later epochs repeat the same batch.
    """
    (alone,) = dealt(lambda: shuffled(7), 1, epoch=3)
    seen: list[int] = []

    def transfer(batch: Any, m: int) -> Any:
        seen.append(m)
        return batch

    source = shuffled(7, num_workers=workers)
    loader = prepared(source, Alike(2, 3), pads=True, transfer=transfer, finish=lambda batch: {**batch, "done": 1})
    (only,) = read(loader, 3)
    assert only.padding
    assert only.batch.pop("done") == 1
    assert same(only.batch, alone[0].batch)
    assert only.drawn == alone[0].drawn
    assert seen == [0]
    (again,) = read(loader, 4)
    assert again.batch.pop("done") == 1  # it was removed from the previous batch only
    assert_same_tensors(again.batch, only.batch)
    loader.close()


# ------------------------------------------------------------------------- batch sizes that are known only after fetching


def everything(options: dict[str, Any], kind: str, window: int | None) -> list[Given]:
    loader = prepared(TALKING[kind](), joined(), window, **{**options, **WEIGH.get(kind, {})})
    found = [as_lists(one) for one in read(loader, 1)]
    loader.close()
    return found


def ragged() -> DataLoader:
    batches = [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10], [11], [12, 13], [1]]
    return DataLoader(Drawing(14), batch_sampler=batches, collate_fn=collate_and_draw)


class Halves(BatchSampler):
    """A batch sampler without a length."""

    def __len__(self) -> int:
        raise NotImplementedError


def tokens(batch: Any) -> float:
    """The weight of a batch, which is 0 if the first sample has an even number."""
    samples = batch["samples"]
    return float(samples[:, 0].sum()) if int(samples[0, 0]) % 2 else 0.0


TALKING: dict[str, Callable[[], Any]] = {
    "ragged": ragged,
    "no length": lambda: DataLoader(
        Drawing(14), batch_sampler=Halves(RandomSampler(range(14)), 4, False), collate_fn=collate_and_draw
    ),
    "one by one": one_by_one,
    "weighed": shuffled,
    "weighed, workers": lambda: shuffled(num_workers=2),
    "nothing counts": shuffled,
    "one after the other": lambda: CombinedLoader([shuffled(5), shuffled(9), shuffled(2)], "sequential"),
    "ready": lambda: [torch.full((n + 1, 1), n) for n in range(5)],
    "one ready": lambda: [torch.zeros(3, 1)],
}
WEIGH: dict[str, dict[str, Any]] = {
    "weighed": {"weigh": tokens},
    "weighed, workers": {"weigh": tokens},
    "nothing counts": {"weigh": lambda batch: 0.0},
}


def all_kinds(window: int | None) -> dict[str, list[Given]]:
    return {kind: everything({}, kind, window) for kind in TALKING}


@pytest.mark.parametrize("size, window", [(2, 1), (2, 2), (3, 2), (4, 1), (3, None)])
def test_processes_that_tell_one_another_agree_with_one(size: int, window: int | None) -> None:
    """Ranks that exchange their batch sizes have the windows and shares of one process."""
    by_rank = run_world(size, all_kinds, window)
    for kind, make in TALKING.items():
        loader = prepared(make(), World(), None if window is None else window * size, **WEIGH.get(kind, {}))
        alone = [as_lists(one) for one in read(loader, 1)]
        loader.close()
        own = [found[kind] for found in by_rank]
        assert_shared_out(own, alone, kind)
        if window is None:
            continue
        found, expected = global_windows(own), global_windows([alone])
        assert [[one.ids for one in group] for group in found] == [[one.ids for one in group] for group in expected], kind
        for group, wanted in zip(found, expected, strict=True):
            assert group[0].empty == wanted[0].empty == (kind == "nothing counts"), kind
            shares = [one.share / size for one in group]
            if window * size == 1:
                assert shares == [1.0]
            else:
                assert shares == pytest.approx([one.share for one in wanted], rel=1e-15), kind


def filled() -> list[Any]:
    found: list[Any] = []
    for make in (lambda: [torch.zeros(2, 1)], lambda: CombinedLoader([shuffled(4), shuffled(4)], "min_size")):
        loader = prepared(make(), joined(), pads=True)
        found.append([(one.padding, one.share, as_lists(one).batch) for one in read(loader)])
    return found


def test_padding_of_other_loaders() -> None:
    """Padding also works for lists of batches and for a `CombinedLoader`: rank 1 repeats the batch of rank 0."""
    first, second = run_world(2, filled)
    for theirs, ours in zip(first, second, strict=True):
        assert [(filler, share) for filler, share, _ in theirs] == [(False, 2.0)]
        assert [(filler, share) for filler, share, _ in ours] == [(True, 0.0)]
        assert same(ours[0][2], theirs[0][2])


# ------------------------------------------------------------------------------------------ fetching ahead on some ranks


def in_windows_on_cuda() -> list[Any]:
    """Rank 0 fetches one batch ahead and rank 1 does not, as can happen on CUDA if their first batches differ in size."""
    world = joined()
    events: list[str] = []

    def to_device(items: Any, load: Any, start: int = 0) -> Any:
        ahead = world.rank == 0
        waiting: list[Any] = []
        for number, item in enumerate(items, start):
            waiting.append(load(item, number))
            events.append("fetched")
            if not ahead or len(waiting) > 1:
                yield waiting.pop(0)
        yield from waiting

    loader = prepared(ragged(), world, 2, ahead=to_device, transfer=lambda batch, m: batch)
    found = []
    for one in read(loader):
        if one.full:
            assert world.sums([1.0]) == [2.0], "as at the end of every step"
        events.append("worked")
        found.append(as_lists(one))
    return [found, events]


def test_fetching_ahead_does_not_disturb_what_processes_tell_one_another() -> None:
    """Ranks exchange the batch sizes of a window when it begins, no matter how far each rank has fetched ahead."""
    results = run_world(2, in_windows_on_cuda)
    assert results[0][1][:3] == ["fetched", "fetched", "worked"]
    assert results[1][1][:2] == ["fetched", "worked"]
    expected = global_windows([list(read(prepared(ragged(), World(), 4)))])
    found = global_windows([own for own, _ in results])
    assert [[one.ids for one in group] for group in found] == [[one.ids for one in group] for group in expected]


# ------------------------------------------------------------------------------------------------- errors and repetition


def test_a_process_without_any_batch_cannot_repeat_one() -> None:
    loader = prepared(CombinedLoader([shuffled(4), shuffled(4)]), Alike(1, 2), pads=True)
    loader._stream.spare = lambda epoch: None
    with pytest.raises(DataError, match="rank 1 has no batch at all"):
        list(read(loader))


def test_what_is_read_again_is_as_it_was() -> None:
    """Reading an epoch again gives the same micro-batches."""
    loader = prepared(shuffled(30), Alike(1, 2), 2)
    assert same([tuple(one) for one in read(loader, 5)], [tuple(one) for one in read(loader, 5)])
    assert ids([next(iter(loader))]) == ids([next(iter(prepared(shuffled(30), Alike(1, 2), 2)))])
    assert loader.window == 2


def test_a_sampler_in_order() -> None:
    def make() -> DataLoader:
        return DataLoader(Drawing(9), batch_size=2, sampler=SequentialSampler(range(9)))

    assert [one.ids for one in global_windows(dealt(make, 3))[0]] == [[0, 1], [2, 3], [4, 5]]
