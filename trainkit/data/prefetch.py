"""Batches to a CUDA device; large ones one ahead, so that the copy of the next overlaps with the work on the current."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainkit.nested import leaves

__all__ = ["SMALL", "one_ahead", "to_device"]

T = TypeVar("T")

# Bytes of a batch below which its copy is asked for when it is needed: next to the work it would save a few microseconds, and
# streams and events cost more (measured on an H200: about 0.1 ms a step).
SMALL = 1 << 20


def to_device(items: Iterator[T], load: Callable[[T, int], T], start: int = 0, *, device: torch.device) -> Iterator[T]:
    """The items loaded to a CUDA device: large ones, judged by the first, by `one_ahead`, small ones one by one."""
    head = list(islice(items, 1))
    items = chain(head, items)
    if head and _bytes_of(head[0]) < SMALL:
        return (load(item, number) for number, item in enumerate(items, start))
    return one_ahead(items, load, device, start)


def _bytes_of(item: Any) -> float:
    """What its tensors hold; infinity if objects of the user's may hold more."""
    total = 0
    for leaf in leaves(item):
        if isinstance(leaf, Tensor):
            total += leaf.numel() * leaf.element_size()
        elif callable(getattr(leaf, "to", None)):
            return math.inf
    return total


def one_ahead(items: Iterator[T], load: Callable[[T, int], T], device: torch.device, start: int = 0) -> Iterator[T]:
    """The items loaded to a CUDA device, each while its predecessor is being worked on.

    The copies run on a stream of their own, truly in parallel with the computation if the items lie in pinned memory.

    Args:
        items: batches, or tuples that hold one, on the CPU.
        load: `load(item, number)` returns the item on the device.
        device: a CUDA device.
        start: the number of the first item.
    """
    side = torch.cuda.Stream(device)
    waiting: tuple[T, torch.cuda.Event] | None = None
    careful = False
    for number, item in enumerate(items, start):
        if careful:
            side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            loaded = load(item, number), side.record_event()
        ready, waiting = waiting, loaded
        if ready is not None:
            careful = _hand_over(*ready, device) or careful
            yield ready[0]
    if waiting is not None:
        _hand_over(*waiting, device)
        yield waiting[0]


def _hand_over(item: Any, copied: torch.cuda.Event, device: torch.device) -> bool:
    """Let the stream that works use the item.

    The allocator must not give the memory to a later copy while that stream still reads it, so each tensor is recorded on it.
    Returns whether there may be tensors that it cannot be told of, inside objects of the user's: then a copy has to wait
    until the work that was asked for before it is done.
    """
    stream = torch.cuda.current_stream(device)
    stream.wait_event(copied)
    hidden = False
    for leaf in leaves(item):
        if isinstance(leaf, Tensor):
            if leaf.is_cuda:
                leaf.record_stream(stream)
        elif callable(getattr(leaf, "to", None)):
            hidden = True
    return hidden
