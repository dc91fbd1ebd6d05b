"""The verbs of `Accelerator` that are about processes; each is one call of a part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.accelerator.facts import AcceleratorState, plugin_of, refuse_precision, state_of
from trainkit.accelerator.gathering import CurrentBatch, Gathering
from trainkit.accelerator.options import mixed_name
from trainkit.accelerator.processes import Processes, only_where
from trainkit.config.deepspeed_plugin import DeepSpeedPlugin
from trainkit.config.fsdp_plugin import FullyShardedDataParallelPlugin
from trainkit.config.kwargs_handlers import DistributedType, distributed_type
from trainkit.config.settings import Plugin
from trainkit.console import echo
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError
from trainkit.strategy import Strategy

__all__ = ["ProcessVerbs"]

Function = TypeVar("Function", bound=Callable[..., Any])


class ProcessVerbs:
    """Which process this is, waiting for the others, and exchanging tensors with them.

    The base of `trainkit.Accelerator`, which also works without the rest of it.

    Args:
        strategy: The strategy of the run.
        batch: The batch that the loop has read last. Default: none.
        plugin: The plugin that was given.

    Attributes:
        strategy: The strategy of the run.
        collective_checks: Compares what the processes call.
    """

    def __init__(self, strategy: Strategy, batch: CurrentBatch | None = None, plugin: Plugin | None = None) -> None:
        self.strategy = strategy
        self.collective_checks = CollectiveChecks.of(strategy.world)
        self._processes = Processes(strategy, self.collective_checks)
        self._gathering = Gathering(strategy, self.collective_checks, batch)
        self._plugin = plugin

    # -------------------------------------------------------------------------------------------------------------- facts

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.strategy.world

    @property
    def device(self) -> torch.device:
        """The device of the models and the batches."""
        return self.strategy.device

    @property
    def num_processes(self) -> int:
        """Number of processes; where one process drives several devices (XLA's SPMD), number of devices."""
        return self.strategy.world_size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self.strategy.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self.strategy.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process, rank 0, which writes."""
        return self.strategy.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.strategy.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process; true where one process drives all devices (XLA's SPMD)."""
        return self.strategy.rank == self.strategy.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether `num_processes` is more than 1."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """How the run is distributed: `MULTI_CPU` and `MULTI_GPU` are DDP, `DEEPSPEED` is ZeRO, `NO` is one process."""
        return distributed_type(self.strategy)

    @property
    def state(self) -> AcceleratorState:
        """The device, the processes and the precision in one object, as in Accelerate."""
        return state_of(self.strategy, self._plugin)

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The options of ZeRO; `None` without ZeRO."""
        return plugin_of(self.strategy, self._plugin, DeepSpeedPlugin)

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """The options of FSDP; `None` without FSDP."""
        return plugin_of(self.strategy, self._plugin, FullyShardedDataParallelPlugin)

    @property
    def is_fsdp2(self) -> bool:
        """Whether the strategy is FSDP, which is always FSDP2."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"` or `"bf16"`; see `strategy.precision` for the precise name."""
        return mixed_name(self.strategy.precision)

    @property
    def native_amp(self) -> bool:
        """Whether the forward runs under autocast. Setting it has no effect: pass `mixed_precision` to the accelerator."""
        return self.strategy.precision.autocast_dtype is not None

    @native_amp.setter
    def native_amp(self, native: bool) -> None:
        refuse_precision(self.strategy, native)

    # ---------------------------------------------------------------------------------------------------- order, division

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called it. There is no timeout: the main process may evaluate or write meanwhile.

        Raises:
            CollectiveError: Another process made a different call, waits for this one, or has ended; the message names the
                lines.
        """
        self.collective_checks.wait("wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A context whose body runs on the main process first, then on the others, which find its downloads in the cache.

        Raises:
            CollectiveError: As in `wait_for_everyone`.
        """
        with self._processes.first("main_process_first", self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """A context whose body runs on the first process of each node first, then on the others.

        Raises:
            CollectiveError: As in `wait_for_everyone`.
        """
        with self._processes.first("local_main_process_first", self.is_local_main_process):
            yield

    def on_main_process(self, function: Function) -> Function:
        """A decorator: the function runs on the main process only; on the others it returns `None`."""
        return only_where(lambda: self.is_main_process, function, "on_main_process")

    def on_local_main_process(self, function: Function) -> Function:
        """A decorator: the function runs on the first process of each node only."""
        return only_where(lambda: self.is_local_main_process, function, "on_local_main_process")

    def on_last_process(self, function: Function) -> Function:
        """A decorator: the function runs on the last process only."""
        return only_where(lambda: self.is_last_process, function, "on_last_process")

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """A decorator, `@accelerator.on_process(process_index=1)`: the function runs on that process only.

        A single process runs it for any number.

        Raises:
            ConfigurationError: `process_index` is missing.
        """
        if process_index is None:
            raise ConfigurationError("on_process needs the rank of the process: @accelerator.on_process(process_index=1)")
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return only_where(lambda: self.world.size == 1 or self.process_index == process_index, function, "on_process")

    def on_local_process(self, function: Callable[..., Any] | None = None, local_process_index: int | None = None) -> Any:
        """A decorator, `@accelerator.on_local_process(local_process_index=1)`: the function runs on that process of each node
        only.

        Raises:
            ConfigurationError: `local_process_index` is missing.
        """
        if local_process_index is None:
            raise ConfigurationError(
                "on_local_process needs the rank of the process on its node: "
                "@accelerator.on_local_process(local_process_index=1)"
            )
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)

        def here() -> bool:
            return self.world.size == 1 or self.local_process_index == local_process_index

        return only_where(here, function, "on_local_process")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node only; the arguments are those of `print`."""
        if self.is_local_main_process:
            echo(*args, **kwargs)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """A context with this process's contiguous part of `inputs`; the sizes of the parts differ by at most 1.

        Args:
            inputs: A list, tuple, tensor, array, `datasets.Dataset`, or a dict of these with values of one length; the same
                on all processes.
            apply_padding: Repeat the last element of `inputs` in parts that are shorter, so that results can be gathered;
                drop the repeated results then. Tensors are moved to the device.

        Raises:
            ConfigurationError: `inputs` cannot be split, or the values of a dict differ in length.

        Example:
            ```python
            with accelerator.split_between_processes(["A", "B", "C"]) as prompts:
                ...  # ["A", "B"] on the first of two processes, ["C"] on the second
            ```
        """
        with self._processes.split(inputs, apply_padding) as part:
            yield part

    def set_trigger(self) -> None:
        """Set a flag for `check_trigger`: for example, that this process wants to stop."""
        self._processes.set_trigger()

    def check_trigger(self) -> bool:
        """Whether any process has called `set_trigger` since the last check; the same on all. All processes call it.

        Raises:
            CollectiveError: As in `wait_for_everyone`.
        """
        return self._processes.check_trigger()

    # ---------------------------------------------------------------------------------------------------------- exchanges

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes in the order of the ranks; scalars become a vector.

        Tensors may differ in the first dimension if it is the size of each process's micro-batch: the last one of an epoch
        may be short. With one process the tensors are returned unchanged.

        Args:
            tensor: A tensor, or tensors in lists, tuples and dicts; the same containers on all processes.

        Raises:
            CollectiveError: Containers, shapes or dtypes differ between processes; the message names them.
            ConfigurationError: An item is not a tensor.
        """
        return self._gathering.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without padding: each sample of an epoch occurs once, in the order of the data.

        Args:
            input_data: Tensors in containers; or lists of objects that can be pickled, which are concatenated.
            use_gather_object: Treat tensors as objects too: they may have any shape, and are returned on the CPU.

        Raises:
            CollectiveError: As in `gather`.
            ConfigurationError: As in `gather`.
        """
        return self._gathering.gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum of tensors over the processes; the same bits on all, in new tensors.

        Args:
            tensor: A tensor, or tensors in lists, tuples and dicts; of the same shapes on all processes.
            reduction: `"sum"`, `"mean"`, `"max"`, or `"none"`, which only scales.
            scale: A factor for the result.

        Raises:
            CollectiveError: Shapes or dtypes differ between processes.
            ConfigurationError: The reduction is unknown.
        """
        return self._gathering.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad tensors in one dimension to the largest size of all processes, so that they can be gathered.

        Args:
            tensor: A tensor, or tensors in lists, tuples and dicts. Tensors without dimension `dim` are unchanged.
            dim: The dimension to pad.
            pad_index: The value to pad with.
            pad_first: Pad at the start instead of the end.

        Raises:
            CollectiveError: Containers or numbers of dimensions differ between processes.
        """
        return self._gathering.pad_across_processes(tensor, dim, pad_index, pad_first)
