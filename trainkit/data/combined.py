"""What can be read as a loader, collections of loaders, and `CombinedLoader`, which reads several as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit.console import warn
from trainkit.errors import DataError, EmptyLoaderError, UnknownNameError, nearest
from trainkit.nested import batch_size, rebuild

__all__ = [
    "MODES",
    "NO_BATCH_IN_LOADER",
    "CombinedLoader",
    "as_passed",
    "batch_size_of",
    "batches_in",
    "begins_again",
    "end_of",
    "evaluation_sources",
    "is_collection",
    "is_loader",
    "is_plain_list",
    "iterates_itself",
    "length_of",
    "loaders_in",
    "rebuild_collection",
    "resamples",
    "restartable",
    "training_source",
]

_AS_DATALOADER = ("torchdata",)  # packages whose DataLoader iterates as torch's does, and is resumed without its own state


def iterates_itself(loader: Any) -> bool:
    """Whether a `DataLoader` is of a class that overrides `__iter__`: a copy with other samplers might not follow them."""
    owner = next(kind for kind in type(loader).__mro__ if "__iter__" in vars(kind))
    return owner is not DataLoader and owner.__module__.partition(".")[0] not in _AS_DATALOADER


def is_plain_list(item: Any) -> bool:
    """Whether it is a list or tuple that is iterated as one; a class derived from them may load its items one by one."""
    methods = (type(item).__iter__, type(item).__len__) if isinstance(item, list | tuple) else None
    return methods in ((list.__iter__, list.__len__), (tuple.__iter__, tuple.__len__))


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


def length_of(source: Any, quiet: bool = False) -> int | None:
    """What `len()` returns for a loader, a dataset or a sampler; `None` if it has no length. `quiet`: without a warning."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
    except Exception as error:  # a __len__ that raises must not look like one that is missing
        if not quiet:
            warn(f"len() of {type(source).__name__} failed ({error!r}); treating its length as unknown.")
        return None


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


def rebuild_collection(collection: Any, values: Iterator[Any]) -> Any:
    """The collection with the next value in the place of each loader."""
    if is_loader(collection):
        return next(values)
    return rebuild(collection, lambda item: rebuild_collection(item, values) if is_collection(item) else next(values))


def batches_in(collection: Any, batch: Any) -> Iterator[Any]:
    """The batches in a batch that `rebuild_collection` built."""
    if is_loader(collection):
        yield batch
        return
    for key in collection if isinstance(collection, Mapping) else range(len(collection)):
        if is_collection(collection[key]):
            yield from batches_in(collection[key], batch[key])
        else:
            yield batch[key]


MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
_END = object()
NO_BATCH_IN_LOADER = "a loader inside a CombinedLoader has no batch. Remove it, or fill its dataset."


