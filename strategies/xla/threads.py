"""Replicas that are threads of one process: `torch_xla.launch` starts them on XLA's CPU runtime, for tests.

Threads share global state: the random number generators and the flags of torch. So only one replica runs at a time, until it
has to wait for the others; then the next one continues. This way each replica draws the random numbers that it seeded, and the
runtime gets the graphs of the replicas one after the other, as it requires.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainkit.console import set_printing
from trainkit.distributed.world import Pending, ThreadExchange, World
from trainkit.errors import ConfigurationError, ProcessFailedError

__all__ = ["ReplicaTurns", "ThreadWorld", "replica_turns"]

_Key = tuple[str, int]


class ReplicaTurns:
    """Runs the replicas of a process one at a time, and exchanges values between them.

    Args:
        size: number of replicas.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._inside: dict[int, _Key | None] = {}  # replicas in the current run → the exchange that each waits for
        self._arriving: set[int] = set()  # replicas that wait for the next run to start
        self._given: dict[_Key, dict[int, Any]] = {}
        self._taken: dict[_Key, int] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._failed: tuple[int, BaseException] | None = None
        self.launched: set[int] = set()

    def enter(self, rank: int) -> None:
        """Join a run. Returns when all replicas have joined and it is the turn of this one."""
        with self._changed:
            self._arriving.add(rank)
            self._begin()
            self._changed.wait_for(lambda: rank not in self._arriving)
            self._await(rank)

    def _begin(self) -> None:
        """Start a run if all replicas have arrived and have left the previous run, whose state is discarded."""
        if len(self._arriving) < self.size or self._inside:
            return
        self._inside = dict.fromkeys(self._arriving)
        self._arriving, self._holder, self._failed = set(), 0, None
        self._given, self._taken, self._counts = {}, {}, {}
        self._changed.notify_all()

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """Leave the run. With an error, the other replicas fail too."""
        with self._changed:
            if error is not None and self._failed is None and not isinstance(error, ProcessFailedError):
                self._failed = rank, error
            if rank in self._inside:
                del self._inside[rank]
                if self._holder == rank:
                    self._pass_on(rank)
            self._begin()
            self._changed.notify_all()

    def inside(self, rank: int) -> bool:
        """Whether a replica has joined the run."""
        return rank in self._inside

    def give(self, rank: int, name: str, value: Any) -> _Key:
        """Give a value to all replicas; each gets it from `collect`."""
        with self._changed:
            number = self._counts[name, rank] = self._counts.get((name, rank), 0) + 1
            key = (name, number)
            self._given.setdefault(key, {})[rank] = value
            if len(self._given[key]) == self.size:
                self._inside.update({other: None for other, waits in self._inside.items() if waits == key})
            return key

    def collect(self, rank: int, key: _Key) -> list[Any]:
        """Return the values of all replicas, in rank order. Other replicas run until all values are there."""
        with self._changed:
            if len(self._given[key]) < self.size:
                self._inside[rank] = key
                self._pass_on(rank)
            self._await(rank)
            given = self._given[key]
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == self.size:
                del self._given[key], self._taken[key]
            return [given[other] for other in range(self.size)]

    def _pass_on(self, rank: int) -> None:
        """Let the next replica that does not wait for an exchange run."""
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        ready = [other for other in order if other in self._inside and self._inside[other] is None]
        self._holder = ready[0] if ready else None
        if not ready and self._inside and self._failed is None and len(self._inside) < self.size:
            exited = next(other for other in order if other not in self._inside)
            error = f"replica {exited} has exited, but the other replicas wait for it. Call collectives on all replicas."
            self._failed = exited, ProcessFailedError(error)
        self._changed.notify_all()

    def _await(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._holder == rank or self._failed is not None)
        if self._failed is not None and self._failed[0] != rank:
            self._inside.pop(rank, None)
            self._changed.notify_all()
            other, error = self._failed
            raise ProcessFailedError(f"replica {other} has failed: {type(error).__name__}: {error}") from error


_turns: ReplicaTurns | None = None
_made = threading.Lock()


def replica_turns(size: int) -> ReplicaTurns:
    """Return the object that all replicas of this process share.

    Raises:
        ConfigurationError: the runtime is not set to run one graph after the other.
    """
    global _turns
    if os.environ.get("PJRT_CPU_ASYNC_CLIENT") != "0":
        raise ConfigurationError(
            "replicas on XLA's CPU runtime are threads, so it must run one graph after the other. Set this before it starts: "
            "export PJRT_CPU_ASYNC_CLIENT=0. XLAStrategy.launch(main) sets it."
        )
    with _made:
        if _turns is None or _turns.size != size:
            # In a forked process torch creates its thread pool again at first use. Autograd uses it from one thread for each
            # device: together they would find a half-created pool, and crash.
            torch.set_num_threads(torch.get_num_threads())
            _turns = ReplicaTurns(size)
        return _turns


class ThreadWorld(World):
    """The world of a replica that is one of several threads of a process."""

    def __init__(self, rank: int, size: int, turns: ReplicaTurns) -> None:
        super().__init__(rank, size, local_rank=rank, local_size=size, launcher="torch_xla.launch")
        self.turns = turns
        set_printing(main=rank == 0, rank=rank, thread=True)

    def rest(self) -> None:
        """Leave the run at its end, unless `trainkit.strategies.XLAStrategy.launch` does so."""
        if self.rank not in self.turns.launched:
            self.turns.leave(self.rank)

    def exchange(self, value: Any) -> list[Any]:
        """See `trainkit.distributed.world.World.exchange`."""
        return [json.loads(text) for text in self.gather("exchange", json.dumps(value))]

    def exchange_state(self, value: Any) -> list[Any]:
        """See `trainkit.distributed.world.World.exchange_state`."""
        return [copy.deepcopy(other) for other in self.gather("state", value)]

    def exchange_user_objects(self, value: Any) -> list[Any]:
        """See `trainkit.distributed.world.World.exchange_user_objects`."""
        return self.exchange_state(value)

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """See `trainkit.distributed.world.World.rows`."""
        return [list(row) for row in self.gather("rows", [float(value) for value in values])]

    def begin_largest(self, values: Sequence[int]) -> Pending:
        """See `trainkit.distributed.world.World.begin_largest`."""
        return _Largest(self, self.turns.give(self.rank, "largest", [int(value) for value in values]))

    def thread_exchange(self, name: str) -> ThreadExchange:
        """See `trainkit.distributed.world.World.thread_exchange`."""
        return _ReplicaExchange(name, self)

    def gather(self, name: str, value: Any = None) -> list[Any]:
        """Return the values of all replicas. The other replicas run until they give theirs."""
        if not self.turns.inside(self.rank):
            self.turns.enter(self.rank)
        return self.turns.collect(self.rank, self.turns.give(self.rank, name, value))


class _Largest(Pending):
    def __init__(self, world: ThreadWorld, key: _Key) -> None:
        self._world, self._key = world, key

    def wait(self) -> list[int]:
        rows = self._world.turns.collect(self._world.rank, self._key)
        return [max(column) for column in zip(*rows, strict=True)]


class _ReplicaExchange(ThreadExchange):
    """A team of replicas that run one at a time. Do not use it from other threads."""

    concurrent = False

    def __init__(self, name: str, world: ThreadWorld) -> None:
        super().__init__(name, None, world.rank, world.size)
        self._world = world

    def exchange(self, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        return [json.loads(text) for text in self._world.gather(f"team {self._name}", json.dumps(value))]
