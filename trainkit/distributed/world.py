"""`World`: the rank and size of a process, and small collectives that synchronize the ranks.

These collectives exchange numbers, names and decisions. They use their own gloo group on the CPU, so they neither wait for a
device nor mix with the collectives of the gradients. Every rank calls the same methods in the same order, from its main
thread; other threads use `World.thread_exchange`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainkit.distributed.collective_tracker import CollectiveTracker
from trainkit.distributed.user_objects import all_gather_user_objects, broadcast_user_object
from trainkit.errors import ConfigurationError
from trainkit.tagged_json.message import from_bytes, to_bytes

if TYPE_CHECKING:
    from trainkit.distributed.channel import Channel
    from trainkit.distributed.restart_store import RestartStore
    from trainkit.distributed.watchdog import Watchdog

__all__ = ["Pending", "ThreadExchange", "World"]

_SLOT = 2048  # bytes of an exchange that takes one collective; longer ones take two
_HEAD = 8


class World:
    """The processes of a run, and small collectives for numbers and decisions.

    In a strategy it is `self.world`, the result of `trainkit.launch.joining.join`. `World()` is a single process, for which
    all collectives return at once. All ranks call the same methods in the same order, from the main thread. Their collectives
    run on the CPU, in a process group of their own. For tensors, use `torch.distributed` inside `with world.collectives:`.

    Args:
        rank: the rank of this process, from 0.
        size: the world size.
        local_rank: the rank of this process on its node.
        local_size: number of processes on its node.
        node: the index of its node.
        nodes: number of nodes.
        devices: number of devices per process, each with its own micro-batch.
        launcher: what started the processes, for messages.
        control: a gloo group of all ranks, used by this object only.
        channel: the connection between all ranks that works without collectives.
        watchdog: ends this process when another rank has failed.
        restarts: how many times the launcher has restarted the processes after a failure.
        memory: keeps texts over such a restart.

    Attributes:
        collectives: counts the collectives of this process. Put each of your own inside `with world.collectives:`. If another
            rank fails, the failure report then says that this rank waited in a collective.

    Example:
        ```python
        import torch
        import torch.distributed as dist

        from trainkit.distributed.world import World


        def sum_over_ranks(world: World, tensor: torch.Tensor) -> None:
            if world.size > 1:
                with world.collectives:
                    dist.all_reduce(tensor)
        ```
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        local_rank: int = 0,
        local_size: int = 1,
        node: int = 0,
        nodes: int = 1,
        devices: int = 1,
        launcher: str = "one process",
        control: dist.ProcessGroup | None = None,
        channel: Channel | None = None,
        watchdog: Watchdog | None = None,
        restarts: int = 0,
        memory: RestartStore | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self.node, self.nodes = node, nodes
        self.devices = devices
        self.launcher = launcher
        self.control = control
        self.channel = channel
        self.watchdog = watchdog
        self.restarts = restarts
        self.collectives = CollectiveTracker() if channel is None else channel.collectives
        self.collective_checks: Any = None  # of your own training loop
        self._memory = memory

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, launcher={self.launcher!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> World:
        return self  # a copy of a strategy or a Trainer has the same processes

    def __getstate__(self) -> dict[str, Any]:
        if self.size > 1:
            raise ConfigurationError(
                f"a Trainer or strategy of {self.size} processes cannot be pickled, because it holds their connections. Pickle "
                "what you need of it, such as trainer.callback_metrics; copy.deepcopy works."
            )
        return {**self.__dict__, "collective_checks": None}

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which prints, logs and writes."""
        return self.rank == 0

    @property
    def width(self) -> int:
        """Number of devices of all ranks, each of which works on its own micro-batch."""
        return self.size * self.devices

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order.

        Args:
            value: JSON: lists, dicts with strings as keys, strings, `None`, and numbers, NaN included. Tuples become lists.

        Example:
            ```python
            names = [name for name, _ in module.named_parameters()]
            assert all(other == names for other in self.world.exchange(names))
            ```
        """
        if self.size == 1:
            return [value]
        return [json.loads(bytes(data)) for data in self._gathered(json.dumps(value).encode())]

    def exchange_state(self, value: Any) -> list[Any]:
        """Like `exchange`, for values that a checkpoint can contain: tuples, bytes, arrays, tensors and more.

        If there are several ranks, tensors are returned on the CPU.

        Raises:
            UnsavableError: something in it cannot be encoded; see `trainkit.tagged_json.encode`.
        """
        return [value] if self.size == 1 else [from_bytes(data) for data in self._gathered(to_bytes(value))]

    def exchange_user_objects(self, value: Any) -> list[Any]:
        """Like `exchange`, for objects of the user, which are pickled; tensors keep their devices."""
        if self.size == 1:
            return [value]
        with self.collectives:
            return all_gather_user_objects(value, self.size, self.control)

    def broadcast_user_object(self, value: Any, source: int = 0) -> Any:
        """Return the object that rank `source` has, which is pickled; tensors keep their devices."""
        if self.size == 1:
            return value
        with self.collectives:
            return broadcast_user_object(value, source, self.control)

    def from_main(self, value: Any) -> Any:
        """Return the value of the main process; on other ranks `value` has no effect.

        Args:
            value: JSON, as for `exchange`.

        Example:
            ```python
            run_id = self.world.from_main(secrets.token_hex(8))
            ```
        """
        return value if self.size == 1 else self.exchange(value if self.is_main else None)[0]

    def agree(self, error: BaseException | None = None) -> str | None:
        """The error of the first rank that has one, with its rank; `None` if no rank has one."""
        errors = self.exchange(None if error is None else f"{type(error).__name__}: {error}")
        return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None), None)

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each rank, in rank order.

        Args:
            values: Numbers, which are sent as float64; the same number of values on all ranks.

        Example:
            ```python
            seconds = [row[0] for row in self.world.rows([step_time])]
            ```
        """
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self.collectives:
            dist.all_gather(rows, mine, group=self.control)
        return [row.tolist() for row in rows]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each number over all ranks, added in rank order: the same bits on every rank.

        Args:
            values: As for `rows`.

        Example:
            ```python
            loss_sum, tokens = self.world.sums([float(loss), tokens])
            ```
        """
        return [sum(column) for column in zip(*self.rows(values), strict=True)]

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each number over all ranks.

        Args:
            values: 64-bit integers or booleans; the same number of values on all ranks.

        Example:
            ```python
            (any_overflow,) = self.world.largest([overflow])
            ```
        """
        return self.begin_largest(values).wait()

    def begin_largest(self, values: Sequence[int]) -> Pending:
        """Start `largest`; wait for it later."""
        tensor = torch.tensor(values, dtype=torch.int64)
        work = None
        if self.size > 1:
            self.collectives.begun += 1
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        return Pending(tensor, work, self.collectives)

    def keep_text(self, key: str, text: str) -> None:
        """Keep the text of the main process over a restart of the processes, if the launcher can."""
        if self._memory is not None and self.is_main:
            self._memory.set(key, text)

    def load_text(self, key: str) -> str | None:
        """The text of a key, stored before a restart or since. Collective."""
        remembered = self._memory.get(key) if self._memory is not None and self.is_main else None
        text: str | None = self.from_main(remembered)
        return text

    def barrier(self) -> None:
        """Wait until all ranks have called it.

        Example:
            ```python
            if self.world.is_main:
                path.write_text("...")
            self.world.barrier()  # now the file exists for all ranks
            ```
        """
        if self.size > 1:
            self.largest([0])

    def thread_exchange(self, name: str) -> ThreadExchange:
        """Exchanges for a thread other than the main thread, or for a wait that may be long."""
        if self.size > 1 and self.channel is None:
            raise ValueError(f"{self!r} has no channel, which exchanges in a thread need. Use World(channel=Channel.open(...))")
        return ThreadExchange(name, self.channel if self.size > 1 else None, self.rank, self.size)

    def _gathered(self, data: bytes) -> list[memoryview]:
        """The bytes of each rank, with one collective if all are short."""
        with self.collectives:
            slots = self._slots(data[:_SLOT], len(data), _SLOT)
            longest = max(length for length, _ in slots)
            if longest > _SLOT:
                slots = self._slots(data, len(data), longest)
        return [piece[:length] for length, piece in slots]

    def _slots(self, data: bytes, length: int, size: int) -> list[tuple[int, memoryview]]:
        mine = torch.zeros(_HEAD + size, dtype=torch.uint8)
        head = length.to_bytes(_HEAD, "little") + data
        mine[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        slots = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(slots, mine, group=self.control)
        views = [slot.numpy().data for slot in slots]
        return [(int.from_bytes(view[:_HEAD], "little"), view[_HEAD:]) for view in views]


class Pending:
    """A reduction in progress."""

    __slots__ = ("_collectives", "_tensor", "_work")

    def __init__(self, tensor: torch.Tensor, work: Any, collectives: CollectiveTracker) -> None:
        self._tensor, self._work, self._collectives = tensor, work, collectives

    def wait(self) -> list[int]:
        """Wait for the result."""
        if self._work is not None:
            self._collectives.depth += 1  # not `with`: it was counted when it started
            try:
                self._work.wait()
            finally:
                self._collectives.depth -= 1
            self._work = None
        values: list[int] = self._tensor.tolist()
        return values


class ThreadExchange:
    """`World.exchange` without collectives and without a time limit, for any thread, but one thread at a time.

    Args:
        name: its name, the same on all ranks. Only one `ThreadExchange` has the name at a time.
        channel: the connection; `None` for a single process.
        rank: the rank of this process.
        size: the world size.

    Attributes:
        concurrent: whether a thread other than the one that trains may use it.
        completed: the number of completed exchanges, the same on all ranks.
    """

    concurrent = True

    def __init__(self, name: str = "", channel: Channel | None = None, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._name, self._channel = name, channel
        self.completed = 0

    def exchange(self, value: Any, while_waiting: Callable[[], None] | None = None) -> list[Any]:
        """The values of all ranks, in rank order; JSON.

        An exchange that an error or a signal ended before it was complete does not count: the next one takes its place.

        Args:
            value: the value of this rank.
            while_waiting: called from time to time during the wait; an exception in it ends the wait.
        """
        if self._channel is None:
            return [value]
        return self._channel.exchange(f"{self._name}/{self.completed + 1}", value, while_waiting, self._complete)

    def _complete(self) -> None:
        self.completed += 1
