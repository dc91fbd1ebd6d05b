"""`Processes`: the part of an `Accelerator` that orders the processes of a run and splits work between them."""

from __future__ import annotations

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

__all__ = ["Processes", "only_where"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Processes:
    """Waits for the other processes, lets one run first, and splits work between all.

    Args:
        strategy: knows the processes and the device of this one.
        checks: compares what the processes call.
    """

    def __init__(self, strategy: Strategy, checks: CollectiveChecks) -> None:
        self._strategy, self._checks = strategy, checks
        self._triggered = False

    @contextmanager
    def first(self, verb: str, is_first: bool) -> Iterator[None]:
        """Run the block on processes with `is_first`, then on the others.

        Raises:
            CollectiveError: another process called something other than `verb`, waits for this one, or has ended.
        """
        if not is_first:
            self._checks.wait(verb)
        yield
        if is_first:  # not after an error: the other processes would continue as if there had been none
            self._checks.wait(verb)

    @contextmanager
    def split(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's contiguous part of `inputs`; the sizes of the parts differ by at most 1.

        Args:
            inputs: the same on all processes: a list, tuple, tensor, array, `datasets.Dataset`, or a dict of these.
            apply_padding: repeat the last element of `inputs` until all parts have one size.

        Raises:
            ConfigurationError: `inputs` cannot be split, or the values of a dict differ in length.
        """
        world = self._strategy.world
        if world.size == 1:
            yield inputs
            return
        length = _length(inputs)
        each, more = divmod(length, world.size)
        start = world.rank * each + min(world.rank, more)
        end = start + each + (world.rank < more)
        missing = each + (more > 0) - (end - start) if apply_padding else 0
        part = _part(inputs, start, end, missing)
        yield _on_device(part, self._strategy.device) if apply_padding else part

    def set_trigger(self) -> None:
        """Set a flag on this process for `check_trigger`."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has set the flag since the last check; the same on all. Collective.

        Raises:
            CollectiveError: as `first`.
        """
        found = any(self._checks.exchange("check_trigger", self._triggered))
        self._triggered = False
        return found


def only_where(here: Callable[[], bool], function: Function, verb: str) -> Function:
    """`function`, which returns `None` without running where `here()` is false; asked at each call.

    Raises:
        ConfigurationError: `function` cannot be called; `verb` names the decorator.
    """
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
                "split_between_processes: the values of a dict must have the same length, but they have "
                f"{', '.join(f'{n} ({key!r})' for key, n in lengths.items())}."
            )
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, list | tuple) or (isinstance(inputs, Tensor | np.ndarray) and inputs.ndim > 0) or _is_dataset(inputs):
        return len(inputs)
    raise ConfigurationError(
        "split_between_processes splits lists, tuples, tensors, arrays, datasets and dicts of them, not a "
        f"{type(inputs).__name__}."
    )


def _is_dataset(inputs: Any) -> bool:
    """Whether it has the interface of a `datasets.Dataset`."""
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
