"""`skip_first_batches`: a loader that starts in the middle of its epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from trainkit.checks import whole_number
from trainkit.data.loader import PreparedLoader

__all__ = ["SkippedLoader", "skip_first_batches"]


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader that skips the first batches of its epochs, to resume in the middle of an epoch.

    A prepared loader does not fetch the samples of a map-style dataset that it skips. After
    `accelerator.load_state(folder)` count the batches from the start of the checkpoint's epoch. `load_state(folder,
    resume_loaders=True)` needs no skipping.

    Args:
        dataloader: The loader, prepared or not.
        num_batches: Number of batches of this process to skip.

    Raises:
        ConfigurationError: The number is not an integer ≥ 0.
    """
    return SkippedLoader(dataloader, num_batches)


class SkippedLoader:
    """A loader without the first batches of its epochs; other attributes are those of the loader.

    Attributes:
        loader: Prepared or not.
        skipped: Number of batches of an epoch to skip.

    Raises:
        ConfigurationError: The number is not an integer ≥ 0.
    """

    def __init__(self, loader: Any, skipped: int) -> None:
        fix = "skip_first_batches(loader, num_batches=100)"
        self.loader, self.skipped = loader, whole_number(skipped, "skip_first_batches: num_batches", fix=fix)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.skipped)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, PreparedLoader):
            self.loader.start_at(self.skipped)
            return iter(self.loader)
        return islice(iter(self.loader), self.skipped, None)
