"""Processes that are threads. What talks only through its ``World`` cannot tell."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch
from helpers.patience import PATIENCE
from torch import Tensor

from trainkit.distributed.collective_tracker import CollectiveTracker
from trainkit.distributed.failure import Runs
from trainkit.distributed.world import Team, World
from trainkit.strategy import Strategy

__all__ = ["GoneError", "Hub", "ThreadStrategy", "ThreadWorld", "in_threads", "in_worlds", "values"]


class GoneError(Exception):
    """Another process has ended."""


class Hub:
    """What the channels of so many processes meet in.

    Attributes:
        exchanges: how many there have been.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.exchanges = 0
        self._given: dict[str, dict[int, str]] = {}
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def exchange(self, rank: int, key: str, value: Any) -> list[Any]:
        """As of a channel; for the process of a rank.

        Raises:
            GoneError: another has gone before it gave its part.
        """
        end = monotonic() + PATIENCE
        with self._changed:
            given = self._given.setdefault(key, {})
            assert rank not in given, f"rank {rank} has used {key} before"
            given[rank] = json.dumps(value)
            self.exchanges += len(given) == self.size
            self._changed.notify_all()
            while len(given) < self.size:
                if self._gone - given.keys():
                    raise GoneError(f"rank {min(self._gone - given.keys())} has ended")
                assert self._changed.wait(end - monotonic()), f"rank {rank} waits for {key} in vain"
        return [json.loads(given[other]) for other in range(self.size)]

    def leave(self, rank: int) -> None:
        """A process has ended: nobody needs to wait for it."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


class _Line:
    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self.collectives, self.runs = CollectiveTracker(), Runs()
        self.runs.begin()

    def exchange(
        self,
        key: str,
        value: Any,
        looking: Callable[[], None] | None = None,
        complete: Callable[[], None] | None = None,
    ) -> list[Any]:
        found = self._hub.exchange(self._rank, key, value)
        if complete is not None:
            complete()
        return found


class ThreadWorld(World):
    """The processes as one of them sees it."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(rank, hub.size, channel=_Line(hub, rank))  # type: ignore[arg-type]
        self._all = self.team("world")

    def exchange(self, value: Any) -> list[Any]:
        return self._all.exchange(value)

    def exchange_state(self, value: Any) -> list[Any]:
        """For values that JSON can hold."""
        return self._all.exchange(value)

    def exchange_user_objects(self, value: Any) -> list[Any]:
        """For values that JSON can hold."""
        return self._all.exchange(value)

    def rows(self, values: Any) -> list[list[float]]:
        return self._all.exchange([float(value) for value in values])


class ThreadStrategy(Strategy):
    """A strategy on the CPU whose processes are the threads of a :class:`ThreadWorld`."""

    def __init__(self, world: World) -> None:
        super().__init__("cpu")
        self.world = world

    def all_gather(self, data: Tensor, sync_grads: bool = False, alike: bool = False) -> Tensor:
        return torch.stack([torch.tensor(one, dtype=data.dtype) for one in self.world.exchange(data.tolist())])


def in_threads(size: int, work: Callable[[Team], Any]) -> list[Any]:
    """Call ``work(team)`` in a thread for each rank; by rank what it returned, or the exception that it raised."""
    return in_worlds(size, lambda world: work(world.team("team")))


def in_worlds(size: int, work: Callable[[World], Any]) -> list[Any]:
    """:func:`in_threads`, with the whole world."""
    hub = Hub(size)
    ends: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            ends[rank] = work(World() if size == 1 else ThreadWorld(hub, rank))
        except BaseException as error:
            ends[rank] = error
        hub.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = monotonic() + PATIENCE
    for rank, thread in enumerate(threads):
        thread.join(max(0.0, end - monotonic()))
        assert not thread.is_alive(), f"rank {rank} hangs; the others: {ends}"
    return ends


def values(ends: list[Any]) -> list[Any]:
    """What all have returned, of :func:`in_threads`; raises what one has raised."""
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return ends
