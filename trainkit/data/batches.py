"""Batches of any structure: concatenated for several devices, padded to full size, split, copied to a CUDA device in advance.

The first dimension of every tensor in a batch is the batch dimension, and lists of strings and numbers, as `default_collate`
returns them, have one item for each sample. Everything else must be equal in all micro-batches.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainkit.console import quantity, with_article
from trainkit.data.micro_batches import MicroBatch
from trainkit.errors import DataError, ModuleError
from trainkit.nested import batch_size, first_tensor, leaves, rebuild

__all__ = [
    "SMALL",
    "BatchPadding",
    "concatenate",
    "concatenate_each",
    "concatenate_groups",
    "one_ahead",
    "pad",
    "split",
    "to_device",
]


class BatchPadding:
    """Pads batches to one size, and records how many samples each had before.

    Args:
        size: samples of a full batch.
        to_device: moves a mask to the device.

    Attributes:
        samples: number of samples of the current batch, without padding.
        mask_used: its mask was read.
        trained: a loss of it had a backward pass.
    """

    def __init__(self, size: int, to_device: Callable[[Tensor], Tensor]) -> None:
        self.size = self.samples = size
        self.mask_used = True
        self.trained = False
        self._to_device = to_device
        self._masks: dict[int, Tensor] = {}
        self._counts: deque[int] = deque()

    @classmethod
    def of(cls, source: Any, size: int | None, devices: int, to_device: Callable[[Tensor], Tensor]) -> BatchPadding:
        """For the batches of a loader, of `size` samples each, concatenated for `devices` devices.

        Raises:
            DataError: the loader has no `batch_size`.
        """
        if size is None or isinstance(getattr(source, "loaders", None), Mapping | list | tuple):
            raise DataError(
                f"pad_last_batch=True pads batches to the loader's batch_size, but {type(source).__name__} has none, or "
                "a different one for each of its loaders. Use a DataLoader with a batch_size, or remove pad_last_batch."
            )
        return cls(size * devices, to_device)

    def fill(self, batch: Any) -> Any:
        """The batch, padded to full size."""
        samples = batch_size(batch)
        self._counts.append(samples)
        return batch if samples >= self.size else pad(batch, samples, self.size)

    def note_backward(self) -> None:
        """Record that a loss of the current batch had a backward pass."""
        self.trained = True

    def watch(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches as the loop trains on them, in the order in which they were padded.

        Raises:
            ModuleError: a loss had a backward pass without using the mask.
        """
        self._counts.clear()
        for micro in micro_batches:
            self.samples = self._counts.popleft()
            self.mask_used = False
            self.trained = False
            yield micro
            if self.trained and not self.mask_used:
                raise ModuleError(
                    "pad_last_batch=True pads short batches with samples that must not count, but the loss does not exclude "
                    "them. In training_step: mask = self.sample_mask (bool, one for each sample), and "
                    "loss = (F.cross_entropy(logits, y, reduction='none') * mask).sum() / mask.sum(); in your own training "
                    "loop: mask = loader.sample_mask. Or remove pad_last_batch: a short batch costs one more compilation."
                )

    def mask(self) -> Tensor:
        """Which samples of the current batch count: bool, [batch], on the device."""
        self.mask_used = True
        if self.samples not in self._masks:
            self._masks[self.samples] = self._to_device(torch.arange(max(self.size, self.samples)) < self.samples)
        return self._masks[self.samples]


def concatenate_groups(batches: Iterator[Any], devices: int, join: Callable[[Sequence[Any]], Any]) -> Iterator[Any]:
    """Concatenate every `devices` batches; the last group may have fewer."""
    while group := list(islice(batches, devices)):
        yield group[0] if len(group) == 1 else join(group)


def concatenate_each(batches: Sequence[Any]) -> Any:
    """`concatenate` for batches of several loaders, each with its own number of samples."""
    return _rebuild_from(batches, concatenate)


def concatenate(batches: Sequence[Any], sizes: Sequence[int] | None = None) -> Any:
    """Concatenate batches of the same structure; `sizes` are the numbers of their samples, by default read from tensors.

    Raises:
        DataError: they cannot be concatenated.
    """
    return _concatenate_items(batches, [batch_size(batch) for batch in batches] if sizes is None else sizes)


