"""The `Accelerator` of a process, for functions that are called without one, as scripts for Accelerate do."""

from __future__ import annotations

import os
import threading
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import nn

from trainkit.accelerator.gathering import Gathering
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import read_ranks, runtime_is_loaded
from trainkit.launch.joining import joined_world
from trainkit.strategy import Strategy

if TYPE_CHECKING:
    from trainkit.accelerator.accelerator import Accelerator

__all__ = ["gathering", "latest", "place", "remember", "strategy_of"]


class _OfThread(threading.local):
    """The accelerators that this thread has created: on XLA, threads may take the place of processes."""

    def __init__(self) -> None:
        self.alive: WeakValueDictionary[int, Accelerator] = WeakValueDictionary()  # in the order in which they were created


_of_thread, _number = _OfThread(), count()
_of_process: WeakValueDictionary[int, Accelerator] = WeakValueDictionary()


def remember(accelerator: Accelerator) -> None:
    """Record a new accelerator of a user's own training loop, by a weak reference."""
    number = next(_number)
    _of_thread.alive[number] = _of_process[number] = accelerator


def latest() -> Accelerator | None:
    """The accelerator that this thread has created last, otherwise the process; `None`: none is alive.

    One that has prepared something comes before one that was created to read a property, as in `Accelerator().process_index`.
    """
    for alive in (_of_thread.alive, _of_process):
        found = list(alive.values())
        if found:
            return next((one for one in reversed(found) if one._models or one._loaders), found[-1])
    return None


def strategy_of(model: nn.Module) -> Strategy | None:
    """The strategy of the accelerator that has prepared a model of the user's; `None`: none has."""
    return next((one.strategy for one in _of_process.values() if any(model is own for own in one._bare)), None)


def place() -> tuple[int, int]:
    """The rank of this process and the world size; before the process group exists, as the launcher has set them."""
    accelerator = latest()
    if accelerator is not None:
        return accelerator.world.rank, accelerator.world.size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = read_ranks(os.environ)
    return (0, 1) if found is None else (found.rank, found.size)


def gathering(verb: str) -> Gathering:
    """The part of the `Accelerator` by which functions that all processes call exchange tensors.

    A single process needs no `Accelerator`.

    Raises:
        ConfigurationError: there are several processes, but no `Accelerator`.
    """
    found = latest()
    if found is not None:
        return found._gathering
    if not runtime_is_loaded() and joined_world().size == 1:
        return Gathering(Strategy("cpu"))
    raise ConfigurationError(
        f"{verb} exchanges data between all processes, which needs an Accelerator. Create one first, and keep it: accelerator "
        "= Accelerator(). In a TrainModule, use self.all_gather."
    )
