"""Replicas that are threads of one process: `torch_xla.launch` starts them on XLA's CPU runtime, for tests.

Threads share global state: the random number generators and the flags of torch. So only one replica runs at a time, until it
has to wait for the others; then the next one continues. This way each replica draws the random numbers that it seeded, and the
runtime receives the graphs of the replicas one after the other, as it requires.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from trainkit.console import set_printing
from trainkit.distributed.world import Pending, ThreadExchange, World
from trainkit.errors import ConfigurationError, ProcessFailedError

__all__ = ["ReplicaScheduler", "ThreadWorld", "replica_scheduler"]

_Key = tuple[str, int]


class ReplicaScheduler:
    """Runs the replicas of a process one at a time, and exchanges values between them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._running: int | None = None
        self._waiting_for: dict[int, _Key | None] = {}  # replica in the current run → the exchange that it waits for
        self._joining: set[int] = set()  # replicas that wait for the next run to start
        self._submitted: dict[_Key, dict[int, Any]] = {}
        self._read_counts: dict[_Key, int] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._failed: tuple[int, BaseException] | None = None
        self.launched: set[int] = set()

    def join(self, rank: int) -> None:
        """Join a run. Returns when all replicas have joined and it is the turn of this one."""
        with self._changed:
            self._joining.add(rank)
            self._begin()
            self._changed.wait_for(lambda: rank not in self._joining)
            self._wait_for_turn(rank)

    def _begin(self) -> None:
        """Start a run if all replicas have arrived and have left the previous run, whose state is discarded."""
        if len(self._joining) < self.size or self._waiting_for:
            return
        self._waiting_for = dict.fromkeys(self._joining)
        self._joining = set()
        self._running = 0
        self._failed = None
        self._submitted = {}
        self._read_counts = {}
        self._counts = {}
        self._changed.notify_all()

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """Leave the run. With an error, the other replicas fail too."""
        with self._changed:
            if error is not None and self._failed is None and not isinstance(error, ProcessFailedError):
                self._failed = rank, error
            if rank in self._waiting_for:
                del self._waiting_for[rank]
                if self._running == rank:
                    self._run_next(rank)
            self._begin()
            self._changed.notify_all()

    def has_joined(self, rank: int) -> bool:
        """Whether a replica is in the current run."""
        return rank in self._waiting_for

    def submit(self, rank: int, name: str, value: Any) -> _Key:
        """Submit the value of a replica to an exchange, without waiting; `values` returns the values of all replicas."""
        with self._changed:
            number = self._counts[name, rank] = self._counts.get((name, rank), 0) + 1
            key = (name, number)
            self._submitted.setdefault(key, {})[rank] = value
            if len(self._submitted[key]) == self.size:
                self._waiting_for.update({other: None for other, waits in self._waiting_for.items() if waits == key})
            return key

    def values(self, rank: int, key: _Key) -> list[Any]:
        """Return the values of all replicas, in rank order. Other replicas run until all have submitted theirs."""
        with self._changed:
            if len(self._submitted[key]) < self.size:
                self._waiting_for[rank] = key
                self._run_next(rank)
            self._wait_for_turn(rank)
            submitted = self._submitted[key]
            self._read_counts[key] = self._read_counts.get(key, 0) + 1
            if self._read_counts[key] == self.size:
                del self._submitted[key], self._read_counts[key]
            return [submitted[other] for other in range(self.size)]

    def _run_next(self, rank: int) -> None:
        """Let the next replica that does not wait for an exchange run."""
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        ready = [other for other in order if other in self._waiting_for and self._waiting_for[other] is None]
        self._running = ready[0] if ready else None
        if not ready and self._waiting_for and self._failed is None and len(self._waiting_for) < self.size:
            exited = next(other for other in order if other not in self._waiting_for)
            error = f"replica {exited} has exited, but the other replicas wait for it. Call collectives on all replicas."
            self._failed = exited, ProcessFailedError(error)
        self._changed.notify_all()

    def _wait_for_turn(self, rank: int) -> None:
        self._changed.wait_for(lambda: self._running == rank or self._failed is not None)
        if self._failed is not None and self._failed[0] != rank:
            self._waiting_for.pop(rank, None)
            self._changed.notify_all()
            other, error = self._failed
            raise ProcessFailedError(f"replica {other} has failed: {type(error).__name__}: {error}") from error


