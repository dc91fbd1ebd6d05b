"""Positions on several ranks: a run on W processes resumes on any other number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.data.dealt import Alike, Given, global_windows, heard, joined, observed, prepared, read
from helpers.data.samples import Drawing, DrawingStream, collate_and_draw, same
from helpers.worlds.worlds import run_world
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from trainkit import CombinedLoader
from trainkit.data import PreparedLoader
from trainkit.distributed.world import World
from trainkit.errors import StateMismatchError
from trainkit.micro_batch import MicroBatchKind


def shuffled(length: int = 46, **options: Any) -> DataLoader:
    return DataLoader(Drawing(length), **{"batch_size": 2, "shuffle": True, "collate_fn": collate_and_draw, **options})


SOURCES: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "short last": lambda: shuffled(45),
    "replacement": lambda: shuffled(shuffle=False, sampler=RandomSampler(range(46), True, 45)),
    "combined": lambda: CombinedLoader([shuffled(46), shuffled(16, batch_size=4)], "max_size_cycle"),
}


def loaders(make: Callable[[], Any], size: int, accumulated: int) -> list[PreparedLoader]:
    worlds = [World()] if size == 1 else [Alike(rank, size) for rank in range(size)]
    return [prepared(make(), world, accumulated // size) for world in worlds]


def windows_of(of: list[PreparedLoader], epoch: int, count: int | None = None) -> list[list[Given]]:
    """Read the next accumulation windows as your own training loop would, `count` of them or all."""
    parts = []
    for loader in of:
        own = []
        for one in observed(loader, loader.next_epoch()):
            own.append(one)
            if one.full and count is not None and sum(other.full for other in own) == count:
                break
        assert loader.epoch == epoch
        parts.append(own)
    return global_windows(parts)


def contents(windows: list[list[Given]]) -> list[Any]:
    return [[(one.batch, one.drawn) for one in group] for group in windows]


# ------------------------------------------------------------------------------------------- the same global batch size

WORLDS = [(2, 1), (1, 2), (2, 3), (3, 2), (4, 1), (3, 4), (6, 2), (2, 2)]


@pytest.mark.parametrize("source, workers", [*((source, 0) for source in SOURCES), ("shuffled", 2)])
def test_another_number_of_processes_resumes(source: str, workers: int) -> None:
    """A run that stops after its first optimizer step resumes with the same global batches on another number of ranks.

    An epoch has 23 micro-batches, and a window has 12 on all ranks together.
    """
    make = SOURCES[source] if not workers else lambda: shuffled(num_workers=workers)
    whole = windows_of(loaders(SOURCES[source], 1, 12), 0)
    for before, after in WORLDS[:2] if workers else WORLDS:
        first = loaders(make, before, 12)
        head = windows_of(first, 0, 1)
        positions = [loader.state_dict() for loader in first]
        assert {(place["batches"], place["samples"]) for place in positions} == {
            (12, None if source == "combined" and positions[0]["samples"] is None else 12 * (2 if source != "combined" else 6))
        }
        second = loaders(make, after, 12)
        for loader in second:
            loader.load_state_dict(positions[0])
            assert loader.length == len(loader) == -(-23 // after)
        tail = windows_of(second, 0)
        assert same(contents(head + tail), contents(whole))
        for loader in (*first, *second):
            loader.close()


def test_a_window_that_is_being_worked_on_is_repeated_by_all() -> None:
    first = loaders(shuffled, 2, 12)
    for loader in first:
        for number, _ in enumerate(observed(loader, loader.next_epoch()), 1):
            if number == 8:  # the second micro-batch of the second window
                break
    assert [loader.state_dict()["batches"] for loader in first] == [12, 12]


def test_an_epoch_that_is_complete() -> None:
    first = loaders(lambda: shuffled(45), 2, 4)
    windows_of(first, 0)
    places = [loader.state_dict() for loader in first]
    assert {(place["epoch"], place["batches"]) for place in places} == {(1, 0)}
    last = first[1].position(0, 12)
    assert (last["batches"], last["samples"], last["complete"]) == (23, 45, True)
    (third,) = loaders(lambda: shuffled(45, batch_size=3), 1, 4)
    assert third.start_of(last) == 15


# ------------------------------------------ another global batch size, and starts that are no multiple of the world size


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("start", [1, 2, 5, 7, 22, 23])
@pytest.mark.parametrize("length", [45, 46, 47])
def test_sharding_begins_where_the_epoch_resumes(start: int, size: int, length: int) -> None:
    make = lambda: shuffled(length)  # noqa: E731
    (alone,) = loaders(make, 1, 1)
    expected = [one for one in read(alone) if not one.padding][start:]
    place = {**alone.position(0, start)}
    group = loaders(make, size, 2 * size)
    rows = set()
    for loader in group:
        loader.load_state_dict(place)
        rows.add((loader.start_of(place), loader.length))
        assert loader.state_dict()["batches"] == start, "what it would save before it has done anything"
    ((first, total),) = rows
    assert first == -(-start // size)
    windows = windows_of(group, 0)
    assert same(contents([[one for part in windows for one in part]]), contents([expected]))
    assert total == first + -(-(loader.micro_batches - start) // size)
    if windows:
        assert {loader.given for loader in group} == {total}
    for rows_done in range(first, total + 1):
        saved = group[0].position(0, rows_done)
        assert saved["batches"] == min(start + (rows_done - first) * size, alone.length)
        assert alone.start_of(saved) == saved["batches"]
    assert group[0].position(1, 1)["batches"] == size, "the next epoch begins at its begin"
    list(group[0].iterate(1))
    assert group[0].length == -(-alone.length // size)


def test_an_epoch_that_is_begun_again_after_a_resume() -> None:
    """After a resume inside an epoch, iterating the epoch from its start has its full length again."""
    first, second = loaders(shuffled, 2, 2)
    for loader in (first, second):
        loader.load_state_dict(loaders(shuffled, 1, 1)[0].position(0, 3))
        assert loader.length == 12
        list(loader.iterate(0))
        assert loader.length == 12
        assert loader.position(0, 2)["batches"] == 4


def test_a_position_inside_a_batch_is_refused_on_each() -> None:
    place = prepared(shuffled(), Alike(0, 2)).position(0, 3)
    assert place["samples"] == 12
    with pytest.raises(StateMismatchError, match="12 samples .* inside a micro-batch of 5"):
        prepared(shuffled(batch_size=5), Alike(1, 2)).start_of(place)


def test_what_a_position_holds() -> None:
    assert prepared(shuffled(), Alike(1, 2)).position(3, 4) == {
        "epoch": 3,
        "batches": 8,
        "samples": 16,
        "complete": False,
        "dataset": 46,
        "iterable": None,
        "processes": 2,
        "rank": 1,
        "splits": False,
    }


def test_a_limit_ends_where_it_ends() -> None:
    """At the end of a limited epoch, the position has the number of micro-batches of the limit, not one per rank more."""
    loader = prepared(shuffled(45), Alike(0, 2))
    loader.micro_limit = 5
    assert loader.length == 3
    assert (loader.position(0, 3)["batches"], loader.position(0, 3)["samples"]) == (5, 10)


# ------------------------------------------------------------------------------------------------------------ iterables


class Counter(IterableDataset):
    """A stateful dataset of successive numbers. With `parts`, each rank yields only its own numbers."""

    def __init__(self, length: int, parts: bool = False) -> None:
        self.length, self.parts = length, parts
        self.next = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if self.parts else (0, 1)
        while self.next * size + rank < self.length:
            number = self.next * size + rank
            self.next += 1
            self.read.append(number)
            yield torch.tensor([number, torch.rand((), dtype=torch.float64).item()], dtype=torch.float64)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, **({"rank": torch.distributed.get_rank()} if self.parts else {})}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]
        assert state.get("rank", 0) == (torch.distributed.get_rank() if self.parts else 0), "its own"


def go_on(parts: bool, stateful: bool, place: Any, rows: int | None) -> tuple[Any, ...]:
    """Resume from a position and read up to `rows` micro-batches.

    Returns them, the position after them, the numbers read from the dataset, the notices, and the random numbers drawn.
    """
    dataset: Any = Counter(29, parts) if stateful else DrawingStream(29)
    found: list[Any] = []
    drawn: list[Any] = []
    with heard() as texts:
        loader = prepared(DataLoader(dataset, batch_size=2), joined())
        if place is not None:
            loader.load_state_dict(place)
        for micro in loader.next_epoch():
            without_data = micro.kind is not MicroBatchKind.DATA
            found.append(None if without_data else micro.batch[:, 0].int().tolist())
            drawn.append(None if without_data else micro.batch[:, 1].tolist())
            if len(found) == rows:
                break
    return found, loader.gather_position(loader.state_dict()), list(getattr(dataset, "read", [])), " ".join(texts), drawn


def by_rows(results: list[Any]) -> list[Any]:
    rows = max(len(found) for found, *_ in results)
    batches = [found[row] for row in range(rows) for found, *_ in results if row < len(found)]
    return [batch for batch in batches if batch is not None]


WHOLE = [list(range(n, min(n + 2, 29))) for n in range(0, 29, 2)]


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("before, after", [(2, 3), (3, 2), (2, 2), (1, 2), (2, 1)])
def test_one_stream_resumes_on_any_number_of_processes(before: int, after: int, stateful: bool) -> None:
    rows = 2
    (whole,) = run_world(1, go_on, False, stateful, None, None)
    first = run_world(before, go_on, False, stateful, None, rows)
    assert by_rows(first) == WHOLE[: before * rows]
    places = [place for _, place, *_ in first]
    assert [place["batches"] for place in places] == [before * rows] * before
    assert [place["iterable"] for place in places] == [{"next": 4 * before} if stateful else None] * before
    second = run_world(after, go_on, False, stateful, places[0], None)
    assert by_rows(second) == WHOLE[before * rows :]
    drawn = [[one[4][row] for row in range(len(one[4])) if one[4][row] is not None] for one in second]
    assert drawn == [whole[4][before * rows + rank :: after] for rank in range(after)], "under the same random numbers"
    if stateful:
        for _, _, read_again, *_ in second:
            assert read_again == list(range(2 * before, 29)), "and of what was read only the last row"


@pytest.mark.parametrize("before, after", [(1, 1), (2, 2), (2, 1), (1, 3), (2, 3)])
def test_a_stream_that_was_read_to_its_end_is_not_read_again(before: int, after: int) -> None:
    """At the end of an epoch, the saved state is the start of the next epoch, so a resume reads nothing again.

    The last batch is short. On two ranks, only rank 0 has a last batch.
    """
    first = run_world(before, go_on, False, True, None, -(-15 // before))
    assert by_rows(first) == WHOLE
    second = run_world(after, go_on, False, True, first[0][1], None)
    assert [(found, read_again) for found, _, read_again, *_ in second] == [([], [])] * after


class Lines:
    """A stateful iterable of batches. Its state counts on from epoch to epoch."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(5):
            self.count += 1
            yield torch.tensor([[100 * (self.count // 6) + number]])
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_epoch_after_one_that_was_read_to_its_end(epoch: int) -> None:
    """A run that resumes at the end of an epoch continues with the next epoch.

    This holds whether the loader iterates the finished epoch again, which yields nothing, or only the next one.
    """
    first = prepared(Lines(), Agreeing(0, 2))
    assert [one.ids for one in read(first)] == [[0], [2], [4]]
    place = first.position(0, 3)
    second = prepared(Lines(), Agreeing(0, 2))
    second.resume(place, second.start_of(place))
    if epoch == 0:
        assert list(read(second, 0, 3)) == []
        assert second.position(0, 3)["iterable"] == place["iterable"], "a run that is saved there again"
    assert [one.ids for one in read(second, 1)] == [[100], [102], [104]]


@pytest.mark.parametrize("stateful", [True, False])
def test_separate_streams_resume_on_as_many_processes(stateful: bool) -> None:
    whole = run_world(2, go_on, True, True, None, None)
    assert [found for found, *_ in whole] == [
        [[0, 2], [4, 6], [8, 10], [12, 14], [16, 18], [20, 22], [24, 26], [28]],
        [[1, 3], [5, 7], [9, 11], [13, 15], [17, 19], [21, 23], [25, 27], None],
    ]
    first = run_world(2, go_on, True, True, None, 3)
    place = first[0][1]
    assert (place["iterable"], place["splits"], place["processes"]) == (
        [{"next": 6, "rank": 0}, {"next": 6, "rank": 1}],
        True,
        2,
    )
    if not stateful:
        place = {**place, "iterable": None}
    second = run_world(2, go_on, True, True, place, None)
    for rank in range(2):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        assert first[rank][4] + second[rank][4] == whole[rank][4], "under the same random numbers"
        assert len(second[rank][2]) == len(whole[rank][2]) - (4 if stateful else 0), "the last batch again"


def test_streams_of_their_own_on_another_number_of_processes() -> None:
    """Inside an epoch, separate streams resume on another number of ranks by skipping batches, with a notice from rank 0."""
    place = run_world(2, go_on, True, True, None, 3)[0][1]
    found = run_world(3, go_on, True, True, place, None)
    assert "was saved by 2 processes, each with its own stream of data; on 3" in found[0][3]
    assert "is of 2 processes" not in found[1][3], "one speaks for all"
    assert found[0][0] == [[12, 15], [18, 21], [24, 27]], "two batches of each are skipped, as 6 have been read in all"


def test_streams_of_their_own_begin_an_epoch_on_another_number_of_processes() -> None:
    """From a position at the start of an epoch, separate streams resume on another number of ranks and lose no samples.

    The position has a state for each of the 2 old ranks.
    """
    place = {**run_world(2, go_on, True, True, None, 3)[0][1], "epoch": 1, "batches": 0}
    assert len(place["iterable"]) == 2
    for size in (3, 4):
        found = run_world(size, go_on, True, True, place, None)
        assert sorted(number for batch in by_rows(found) for number in batch) == list(range(29))


def test_the_state_of_one_process_is_not_anothers() -> None:
    """If a position has only the state of rank 0, rank 1 uses only the number of batches and skips them."""
    place = {**run_world(2, go_on, True, True, None, 3)[0][1], "iterable": {"next": 6, "rank": 0}, "rank": 0}
    del place["replay"]
    second = run_world(2, go_on, True, True, place, None)
    assert [len(read) for _, _, read, *_ in second] == [15 - 6, 14]
    assert [found[0] for found, *_ in second] == [[12, 14], [13, 15]]


class Agreeing(Alike):
    """A world in which all ranks have the values of this one."""

    def rows(self, values: Any) -> Any:
        return [list(values)] * self.size


def test_what_had_to_be_skipped_has_a_state_at_its_end() -> None:
    """After a resume that skipped batches, the state is known for the resumed position too."""
    loader = prepared(DataLoader(Counter(29), batch_size=2), Agreeing(1, 2))
    place = {**loader.position(0, 2), "iterable": None}
    loader.load_state_dict(place)
    batches = iter(loader)
    assert next(batches)[:, 0].tolist() == [10, 11]
    assert loader.state_dict()["iterable"] == {"next": 12}
    assert loader.position(0, 2)["iterable"] == {"next": 8}
