"""`split_batches`: a loader whose `batch_size` is that of all processes together → one of micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainkit.console import with_article
from trainkit.data.sampling import is_distributed
from trainkit.errors import ConfigurationError, DataError

__all__ = ["split_batches"]


def split_batches(loader: Any, parts: int) -> tuple[DataLoader[Any], int | None]:
    """A loader like this one, each of whose batches is made of as many micro-batches as there are parts.

    Args:
        loader: the user's, which is not changed.
        parts: micro-batches of a batch, one for each process.

    Returns:
        The loader of micro-batches, and how many of them an epoch has where `drop_last` drops some of a last batch that is
        short; else `None`.

    Raises:
        ConfigurationError: it cannot be split so.
    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        raise ConfigurationError(
            f"split_batches=True divides the batch_size of a DataLoader, and this is {_described(loader)}. Let it give "
            "micro-batches, one for each process, and leave split_batches out."
        )
    changes: dict[str, Any] = {"_iterator": None}
    sampler, end = loader.batch_sampler, None
    if isinstance(loader.dataset, IterableDataset):
        if loader.drop_last:
            raise ConfigurationError(
                "split_batches=True with drop_last=True: of a stream it is not known where its last batch begins. Leave "
                "drop_last out: a short last batch counts by its samples."
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
    twin = copy.copy(loader)
    twin.__dict__.update(changes)  # DataLoader refuses to have them assigned
    return twin, end


def _size(batch_size: Any, parts: int) -> int:
    """Samples of a micro-batch."""
    if batch_size % parts:
        nearest = max(1, batch_size // parts) * parts
        raise ConfigurationError(
            f"split_batches=True: a batch_size of {batch_size} cannot be divided by {parts} processes. Use {nearest}, say, or "
            "leave split_batches out, where batch_size is that of one process."
        )
    return int(batch_size // parts)


def _whole(sampler: BatchSampler, parts: int) -> int:
    """Micro-batches of the batches that are not short."""
    inner: Any = sampler.sampler
    try:
        samples = len(inner.dataset) if is_distributed(inner) else len(inner)
    except TypeError:
        raise ConfigurationError(
            f"split_batches=True with drop_last=True: {type(inner).__name__} does not say how many samples it gives. Define "
            "__len__, or leave drop_last out."
        ) from None
    return samples // sampler.batch_size * parts


def _described(loader: Any) -> str:
    return "one with batch_size=None" if isinstance(loader, DataLoader) else with_article(type(loader).__name__)


class _Parts:
    """The batches of a user's batch sampler, each divided into `parts`, whose sizes differ by one at most."""

    def __init__(self, sampler: Any, parts: int) -> None:
        self.sampler, self._parts = sampler, parts

    def __getattr__(self, name: str) -> Any:
        if name == "sampler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.sampler, name)

    @property
    def size_of_all(self) -> Any:
        """Samples of a batch of the user's; `None`: the batch sampler does not tell."""
        return getattr(self.sampler, "batch_size", None)

    def __len__(self) -> int:
        return len(self.sampler) * self._parts

    def __iter__(self) -> Iterator[Sequence[Any]]:
        short = 0
        for batch in self.sampler:
            if short:
                raise DataError(
                    f"split_batches=True: {type(self.sampler).__name__} gave {short} samples for {self._parts} processes, and "
                    "that only the last batch of an epoch may be. Give each batch a sample for each process at least."
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
