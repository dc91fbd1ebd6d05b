"""The `Accelerator` of a process, for functions that are called without one, as scripts for Accelerate do."""

from __future__ import annotations

import os
import threading
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from trainkit.accelerator.gathering import Gathering
from trainkit.errors import ConfigurationError
from trainkit.launch.environment import read_place
from trainkit.launch.joining import joined
from trainkit.launch.tpu import runtime_is_loaded
from trainkit.strategy import Strategy

if TYPE_CHECKING:
    from trainkit.accelerator.core import Accelerator

__all__ = ["gathering", "latest", "place", "remember"]


class _Made(threading.local):
    """By this thread: on XLA threads may be what processes are elsewhere."""

    def __init__(self) -> None:
        self.alive: WeakValueDictionary[int, Accelerator] = WeakValueDictionary()  # in the order in which they were made


_made, _number = _Made(), count()
_by_all: WeakValueDictionary[int, Accelerator] = WeakValueDictionary()


def remember(accelerator: Accelerator) -> None:
    """An own loop's has been made. It is not kept from being forgotten, with all that it holds."""
    number = next(_number)
    _made.alive[number] = _by_all[number] = accelerator


def latest() -> Accelerator | None:
    """The one that this thread has made last, else the process; `None`: there is none any more.

    One that has prepared something comes before one that was made for a word, as in `Accelerator().process_index`.
    """
    for alive in (_made.alive, _by_all):
        found = list(alive.values())
        if found:
            return next((one for one in reversed(found) if one._models or one._loaders), found[-1])
    return None


def place() -> tuple[int, int]:
    """Which of how many processes this one is; before it has joined them, as its launcher says."""
    accelerator = latest()
    if accelerator is not None:
        return accelerator.world.rank, accelerator.world.size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = read_place(os.environ)
    return (0, 1) if found is None else (found.rank, found.size)


def gathering(verb: str) -> Gathering:
    """What functions that all processes call exchange tensors by: a part of the `Accelerator`.

    A single process needs no `Accelerator`.

    Raises:
        ConfigurationError: there are several processes, and no `Accelerator`.
    """
    found = latest()
    if found is not None:
        return found._gathering
    if not runtime_is_loaded() and joined().size == 1:
        return Gathering(Strategy("cpu"))
    raise ConfigurationError(
        f"{verb} is for all processes, and works through the Accelerator: make it before, and keep it: accelerator = "
        "Accelerator(). In a TrainModule there is self.all_gather."
    )
