"""Ranks that are threads of this process, for code that talks to other ranks only through its `World` or `ThreadExchange`.

`run_threads(3, function, *args)` calls `function(world, *args)` in three threads, each with the `World` of a rank.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable
from functools import reduce
from time import monotonic
from typing import Any

import torch
from helpers.patience import PATIENCE
from torch import Tensor

from trainkit.distributed.failure import Runs
from trainkit.distributed.world import CollectiveTracker, Pending, ThreadExchange, World
from trainkit.strategy import Strategy
from trainkit.tagged_json.codec import from_bytes, to_bytes

__all__ = ["FakeWorld", "GoneError", "ThreadStrategy", "run_groups", "run_threads", "try_groups", "try_threads"]


class GoneError(Exception):
    """Another rank has ended."""


class _Hub:
    """Passes the values of all ranks to all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: dict[str, dict[int, Any]] = {}
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def exchange(self, rank: int, key: str, value: Any) -> list[Any]:
        """The values of all ranks, in rank order.

        Raises:
            GoneError: A rank has ended without passing its value.
        """
        end = monotonic() + PATIENCE
        with self._changed:
            given = self._given.setdefault(key, {})
            assert rank not in given, f"rank {rank} has used {key} before"
            given[rank] = value
            self._changed.notify_all()
            while len(given) < self.size:
                if self._gone - given.keys():
                    raise GoneError(f"rank {min(self._gone - given.keys())} has ended")
                assert self._changed.wait(end - monotonic()), f"rank {rank} waits for {key} in vain"
        return [given[other] for other in range(self.size)]

    def leave(self, rank: int) -> None:
        """Record that a rank has ended."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


class _Channel:
    """The part of a `Channel` that `ThreadExchange` uses."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self.collectives, self.runs = CollectiveTracker(), Runs()
        self.runs.begin()

    def exchange(
        self,
        key: str,
        value: Any,
        while_waiting: Callable[[], None] | None = None,
        complete: Callable[[], None] | None = None,
    ) -> list[Any]:
        found = self._hub.exchange(self._rank, key, json.dumps(value))
        if complete is not None:
            complete()
        return [json.loads(text) for text in found]

    def collect(self, key: str, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        values = self.exchange(f"{key}/values", value)
        return self.exchange(f"{key}/reply", answer(values) if self._rank == 0 else None)[0]


class FakeWorld(World):
    """The `World` of a rank that is a thread.

    Attributes:
        exchanges: Number of exchanges so far, without those of `ThreadExchange`.
        calls: The name of each collective so far, in order.
    """

    def __init__(self, hub: _Hub, rank: int) -> None:
        super().__init__(rank, hub.size, channel=_Channel(hub, rank))  # type: ignore[arg-type]
        self._hub = hub
        self.exchanges = 0
        self.calls: list[str] = []

    def exchange(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._all(json.dumps(value), "exchange")]

    def from_main(self, value: Any) -> Any:
        return json.loads(self._all(json.dumps(value if self.is_main else None), "from_main")[0])

    def collect(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        values = [json.loads(text) for text in self._all(json.dumps(value), "collect")]
        return self.from_main(answer(values) if self.is_main else None)

    def combine(self, value: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return reduce(function, self._all(value.clone(), "combine"))

    def begin_largest(self, values: Any) -> Pending:
        return Pending(
            torch.stack(self._all(torch.tensor(values, dtype=torch.int64), "largest")).amax(0), None, self.collectives
        )

    def exchange_state(self, value: Any) -> list[Any]:
        return [from_bytes(data) for data in self._all(to_bytes(value), "exchange_state")]

    def exchange_user_objects(self, value: Any) -> list[Any]:
        return copy.deepcopy(self._all(copy.deepcopy(value), "exchange_user_objects"))

    def broadcast_user_object(self, value: Any, source: int = 0) -> Any:
        return self.exchange_user_objects(value)[source]

    def rows(self, values: Any) -> list[list[float]]:
        return self._all([float(value) for value in values], "rows")

    def _all(self, value: Any, name: str) -> list[Any]:
        self.exchanges += 1
        self.calls.append(name)
        return self._hub.exchange(self.rank, f"world/{self.exchanges}", value)


class ThreadStrategy(Strategy):
    """A strategy on the CPU whose ranks are the threads of a `FakeWorld`."""

    def __init__(self, world: World) -> None:
        super().__init__("cpu")
        self.world = world

    def all_gather(self, data: Tensor, sync_grads: bool = False, alike: bool = False) -> Tensor:
        return torch.stack([torch.tensor(one, dtype=data.dtype) for one in self.world.exchange(data.tolist())])


def try_threads(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(world, *args)` in `size` threads; returns for each rank its result, or the exception that it raised."""
    hub = _Hub(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(World() if size == 1 else FakeWorld(hub, rank), *args)
        except BaseException as error:
            results[rank] = error
        hub.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = monotonic() + PATIENCE
    for rank, thread in enumerate(threads):
        thread.join(max(0.0, end - monotonic()))
        assert not thread.is_alive(), f"rank {rank} hangs; results of the other ranks: {results}"
    return results


def run_threads(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Like `try_threads`, but raises the exception of the first rank that has one, preferably one other than `GoneError`."""
    results = try_threads(size, function, *args)
    for error in sorted((r for r in results if isinstance(r, BaseException)), key=lambda r: isinstance(r, GoneError)):
        raise error
    return results


def try_groups(size: int, function: Callable[[ThreadExchange], Any]) -> list[Any]:
    """Like `try_threads`, but passes a `ThreadExchange` to the function instead of a `World`."""
    return try_threads(size, lambda world: function(world.thread_exchange("group")))


def run_groups(size: int, function: Callable[[ThreadExchange], Any]) -> list[Any]:
    """Like `run_threads`, but passes a `ThreadExchange` to the function instead of a `World`."""
    return run_threads(size, lambda world: function(world.thread_exchange("group")))
