"""Verbs for a loop on several processes: who is who, who goes first, waiting for each other, work shared out."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainkit.accelerator.collective_checks import CollectiveChecks
from trainkit.errors import ConfigurationError
from trainkit.nested import rebuild
from trainkit.strategy import Strategy
from trainkit.utils.distributed_type import DistributedType, distributed_type

__all__ = ["ProcessVerbs"]

Function = TypeVar("Function", bound=Callable[..., Any])


class ProcessVerbs:
    """The verbs of :class:`trainkit.Accelerator` that are about processes."""

    strategy: Strategy
    collective_checks: CollectiveChecks
    _trigger: bool

    @property
    def device(self) -> torch.device:
        """Where the model and the batches are."""
        return self.strategy.device

    @property
    def num_processes(self) -> int:
        """So many micro-batches are worked on side by side: of processes, or of the devices that one drives (XLA's SPMD)."""
        return self.strategy.world_size

    @property
    def process_index(self) -> int:
        """The number of this process among all, from 0."""
        return self.strategy.rank

    @property
    def local_process_index(self) -> int:
        """The number of this process among those of its machine, from 0."""
        return self.strategy.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that writes, the first of all."""
        return self.strategy.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.strategy.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes; where one drives several devices, as XLA's SPMD does, that one."""
        return self.strategy.rank == self.strategy.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether micro-batches are worked on side by side."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """What distributes the run: ``DEEPSPEED`` is ZeRO, ``MULTI_CPU`` and ``MULTI_GPU`` are DDP, ``NO`` is one process."""
        return distributed_type(self.strategy)

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called it, for as long as that takes: the main one may evaluate or write meanwhile.

        Raises:
            CollectiveError: another one has called another verb, waits for this one, or has ended; it names the lines.
        """
        self.collective_checks.wait("wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process goes through the block first, then the others: it downloads, and they find it in the cache.

        Raises:
            CollectiveError: as of :meth:`wait_for_everyone`.
        """
        with self._first(self.is_main_process, "main_process_first"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first process of each machine goes through the block first, then the others.

        Raises:
            CollectiveError: as of :meth:`wait_for_everyone`.
        """
        with self._first(self.is_local_main_process, "local_main_process_first"):
            yield

    @contextmanager
    def _first(self, is_first: bool, verb: str) -> Iterator[None]:
        if not is_first:
            self.collective_checks.wait(verb)
        yield
        if is_first:  # not after an error: the others would go on as if there had been none
            self.collective_checks.wait(verb)

    def on_main_process(self, function: Function) -> Function:
        """A decorator: the function is called on the main process only; on the others it returns ``None``."""
        return _on(lambda: self.is_main_process, function, "on_main_process")

    def on_local_main_process(self, function: Function) -> Function:
        """A decorator: the function is called on the first process of each machine only."""
        return _on(lambda: self.is_local_main_process, function, "on_local_main_process")

    def on_last_process(self, function: Function) -> Function:
        """A decorator: the function is called on the last process only."""
        return _on(lambda: self.is_last_process, function, "on_last_process")

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """A decorator: ``@accelerator.on_process(process_index=1)`` calls the function on that process only.

        A single process calls it whatever the number is.

        Raises:
            ConfigurationError: no number.
        """
        if process_index is None:
            raise ConfigurationError("on_process needs the number of the process: @accelerator.on_process(process_index=1)")
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _on(lambda: self._alone or self.process_index == process_index, function, "on_process")

    def on_local_process(self, function: Callable[..., Any] | None = None, local_process_index: int | None = None) -> Any:
        """A decorator: ``@accelerator.on_local_process(local_process_index=1)``, on each machine.

        A single process calls it whatever the number is.

        Raises:
            ConfigurationError: no number.
        """
        if local_process_index is None:
            raise ConfigurationError(
                "on_local_process needs the number of the process on its machine: "
                "@accelerator.on_local_process(local_process_index=1)"
            )
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _on(lambda: self._alone or self.local_process_index == local_process_index, function, "on_local_process")

    @property
    def _alone(self) -> bool:
        return self.strategy.world.size == 1

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first process of each machine only."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of what there is to do, in the order of the processes; the sizes differ by 1 at most.

        ::

            with accelerator.split_between_processes(["A", "B", "C"]) as prompts:
                ...  # ["A", "B"] on the first of two processes, ["C"] on the second

        Args:
            inputs: a list, tuple, tensor, array, ``datasets.Dataset``, or a dict of such, which are of one length; on all
                processes the same.
            apply_padding: repeat the last element of all where a part is shorter than others, so that what is made of them can
                be gathered; drop it then. Tensors come on the device.

        Raises:
            ConfigurationError: something that has no parts, or a dict whose values differ in length.
        """
        world = self.strategy.world
        if world.size == 1:
            yield inputs
            return
        length = _length(inputs)
        each, more = divmod(length, world.size)
        start = world.rank * each + min(world.rank, more)
        end = start + each + (world.rank < more)
        missing = each + (more > 0) - (end - start) if apply_padding else 0
        part = _part(inputs, start, end, missing)
        yield _on_device(part, self.device) if apply_padding else part

    def set_trigger(self) -> None:
        """Set a flag that :meth:`check_trigger` sees on all processes: this one wants to stop, say."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has set the flag since this was asked last; on all processes the same. To be called on all.

        Raises:
            CollectiveError: as of :meth:`wait_for_everyone`.
        """
        found = any(self.collective_checks.exchange("check_trigger", self._trigger))
        self._trigger = False
        return found


def _on(here: Callable[[], bool], function: Function, verb: str) -> Function:
    if not callable(function):
        raise ConfigurationError(f"{verb} is a decorator: it needs a function, not {function!r}.")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here() else None

    return called  # type: ignore[return-value]


def _length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigurationError(
                "split_between_processes: the values of a dict must have one length, and they have "
                f"{', '.join(f'{n} ({key!r})' for key, n in lengths.items())}."
            )
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, list | tuple) or (isinstance(inputs, Tensor | np.ndarray) and inputs.ndim > 0) or _is_dataset(inputs):
        return len(inputs)
    raise ConfigurationError(
        f"split_between_processes divides lists, tuples, tensors, arrays, datasets and dicts of them, not a "
        f"{type(inputs).__name__}."
    )


def _is_dataset(inputs: Any) -> bool:
    """Whether it is like a ``datasets.Dataset``."""
    return hasattr(inputs, "select") and hasattr(inputs, "__len__") and not isinstance(inputs, Tensor)


def _part(inputs: Any, start: int, end: int, missing: int) -> Any:
    if isinstance(inputs, Mapping):
        return rebuild(inputs, lambda value: _part(value, start, end, missing))
    places = [*range(start, end), *[len(inputs) - 1] * missing]
    if _is_dataset(inputs):
        return inputs.select(places)
    if not missing:
        return inputs[start:end]
    if isinstance(inputs, list | tuple):
        return type(inputs[:0])(inputs[place] for place in places)
    return inputs[places]


def _on_device(part: Any, device: torch.device) -> Any:
    if isinstance(part, Mapping):
        return rebuild(part, lambda value: _on_device(value, device))
    return part.to(device) if isinstance(part, Tensor) else part
