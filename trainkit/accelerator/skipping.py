"""``skip_first_batches``: a loader that begins in the middle of its epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from trainkit.checks import whole_number
from trainkit.data.loader import PreparedLoader

__all__ = ["SkippedLoader", "skip_first_batches"]


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader whose iterations begin after so many batches, to go on in the middle of an epoch.

    Of a prepared loader nothing of a map-style dataset is fetched to get there. After ``accelerator.load_state(folder)`` the
    batches are counted from the beginning of the checkpoint's epoch; ``load_state(folder, resume_loaders=True)`` needs no
    skipping.

    Args:
        dataloader: prepared or not.
        num_batches: of this process.

    Raises:
        ConfigurationError: the number is no integer ≥ 0.
    """
    return SkippedLoader(dataloader, num_batches)


class SkippedLoader:
    """A loader whose iterations begin after some batches; what it does not define is the loader's.

    Attributes:
        loader: prepared or not.
        skipped: batches of an epoch that are left out.

    Raises:
        ConfigurationError: the number is no integer ≥ 0.
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
            self.loader.begin_at(self.skipped)
            return iter(self.loader)
        return islice(iter(self.loader), self.skipped, None)
