"""One batch ahead on CUDA: the copy of the next batch overlaps with the work on the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from trainkit.data.nested import map_tensors

__all__ = ["one_ahead"]

T = TypeVar("T")


def one_ahead(items: Iterator[T], load: Callable[[T, int], T], device: torch.device, start: int = 0) -> Iterator[T]:
    """The items loaded to a CUDA device, each while its predecessor is being worked on.

    The copies run on a stream of their own, truly beside the computation if the items lie in pinned memory.

    Args:
        items: batches, or tuples that hold one, on the CPU.
        load: ``load(item, number)`` returns the item on the device.
        device: a CUDA device.
        start: the number of the first item.
    """
    side = torch.cuda.Stream(device)
    waiting: tuple[T, torch.cuda.Event] | None = None
    for number, item in enumerate(items, start):
        with torch.cuda.stream(side):
            loaded = load(item, number), side.record_event()
        ready, waiting = waiting, loaded
        if ready is not None:
            yield _hand_over(*ready, device)
    if waiting is not None:
        yield _hand_over(*waiting, device)


def _hand_over(item: T, copied: torch.cuda.Event, device: torch.device) -> T:
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    # the allocator must not give the memory to the next copy while this stream still reads it
    map_tensors(item, lambda tensor: tensor.record_stream(stream) if tensor.is_cuda else None)
    return item
