"""`World`: the ranks of a run and small collectives that synchronize them; `Ranks`: what users exchange between them.

The collectives of `World` exchange numbers, names and decisions. They use their own gloo group on the CPU, so they neither wait
for a device nor mix with the collectives of the gradients. Every rank calls the same methods in the same order, from its main
thread; other threads use `World.thread_exchange`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.hops import Hop, hops
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.nested import map_tensors
from trainkit.registry import strategy_infos
from trainkit.tagged_json.codec import from_bytes, to_bytes

if TYPE_CHECKING:
    from trainkit.distributed.channel import Channel
    from trainkit.distributed.failure_handling import Watchdog
    from trainkit.distributed.stores import RestartStore

__all__ = [
    "RING_RANKS",
    "CollectiveTracker",
    "Pending",
    "Ranks",
    "ThreadExchange",
    "World",
    "file_name_of",
    "find_call",
    "find_caller",
]

_SLOT = 2048  # bytes of an exchange that takes one collective; longer ones take two
_HEAD = 8
_TAGS = 256  # more than there are reductions in progress at a time
RING_RANKS = 64  # up to this number of ranks, gloo reduces in a ring, which continues by itself during a step

_OPERATIONS = {
    "mean": lambda stacked: stacked.sum(0) / len(stacked),
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}
_OTHER_NAMES = {"avg": "mean"}

# Packages between a user's script and trainkit: their frames are not the script's.
_BETWEEN = ("accelerate", "contextlib", "functools", "peft", "torch", "transformers")
_OURS = "trainkit"


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
        self.collective_checks: Any = None  # Set by an Accelerator in your own training loop.
        self.reductions = 0  # that this rank has started by `combine`; the same on all ranks
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
        return [json.loads(bytes(data)) for data in self._gather_bytes(json.dumps(value).encode())]

    def exchange_state(self, value: Any) -> list[Any]:
        """Like `exchange`, for values that a checkpoint can contain: tuples, bytes, arrays, tensors and more.

        If there are several ranks, tensors are returned on the CPU.

        Raises:
            UnsavableError: something in it cannot be encoded; see `trainkit.tagged_json.codec`.
        """
        return [value] if self.size == 1 else [from_bytes(data) for data in self._gather_bytes(to_bytes(value))]

    def exchange_user_objects(self, value: Any) -> list[Any]:
        """Like `exchange`, for objects of the user, which are pickled; tensors keep their devices.

        Only here and in `broadcast_user_object` do ranks exchange anything but JSON and tensors. It is sent between the ranks
        of one run, and is never written to a file or read from one.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.collectives:
            dist.all_gather_object(values, value, group=self.control)  # noqa: TID251
        return values

    def broadcast_user_object(self, value: Any, source: int = 0) -> Any:
        """Return the object that rank `source` has, which is pickled; tensors keep their devices."""
        if self.size == 1:
            return value
        values = [value]
        with self.collectives:
            dist.broadcast_object_list(values, source, group=self.control)  # noqa: TID251
        return values[0]

    def from_main(self, value: Any) -> Any:
        """Return the value of the main process; on other ranks `value` has no effect.

        Args:
            value: JSON, as for `exchange`.

        Example:
            ```python
            run_id = self.world.from_main(secrets.token_hex(8))
            ```
        """
        if self.size == 1:
            return value
        with self.collectives:
            return json.loads(self._broadcast_bytes(json.dumps(value).encode() if self.is_main else b""))

    def collect(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """Return the reply of the main process to the values of all ranks, which go to the main process only.

        Args:
            value: JSON, as for `exchange`.
            answer: On the main process, returns the reply (JSON) to the values of all ranks, in rank order.
        """
        if self.size == 1:
            return answer([value])
        data = json.dumps(value).encode()
        (longest,) = self.largest([len(data)])
        mine = _with_length(data, longest)
        slots = [torch.empty_like(mine) for _ in range(self.size)] if self.is_main else None
        with self.collectives:
            dist.gather(mine, slots, 0, group=self.control)
        reply = None if slots is None else answer([json.loads(bytes(_without_length(slot))) for slot in slots])
        return self.from_main(reply)

    def agree(self, error: BaseException | None = None) -> str | None:
        """The error of the first rank that has one, with its rank; `None` if no rank has one."""
        if not any(self.largest([error is not None])):
            return None
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
        found = torch.tensor(values, dtype=torch.int64)
        largest: list[int] = (self.combine(found, torch.maximum) if self.size > 1 else found).tolist()
        return largest

    def begin_largest(self, values: Sequence[int]) -> Pending:
        """Start `largest`; wait for it later. Of many ranks, the hops but the first are done during that wait."""
        tensor = torch.tensor(values, dtype=torch.int64)
        work = None
        if self.size > 1:
            self.collectives.begun += 1
        if self.size > RING_RANKS:
            return _Hops(self, tensor, torch.maximum)
        if self.size > 1:
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        return Pending(tensor, work, self.collectives)

    def combine(self, value: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the values of all ranks, combined in O(log N) messages per rank; the same bits on every rank.

        Args:
            value: A tensor on the CPU, of the same shape and dtype on all ranks.
            function: Combines two values into one; their order must not matter.
        """
        self.collectives.begun += 1
        return _Hops(self, value, function).result()

    def post(self, hop: Hop, value: Tensor, tag: int) -> tuple[Tensor, list[Any]]:
        """Start a hop of the reduction with this tag; returns where the received value will be, and what to wait for."""
        received = torch.empty_like(value)
        group = self.control
        assert group is not None
        # the methods of the group take half the time of `isend` and `irecv`
        works: list[Any] = [group.send([value], hop.peer, tag)] if hop.sends else []
        if hop.receives:
            works.append(group.recv([received], hop.peer, tag))
        return received, works

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

    def _gather_bytes(self, data: bytes) -> list[memoryview]:
        """The bytes of each rank, with one collective if all are short."""
        with self.collectives:
            slots = self._slots(data, _SLOT)
            longest = max(map(_length, slots))
            if longest > _SLOT:
                slots = self._slots(data, longest)
        return [_without_length(slot) for slot in slots]

    def _slots(self, data: bytes, size: int) -> list[Tensor]:
        mine = _with_length(data, size)
        slots = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(slots, mine, group=self.control)
        return slots

    def _broadcast_bytes(self, data: bytes) -> bytes:
        """The bytes of the main process, with one collective if they are short."""
        slot = _with_length(data, _SLOT)
        dist.broadcast(slot, 0, group=self.control)
        if _length(slot) > _SLOT:
            slot = _with_length(data, _length(slot))
            dist.broadcast(slot, 0, group=self.control)
        return bytes(_without_length(slot))


def _with_length(data: bytes, size: int) -> Tensor:
    """A tensor of the length of `data` and its first `size` bytes, padded with zeros."""
    slot = torch.zeros(_HEAD + size, dtype=torch.uint8)
    content = bytearray(len(data).to_bytes(_HEAD, "little") + data[:size])
    slot[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    return slot


def _length(slot: Tensor) -> int:
    """The length of the bytes in the result of `_with_length`, even if it does not have all of them."""
    return int.from_bytes(slot[:_HEAD].numpy().tobytes(), "little")


def _without_length(slot: Tensor) -> memoryview:
    """The bytes in the result of `_with_length`."""
    return slot.numpy().data[_HEAD : _HEAD + _length(slot)]


class Pending:
    """A reduction in progress."""

    __slots__ = ("_collectives", "_tensor", "_work")

    def __init__(self, tensor: torch.Tensor, work: Any, collectives: CollectiveTracker) -> None:
        self._tensor = tensor
        self._work = work
        self._collectives = collectives

    def wait(self) -> list[int]:
        """Wait for the result."""
        if self._work is not None:
            self._collectives.depth += 1  # `with` would count it again: it was counted when it started.
            try:
                self._work.wait()
            finally:
                self._collectives.depth -= 1
            self._work = None
        values: list[int] = self._tensor.tolist()
        return values


class _Hops(Pending):
    """A reduction in progress, of which each rank does its hops itself. The first one has started; `wait` does the others."""

    __slots__ = ("_function", "_hops", "_posted", "_tag", "_world")

    def __init__(self, world: World, value: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(value, None, world.collectives)
        self._world = world
        self._function = function
        self._hops = hops(world.rank, world.size)
        world.reductions += 1
        self._tag = world.reductions % _TAGS  # two ranks may be in different hops of two reductions at the same time
        self._posted = world.post(self._hops[0], value, self._tag) if self._hops else None

    def wait(self) -> list[int]:
        values: list[int] = self.result().tolist()
        return values

    def result(self) -> Tensor:
        """Wait for the result."""
        self._collectives.depth += 1
        try:
            for hop in self._hops:
                received, works = self._posted or self._world.post(hop, self._tensor, self._tag)
                self._posted = None
                for work in works:
                    work.wait()
                if hop.receives:
                    self._tensor = received if hop.final else self._function(self._tensor, received)
        finally:
            self._collectives.depth -= 1
        self._hops = ()
        return self._tensor


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
        self._name = name
        self._channel = channel
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

    def collect(self, value: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """`World.collect` for any thread. Every call counts as completed."""
        if self._channel is None:
            return answer([value])
        try:
            return self._channel.collect(f"{self._name}/{self.completed + 1}", value, answer)
        finally:
            self.completed += 1

    def _complete(self) -> None:
        self.completed += 1


# ------------------------------------------------------------------------------------------------------------------ counting


class CollectiveTracker:
    """The collectives of one process: use `with tracker:` around each one in which the main thread may wait.

    All ranks call the same collectives, so each collective has the same number on all ranks. A rank in a collective whose
    number another rank has not reached waits for that rank. It waits forever if that rank calls something else first.

    Attributes:
        begun: the number of collectives that have begun.
        depth: the number of collectives that this process is in; one may be part of another.
        checks: the number of completed comparisons of verbs; see `trainkit/distributed/collective_checks.py`.
        location: the verb and the place of its call, if the stack frames do not show them.
        failed: what `trainkit.distributed.collective_checks.FailuresOfMain` shows to ranks that wait; JSON.
    """

    __slots__ = ("_forward", "begun", "checks", "depth", "failed", "location", "thread")

    def __init__(self) -> None:
        self.begun = self.depth = self.checks = 0
        self.location: tuple[str, str] | None = None
        self.failed: list[Any] = []
        self.thread = threading.get_ident()
        self._forward: tuple[object, int, FrameType] | None = None

    def __enter__(self) -> None:
        if self._forward is not None:
            self.in_forward()
        self.begun += 1
        if not self.depth:  # parts may be in other threads, as those of a backward pass are
            self.thread = threading.get_ident()
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1

    def enter_forward(self, part: object, frame: FrameType, location: tuple[str, str]) -> None:
        """Count a forward; torch calls hooks at its beginning and its end.

        Args:
            part: the module that is called.
            frame: a frame of this thread that exists while the forward runs.
            location: the attribute, unless the forward is part of another collective.
        """
        thread = threading.get_ident()
        # no calls between these lines, which a signal could interrupt
        if not self.depth:
            self.location = location
            self.thread = thread
        self.begun += 1
        self.depth += 1
        self._forward = (part, thread, frame)

    def leave_forward(self, part: object) -> None:
        """End the forward, if it is that of `part`."""
        if self._forward is not None and self._forward[0] is part:
            self._end_forward()

    def in_forward(self) -> bool:
        """Whether a forward runs. torch calls no hook for a forward that Ctrl-C has ended; it is ended here."""
        if self._forward is not None and not _runs(*self._forward[1:]):
            self._end_forward()
        return self._forward is not None

    def _end_forward(self) -> None:
        self._forward = None
        self.depth -= 1
        if not self.depth:
            self.location = None

    def record(self) -> dict[str, Any]:
        """The counters as JSON, for other ranks; from any thread.

        `where` is the verb that waits and the place of its call; `None` if this rank does not wait.
        """
        begun, forward = self.begun, self._forward
        waiting = self.depth and (forward is None or _runs(*forward[1:]))
        where = list(self.location or find_call(sys._current_frames().get(self.thread))) if waiting else None
        # `checks` is read last: a collective in `begun` cannot have begun after a later check
        return {"begun": begun, "where": where, "checks": self.checks, "failed": self.failed}


def find_call(frame: FrameType | None) -> tuple[str, str]:
    """The trainkit function that a script has called, and where: `("backward", "train.py:12")`."""
    verb, script = find_caller(frame)
    if script is None:
        return verb, "an unknown line"
    return verb, f"{file_name_of(script)}:{script.f_lineno}"


def find_caller(frame: FrameType | None) -> tuple[str, FrameType | None]:
    """The trainkit function that a script has called, and the script's frame; see `find_call`."""
    while frame is not None and _package(frame) != _OURS:
        frame = frame.f_back
    verb = ""
    between = {_OURS, *_BETWEEN, *(package for info in strategy_infos() for package in info.packages)}
    while frame is not None and _package(frame) in between:
        verb = frame.f_code.co_name if _package(frame) == _OURS else verb
        frame = frame.f_back
    return verb, frame


def _runs(thread: int, frame: FrameType) -> bool:
    """Whether a frame is still on the stack of a thread."""
    current = sys._current_frames().get(thread)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def file_name_of(frame: FrameType) -> str:
    """The name of the frame's file, without folders."""
    return frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__") or ""
    return name.partition(".")[0]


# ----------------------------------------------------------------------------------------------------------- verbs for users


class Ranks:
    """The process of a run that this is, and verbs for values of users, which all processes call in the same order.

    Attributes:
        world: The processes of the run.
        device: The device of this process.
    """

    world: World = World()
    device: torch.device

    @property
    def data_world(self) -> World:
        """The processes over which data is sharded and metrics are reduced; not `world` where each process reads all data."""
        return self.world

    @property
    def repeats_data(self) -> bool:
        """Whether a process with a lower rank reads the same data, as in a tensor-parallel group."""
        return self.world.rank % max(1, self.world.size // self.data_world.size) > 0

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.world.rank

    @property
    def global_rank(self) -> int:
        """The rank of this process, as `rank`."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node."""
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        """The index of this process's node."""
        return self.world.node

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world.nodes

    @property
    def world_size(self) -> int:
        """Number of devices over which the data is sharded: of processes, unless a process uses several devices."""
        return self.data_world.width

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process (rank 0), which prints, logs and writes."""
        return self.world.is_main

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process, as `is_main_process`."""
        return self.world.is_main

    @property
    def root_device(self) -> torch.device:
        """The device of this process, as `device`."""
        return self.device

    def all_gather(self, data: Any, sync_grads: bool = False, alike: bool = False) -> Any:
        """Return the tensors of all processes, stacked along a new first dimension; with one process the tensors unchanged.

        Args:
            data: A tensor, or tensors in containers; of the same shapes on all processes.
            sync_grads: Let gradients flow back: each process gets the sum of all gradients of its tensors.
            alike: Their shapes have been compared already.
        """
        return data

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over the processes."""
        return value

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes.

        Args:
            name: What to call this barrier in an error message, if another process waits in another call.
        """
        self.barrier_for("strategy.barrier" if name is None else f"strategy.barrier({name!r})")

    def barrier_for(self, verb: str) -> None:
        """Wait until all processes have called this verb of the strategy. For authors of strategies.

        Args:
            verb: The verb, such as "strategy.barrier". Strategies that compare what the processes call name it in the error.
        """
        self.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object that one process has, on all processes; with one process the object unchanged.

        Args:
            obj: Any object that can be pickled; on the other processes it has no effect. Tensors arrive on the CPU.
            src: The rank of the process that has it.

        Raises:
            ConfigurationError: There is no such rank.
            CollectiveError: Another process made a different call.

        Example:
            ```python
            path = trainer.strategy.broadcast(make_path() if trainer.is_global_zero else None)
            ```
        """
        if not isinstance(src, int) or not 0 <= src < self.world.size:
            raise ConfigurationError(f"broadcast: src must be a rank from 0 to {self.world.size - 1}, not {src!r}. Use src=0")
        if self.world.size == 1:
            return obj
        self.barrier_for("strategy.broadcast")
        value = map_tensors(obj, lambda tensor: tensor.detach().cpu()) if self.world.rank == src else None
        return self.world.broadcast_user_object(value, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, maximum or minimum of tensors over the processes; the same bits on all of them.

        Gradients do not flow back. With one process the tensors are returned unchanged.

        Args:
            tensor: A tensor, or tensors in containers; of the same shapes on all processes. Other values are not reduced.
            group: Only `None`: all processes.
            reduce_op: `"mean"` (or `"avg"`), `"sum"`, `"max"`, `"min"`, or torch's `ReduceOp`.

        Raises:
            ConfigurationError: Shapes differ, or a group was given.
            UnknownNameError: Another operation.
        """
        if group is not None:
            raise ConfigurationError("strategy.reduce works on all processes. For a group: torch.distributed.all_reduce")
        name = str(reduce_op).rpartition(".")[2].lower() if isinstance(reduce_op, dist.ReduceOp.RedOpType) else str(reduce_op)
        name = _OTHER_NAMES.get(name.lower(), name.lower())
        if name not in _OPERATIONS:
            raise UnknownNameError(
                f"strategy.reduce: unknown reduce_op {reduce_op!r}; known: {', '.join(_OPERATIONS)}."
                f"{nearest(name, _OPERATIONS)}"
            )
        if self.world.size == 1:
            return tensor

        def reduce_tensor(one: Tensor) -> Any:
            return _OPERATIONS[name](self.all_gather(one.detach()))

        return map_tensors(tensor, reduce_tensor)
