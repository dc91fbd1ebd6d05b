"""`Ranks`: which process of a run this is, and what users exchange between the processes. The base of `trainkit.Strategy`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, UnknownNameError, nearest
from trainkit.nested import map_tensors

__all__ = ["Ranks"]

_OPERATIONS = {
    "mean": lambda stacked: stacked.sum(0) / len(stacked),
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}
_OTHER_NAMES = {"avg": "mean"}


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

        def reduced(one: Tensor) -> Any:
            return _OPERATIONS[name](self.all_gather(one.detach()))

        return map_tensors(tensor, reduced)
