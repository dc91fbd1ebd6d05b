"""Which loaders a run uses: those given to `fit`, those of the `DataModule`, or those of the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit.data.combined import CombinedLoader
from trainkit.errors import ConfigurationError, DataError

__all__ = ["batch_size_of", "evaluation_sources", "training_source"]


def training_source(source: Any) -> Any:
    """A training loader; a dict or list of loaders becomes a `CombinedLoader`."""
    if isinstance(source, Mapping):
        return CombinedLoader(source)
    if isinstance(source, list | tuple) and source and all(_is_loader(item) for item in source):
        return CombinedLoader(source)
    if not isinstance(source, Iterable | CombinedLoader):
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
        if source.mode != "sequential":
            raise ConfigurationError(
                f"an evaluation reads its loaders one after another, not with mode={source.mode!r}. Pass a list of loaders."
            )
        return source.parts()
    if isinstance(source, Mapping):
        return [loader for part in source.values() for loader in _flattened(part) or [part]]
    if isinstance(source, list | tuple):
        flat = _flattened(source)
        return [source] if flat is None else flat
    return [source]


def _flattened(source: Any) -> list[Any] | None:
    """The loaders in nested lists and dicts of loaders, or `None` if one of the items is not a loader.

    As in Lightning, a list that contains only numbers and strings is a loader.
    """
    if not isinstance(source, list | tuple | Mapping):
        return [source] if _is_loader(source) else None
    items = list(source.values()) if isinstance(source, Mapping) else list(source)
    if items and all(isinstance(item, int | float | str) for item in items):
        return [source]
    parts = [_flattened(item) for item in items]
    return None if None in parts else [loader for part in parts if part for loader in part]


def _is_loader(item: Any) -> bool:
    """Whether an item of a list is a loader, not a batch."""
    if isinstance(item, DataLoader | CombinedLoader):
        return True
    if callable(getattr(item, "to", None)):  # a batch of a custom class, which may be iterable
        return False
    return isinstance(item, Iterable) and not isinstance(item, Tensor | np.ndarray | list | tuple | Mapping | str | bytes)


def batch_size_of(source: Any) -> int | None:
    """Number of samples of a micro-batch of a loader; `None` if it has no batch size."""
    if isinstance(source, CombinedLoader):
        sizes = [batch_size_of(part) for part in source.parts()]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        if source.mode == "sequential":
            return known[0] if len(set(known)) == 1 else None
        return sum(known)
    size = getattr(source, "batch_size", None)
    if size is None:
        size = getattr(getattr(source, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
