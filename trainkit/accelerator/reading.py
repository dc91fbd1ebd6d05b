"""Which prepared loader an own loop is reading, and what of its current batch counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainkit.data.sources import batch_size_of
from trainkit.data.window import NOTHING, Window
from trainkit.errors import ConfigurationError
from trainkit.nested import batch_size, copied

if TYPE_CHECKING:
    from trainkit.data.loader import PreparedLoader

__all__ = ["Reading"]


class _Place:
    """A loader with the batch of it that was given last, and the window as it was before it was read."""

    __slots__ = ("ahead", "batch", "before", "filler", "full", "loader", "number", "odd")

    def __init__(self, loader: PreparedLoader, before: tuple[Any, ...], number: int, devices: int) -> None:
        self.loader, self.before, self.number = loader, before, number
        self.ahead = 0  # batches that were given since one was worked on
        self.odd = False  # not all of these count the same
        self.batch: Any = None
        size = batch_size_of(loader.source)
        self.full = None if size is None else size * devices
        self.filler = False


class Reading:
    """The loaders that are being read, one inside the other, as an evaluation is inside an epoch.

    Args:
        window: the accumulation window, which each of them sets; the outer one finds it as it was.
        models: the user's; while none of them is in training mode, an evaluation is going on.
        devices: that a process drives: its batch is a micro-batch for each, side by side.

    Attributes:
        loaded: a checkpoint has been loaded since a batch was worked on, so the loop may skip batches by reading them.
    """

    def __init__(self, window: Window, models: Sequence[nn.Module], devices: int = 1) -> None:
        self._window, self._models, self._devices = window, models, devices
        self._numbers, self.loaded = count(), False
        self._places: list[_Place] = []  # the one that has given a batch last is the last

    def follow(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a loader, as an own loop reads them.

        Where only others have a batch there is one that counts nothing, for the collectives of a training. In an evaluation
        there is none, unless the loader itself gives one.
        """
        places, window = self._places, self._window
        place = _Place(loader, window.state(), next(self._numbers), self._devices)
        places.append(place)
        try:
            for batch in batches:
                if batch is NOTHING:
                    if not any(model.training for model in self._models):
                        continue
                    batch = loader.filler() if place.batch is None else copied(place.batch)
                place.batch, place.filler = copied(batch), window.filler  # the loop may take its own apart
                place.ahead += 1
                place.odd = place.odd or (window.share if window.offered is None else window.offered.alone) != 1.0
                if places[-1] is not place:
                    places.remove(place)
                    places.append(place)
                yield batch
            loader.exhausted = True
        finally:
            self._end(place)

    def _end(self, place: _Place) -> None:
        """A loader has been read, and the window is what it was before it."""
        if self._places[-1] is place:
            self._window.put_back(place.before)
        self._places.remove(place)
        if not self._places:
            self._window.leave()
        later = [other for other in self._places if other.number > place.number]
        if later:  # read side by side: what was before this one was before all of them
            min(later, key=lambda other: other.number).before = place.before

    def working(self) -> None:
        """The batch that was read last is worked on now.

        Raises:
            ConfigurationError: it is not clear which one is, as some were read that nobody has worked on.
        """
        if not self._places:
            return
        place = self._places[-1]
        ahead, odd, skips = place.ahead, place.odd, self.loaded
        place.ahead, place.odd, self.loaded = 0, False, False
        if ahead > 1 and not skips and (odd or (self._window.size > 1 and self._window.by_hand is not True)):
            raise ConfigurationError(
                f"{ahead} batches have been read since the last one that was worked on, and how much a loss counts is known of "
                "the one that was read last. Work on each batch before the next one is read; for one that is to be left out "
                "call accelerator.backward(None), and to begin in the middle of an epoch "
                "accelerator.skip_first_batches(loader, n). If batches are read ahead to count what is in them: "
                "accelerator.backward(loss, weight=count), or prepare(loader, batch_weight=count)."
            )

    @property
    def active(self) -> bool:
        """Whether a loader is being read."""
        return bool(self._places)

    @property
    def samples(self) -> int | None:
        """Of the micro-batch that was given last; ``None``: no loader is being read."""
        return batch_size(self._places[-1].batch) if self._places else None

    @property
    def filler(self) -> bool:
        """Whether that one counts nothing: other processes have one more."""
        return bool(self._places) and self._places[-1].filler

    def cut(self, tensor: Tensor) -> Tensor:
        """Of a tensor with a row for each sample of a full micro-batch, as many as there are in this one, which may be short.

        So ``loss.repeat(batch_size)`` counts no more samples than there are, and nor does what a short one was filled up by.
        """
        if not self._places or tensor.ndim == 0:
            return tensor
        place = self._places[-1]
        here, full = batch_size(place.batch), place.full
        samples = here if place.loader.samples is None else place.loader.samples
        return tensor[:samples] if samples < len(tensor) and len(tensor) in (here, full) else tensor