class CombinedLoader:
    """Several loaders that are read together as one.

    Args:
        iterables: Loaders in a dict, list or tuple, which may contain others. A batch has the same form. Inside, a list or
            tuple in which not everything is a loader counts as a loader: a list of batches. One loader without a collection
            yields its own batches.
        mode: `"min_size"` stops with the shortest loader; `"max_size_cycle"` continues until the longest ends, and restarts
            shorter ones, reshuffled; `"max_size"` continues until the longest ends, with `None` as the batch of those that
            have ended; `"sequential"` yields the batches of one loader after the other, each unchanged.

    Raises:
        UnknownNameError: The mode is unknown.
        DataError: There are no loaders, or one of them is a `CombinedLoader`.

    Example:
        ```python
        trainer.fit(module, CombinedLoader({"labeled": a, "unlabeled": b}, mode="max_size_cycle"))
        ```

    The weight of a combined micro-batch in its accumulation window is the number of all samples in it.

    In your own code, `for batch, batch_idx, dataloader_idx in loader` reads the loaders as they are, without the order and
    the random numbers that they have in a run.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise UnknownNameError(f"unknown mode {mode!r}; known: {', '.join(MODES)}.{nearest(mode, MODES)}")
        if not (isinstance(iterables, Mapping | list | tuple) or is_loader(iterables)):
            raise _no_loaders(iterables)
        self._iterables = iterables
        self.mode = mode
        if not self.flattened:
            raise _no_loaders(iterables)
        if any(isinstance(part, CombinedLoader) for part in self.flattened):
            raise DataError(
                "CombinedLoader: a CombinedLoader inside it is not supported. Put its loaders into the collection: "
                "CombinedLoader([a, [b, c]])"
            )

    @property
    def iterables(self) -> Any:
        """The collection of loaders, or the one loader."""
        return self._iterables

    @property
    def flattened(self) -> list[Any]:
        """The loaders in order, without the collections around them. Assign as many to replace them."""
        return list(loaders_in(self._iterables))

    @flattened.setter
    def flattened(self, loaders: Sequence[Any]) -> None:
        if len(loaders) != len(self.flattened):
            raise DataError(
                f"CombinedLoader: flattened must have as many loaders as before, {len(self.flattened)}, not {len(loaders)}. "
                "For others, make another one: CombinedLoader(loaders)"
            )
        self._iterables = rebuild_collection(self._iterables, iter(loaders))

    def count(self, batch: Any) -> int:
        """Return the number of samples in a batch that `assemble` made."""
        if self.mode == "sequential":
            return batch_size(batch)
        return sum(batch_size(part) for part in batches_in(self._iterables, batch) if part is not None)

    def assemble(self, batches: list[Any]) -> Any:
        """Build a batch of the form of `iterables` from one batch of each loader."""
        return rebuild_collection(self._iterables, iter(batches))

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        loaders = self.flattened
        lengths = [length_of(loader) for loader in loaders]
        bounded = [_Bounded(loader, length) for loader, length in zip(loaders, lengths, strict=True)]
        if self.mode == "sequential":
            for number, loader in enumerate(bounded):
                yield from ((batch, index, number) for index, batch in enumerate(loader))
            return
        rows: Iterator[Any] = _restarting(bounded)
        if self.mode != "max_size_cycle":
            rows = zip(*bounded) if self.mode == "min_size" else zip_longest(*bounded)  # noqa: B905 - ends with the shortest
        for index, batches in enumerate(islice(rows, end_of(self.mode, lengths))):
            yield self.assemble(list(batches)), index, 0

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.flattened]
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)


class _Bounded:
    """A loader that ends after its stated length."""

    def __init__(self, loader: Any, length: int | None) -> None:
        self._loader = loader
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, self._length)


def end_of(mode: str, lengths: Sequence[int | None]) -> int | None:
    """The largest number of batches of several loaders in one mode, each with its stated length; `None` if unknown."""
    known = [length for length in lengths if length is not None]
    if mode == "min_size":
        return min(known, default=None)
    if len(known) < len(lengths):
        return None
    return sum(known) if mode == "sequential" else max(known)


def _restarting(loaders: Sequence[Any]) -> Iterator[list[Any]]:
    """One batch of each loader, until all have ended; those that end earlier restart."""
    iterators, ended = [iter(loader) for loader in loaders], [False] * len(loaders)
    while True:
        batches = [next(iterator, _END) for iterator in iterators]
        ended = [before or batch is _END for before, batch in zip(ended, batches, strict=True)]
        if all(ended):
            return
        for place, batch in enumerate(batches):
            if batch is _END:
                iterators[place] = iter(loaders[place])
                batches[place] = next(iterators[place], _END)
                if batches[place] is _END:
                    raise EmptyLoaderError(NO_BATCH_IN_LOADER)
        yield batches


def _no_loaders(iterables: Any) -> DataError:
    return DataError(
        f"CombinedLoader needs a loader, or a dict or list with at least one in it, not {iterables!r}. "
        "For example: CombinedLoader({'a': loader_a, 'b': loader_b})"
    )


def training_source(source: Any) -> Any:
    """A training loader; a dict or list of loaders becomes a `CombinedLoader` that restarts shorter loaders."""
    if isinstance(source, Mapping) or is_collection(source):
        return CombinedLoader(source, "max_size_cycle")
    if not isinstance(source, Iterable):
        raise DataError(
            f"train_dataloaders must be a DataLoader, an iterable of batches, or a dict or list of loaders, not "
            f"{type(source).__name__}. For example: DataLoader(dataset, batch_size=32, shuffle=True)"
        )
    return source


def evaluation_sources(source: Any) -> list[Any]:
    """The loaders of an evaluation, one or several.

    A list or dict is a collection of loaders if everything in it is one, however deep: a loader, or a list of numbers or
    strings. Otherwise a list is one loader, whose items are its batches: `[(inputs, targets), …]`.
    """
    if source is None:
        return []
    if isinstance(source, CombinedLoader):
        return source.flattened if source.mode == "sequential" else [source]
    if isinstance(source, Mapping):
        return [loader for part in source.values() for loader in _flatten(part) or [part]]
    if is_plain_list(source):
        flat = _flatten(source)
        return [source] if flat is None else flat
    return [source]


def _flatten(source: Any) -> list[Any] | None:
    """The loaders in nested lists and dicts of loaders, or `None` if one of the items is not a loader.

    As in Lightning, a list that contains only numbers and strings is a loader. Only plain lists are read.
    """
    if not (isinstance(source, Mapping) or is_plain_list(source)):
        return [source] if is_loader(source) else None
    items = list(source.values()) if isinstance(source, Mapping) else list(source)
    if items and all(isinstance(item, int | float | str) for item in items):
        return [source]
    parts = [_flatten(item) for item in items]
    return None if None in parts else [loader for part in parts if part for loader in part]


def as_passed(sources: list[Any]) -> Any:
    """The loader, or the collection of loaders, in the form of `CombinedLoader.iterables`; `None` if there is none."""
    source = sources[0] if len(sources) == 1 else sources or None
    return source.iterables if isinstance(source, CombinedLoader) else source


def batch_size_of(source: Any) -> int | None:
    """Number of samples of a micro-batch of a loader; `None` if it has no batch size."""
    if isinstance(source, CombinedLoader):
        sizes = [batch_size_of(part) for part in source.flattened]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        if source.mode == "max_size":
            return None
        if source.mode == "sequential":
            return known[0] if len(set(known)) == 1 else None
        return sum(known)
    size = getattr(source, "batch_size", None)
    if size is None:
        size = getattr(getattr(source, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