def pad(batch: Any, samples: int, size: int) -> Any:
    """A batch of `samples` padded to `size` samples with its last sample.

    Raises:
        DataError: an item has another number of samples.
    """
    if isinstance(batch, Tensor):
        if batch.ndim == 0:
            return batch
        _check_samples(batch, samples)
        return torch.cat([batch, batch[-1:].expand(size - samples, *batch.shape[1:])])
    if _is_list_of_samples(batch, samples):
        return type(batch)([*batch, *[batch[-1]] * (size - samples)])
    return rebuild(batch, lambda item: pad(item, samples, size))


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch along the batch dimension into parts of whole samples, as even as possible, the larger ones first.

    The tensors of the parts are views of those of the batch.

    Args:
        batch: with at least `parts` samples.
        parts: number of parts.

    Raises:
        DataError: it cannot be split; the message names what.
    """
    if first_tensor(batch) is None:
        raise DataError(
            "a batch contains no tensor with a batch dimension, so it cannot be split. Return tensors of shape [batch, …]."
        )
    samples = batch_size(batch)
    small, larger = divmod(samples, parts)
    ends = [small * part + min(part, larger) for part in range(parts + 1)]
    return [_slice(batch, begin, end, samples) for begin, end in pairwise(ends)]


def _slice(batch: Any, begin: int, end: int, samples: int) -> Any:
    if isinstance(batch, Tensor) and batch.ndim:
        if batch.is_nested or batch.is_sparse:
            raise DataError("a batch contains a nested or sparse tensor, which cannot be split. Use a padded, dense one.")
        _check_samples(batch, samples)
        return batch[begin:end]
    if _is_list_of_samples(batch, samples) or (isinstance(batch, np.ndarray) and batch.ndim and len(batch) == samples):
        return batch[begin:end]
    if _is_list_of_rows(batch, samples):
        return batch[begin:end]
    if isinstance(batch, Mapping | list | tuple) or (dataclasses.is_dataclass(batch) and not isinstance(batch, type)):
        return rebuild(batch, lambda item: _slice(item, begin, end, samples))
    if batch is None or isinstance(batch, Tensor | np.generic | str | bytes | int | float | bool | complex):
        return batch
    raise DataError(
        f"a batch contains {with_article(type(batch).__name__)}, which cannot be split. Return tensors of shape [batch, …], in "
        "dicts, lists, tuples or dataclasses."
    )


def _concatenate_items(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        kinds = ", ".join(dict.fromkeys(type(batch).__name__ for batch in batches))
        raise DataError(
            f"micro-batches of one epoch cannot be concatenated: at one position they have different types: {kinds}. "
            "Return the same structure from every call of the collate_fn."
        )
    if isinstance(first, Tensor) and first.ndim:
        for batch, size in zip(batches, sizes, strict=True):
            _check_samples(batch, size)
        return _concatenate_tensors(batches)
    if all(_is_list_of_samples(batch, size) for batch, size in zip(batches, sizes, strict=True)):
        return type(first)(chain.from_iterable(batches))
    if isinstance(first, Mapping | list | tuple) or (dataclasses.is_dataclass(first) and not isinstance(first, type)):
        return _rebuild_from(batches, lambda items: _concatenate_items(items, sizes))
    if all(_equal(first, batch) for batch in batches[1:]):
        return first
    raise DataError(
        f"micro-batches of one epoch cannot be concatenated: each has its own {_preview(first)}, which cannot be combined. "
        "Return one value for each sample, in a tensor or list as long as the batch, or compute it in the step."
    )


def _rebuild_from(batches: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """A container like the first, each item joined with the items at the same position in the others."""
    columns = zip(*(_items(batch, batches[0]) for batch in batches), strict=True)
    return rebuild(batches[0], lambda _: join(next(columns)))


def _items(batch: Any, like: Any) -> list[Any]:
    if isinstance(like, Mapping):
        if batch.keys() != like.keys():
            odd = sorted(map(str, set(batch) ^ set(like)))
            raise DataError(f"micro-batches of one epoch cannot be concatenated: only some have the keys {', '.join(odd)}.")
        return [batch[key] for key in like]
    if isinstance(like, list | tuple):
        if len(batch) != len(like):
            raise DataError(
                f"micro-batches of one epoch cannot be concatenated: one is {with_article(type(like).__name__)} "
                f"of {len(like)} items, another of {len(batch)}."
            )
        return list(batch)
    names = [field.name for field in dataclasses.fields(like) if hasattr(like, field.name)]
    return [getattr(batch, name) for name in names]


def _concatenate_tensors(batches: Sequence[Any]) -> Tensor:
    try:
        return torch.cat(list(batches))
    except RuntimeError as error:
        shapes = ", ".join(dict.fromkeys(str(tuple(batch.shape)) for batch in batches))
        raise DataError(
            f"micro-batches of one epoch cannot be concatenated: they contain tensors of the shapes {shapes}, which may differ "
            "only in the first dimension. Pad all samples to one length, in the dataset or the collate_fn."
        ) from error


def _check_samples(tensor: Tensor, size: int) -> None:
    if len(tensor) != size:
        raise DataError(
            f"a batch of {quantity(size, 'sample')} contains a tensor of shape {tuple(tensor.shape)}, whose first dimension is "
            "not the batch dimension, so it cannot be split. Return tensors of shape [batch, …], or compute it in the step. "
            "The first tensor of the batch gives the number of samples."
        )


def _is_list_of_samples(value: Any, size: int) -> bool:
    plain = isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) == size
    return plain and not any(
        isinstance(item, Tensor | Mapping | list | tuple) or dataclasses.is_dataclass(item) for item in value
    )


def _is_list_of_rows(value: Any, size: int) -> bool:
    """Whether a list has a list, tuple or dict of numbers and strings for each sample, as a `collate_fn` of your own returns.

    Raises:
        DataError: Its items may as well be columns with one number for each sample.
    """
    plain = isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) == size
    if not plain or not all(isinstance(item, Mapping | list | tuple) for item in value):
        return False
    if any(isinstance(leaf, Tensor | np.ndarray) for leaf in leaves(value)):
        return False
    if all(_has_list_of_samples(item, size) for item in value):
        raise DataError(
            f"a batch of {size} samples contains a {type(value).__name__} of {size} items with lists of {size} in each, so it "
            "is not clear what belongs to one sample, and it cannot be split. Return it as a tensor of shape [batch, …]."
        )
    return True


def _has_list_of_samples(value: Any, size: int) -> bool:
    if isinstance(value, Mapping):
        return any(_has_list_of_samples(item, size) for item in value.values())
    if isinstance(value, list | tuple):
        return _is_list_of_samples(value, size) or any(_has_list_of_samples(item, size) for item in value)
    return False


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays, which compare each element
        return one is other


def _preview(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:40]})"


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
