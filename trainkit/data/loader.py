"""``PreparedLoader``: a user's loader as the loop reads it, in keyed order, under keyed randomness, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainkit.data.combined import CombinedLoader, CombinedStream
from trainkit.data.nested import batch_size, move
from trainkit.data.prefetch import to_device
from trainkit.data.stream import Stream, open_stream
from trainkit.data.window import MicroBatch, Window, windows
from trainkit.rng import KeyStream, Purpose, Stage, seed_generators

__all__ = ["PreparedLoader"]


class PreparedLoader:
    """Gives the batches of one epoch per iteration, each on the device, the generators seeded for the work on it.

    Iterating it starts the next epoch, or the one given to :meth:`set_epoch`. What it does not define is the user's
    loader's: ``len(prepared.dataset)`` works.

    Args:
        source: a ``DataLoader``, a :class:`~trainkit.data.CombinedLoader`, or any iterable of batches.
        seed: of the run.
        device: where the batches go.
        stage: which keys are used.
        index: the loader's number in its stage.
        generators: the device's generators, seeded with the CPU's.
        window: told, before each batch, which place it has in its accumulation window; ``None`` for evaluation.
        limit: the number of micro-batches of an epoch at most.
        weigh: the user's ``batch_weight``.
        transfer: ``transfer(batch, m)`` puts a batch on the device; the default moves every tensor in it.
        finish: applied to a batch on the device after the generators are seeded for the work on it.
        sequential: do not shuffle.
    """

    def __init__(
        self,
        source: Any,
        *,
        seed: int,
        device: torch.device,
        stage: Stage = Stage.TRAIN,
        index: int = 0,
        generators: tuple[torch.Generator, ...] = (),
        window: Window | None = None,
        limit: int | None = None,
        weigh: Callable[[Any], float] | None = None,
        transfer: Callable[[Any, int], Any] | None = None,
        finish: Callable[[Any], Any] | None = None,
        sequential: bool = False,
    ) -> None:
        self.source = source
        self._seed, self._stage = seed, stage.of_loader(index)
        self._device, self._generators = device, generators
        self._window = window
        self._weigh = weigh
        self._non_blocking = device.type == "cuda"
        self._moves = transfer is None
        self._transfer = self._move if transfer is None else transfer
        self._finish = finish
        if isinstance(source, CombinedLoader):
            self._stream: Stream = CombinedStream(source, seed, stage, index, device, sequential)
            self._count: Callable[[Any], int] = source.count
        else:
            self._count = batch_size
            self._stream = open_stream(source, seed, self._stage, device, sequential)
        self.limit = limit
        self._epoch = 0
        self._next_epoch = 0

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not set yet: an object that is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def length(self) -> int | None:
        """Micro-batches of an epoch, ``None`` if only its end tells."""
        length = self._stream.length
        if length is None or self.limit is None:
            return length
        return min(length, self.limit)

    @property
    def exact(self) -> bool:
        """The length is certain; else it is what a dataset or sampler of the user's says of itself."""
        return self._stream.exact

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError(f"{type(self.source).__name__} has no length")
        return length

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or was last."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration gives this epoch."""
        self._next_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch = self._next_epoch
        self._next_epoch = epoch + 1
        return self.iterate(epoch)

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from micro-batch ``start`` on; nothing before it is fetched from a map-style dataset."""
        raw = iter(self._stream.batches(epoch, start, self.limit))
        keys = KeyStream(self._seed, self._stage, Purpose.FORWARD, epoch)
        if self._window is None or (self._window.size == 1 and self._weigh is None):
            return self._one_by_one(raw, keys, start)
        return self._in_windows(self._window, raw, keys, start)

    def _one_by_one(self, raw: Iterator[Any], keys: KeyStream, start: int) -> Iterator[Any]:
        """Every micro-batch is a window of its own that counts in full, so there is nothing to say about it."""
        if self._window is not None:
            self._window.take(MicroBatch(None, True, True, 1.0))
        device, generators, finish = self._device, self._generators, self._finish
        moves, transfer = self._moves, self._transfer
        if device.type == "cuda":
            raw, moves, transfer = to_device(raw, self._transfer, device, start), False, _as_it_is
        for m, batch in enumerate(raw, start):
            # move itself where it is all that self._transfer does: at every step, a call counts
            batch = move(batch, device) if moves else transfer(batch, m)
            seed_generators(keys(m), generators)
            yield batch if finish is None else finish(batch)
        if self._window is not None:
            self._window.driven = False  # what is read next may be a loader that was not prepared

    def _in_windows(self, window: Window, raw: Iterator[Any], keys: KeyStream, start: int) -> Iterator[Any]:
        sizes, length = self._stream.sizes, self.length
        if sizes is not None and length != self._stream.length:
            sizes = (sizes[0], sizes[0])  # the limit leaves the short last micro-batch out
        items = windows(raw, window.size, count=self._count, start=start, length=length, sizes=sizes, weigh=self._weigh)
        if self._device.type == "cuda":
            items = to_device(items, self._transfer_micro, self._device, start)
        transfer = _as_it_is if self._device.type == "cuda" else self._transfer
        for m, item in enumerate(items, start):
            batch = transfer(item.batch, m)
            window.take(item)
            seed_generators(keys(m), self._generators)
            yield batch if self._finish is None else self._finish(batch)
        window.driven = False

    def close(self) -> None:
        """End the worker processes of persistent workers."""
        self._stream.close()

    def _move(self, batch: Any, m: int) -> Any:
        return move(batch, self._device, self._non_blocking)

    def _transfer_micro(self, micro: MicroBatch, m: int) -> MicroBatch:
        return micro._replace(batch=self._transfer(micro.batch, m))


def _as_it_is(batch: Any, m: int) -> Any:
    return batch
