"""``skip_first_batches``: a loader that starts in the middle of its epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from trainkit.data.loader import PreparedLoader
from trainkit.errors import ConfigurationError

__all__ = ["SkippedLoader", "skip_first_batches"]


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader that skips the first batches of its epochs, to resume in the middle of an epoch.

    A prepared loader does not fetch the samples of a map-style dataset that it skips. After ``accelerator.load_state(folder)``
    count the batches from the start of the checkpoint's epoch. ``load_state(folder, resume_loaders=True)`` needs no skipping.

    Args:
        dataloader: prepared or not.
        num_batches: number of batches of this process to skip.

    Raises:
        ConfigurationError: the number is not an integer ≥ 0.
    """
    return SkippedLoader(dataloader, num_batches)


class SkippedLoader:
    """A loader without the first batches of its epochs; other attributes are those of the loader.

    Attributes:
        loader: prepared or not.
        skipped: number of batches of an epoch to skip.

    Raises:
        ConfigurationError: the number is not an integer ≥ 0.
    """

    def __init__(self, loader: Any, skipped: int) -> None:
        if isinstance(skipped, bool) or not isinstance(skipped, int) or skipped < 0:
            raise ConfigurationError(f"skip_first_batches: num_batches must be an integer ≥ 0, not {skipped!r}.")
        self.loader, self.skipped = loader, skipped

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.skipped)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, PreparedLoader):
            self.loader.begin_at(self.skipped)
            return iter(self.loader)
        return islice(iter(self.loader), self.skipped, None)
