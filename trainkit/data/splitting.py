"""`split_batches`: splits each batch of a loader over the processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainkit.console import with_article
from trainkit.data.loader_collections import iterates_itself
from trainkit.data.sampling import is_distributed
from trainkit.errors import ConfigurationError, DataError

__all__ = ["split_batches"]


def split_batches(loader: Any, parts: int) -> tuple[DataLoader[Any], int | None]:
    """A loader like this one that yields each batch in `parts` micro-batches.

    Args:
        loader: the user's loader, which is not changed.
        parts: micro-batches of a batch, one for each process.

    Returns:
        The loader of micro-batches, and their number in an epoch if `drop_last` drops micro-batches of a short last batch;
        otherwise `None`.

    Raises:
        ConfigurationError: the loader cannot be split.
    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or iterates_itself(loader):
        raise ConfigurationError(
            f"split_batches=True divides the batch_size of a DataLoader, but this is {_described(loader)}. Let it yield one "
            "micro-batch for each process, and remove split_batches."
        )
    changes: dict[str, Any] = {"_iterator": None}
    sampler, end = loader.batch_sampler, None
    if isinstance(loader.dataset, IterableDataset):
        if loader.drop_last:
            raise ConfigurationError(
                "split_batches=True with drop_last=True: the last batch of a stream is not known in advance. Remove "
                "drop_last: a short last batch counts by its samples."
            )
        changes["batch_size"] = _size(loader.batch_size, parts)
    elif type(sampler) is BatchSampler:
        size = _size(sampler.batch_size, parts)
        changes["batch_sampler"] = BatchSampler(sampler.sampler, size, sampler.drop_last)
        if loader.batch_size is not None:
            changes["batch_size"] = size
        end = _whole(sampler, parts) if sampler.drop_last else None
    else:
        changes["batch_sampler"] = _Parts(sampler, parts)
    split = copy.copy(loader)
    split.__dict__.update(changes)  # DataLoader refuses to assign them
    return split, end


def _size(batch_size: Any, parts: int) -> int:
    """Samples of a micro-batch."""
    if batch_size % parts:
        nearest = max(1, batch_size // parts) * parts
        raise ConfigurationError(
            f"split_batches=True: a batch_size of {batch_size} cannot be divided by {parts} processes. Use {nearest}, or "
            "remove split_batches: batch_size is then that of one process."
        )
    return int(batch_size // parts)


def _whole(sampler: BatchSampler, parts: int) -> int:
    """Micro-batches of the batches that are not short."""
    inner: Any = sampler.sampler
    try:
        samples = len(inner.dataset) if is_distributed(inner) else len(inner)
    except TypeError:
        raise ConfigurationError(
            f"split_batches=True with drop_last=True: {type(inner).__name__} has no length. Define __len__, or remove "
            "drop_last."
        ) from None
    return samples // sampler.batch_size * parts


def _described(loader: Any) -> str:
    if isinstance(loader, DataLoader) and iterates_itself(loader):
        return f"{with_article(type(loader).__name__)}, which overrides __iter__"
    return "one with batch_size=None" if isinstance(loader, DataLoader) else with_article(type(loader).__name__)


class _Parts:
    """The batches of a user's batch sampler, each divided into `parts` parts whose sizes differ by at most 1."""

    def __init__(self, sampler: Any, parts: int) -> None:
        self.sampler, self._parts = sampler, parts

    def __getattr__(self, name: str) -> Any:
        if name == "sampler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.sampler, name)

    @property
    def size_of_all(self) -> Any:
        """Samples of a whole batch; `None` if the batch sampler has no `batch_size`."""
        return getattr(self.sampler, "batch_size", None)

    def __len__(self) -> int:
        return len(self.sampler) * self._parts

    def __iter__(self) -> Iterator[Sequence[Any]]:
        short = 0
        for batch in self.sampler:
            if short:
                raise DataError(
                    f"split_batches=True: {type(self.sampler).__name__} yielded {short} samples for {self._parts} processes, "
                    "which only the last batch of an epoch may do. Yield at least one sample for each process in each batch."
                )
            indices = list(batch)
            short = len(indices) if len(indices) < self._parts else 0
            each, more = divmod(len(indices), self._parts)
            begin = 0
            for part in range(self._parts):
                end = begin + each + (part < more)
                if end > begin:
                    yield indices[begin:end]
                begin = end
