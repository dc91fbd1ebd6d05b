"""The position of a loop in its data, and resuming from it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from itertools import count, islice, repeat
from typing import Any

import pytest
import torch
from helpers.data.samples import Drawing, collate_and_draw, prepare, same, whole_epoch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from trainkit import CombinedLoader
from trainkit.data.stream_sharder import Resumption, StateHistory
from trainkit.errors import StateMismatchError


def shuffled(length: int = 14, **options: Any) -> DataLoader:
    return DataLoader(Drawing(length), **{"batch_size": 4, "shuffle": True, "collate_fn": collate_and_draw, **options})


def test_the_sizes_of_all_processes_together() -> None:
    loader = prepare(shuffled())
    assert (loader.total_batch_size, loader.total_dataset_length) == (4, 14)

    class Part(Drawing):
        total_length = 100

    assert prepare(DataLoader(Part(14), 4)).total_dataset_length == 100
    assert prepare(CombinedLoader([shuffled(), shuffled()])).total_batch_size == 8
    assert getattr(prepare([[1], [2]]), "total_batch_size", None) is None
    assert not hasattr(prepare([[1], [2]]), "total_dataset_length")


@pytest.mark.parametrize("done", range(5))
def test_the_position_after_each_batch(done: int) -> None:
    """A loader that resumes after any number of batches continues with the rest of the epoch."""
    first = prepare(shuffled())
    batches = iter(first)
    head = [next(batches) for _ in range(done)]
    second = prepare(shuffled())
    second.load_state_dict(first.state_dict())
    epoch = 0 if done < 4 else 1  # after a complete epoch, the next one starts
    assert second.epoch == epoch
    expected = whole_epoch(second, epoch)
    assert same(list(second), expected[done:] if done < 4 else expected)
    assert len(head) == done


def test_what_a_position_holds() -> None:
    loader = prepare(shuffled())
    assert loader.position(3, 2) == {
        "epoch": 3,
        "batches": 2,
        "samples": 8,
        "complete": False,
        "dataset": 14,
        "iterable": None,
    }
    last = loader.position(3, 4)
    assert (last["samples"], last["complete"]) == (14, True)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_may_change(workers: int) -> None:
    """A position resumes with another number of workers."""
    first = prepare(shuffled(num_workers=2 - workers))
    batches = iter(first)
    next(batches)
    second = prepare(shuffled(num_workers=workers))
    second.load_state_dict(first.state_dict())
    assert same(list(second), whole_epoch(first, 0)[1:])
    first.close()
    second.close()


def test_a_window_that_is_being_worked_on_is_repeated() -> None:
    """The saved position is the start of the current window, so an incomplete window is repeated after a resume."""
    loader = prepare(shuffled(30), window=3)
    batches = iter(loader)
    positions = [loader.state_dict()["batches"] for _ in batches]
    assert positions == [0, 0, 3, 3, 3, 6, 6, 0], "8 batches: windows of 3, 3 and 2, and then the next epoch"


def test_a_sampler_that_draws_more_samples_than_there_are() -> None:
    """If a sampler draws more samples than the dataset has, the epoch is complete only at the end of the sampler."""
    sampler = RandomSampler(range(8), replacement=True, num_samples=16)
    loader = prepare(DataLoader(Drawing(8), batch_size=4, sampler=sampler, collate_fn=collate_and_draw))
    assert loader.position(0, 2)["samples"] == 8
    assert loader.start_of(loader.position(0, 2)) == 2
    assert loader.start_of(loader.position(0, 4)) == 4


def test_an_epoch_that_was_complete_is_complete_in_any_batch_size() -> None:
    """A position at the end of an epoch can be resumed with another batch size."""
    position = prepare(shuffled(14)).position(0, 4)
    assert prepare(shuffled(14, batch_size=5)).start_of(position) == 3


def test_a_position_inside_a_batch_is_refused() -> None:
    position = prepare(shuffled(14)).position(0, 2)
    assert prepare(shuffled(14, batch_size=2)).start_of(position) == 4
    with pytest.raises(StateMismatchError, match="8 samples .* inside a micro-batch of 3.*divides 8, such as 1"):
        prepare(shuffled(14, batch_size=3)).start_of(position)


def test_loaders_read_together_resume_together() -> None:
    def both() -> CombinedLoader:
        return CombinedLoader([shuffled(24), shuffled(8, batch_size=2)], mode="max_size_cycle")

    whole = list(prepare(both()))
    loader = prepare(both())
    loader.load_state_dict(loader.position(0, 3))
    rest = list(loader)
    assert len(rest) == len(whole) - 3
    assert same(rest, whole[3:])


def test_a_weighted_sampler_resumes() -> None:
    def weighted() -> DataLoader:
        sampler = WeightedRandomSampler([1.0] * 10 + [5.0] * 4, 14)
        return DataLoader(Drawing(14), batch_size=4, sampler=sampler, collate_fn=collate_and_draw)

    whole = list(prepare(weighted()))
    loader = prepare(weighted())
    loader.load_state_dict(loader.position(0, 2))
    assert same(list(loader), whole[2:])


class Countdown:
    """A stateful iterable."""

    def __init__(self) -> None:
        self.left = 6

    def __iter__(self) -> Any:
        while self.left:
            self.left -= 1
            yield self.left

    def state_dict(self) -> dict[str, int]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left = state["left"]


def states(history: StateHistory, *numbers: int) -> list[Any]:
    """The states after these numbers of batches."""
    return [None if (entry := history.at(number)) is None else entry.state for number in numbers]


def test_a_trail_keeps_the_last_states() -> None:
    """A `StateHistory` keeps only the states after the last few batches, or after more of them if requested."""
    owner = Countdown()
    history = StateHistory(owner, readable=True)
    batches = history.follow(iter(owner), history.begin(0))
    assert [next(batches) for _ in range(5)] == [5, 4, 3, 2, 1]
    assert states(history, 5, 2) == [{"left": 1}, {"left": 4}]
    assert history.at(0) is None, "only the last ones are kept"
    history.keep(10)
    assert states(history, 2) == [{"left": 4}]


def test_the_state_after_batches_that_were_skipped() -> None:
    """If batches were skipped, the state is known as soon as the last of them has been read."""
    owner = Countdown()
    history = StateHistory(owner, readable=True)
    assert history.begin(2) == 0, "from the beginning"
    numbers = iter(owner)
    assert [next(numbers), next(numbers)] == [5, 4]
    history.mark(2)
    batches = history.follow(numbers, 2)
    assert next(batches) == 3
    assert states(history, 2, 3) == [{"left": 4}, {"left": 3}]


def test_a_trail_of_rows() -> None:
    """On 3 ranks, each rank reads 3 batches for each one it yields: the history has a state for every third batch."""
    owner = Countdown()
    history = StateHistory(owner, readable=True)
    history.mark(6)
    batches = iter(owner)
    rows = history.follow((max(islice(batches, 3)) for _ in range(2)), 6, 3)
    assert list(rows) == [5, 2]
    assert states(history, 6, 7, 9, 12) == [{"left": 6}, None, {"left": 3}, {"left": 0}]


def test_a_history_continues_without_reading() -> None:
    """A restored state is used once: the iterable continues there and no batch is skipped."""
    owner = Countdown()
    history = StateHistory(owner, readable=True)
    history.resume(Resumption(4, {"left": 2}))
    assert history.begin(4) == 4
    assert list(history.follow(iter(owner), 4)) == [1, 0]
    assert history.begin(4) == 0, "once"


def test_a_history_reads_the_last_batch_again() -> None:
    """With the state before the last batch, the iterable continues there, so that the batch can be compared."""
    owner = Countdown()
    history = StateHistory(owner, readable=True)
    history.resume(Resumption(4, {"left": 2}, "digest", (3, {"left": 3})))
    assert history.begin(4) == 3
    assert next(iter(owner)) == 2
    history.restart()
    assert owner.left == 6, "its first state"


def test_a_state_that_lies_in_workers_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    """With workers, the state of an iterable is not saved, and a notice says so."""
    history = StateHistory(Countdown(), readable=False)
    assert not history.active
    assert history.begin(3) == 0
    assert "its state lies in worker processes; it can be kept with num_workers=0" in caplog.text


# --------------------------------------------------------------------------------------- whether it continues where it was


class Buffered:
    """Shuffles 40 numbers through a buffer of 10, with a seed, and has a state without the content of the buffer.

    Like an `IterableDataset` of Hugging Face's `datasets`: what is read next is known, and the buffer is filled again.
    """

    def __init__(self, seeds: Iterator[int] | None = None) -> None:
        self.seeds, self.next = repeat(5) if seeds is None else seeds, 0

    def __iter__(self) -> Iterator[Tensor]:
        shuffle, buffer = random.Random(next(self.seeds)), []
        while self.next < 40 or buffer:
            while self.next < 40 and len(buffer) < 10:
                buffer.append(self.next)
                self.next += 1
            yield torch.tensor([buffer.pop(shuffle.randrange(len(buffer)))])
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Shuffled:
    """Shuffles without a state."""

    def __init__(self, seeds: Iterator[int]) -> None:
        self.seeds = seeds

    def __iter__(self) -> Iterator[Tensor]:
        numbers = list(range(40))
        random.Random(next(self.seeds)).shuffle(numbers)
        return (torch.tensor([number]) for number in numbers)


class Exact(Buffered):
    """Its state has the buffer, and the state of its generator."""

    def __init__(self) -> None:
        super().__init__()
        self.shuffle, self.buffer = random.Random(5), list[int]()

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < 40 or self.buffer:
            while self.next < 40 and len(self.buffer) < 10:
                self.buffer.append(self.next)
                self.next += 1
            yield torch.tensor([self.buffer.pop(self.shuffle.randrange(len(self.buffer)))])
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "buffer": self.buffer, "generator": self.shuffle.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.buffer = state["next"], list(state["buffer"])
        self.shuffle.setstate(state["generator"])


@pytest.mark.parametrize(
    "make, lost, text",
    [
        (lambda others: Exact(), 0, ""),
        (
            lambda others: Buffered(),
            0,
            "did not continue where its state_dict was saved, so the epoch was read from its beginning: 17 batches",
        ),
        (lambda others: Shuffled(repeat(3)), 0, "cannot start in the middle"),
        (Buffered, None, "batch 17 of the epoch differs from the one that was trained on"),
        (Shuffled, None, "batch 17 of the epoch differs from the one that was trained on"),
    ],
)
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_resumed_stream_is_compared(
    make: Callable[[Iterator[int]], Any], lost: int | None, text: str, epoch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the state is not exact, the epoch is read from its beginning; where that is not exact either, a warning says so."""
    others = count()  # as a generator without a seed: each iteration is another one
    first, second = prepare(make(others), window=1), prepare(make(others), window=1)
    for _ in range(epoch):
        list(first)
    before = [int(batch) for batch in islice(first, 17)]
    place = first.state_dict()
    caplog.clear()
    second.load_state_dict(place)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after = [int(batch) for batch in second]
    assert len(before) + len(after) == 40
    assert lost is None or sorted(before + after) == list(range(40))
    told = caplog.text + " ".join(str(one.message) for one in caught)
    assert text in told
    assert bool(caught) == (lost is None)
    assert text or "beginning" not in told


def test_a_run_that_is_saved_again_where_it_was_resumed() -> None:
    """It is as good a position as the first one: what is compared is kept."""
    first, second, third = (prepare(Buffered(), window=1) for _ in range(3))
    before = [int(batch) for batch in islice(first, 17)]
    second.load_state_dict(first.state_dict())
    between = [int(batch) for batch in islice(second, 1)]
    third.load_state_dict(second.state_dict())
    assert sorted(before + between + [int(batch) for batch in third]) == list(range(40))
