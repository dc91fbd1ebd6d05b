"""`gather`, `gather_for_metrics`, `reduce` and `pad_across_processes`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.worlds.threaded import ThreadStrategy, run_threads
from helpers.worlds.worlds import run_world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, Strategy
from trainkit.accelerator.processes import Gathering
from trainkit.distributed.world import World
from trainkit.errors import CollectiveError, ConfigurationError

WORLDS = (1, 2, 3)


def numbers(samples: int, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size, **options)


def said(error: type[Exception], function: Any) -> str:
    with pytest.raises(error) as raised:
        function()
    return str(raised.value)


# ------------------------------------------------------------------------------------------------------- samples of an epoch


def read_all(samples: int, even: bool, shuffle: bool) -> dict[str, Any]:
    accelerator = Accelerator(even_batches=even)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), numbers(samples, 3, shuffle=shuffle))
    model.eval()
    found: dict[str, Any] = {"tensors": [], "objects": [], "whole": [], "batches": 0}
    with torch.no_grad():
        for (x,) in loader:
            found["batches"] += 1
            if not even and accelerator.num_processes > 1:
                continue  # the processes have different numbers of batches, so they cannot gather
            found["tensors"] += accelerator.gather_for_metrics(x).tolist()
            found["objects"] += accelerator.gather_for_metrics([str(one) for one in x.tolist()])
            found["whole"] += accelerator.gather((x, {"twice": 2 * x}))[1]["twice"].tolist()
    return found


@pytest.mark.parametrize("size", WORLDS)
def test_each_sample_is_there_once_and_in_order(size: int) -> None:
    for found in run_world(size, read_all, 21, True, False):
        assert found["tensors"] == list(range(21))
        assert found["objects"] == [str(one) for one in range(21)]
        rows = -(-7 // size)
        assert found["batches"] == rows
        # a process without a micro-batch repeats its last one, which gather keeps and gather_for_metrics drops
        assert found["whole"][:21] == [2 * one for one in range(21)]
        assert (len(found["whole"]) > 21) is (size > 1)  # seven micro-batches do not divide evenly among two or three processes


def by_length(even: bool) -> tuple[list[float], int, int, list[str]]:
    """In a last batch of 3: class counts of as many classes as a full batch has samples, and a loss for each sample."""
    accelerator = Accelerator(even_batches=even)
    loader = accelerator.prepare(numbers(10 * accelerator.num_processes + 3, 10))
    counts, repeated, full = torch.zeros(10), 0, 0
    with told() as lines:
        for (x,) in loader:
            classes = nn.functional.one_hot(x % 10, 10).sum(0).float()
            counts += accelerator.gather_for_metrics(classes).view(-1, 10).sum(0)
            repeated += len(accelerator.gather_for_metrics(x.float().mean().repeat(len(x))))
            full += len(accelerator.gather_for_metrics(x.float().mean().repeat(10)))
    return counts.tolist(), repeated, full, lines


@contextmanager
def told() -> Iterator[list[str]]:
    """The notices of this process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainkit").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("trainkit").removeHandler(handler)


@pytest.mark.parametrize("size", [1, 2])
def test_no_rows_are_dropped_because_of_a_length(size: int) -> None:
    """A tensor that is by chance as long as a full batch stays whole in a short one; rank 1 has padding there."""
    (counts, repeated, full, lines), *others = run_world(size, by_length, True)
    samples = 10 * size + 3
    assert counts == [size + (label < 3) for label in range(10)], "as many of each class as there are"
    assert (sum(counts), repeated, full) == (samples, samples, 10 * size + 10)
    assert [other[:3] for other in others] == [(counts, repeated, full)] * (size - 1)
    kept = "gather_for_metrics keeps all 10 rows where the batch has 3 samples, fewer than the others"
    assert kept in lines[0]
    assert "accelerator.gather_for_metrics(loss.repeat(len(batch)))" in lines[0]
    dropped = "gather_for_metrics drops what rank 1 passes where only other ranks have a batch"
    assert [dropped in line for line in lines] == [False, True][:size]
    assert [other[3] for other in others] == [[]] * (size - 1)


