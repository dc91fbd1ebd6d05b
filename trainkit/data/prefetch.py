"""Moves batches to a CUDA device: large ones one step in advance, so that the copy overlaps with computation."""

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

# Smaller batches (in bytes) are copied when they are needed: overlapping would save a few microseconds, and streams and
# events cost more (measured on an H200: about 0.1 ms a step).
SMALL = 1 << 20


def to_device(items: Iterator[T], load: Callable[[T, int], T], start: int = 0, *, device: torch.device) -> Iterator[T]:
    """The items loaded to a CUDA device: with `one_ahead` if the first one is large, otherwise when they are needed."""
    head = list(islice(items, 1))
    items = chain(head, items)
    if head and _bytes_of(head[0]) < SMALL:
        return (load(item, number) for number, item in enumerate(items, start))
    return one_ahead(items, load, device, start)


def _bytes_of(item: Any) -> float:
    """Bytes of its tensors; infinity if other objects in it may contain tensors."""
    total = 0
    for leaf in leaves(item):
        if isinstance(leaf, Tensor):
            total += leaf.numel() * leaf.element_size()
        elif callable(getattr(leaf, "to", None)):
            return math.inf
    return total


def one_ahead(items: Iterator[T], load: Callable[[T, int], T], device: torch.device, start: int = 0) -> Iterator[T]:
    """The items loaded to a CUDA device, each during the computation of the item before it.

    The copies run on a separate stream, in parallel with the computation if the items are in pinned memory.

    Args:
        items: batches, or tuples that contain one, on the CPU.
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
    """Let the current stream use the item.

    The allocator must not reuse the memory for a later copy while that stream still reads it, so each tensor is recorded on
    the stream. Returns whether there may be tensors inside other objects, which cannot be recorded: then a copy has to wait
    until the computation before it is complete.
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
