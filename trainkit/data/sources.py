"""Which loaders a run uses: those given to `fit`, those of the `DataModule`, or those of the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.data.combined import CombinedLoader
from trainkit.data.loader_collections import is_collection, is_loader, is_plain_list
from trainkit.errors import DataError

__all__ = ["as_passed", "batch_size_of", "evaluation_sources", "training_source"]


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
        return [loader for part in source.values() for loader in _flattened(part) or [part]]
    if is_plain_list(source):
        flat = _flattened(source)
        return [source] if flat is None else flat
    return [source]


def _flattened(source: Any) -> list[Any] | None:
    """The loaders in nested lists and dicts of loaders, or `None` if one of the items is not a loader.

    As in Lightning, a list that contains only numbers and strings is a loader. Only plain lists are read.
    """
    if not (isinstance(source, Mapping) or is_plain_list(source)):
        return [source] if is_loader(source) else None
    items = list(source.values()) if isinstance(source, Mapping) else list(source)
    if items and all(isinstance(item, int | float | str) for item in items):
        return [source]
    parts = [_flattened(item) for item in items]
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