@pytest.mark.parametrize("kind", ["tensors", "nested", "objects"])
def test_rows_of_a_padded_batch_are_dropped_with_a_notice(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The batch of 3 samples was padded to 4 rows: only what has a row for each of its rows is cut, and scalars never."""
    batch = SimpleNamespace(samples=4, padding=False, padded=(4, 3), full=4)
    part, x = Gathering(Strategy("cpu"), batch=batch), torch.arange(4)
    for _ in range(2):
        if kind == "tensors":
            assert part.gather_for_metrics(x).tolist() == [0, 1, 2]
            assert part.gather_for_metrics(torch.ones(5)).tolist() == [1.0] * 5
            assert part.gather(x).tolist() == [0, 1, 2, 3]
        elif kind == "nested":
            found = part.gather_for_metrics({"x": [x, x[:, None]], "loss": torch.tensor(4.0), "other": torch.ones(2, 4)})
            assert [one.tolist() for one in found["x"]] == [[0, 1, 2], [[0], [1], [2]]]
            assert (found["loss"].item(), found["other"].shape) == (4.0, (2, 4))
        else:
            assert part.gather_for_metrics(list("abcd")) == ["a", "b", "c"]
            assert part.gather_for_metrics([x], use_gather_object=True) == [x]
    (line,) = (record.getMessage() for record in caplog.records if "gather_for_metrics" in record.getMessage())
    assert "drops 1 row of 4, because the batch was padded from 3 samples" in line
    assert "accelerator.reduce(value)" in line


def taken_apart() -> list[int]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader([{"x": n, "label": n} for n in range(6)], batch_size=2))
    found: list[int] = []
    for batch in loader:
        label = batch.pop("label")
        found += accelerator.gather_for_metrics(label).tolist()
    return found


def test_a_loop_may_take_its_batches_apart() -> None:
    """A loop may remove entries of a batch before `gather_for_metrics`, also if the batch is used again as padding.

    Two processes share three micro-batches, so in the end one of them gets its previous batch again.
    """
    assert run_world(2, taken_apart) == [list(range(6))] * 2


@pytest.mark.parametrize("samples", [1, 4, 5, 13])
def test_of_less_than_a_row_too(samples: int) -> None:
    """Each sample is gathered once, also if there are fewer micro-batches than processes."""
    for found in run_world(3, read_all, samples, True, True):
        assert sorted(found["tensors"]) == list(range(samples))


def test_without_even_batches_an_evaluation_gives_each_process_its_own() -> None:
    assert [found["batches"] for found in run_world(3, read_all, 12, False, False)] == [2, 1, 1]


def test_as_in_the_quick_tour_the_rest_can_be_cut_off_by_hand() -> None:
    """A loop may drop the padding itself, by cutting to `len(loader.dataset)`, as in Accelerate's quick tour."""
    assert run_world(2, cut_by_hand) == [list(range(21))] * 2


def cut_by_hand() -> list[int]:
    accelerator = Accelerator()
    loader = accelerator.prepare(numbers(21, 3))  # seven micro-batches: at the end one process has padding
    found: list[int] = []
    for (x,) in loader:
        found += accelerator.gather(x).tolist()
    return found[: len(loader.dataset)]


# --------------------------------------------------------------------------------------------------------- shapes and dtypes


@pytest.mark.world_size(2)
def test_what_can_be_gathered() -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    assert accelerator.gather(torch.tensor(float(rank))).tolist() == [0.0, 1.0]
    joined = accelerator.gather({"a": [torch.full((2, 3), rank)], "b": torch.tensor([rank == 0])})
    assert joined["a"][0].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
    assert joined["b"].tolist() == [True, False]
    learnt = torch.ones(2, requires_grad=True)
    assert not accelerator.gather(learnt).requires_grad
    assert accelerator.gather_for_metrics([rank], use_gather_object=True) == [0, 1]
    assert [t.tolist() for t in accelerator.gather_for_metrics([torch.arange(rank)], use_gather_object=True)] == [[], [0]]
    assert accelerator.gather(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.world_size(2)
def test_what_does_not_go_together_is_named() -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    text = said(CollectiveError, lambda: accelerator.gather(torch.zeros(2, 3 + rank)))
    assert "rank 0: float32[2, 3]; rank 1: float32[2, 4]" in text
    assert "accelerator.gather(accelerator.pad_across_processes(x, dim=1))" in text
    text = said(CollectiveError, lambda: accelerator.gather(torch.zeros(2 + rank)))  # no loader is being read
    assert "rank 0: float32[2]; rank 1: float32[3]" in text
    assert "Gather each batch in the loop that reads it" in text
    text = said(CollectiveError, lambda: accelerator.gather(torch.zeros(2, dtype=torch.int64 if rank else torch.int32)))
    assert "rank 0: int32[2]; rank 1: int64[2]" in text
    text = said(CollectiveError, lambda: accelerator.gather([torch.zeros(1)] * (1 + rank)))
    assert "rank 0: float32[1]; rank 1: float32[1], float32[1]" in text
    text = said(CollectiveError, lambda: accelerator.reduce(torch.zeros(2 + rank)))
    assert "Pass tensors of the same shapes and dtypes" in text
    assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]  # the processes can continue after the errors
    assert "but found a str" in said(ConfigurationError, lambda: accelerator.gather(["a"]))
    assert "Pass an object in a list" in said(ConfigurationError, lambda: accelerator.gather_for_metrics("text"))


@pytest.mark.world_size(2)
def test_short_micro_batches_stay_short() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(numbers(7, 4))
    for (x,) in loader:
        assert accelerator.gather(x[:, None] * torch.ones(1, 2)).shape == (7, 2)
        assert "micro-batch" in said(CollectiveError, lambda: accelerator.gather(torch.zeros(len(x) + 1)))  # noqa: B023


# ---------------------------------------------------------------------------------------------------- reducing and padding


@pytest.mark.world_size(3)
def test_reduce() -> None:
    accelerator = Accelerator()
    mine = torch.tensor([1.0, 10.0**accelerator.process_index])
    assert accelerator.reduce(mine).tolist() == [3.0, 111.0]
    assert accelerator.reduce({"a": mine}, reduction="mean")["a"].tolist() == [1.0, 37.0]
    assert accelerator.reduce(mine, reduction="none", scale=2.0).tolist() == (2 * mine).tolist()
    assert accelerator.reduce(torch.tensor(accelerator.process_index), "sum", scale=0.5).item() == 1.5
    assert accelerator.reduce(mine, reduction="max").tolist() == [1.0, 100.0]
    assert "reduction must be one of sum, mean, max, none, not 'min'" in said(
        ConfigurationError, lambda: accelerator.reduce(mine, reduction="min")
    )


@pytest.mark.world_size(2)
def test_pad_across_processes() -> None:
    accelerator = Accelerator()
    rank = accelerator.process_index
    ragged = torch.full((2, 2 + rank), rank + 1)
    padded = accelerator.pad_across_processes(ragged, dim=1, pad_index=-100)
    assert padded.tolist() == ([[1, 1, -100]] * 2 if rank == 0 else [[2, 2, 2]] * 2)
    assert accelerator.gather(padded).tolist() == [[1, 1, -100]] * 2 + [[2, 2, 2]] * 2
    front = accelerator.pad_across_processes({"x": ragged, "n": torch.tensor(rank)}, dim=-1, pad_first=True)
    assert front["x"].tolist() == ([[0, 1, 1]] * 2 if rank == 0 else [[2, 2, 2]] * 2)
    assert front["n"].item() == rank
    rows = accelerator.pad_across_processes(torch.ones(1 + 2 * rank, 2))
    assert rows.shape == (3, 2)
    text = said(CollectiveError, lambda: accelerator.pad_across_processes(torch.zeros([1] * (1 + rank))))
    assert "rank 0: float32[1]; rank 1: float32[1, 1]" in text


def test_one_process_gets_what_it_gave() -> None:
    accelerator, x = Accelerator(cpu=True), torch.ones(2, 3)
    for verb in (accelerator.gather, accelerator.gather_for_metrics, accelerator.pad_across_processes):
        assert verb(x) is x
    reduced = accelerator.reduce(x)
    reduced /= 2
    assert x.tolist() == [[1.0] * 3] * 2  # not modified, as with several processes
    assert accelerator.gather_for_metrics(["a"]) == ["a"]
    assert accelerator.gather(torch.tensor(1.0)).ndim == 0


# ------------------------------------------------------------------------------------------------ without an Accelerator


class Batch:
    """The current batch on each of three ranks: the last batch of rank 1 is short, and rank 2 has padding."""

    def __init__(self, rank: int) -> None:
        self.samples, self.padding, self.full = (2, 1, 2)[rank], rank == 2, 2
        self.padded = (2, 1) if rank == 1 else None


def test_the_part_needs_no_accelerator() -> None:
    """`Gathering` can be used without an `Accelerator`."""
    x = torch.ones(2, 3)
    alone = Gathering(Strategy("cpu"))
    assert alone.world.size == 1
    assert alone.gather(x) is alone.gather_for_metrics(x) is alone.broadcast(x, 0) is alone.pad_across_processes(x) is x
    assert alone.reduce(x, "none", 2.0).tolist() == [[2.0] * 3] * 2
    alone.wait("gather")


def test_the_part_drops_padding_only_for_metrics() -> None:
    """`gather_for_metrics` drops padding; `gather`, `reduce` and `broadcast` keep it."""

    def work(world: World) -> list[Any]:
        part = Gathering(ThreadStrategy(world), batch=Batch(world.rank))
        x = torch.arange(2) + 10 * world.rank
        rows = x[:1] if world.rank == 1 else x
        return [
            part.gather_for_metrics(x).tolist(),
            part.gather(rows).tolist(),
            part.gather_for_metrics([world.rank]),
            part.reduce(x, "max").tolist(),
            part.broadcast(x, 1).tolist(),
        ]

    expected = [[0, 1, 10], [0, 1, 10, 20, 21], [0, 1], [20, 21], [10, 11]]
    assert run_threads(3, work) == [expected] * 3


def test_the_part_names_what_differs() -> None:
    def work(world: World) -> list[str]:
        part = Gathering(ThreadStrategy(world))
        return [
            said(CollectiveError, lambda: part.gather(torch.ones(1 + world.rank))),
            said(CollectiveError, lambda: part.reduce(torch.ones(1 + world.rank))),
            said(ConfigurationError, lambda: part.broadcast(torch.ones(1), world.rank)),
        ]

    for gathered, reduced, sent in run_threads(2, work):
        assert gathered.startswith("gather: ")
        assert reduced.startswith("reduce: ")
        assert "rank 0: float32[1]; rank 1: float32[2]" in gathered
        assert sent == "broadcast: from_process must be the same on all processes, but it is rank 0: 0, rank 1: 1."
