"""Which loaders a run uses: those given to ``fit``, those of the ``DataModule``, or those of the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from trainkit.data.combined import CombinedLoader
from trainkit.errors import ConfigurationError, DataError
from trainkit.module_hooks import DataHooks

__all__ = ["batch_size_of", "evaluation_sources", "find_source", "training_source"]


def find_source(method: str, given: Any, datamodule: Any, module: Any) -> Any:
    """The loader of a stage, or ``None``: the argument, else what ``method`` of the data module or the module returns."""
    if given is not None:
        return given
    for owner in (datamodule, module):
        if owner is not None and getattr(type(owner), method, None) is not getattr(DataHooks, method):
            return getattr(owner, method)()
    return None


def training_source(source: Any) -> Any:
    """A training loader; a dict or list of loaders becomes a ``CombinedLoader``."""
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
    """The loaders of an evaluation, one or several."""
    if source is None:
        return []
    if isinstance(source, CombinedLoader):
        if source.mode != "sequential":
            raise ConfigurationError(
                f"an evaluation reads its loaders one after the other, not in mode {source.mode!r}. Pass a list of loaders."
            )
        return source.parts()
    if isinstance(source, Mapping):
        return list(source.values())
    if isinstance(source, list | tuple) and all(_is_loader(item) for item in source):
        return list(source)
    return [source]


def _is_loader(item: Any) -> bool:
    """Whether an item of a list is a loader, not a batch."""
    if isinstance(item, DataLoader | CombinedLoader):
        return True
    if callable(getattr(item, "to", None)):  # a batch of a class of its own, which may well be iterable
        return False
    return isinstance(item, Iterable) and not isinstance(item, Tensor | np.ndarray | list | tuple | Mapping | str | bytes)


def batch_size_of(source: Any) -> int | None:
    """The samples of a micro-batch of a loader, where it says so."""
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
