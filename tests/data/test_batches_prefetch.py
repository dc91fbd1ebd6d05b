"""Loading one batch ahead on CUDA: the order of events, recorded by fake streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.data.samples import draw
from torch import Tensor

from trainkit.data import batches as batches_module
from trainkit.data.batches import one_ahead
from trainkit.data.loader import PreparedLoader
from trainkit.rng import KeyStream, Purpose, Stage, seed_generators

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """A CUDA stream that only writes its calls to a log."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def record_event(self) -> str:
        self.events += 1
        self.log.append(f"{self.name}: event {self.events}")
        return f"event {self.events}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name}: wait for {event}")

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name}: wait for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls in order. Copies run on the stream "side", the training step on "main"."""
    log: list[str] = []
    main = FakeStream("main", log)
    current = [main]

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    fake = SimpleNamespace(Stream=lambda device: FakeStream("side", log), stream=on, current_stream=lambda device: current[-1])
    monkeypatch.setattr(batches_module.torch, "cuda", fake)
    monkeypatch.setattr(batches_module, "SMALL", 0)
    return log


class FakeCuda(Tensor):
    """A CPU tensor that claims to be on CUDA."""

    is_cuda = True

    def record_stream(self, stream: FakeStream) -> None:
        stream.log.append(f"{stream.name}: uses a tensor")


def on_cuda(value: float) -> FakeCuda:
    return torch.tensor([value]).as_subclass(FakeCuda)


@pytest.mark.parametrize("small", [8, 9])
def test_small_batches_are_loaded_when_they_are_needed(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(batches_module, "SMALL", small)
    monkeypatch.setattr(batches_module, "one_ahead", lambda items, load, device, start: chosen.append(start) or iter(items))
    batches = iter([(torch.zeros(1), torch.zeros(1, dtype=torch.int32)), torch.zeros(100)])  # the first batch decides
    found = list(batches_module.to_device(batches, lambda item, number: (item, number), 3, device=DEVICE))
    assert chosen == ([3] if small == 8 else [])
    assert small == 8 or [number for _, number in found] == [3, 4]
    assert list(batches_module.to_device(iter([]), lambda item, number: item, device=DEVICE)) == []


def test_a_batch_of_unknown_size_counts_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(batches_module, "one_ahead", lambda items, load, device, start: chosen.append(start) or iter(items))
    list(batches_module.to_device(iter([SimpleNamespace(to=lambda device: None)]), lambda item, number: item, device=DEVICE))
    assert chosen == [0]


def numbers(count: int, log: list[str]) -> Iterator[int]:
    for number in range(count):
        log.append(f"fetch {number}")
        yield number


def load_into(log: list[str]) -> Any:
    def load(item: int, number: int) -> FakeCuda:
        log.append(f"load {item} as {number}")
        return on_cuda(item)

    return load


def work(items: Iterator[Any], log: list[str]) -> list[float]:
    found = []
    for item in items:
        log.append(f"work on {int(item)}")
        found.append(float(item))
    return found


def test_each_batch_is_loaded_while_the_one_before_is_worked_on(log: list[str]) -> None:
    """A batch is fetched and copied before the training step on the previous batch begins."""
    items = one_ahead(numbers(3, log), load_into(log), DEVICE, start=5)
    assert work(items, log) == [0, 1, 2]
    assert log == [
        *("fetch 0", "load 0 as 5", "side: event 1"),
        *("fetch 1", "load 1 as 6", "side: event 2"),
        *("main: wait for event 1", "main: uses a tensor", "work on 0"),
        *("fetch 2", "load 2 as 7", "side: event 3"),
        *("main: wait for event 2", "main: uses a tensor", "work on 1"),
        *("main: wait for event 3", "main: uses a tensor", "work on 2"),
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_every_batch_comes_once_and_in_order(count: int, log: list[str]) -> None:
    assert work(one_ahead(numbers(count, log), load_into(log), DEVICE), log) == list(range(count))


def test_nothing_is_loaded_before_the_first_is_asked_for(log: list[str]) -> None:
    items = one_ahead(numbers(3, log), load_into(log), DEVICE)
    assert log == []
    next(items)
    assert [entry for entry in log if entry.startswith("fetch")] == ["fetch 0", "fetch 1"]


def test_every_tensor_of_a_batch_records_its_stream(log: list[str]) -> None:
    batch = {"a": [on_cuda(1), on_cuda(2)], "b": torch.zeros(1), "c": "text"}
    list(one_ahead(iter([batch]), lambda item, number: item, DEVICE))
    assert log.count("main: uses a tensor") == 2, "the one on the CPU is not asked"
    assert "side: wait for main" not in log


class Packed(tuple):
    """Like a PackedSequence, it can be built only from tensors."""

    __slots__ = ()

    def __new__(cls, items: Any) -> Packed:
        assert all(isinstance(item, Tensor) for item in items)
        return super().__new__(cls, items)


def test_a_batch_is_handed_over_as_it_was_loaded(log: list[str]) -> None:
    """The yielded batch is the loaded object; it is not rebuilt."""
    batch = Packed([on_cuda(1)])
    assert next(one_ahead(iter([batch]), lambda item, number: item, DEVICE)) is batch
    assert "main: uses a tensor" in log


class Graph:
    """Holds tensors that trainkit cannot find."""

    def to(self, device: Any) -> Graph:
        return self


def test_a_copy_waits_where_tensors_cannot_record_a_stream(log: list[str]) -> None:
    """If the tensors of a batch are unknown, the next copy waits for the training step before it.

    They cannot record the stream that uses them, so the copies could reuse their memory while the training step still runs.
    """
    for _ in one_ahead(iter([Graph()] * 4), lambda item, number: log.append("load") or item, DEVICE):
        log.append("work")
    assert log == [
        *("load", "side: event 1", "load", "side: event 2", "main: wait for event 1", "work"),
        *("side: wait for main", "load", "side: event 3", "main: wait for event 2", "work"),
        *("side: wait for main", "load", "side: event 4", "main: wait for event 3", "work"),
        *("main: wait for event 4", "work"),
    ]


def test_an_error_in_fetching_comes_at_the_batch_before(log: list[str]) -> None:
    # An error while the second batch is fetched is raised when the first batch is requested.

    def failing() -> Iterator[int]:
        yield 0
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        next(one_ahead(failing(), load_into(log), DEVICE))


@pytest.mark.parametrize("window", [None, 1, 2])
def test_random_numbers_and_the_window_are_those_of_the_batch_that_is_given(window: int | None, log: list[str]) -> None:
    """The random state and the window are those of the yielded batch, although the next batch has already been loaded."""

    def transfer(batch: Tensor, m: int) -> Tensor:
        draw()
        return batch.as_subclass(FakeCuda)

    batches = (torch.tensor([float(m)]) for m in range(5))
    loader = PreparedLoader(batches, seed=1, device=DEVICE, window=window, transfer=transfer)
    keys = KeyStream(1, Stage.TRAIN, Purpose.FORWARD, 0)
    places = []
    for m, micro in enumerate(loader.iterate(0)):
        drawn = draw()
        seed_generators(keys(m))
        assert drawn == draw()
        assert int(micro.batch) == m
        places.append(micro[2:5])
    assert m == 4
    if window == 2:
        assert places == [(True, False, 0.5), (False, True, 0.5)] * 2 + [(True, True, 1.0)]
    if window == 1:
        assert set(places) == {(True, True, 1.0)}
