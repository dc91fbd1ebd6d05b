"""Micro-batches side by side as one batch, for a process that drives several devices; short batches filled up.

In a batch the first dimension of every tensor is that of the samples, and so are lists of strings and numbers as
`default_collate` makes them. What is neither has to be the same in all micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from trainkit.console import with_article
from trainkit.errors import DataError, ModuleError
from trainkit.micro_batch import MicroBatch
from trainkit.nested import batch_size, rebuild

__all__ = ["Filled", "each_joined", "joined", "padded", "side_by_side"]


class Filled:
    """Fills batches up to one size, and knows how many samples were in those that have not been worked on yet.

    Args:
        size: samples of a full batch.
        bring: brings a mask to the device.

    Attributes:
        samples: of the batch that is being worked on.
        asked: its mask has been asked for.
        trained: a loss of it has had a backward pass.
    """

    def __init__(self, size: int, bring: Callable[[Tensor], Tensor]) -> None:
        self.size = self.samples = size
        self.asked, self.trained = True, False
        self._bring = bring
        self._masks: dict[int, Tensor] = {}
        self._counts: deque[int] = deque()

    @classmethod
    def of(cls, source: Any, size: int | None, devices: int, bring: Callable[[Tensor], Tensor]) -> Filled:
        """For the batches of a loader, of `size` samples each, put side by side for `devices` devices.

        Raises:
            DataError: it does not say how many samples they have.
        """
        if size is None or isinstance(getattr(source, "loaders", None), Mapping | list | tuple):
            raise DataError(
                f"pad_last_batch=True fills batches up to the loader's batch_size, and {type(source).__name__} has none, or "
                "one for each of its loaders. Use a DataLoader with a batch_size, or leave pad_last_batch out."
            )
        return cls(size * devices, bring)

    def fill(self, batch: Any) -> Any:
        """A batch of full size."""
        samples = batch_size(batch)
        self._counts.append(samples)
        return batch if samples >= self.size else padded(batch, samples, self.size)

    def note_backward(self) -> None:
        """A loss of the current batch has a backward pass."""
        self.trained = True

    def watched(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches as the loop trains on them, in the order in which they were filled.

        Raises:
            ModuleError: a loss had a backward pass without using the mask.
        """
        self._counts.clear()
        for micro in micro_batches:
            self.samples, self.asked, self.trained = self._counts.popleft(), False, False
            yield micro
            if self.trained and not self.asked:
                raise ModuleError(
                    "pad_last_batch=True fills short batches up with samples that must not count, and the loss does not leave "
                    "them out. In training_step: mask = self.sample_mask (bool, one for each sample), and "
                    "loss = (F.cross_entropy(logits, y, reduction='none') * mask).sum() / mask.sum(); in a loop of your own: "
                    "mask = loader.sample_mask. Or leave pad_last_batch out: a short batch costs one compilation more, once."
                )

    def mask(self) -> Tensor:
        """Which samples of the batch that is being worked on count: bool, [batch], on the device."""
        self.asked = True
        if self.samples not in self._masks:
            self._masks[self.samples] = self._bring(torch.arange(max(self.size, self.samples)) < self.samples)
        return self._masks[self.samples]


def side_by_side(batches: Iterator[Any], devices: int, join: Callable[[Sequence[Any]], Any]) -> Iterator[Any]:
    """Every `devices` batches as one; the last one may have fewer."""
    while parts := list(islice(batches, devices)):
        yield parts[0] if len(parts) == 1 else join(parts)


def each_joined(parts: Sequence[Any]) -> Any:
    """`joined`, for batches of several loaders, each of which has a number of samples of its own."""
    return _rebuilt(parts, joined)


def joined(parts: Sequence[Any]) -> Any:
    """Batches of one form as a single one, their samples one after the other.

    Raises:
        DataError: they cannot be put together.
    """
    sizes = [batch_size(part) for part in parts]
    return _joined(parts, sizes)


def padded(batch: Any, samples: int, wanted: int) -> Any:
    """A batch of `samples` filled up to `wanted` by its last sample.

    Raises:
        DataError: something in it is neither by sample nor the same for all of them.
    """
    if isinstance(batch, Tensor):
        if batch.ndim == 0:
            return batch
        _check_samples(batch, samples)
        return torch.cat([batch, batch[-1:].expand(wanted - samples, *batch.shape[1:])])
    if _is_list_of_samples(batch, samples):
        return type(batch)([*batch, *[batch[-1]] * (wanted - samples)])
    return rebuild(batch, lambda item: padded(item, samples, wanted))


def _joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
        raise DataError(f"micro-batches of one epoch cannot be put side by side: in one place they hold {kinds}.")
    if isinstance(first, Tensor) and first.ndim:
        for part, size in zip(parts, sizes, strict=True):
            _check_samples(part, size)
        return _concatenated(parts)
    if all(_is_list_of_samples(part, size) for part, size in zip(parts, sizes, strict=True)):
        return type(first)(chain.from_iterable(parts))
    if isinstance(first, Mapping | list | tuple) or (dataclasses.is_dataclass(first) and not isinstance(first, type)):
        return _rebuilt(parts, lambda items: _joined(items, sizes))
    if all(_equal(first, part) for part in parts[1:]):
        return first
    raise DataError(
        f"micro-batches of one epoch cannot be put side by side: each has its own {_shown(first)}, and it is not known what it "
        "would be for all. Give it for each sample, in a tensor or list as long as the batch, or work it out in the step."
    )


def _rebuilt(parts: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """A container like the first, each item joined with those of the others in its place."""
    columns = zip(*(_items(part, parts[0]) for part in parts), strict=True)
    return rebuild(parts[0], lambda _: join(next(columns)))


def _items(part: Any, like: Any) -> list[Any]:
    if isinstance(like, Mapping):
        if part.keys() != like.keys():
            odd = sorted(map(str, set(part) ^ set(like)))
            raise DataError(f"micro-batches of one epoch cannot be put side by side: only some have {', '.join(odd)}.")
        return [part[key] for key in like]
    if isinstance(like, list | tuple):
        if len(part) != len(like):
            raise DataError(
                f"micro-batches of one epoch cannot be put side by side: one is {with_article(type(like).__name__)} "
                f"of {len(like)} items, "
                f"another of {len(part)}."
            )
        return list(part)
    names = [field.name for field in dataclasses.fields(like) if hasattr(like, field.name)]
    return [getattr(part, name) for name in names]


def _concatenated(parts: Sequence[Any]) -> Tensor:
    try:
        return torch.cat(list(parts))
    except RuntimeError as error:
        shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
        raise DataError(
            f"micro-batches of one epoch cannot be put side by side: they hold tensors of the shapes {shapes}, which must be "
            "the same but for the first number. Pad all samples to one length, in the dataset or the collate_fn."
        ) from error


def _check_samples(tensor: Tensor, size: int) -> None:
    if len(tensor) != size:
        raise DataError(
            f"a batch of {size} samples holds a tensor of shape {tuple(tensor.shape)}, whose first dimension is not that of "
            "the samples, so it is not known how to divide it. Give tensors of shape [batch, …], or work it out in the step."
        )


def _is_list_of_samples(value: Any, size: int) -> bool:
    plain = isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) == size
    return plain and not any(
        isinstance(item, Tensor | Mapping | list | tuple) or dataclasses.is_dataclass(item) for item in value
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # arrays, which answer for each element
        return one is other


def _shown(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:40]})"
