"""Which prepared loader an own loop is reading, and what of its current batch counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainkit.data.nested import batch_size
from trainkit.data.window import NOTHING, Window

if TYPE_CHECKING:
    from trainkit.data.loader import PreparedLoader

__all__ = ["Reading"]


class _Place:
    """A loader with the batch of it that was given last, and the window as it was before it was read."""

    __slots__ = ("batch", "before", "filler", "loader", "number")

    def __init__(self, loader: PreparedLoader, before: tuple[Any, ...], number: int) -> None:
        self.loader, self.before, self.number = loader, before, number
        self.batch: Any = None
        self.filler = False


class Reading:
    """The loaders that are being read, one inside the other, as an evaluation is inside an epoch.

    Args:
        window: the accumulation window, which each of them sets; the outer one finds it as it was.
        models: the user's; while none of them is in training mode, an evaluation is going on.
    """

    def __init__(self, window: Window, models: Sequence[nn.Module]) -> None:
        self._window, self._models = window, models
        self._numbers = count()
        self._places: list[_Place] = []  # the one that has given a batch last is the last

    def follow(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader, as an own loop reads them.

        Where only others have a batch there is one that counts nothing, for the collectives of a training. In an evaluation
        there is none, unless the loader itself gives one.
        """
        places, window = self._places, self._window
        place = _Place(loader, window.state(), next(self._numbers))
        places.append(place)
        try:
            for batch in batches:
                if batch is NOTHING:
                    if not any(model.training for model in self._models):
                        continue
                    batch = loader.filler() if place.batch is None else place.batch
                place.batch, place.filler = batch, window.filler
                if places[-1] is not place:
                    places.remove(place)
                    places.append(place)
                yield batch
        finally:
            self._end(place)

    def _end(self, place: _Place) -> None:
        """A loader has been read, and the window is what it was before it."""
        if self._places[-1] is place:
            self._window.put_back(place.before)
        self._places.remove(place)
        later = [other for other in self._places if other.number > place.number]
        if later:  # read side by side: what was before this one was before all of them
            min(later, key=lambda other: other.number).before = place.before

    @property
    def samples(self) -> int | None:
        """Of the micro-batch that was given last; ``None``: no loader is being read."""
        return batch_size(self._places[-1].batch) if self._places else None

    @property
    def filler(self) -> bool:
        """Whether that one counts nothing: other processes have one more."""
        return bool(self._places) and self._places[-1].filler

    def cut(self, tensor: Tensor) -> Tensor:
        """Of a tensor with a row for each sample, those that count, where a short micro-batch was filled up."""
        if not self._places:
            return tensor
        place = self._places[-1]
        remainder = place.loader.samples
        if remainder is None or tensor.ndim == 0 or len(tensor) != batch_size(place.batch):
            return tensor
        return tensor[:remainder]