_scheduler: ReplicaScheduler | None = None
_lock = threading.Lock()


def replica_scheduler(size: int) -> ReplicaScheduler:
    """Return the object that all replicas of this process share."""
    global _scheduler
    if os.environ.get("PJRT_CPU_ASYNC_CLIENT") != "0":
        raise ConfigurationError(
            "replicas on XLA's CPU runtime are threads, so it must run one graph after the other. Set this before it starts: "
            "export PJRT_CPU_ASYNC_CLIENT=0. XLAStrategy.launch(main) sets it."
        )
    with _lock:
        if _scheduler is None or _scheduler.size != size:
            # In a forked process torch creates its thread pool again at first use. Autograd uses it from one thread for each
            # device: together they would find a half-created pool, and crash.
            torch.set_num_threads(torch.get_num_threads())
            _scheduler = ReplicaScheduler(size)
        return _scheduler


class ThreadWorld(World):
    """The world of a replica that is one of several threads of a process."""

    def __init__(self, rank: int, size: int, scheduler: ReplicaScheduler) -> None:
        super().__init__(rank, size, local_rank=rank, local_size=size, launcher="torch_xla.launch")
        self.scheduler = scheduler
        set_printing(main=rank == 0, rank=rank, thread=True)

    def leave_run(self) -> None:
        """Leave the run at its end. Does nothing in `trainkit.strategies.XLAStrategy.launch`, which leaves it later."""
        if self.rank not in self.scheduler.launched:
            self.scheduler.leave(self.rank)

    def exchange(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self.gather("exchange", json.dumps(value))]

    def from_main(self, value: Any) -> Any:
        return self.exchange(value if self.is_main else None)[0]

    def collect(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        values = self.exchange(value)
        return self.from_main(answer(values) if self.is_main else None)

    def combine(self, value: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return reduce(function, [torch.tensor(row, dtype=value.dtype) for row in self.exchange(value.tolist())])

    def exchange_state(self, value: Any) -> list[Any]:
        return [copy.deepcopy(other) for other in self.gather("state", value)]

    def exchange_user_objects(self, value: Any) -> list[Any]:
        return self.exchange_state(value)

    def broadcast_user_object(self, value: Any, source: int = 0) -> Any:
        return self.exchange_state(value)[source]

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        return [list(row) for row in self.gather("rows", [float(value) for value in values])]

    def begin_largest(self, values: Sequence[int]) -> Pending:
        return _Largest(self, self.scheduler.submit(self.rank, "largest", [int(value) for value in values]))

    def thread_exchange(self, name: str) -> ThreadExchange:
        return _ReplicaExchange(name, self)

    def gather(self, name: str, value: Any = None) -> list[Any]:
        """Return the values of all replicas. The other replicas run until they submit theirs."""
        if not self.scheduler.has_joined(self.rank):
            self.scheduler.join(self.rank)
        return self.scheduler.values(self.rank, self.scheduler.submit(self.rank, name, value))


class _Largest(Pending):
    def __init__(self, world: ThreadWorld, key: _Key) -> None:
        self._world = world
        self._key = key

    def wait(self) -> list[int]:
        rows = self._world.scheduler.values(self._world.rank, self._key)
        return [max(column) for column in zip(*rows, strict=True)]


class _ReplicaExchange(ThreadExchange):
    """An exchange between replicas that run one at a time. Do not use it from other threads."""

    concurrent = False

    def __init__(self, name: str, world: ThreadWorld) -> None:
        super().__init__(name, None, world.rank, world.size)
        self._world = world

    def exchange(self, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        return [json.loads(text) for text in self._world.gather(f"thread exchange {self._name}", json.dumps(value))]

    def collect(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        return self._world.collect(value, answer)
