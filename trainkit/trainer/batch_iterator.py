"""What a step that takes `dataloader_iter` receives."""

from __future__ import annotations

from typing import Any

from trainkit.errors import DataError

__all__ = ["BatchIterator"]


class BatchIterator:
    """Yields the current batch once: `batch, batch_idx, dataloader_idx = next(dataloader_iter)`.

    The loop has fetched it, so that hooks see the batch, and a checkpoint knows how many batches were used.

    Args:
        batch: On the device.
        batch_idx: Its index in the epoch.
        dataloader_idx: The index of its loader.

    Raises:
        DataError: A second batch is requested.
    """

    def __init__(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._item: tuple[Any, int, int] | None = (batch, batch_idx, dataloader_idx)

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._item is None:
            raise DataError(
                "next(dataloader_iter) was called twice in one step, but each step has one batch. Use a larger batch_size, or "
                "Trainer(accumulate_grad_batches=2), which calls training_step for each batch."
            )
        item, self._item = self._item, None
        return item
