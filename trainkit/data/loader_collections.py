"""Collections of loaders: dicts, lists and tuples, which may contain others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit.nested import rebuild

__all__ = [
    "begins_again",
    "filled",
    "is_collection",
    "is_loader",
    "is_plain_list",
    "iterates_itself",
    "loaders_in",
    "parts_of_batch",
    "resamples",
    "restartable",
]

_AS_DATALOADER = ("torchdata",)  # packages whose DataLoader iterates as torch's does, and is resumed without its own state


def iterates_itself(loader: Any) -> bool:
    """Whether a `DataLoader` is of a class that overrides `__iter__`: a copy with other samplers might not follow them."""
    owner = next(kind for kind in type(loader).__mro__ if "__iter__" in vars(kind))
    return owner is not DataLoader and owner.__module__.partition(".")[0] not in _AS_DATALOADER


def is_plain_list(item: Any) -> bool:
    """Whether it is a list or tuple that is iterated as one; a class derived from them may load its items one by one."""
    own = (type(item).__iter__, type(item).__len__) if isinstance(item, list | tuple) else None
    return own in ((list.__iter__, list.__len__), (tuple.__iter__, tuple.__len__))


def resamples(source: Any) -> bool:
    """Whether a `webdataset` stream draws its shards with replacement: such a stream repeats samples on purpose."""
    stages = getattr(getattr(source, "dataset", source), "pipeline", None)
    return isinstance(stages, list) and any(type(each).__name__.startswith("Resampled") or resamples(each) for each in stages)


def begins_again(item: Any) -> bool:
    """Whether it is of `torchdata.nodes`, whose `Loader` has a state and begins again in each iteration nevertheless."""
    return any(kind.__module__.startswith("torchdata.nodes") for kind in type(item).__mro__)


def restartable(iterator: Any) -> str:
    """What to pass instead of an iterator, so that each epoch can begin again."""
    if begins_again(iterator):
        return "torchdata.nodes.Loader(node), which begins again and has a state"
    return "an object whose __iter__ starts again (a list, a DataLoader, a class with __iter__)"


def is_loader(item: Any) -> bool:
    """Whether an item of a list is a loader, not a batch."""
    if isinstance(item, DataLoader):
        return True
    if callable(getattr(item, "to", None)):  # a batch of a custom class, which may be iterable
        return False
    return isinstance(item, Iterable) and not isinstance(item, Tensor | np.ndarray | list | tuple | Mapping | str | bytes)


def is_collection(item: Any) -> bool:
    """Whether it is a dict, list or tuple of loaders and collections only; otherwise its items are batches."""
    if not (isinstance(item, Mapping) or is_plain_list(item)):
        return False
    items = list(item.values()) if isinstance(item, Mapping) else item
    return bool(items) and all(is_loader(each) or is_collection(each) for each in items)


def loaders_in(collection: Any) -> Iterator[Any]:
    """The loaders of a dict, list or tuple, in order; or the one loader that it is."""
    if is_loader(collection):
        yield collection
        return
    for item in collection.values() if isinstance(collection, Mapping) else collection:
        if is_collection(item):
            yield from loaders_in(item)
        else:
            yield item


def filled(collection: Any, values: Iterator[Any]) -> Any:
    """The collection with the next value in the place of each loader."""
    if is_loader(collection):
        return next(values)
    return rebuild(collection, lambda item: filled(item, values) if is_collection(item) else next(values))


def parts_of_batch(collection: Any, batch: Any) -> Iterator[Any]:
    """The batches in a batch that `filled` built."""
    if is_loader(collection):
        yield batch
        return
    for key in collection if isinstance(collection, Mapping) else range(len(collection)):
        if is_collection(collection[key]):
            yield from parts_of_batch(collection[key], batch[key])
        else:
            yield batch[key]
