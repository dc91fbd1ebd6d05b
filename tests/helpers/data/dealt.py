"""The micro-batches of each of several ranks: `from helpers.data.dealt import Alike, dealt, joined`.

Where ranks need not communicate, they run one after another in the process of the test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any, NamedTuple

from helpers.data.samples import CPU, draw, ids, same

from trainkit.data import PreparedLoader
from trainkit.distributed.requested_devices import RequestedDevices
from trainkit.distributed.world import World
from trainkit.launch.joining import join
from trainkit.micro_batch import NO_BATCH, MicroBatch, MicroBatchKind
from trainkit.nested import map_tensors
from trainkit.rng import Stage

__all__ = [
    "Alike",
    "Given",
    "as_lists",
    "assert_shared_out",
    "dealt",
    "global_windows",
    "heard",
    "joined",
    "observed",
    "prepared",
    "read",
]


class Alike(World):
    """The `World` of one of several ranks that all have the same values: `exchange` repeats the value of this rank."""

    def exchange(self, value: Any) -> list[Any]:
        return [value] * self.size

    def combine(self, value: Any, function: Any) -> Any:
        return reduce(function, [value] * self.size)

    def rows(self, values: Any) -> Any:
        raise AssertionError("these processes have nothing to tell one another")


class Given(NamedTuple):
    """A micro-batch as one rank got it, with fields of `MicroBatch` and the loader's position."""

    batch: Any
    ids: Any
    drawn: list[float]  # random numbers drawn when the rank got the micro-batch
    first: bool
    full: bool
    share: float
    empty: bool
    uneven: bool
    padding: bool
    given: int


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the log messages of trainkit in this process."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainkit").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("trainkit").removeHandler(handler)


def joined() -> World:
    """The `World` of this process, which `worlds.run_world` has started."""
    return join(RequestedDevices(), timeout=timedelta(seconds=30))


def prepared(source: Any, world: World, window: int | None = 1, **options: Any) -> PreparedLoader:
    """Prepare the source as the loader of one rank; `window=None` is for evaluation."""
    return PreparedLoader(source, seed=7, device=CPU, world=world, **{"stage": Stage.TRAIN, "window": window, **options})


def read(loader: PreparedLoader, epoch: int = 0, start: int = 0) -> Iterator[Given]:
    """The micro-batches of an epoch, from `start` on."""
    return observed(loader, loader.iterate(epoch, start))


def observed(loader: PreparedLoader, micro_batches: Iterator[MicroBatch]) -> Iterator[Given]:
    """Each micro-batch of a loader as a `Given`."""
    for micro in micro_batches:
        numbers = None if micro.batch is NO_BATCH else _numbers(micro.batch)
        drawn = draw()
        padding, given = micro.kind is not MicroBatchKind.DATA, 0 if loader.window is None else loader.given
        yield Given(micro.batch, numbers, drawn, *micro[2:5], micro.empty, micro.uneven, padding, given)


def _numbers(batch: Any) -> Any:
    if isinstance(batch, dict) and "samples" not in batch:
        return {key: _numbers(part) for key, part in batch.items()}
    if isinstance(batch, list):
        return [_numbers(part) for part in batch if part is not None]
    return ids([batch])[0]


def as_lists(given: Given) -> Given:
    """A copy with lists instead of tensors, for sending it to another process."""
    return given._replace(batch=map_tensors(given.batch, lambda tensor: tensor.tolist()))


def dealt(make: Callable[[], Any], size: int, window: int | None = 1, epoch: int = 0, **options: Any) -> list[list[Given]]:
    """The micro-batches of an epoch on each of `size` ranks."""
    worlds = [World()] if size == 1 else [Alike(rank, size) for rank in range(size)]
    return [list(read(prepared(make(), world, window, **options), epoch)) for world in worlds]


def assert_shared_out(by_rank: list[list[Given]], alone: list[Given], kind: str) -> None:
    """Each rank gets every n-th of the batches that one process alone gets, and draws the same random numbers for them."""
    for rank, own in enumerate(by_rank):
        batches, expected = [one for one in own if not one.padding], alone[rank :: len(by_rank)]
        assert same([one.batch for one in batches], [one.batch for one in expected]), kind
        assert [one.drawn for one in batches] == [one.drawn for one in expected], kind


def global_windows(by_rank: list[list[Given]]) -> list[list[Given]]:
    """The accumulation windows of an epoch: the micro-batches of all ranks in global order, without padding."""
    parts = [list(_windows(own)) for own in by_rank]
    assert len({len(own) for own in parts}) == 1, "all have as many windows"
    found = []
    for pieces in zip(*parts, strict=True):
        counts = [sum(not piece.padding for piece in own) for own in pieces]
        assert [own[0].uneven for own in pieces] == [len(set(counts)) > 1] * len(pieces)
        assert [own[0].empty for own in pieces] == [pieces[0][0].empty] * len(pieces)
        assert len({own[-1].given for own in pieces}) == 1, "they agree on the rows that are done"
        assert all(len(own) == 1 and own[0].share == 0.0 for own in pieces if own[0].padding)
        found.append([own[row] for row in range(max(counts)) for own in pieces if row < len(own) and not own[row].padding])
    return found


def _windows(own: list[Given]) -> Iterator[list[Given]]:
    window: list[Given] = []
    for given in own:
        assert given.first == (not window)
        window.append(given)
        if given.full:
            yield window
            window = []
    assert not window, "the last one is full"
