"""`PreparedLoader` of a process with several devices: the micro-batches of all devices are joined into one batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainkit.data.loader import PreparedLoader
from trainkit.distributed.world import World
from trainkit.rng import Purpose, Stage, mix


class Drawn(Dataset[Any]):
    """Sample i is (i, a random number that is drawn when it is fetched)."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)), torch.rand(())


def made(samples: int, devices: int, rows: int = 1, size: int = 3, **options: Any) -> PreparedLoader:
    return PreparedLoader(
        DataLoader(Drawn(samples), batch_size=size, shuffle=True),
        seed=5,
        device=torch.device("cpu"),
        window=rows,
        world=World(devices=devices),
        **options,
    )


def epoch(loader: PreparedLoader, number: int = 0, start: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "ids": micro.batch[0].tolist(),
            "drawn": micro.batch[1].tolist(),
            "first": micro.first,
            "full": micro.last,
            "share": micro.share,
            "forward": torch.rand(()).item(),
            "given": loader.given,
        }
        for micro in loader.iterate(number, start)
    ]


@pytest.mark.parametrize("samples", [36, 34, 25, 4, 2])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_is_the_micro_batches_of_its_devices(samples: int, rows: int) -> None:
    """A batch for 4 devices joins 4 micro-batches of a process with one device: the same samples and the same augmentation.

    Shares are proportional to the number of samples.
    """
    devices = 4
    alone = epoch(made(samples, 1))
    wide = epoch(made(samples, devices, rows))
    ids = [id for row in alone for id in row["ids"]]
    drawn = [value for row in alone for value in row["drawn"]]
    assert [id for row in wide for id in row["ids"]] == ids
    assert [value for row in wide for value in row["drawn"]] == drawn
    assert [len(row["ids"]) for row in wide[:-1]] == [devices * 3] * (len(wide) - 1)
    assert len(wide) == -(-len(alone) // devices) == len(made(samples, devices))
    for begin in range(0, len(wide), rows):
        window = wide[begin : begin + rows]
        total = sum(len(row["ids"]) for row in window)
        assert [row["share"] for row in window] == pytest.approx([len(row["ids"]) / total for row in window], abs=1e-15)
        assert [(row["first"], row["full"]) for row in window] == [(n == 0, n == len(window) - 1) for n in range(len(window))]


def test_the_one_forward_over_several_is_seeded_by_the_first_of_them() -> None:
    """The forward pass of 4 joined micro-batches has the random state of the first of them."""
    wide = epoch(made(36, 4))
    firsts = []
    for row in range(len(wide)):
        torch.manual_seed(mix(5, Stage.TRAIN, Purpose.FORWARD, 0, 4 * row))
        firsts.append(torch.rand(()).item())
    assert [row["forward"] for row in wide] == firsts


def test_positions_are_those_of_as_many_processes() -> None:
    """The position of one process with 4 devices is that of 4 processes with one device each."""
    loader = made(34, 4)
    assert loader.position(0, 2) == {
        "epoch": 0, "batches": 8, "samples": 24, "complete": False, "dataset": 34, "iterable": None,
        "processes": 4, "rank": 0, "splits": False,
    }  # fmt: skip
    assert loader.position(0, 3)["samples"] == 34


@pytest.mark.parametrize("devices, after", [(2, 6), (4, 6), (3, 5)])
def test_resumes_wherever_another_number_of_devices_has_left_off(devices: int, after: int) -> None:
    """A position saved with one device resumes on several devices at the same sample, also inside a joined batch."""
    before = made(40, 1)
    position = before.position(0, after)
    expected = [id for row in epoch(made(40, 1))[after:] for id in row["ids"]]
    loader = made(40, devices)
    start = loader.start_of(position)
    loader.resume(position, start)
    found = epoch(loader, 0, start)
    assert [id for row in found for id in row["ids"]] == expected
    assert [len(row["ids"]) for row in found[:-1]] == [devices * 3] * (len(found) - 1)
    assert loader.length == start + len(found)
    assert loader.position(0, start + 1)["batches"] == after + devices


def test_limits_are_in_rows() -> None:
    """`limit` counts joined batches."""
    loader = made(40, 4)
    loader.limit = 2
    found = epoch(loader)
    assert [len(row["ids"]) for row in found] == [12, 12]
    assert len(loader) == 2


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(11.0))


@pytest.mark.parametrize("rows", [1, 2])
def test_of_a_stream_the_last_row_has_what_is_left(rows: int) -> None:
    """With a stream, the last joined batch has the remaining samples."""
    loader = PreparedLoader(
        DataLoader(Numbers(), batch_size=2), seed=1, device=torch.device("cpu"), window=rows, world=World(devices=4)
    )
    found = [(micro.batch.tolist(), micro.last, micro.share) for micro in loader.iterate(0)]
    assert [values for values, _, _ in found] == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
    assert [full for _, full, _ in found] == ([True, True] if rows == 1 else [False, True])
    assert [share for _, _, share in found] == ([1.0, 1.0] if rows == 1 else pytest.approx([8 / 11, 3 / 11]))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("own", [False, True])
def test_batches_that_are_loaded_ahead_are_loaded_once_by_the_first_of_their_row(rows: int, devices: int, own: bool) -> None:
    """A joined batch is transferred once, with the number of its first micro-batch."""
    loaded: list[Any] = []

    def ahead(items: Any, load: Any, start: int = 0) -> Any:
        assert (load is None) is not own, "the code that loads ahead only moves batches"
        waiting: list[Any] = []
        for number, item in enumerate(items, start):
            waiting.append(item if load is None else load(item, number))
            if len(waiting) > 1:
                yield waiting.pop(0)
        yield from waiting

    def transfer(batch: Any, m: int) -> Any:
        loaded.append(m)
        return [batch[0] + 1000, batch[1]]

    plain = epoch(made(34, devices, rows))
    found = epoch(made(34, devices, rows, ahead=ahead, transfer=transfer if own else None))
    assert loaded == (list(range(0, 12, devices)) if own else [])
    for one, other in zip(plain, found, strict=True):
        assert other["ids"] == [id + 1000 * own for id in one["ids"]]
        assert {**other, "ids": None} == {**one, "ids": None}
