"""Loaders as each of several processes reads them: `from helpers.data.dealt import Alike, dealt, joined`.

Where the processes need not talk, they are played one after the other in the test's own process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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
    """One of several processes, all of which say what this one says. They must not have anything else to tell one another."""

    def exchange(self, value: Any) -> list[Any]:
        return [value] * self.size

    def rows(self, values: Any) -> Any:
        raise AssertionError("these processes have nothing to tell one another")


class Given(NamedTuple):
    """A micro-batch as a process was given it."""

    batch: Any
    ids: Any
    drawn: list[float]  # when it was worked on
    first: bool
    full: bool
    share: float
    empty: bool
    uneven: bool
    padding: bool
    given: int


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is said meanwhile, in this process."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainkit").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("trainkit").removeHandler(handler)


def joined() -> World:
    """This process's world; in a process of `worlds.run_world`."""
    return join(RequestedDevices(), timeout=timedelta(seconds=30))


def prepared(source: Any, world: World, window: int | None = 1, **options: Any) -> PreparedLoader:
    """The source as a loader of one process; for training with a window, else for evaluation."""
    return PreparedLoader(source, seed=7, device=CPU, world=world, **{"stage": Stage.TRAIN, "window": window, **options})


def read(loader: PreparedLoader, epoch: int = 0, start: int = 0) -> Iterator[Given]:
    """The rest of an epoch."""
    return observed(loader, loader.iterate(epoch, start))


def observed(loader: PreparedLoader, micro_batches: Iterator[MicroBatch]) -> Iterator[Given]:
    """Batches of a loader with what is known of each when it is given."""
    for micro in micro_batches:
        numbers = None if micro.batch is NO_BATCH else _numbers(micro.batch)
        drawn = draw()
        padding, given = micro.kind is not MicroBatchKind.DATA, 0 if loader.window is None else loader.given
        yield Given(micro.batch, numbers, drawn, *micro[2:5], micro.empty, micro.uneven, padding, given)


def _numbers(batch: Any) -> Any:
    if isinstance(batch, dict) and "samples" not in batch:
        return {key: _numbers(part) for key, part in batch.items()}
    if isinstance(batch, list):
        return [_numbers(part) for part in batch]
    return ids([batch])[0]


def as_lists(given: Given) -> Given:
    """The same without tensors, to be sent to another process."""
    return given._replace(batch=map_tensors(given.batch, lambda tensor: tensor.tolist()))


def dealt(make: Callable[[], Any], size: int, window: int | None = 1, epoch: int = 0, **options: Any) -> list[list[Given]]:
    """What each of `size` processes is given of an epoch, by rank."""
    worlds = [World()] if size == 1 else [Alike(rank, size) for rank in range(size)]
    return [list(read(prepared(make(), world, window, **options), epoch)) for world in worlds]


def assert_shared_out(by_rank: list[list[Given]], alone: list[Given], kind: str) -> None:
    """Each process was given its batches of those that one process is given, and drew the same when it worked on them."""
    for rank, own in enumerate(by_rank):
        batches, expected = [one for one in own if not one.padding], alone[rank :: len(by_rank)]
        assert same([one.batch for one in batches], [one.batch for one in expected]), kind
        assert [one.drawn for one in batches] == [one.drawn for one in expected], kind


def global_windows(by_rank: list[list[Given]]) -> list[list[Given]]:
    """The windows of an epoch, each with its micro-batches in the order of one process, without padding."""
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
