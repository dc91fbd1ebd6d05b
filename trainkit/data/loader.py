"""``PreparedLoader``: a user's loader as the loop reads it, in keyed order, under keyed randomness, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import gcd
from typing import Any

import torch

from trainkit.console import warn
from trainkit.data.combined import CombinedLoader, CombinedStream
from trainkit.data.nested import batch_size, move
from trainkit.data.prefetch import to_device
from trainkit.data.stream import Stream, open_stream
from trainkit.data.window import MicroBatch, Window, windows
from trainkit.errors import StateMismatchError
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
        self._next_start = 0
        self._begun = False  # the epoch, by an own loop
        self._given = 0  # micro-batches of it that have been given out
        for trail in self._stream.trails():
            if window is None:
                trail.stop()  # an evaluation begins anew each time
            else:
                trail.keep(4 + 2 * window.size)  # a window that is worked on, and the next one fetched ahead

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
        """The next iteration gives this epoch, from its first batch unless it is the one that a checkpoint was taken in."""
        if epoch != self._next_epoch:
            self._next_start = 0
        self._next_epoch, self._begun = epoch, False

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._next_epoch, self._next_start
        self._epoch, self._next_epoch, self._next_start, self._begun = epoch, epoch + 1, 0, True
        return self.iterate(epoch, start)

    def state_dict(self) -> dict[str, Any]:
        """The position of a loop that reads this loader: the epoch, and the samples and micro-batches whose windows are full.

        What has been fetched ahead does not count, nor does a window that is being worked on: it is repeated whole.
        """
        if not self._begun:
            return self.position(self._next_epoch, self._next_start)
        done = self._given
        if self._window is not None and done and not self._window.full:
            done = self._window_start
        if done and done == self.length:
            return self.position(self._epoch + 1, 0)
        return self.position(self._epoch, done)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration goes on where :meth:`state_dict` was.

        Raises:
            StateMismatchError: the position is not the start of a micro-batch of this loader.
        """
        self.go_on(state_dict, self.start_of(state_dict))

    def go_on(self, position: Mapping[str, Any], start: int) -> None:
        """The next iteration begins at a position, whose :meth:`start_of` is ``start``."""
        self._next_epoch = self._epoch = int(position["epoch"])
        self._next_start, self._begun = start, False
        self.resume(position, start)

    def position(self, epoch: int, batches: int) -> dict[str, Any]:
        """What a checkpoint keeps of a position: after ``batches`` micro-batches of ``epoch``.

        Returns:
            ``epoch``; ``batches``; ``samples`` (``None`` where only the batches themselves tell their sizes); ``complete``:
            those were all batches of the epoch; ``dataset``: the number of samples there are; ``iterable``: the state of an
            iterable that has one.
        """
        sizes, length = self._stream.sizes, self._stream.length
        samples = None
        if sizes is not None:
            samples = batches * sizes[0] - (sizes[0] - sizes[1] if batches and batches == length else 0)
        states = [trail.at(batches) for trail in self._stream.trails()]
        return {
            "epoch": epoch,
            "batches": batches,
            "samples": samples,
            "complete": 0 < batches == length,
            "dataset": self._stream.samples,
            "iterable": next((state for state in states if state is not None), None),
        }

    def start_of(self, position: Mapping[str, Any]) -> int:
        """The micro-batch that follows a position, in the size that this loader's have.

        Raises:
            StateMismatchError: the position lies inside a micro-batch.
        """
        start, samples, sizes = int(position["batches"]), position["samples"], self._stream.sizes
        there, here = position["dataset"], self._stream.samples
        if start and None not in (there, here) and there != here:
            warn(
                f"the dataset has {here} samples, and had {there} when the checkpoint was written: the rest of the epoch comes "
                "from another order, in which samples that were seen may come again. From the next epoch on all is regular."
            )
        if position["complete"] and self._stream.length is not None:
            start = self._stream.length  # whatever the size of its last micro-batch
        elif samples is not None and sizes is not None:
            start, rest = divmod(samples, sizes[0])
            if rest:
                raise StateMismatchError(
                    f"the checkpoint was written after {samples} samples of the epoch, which lies inside a micro-batch of "
                    f"{sizes[0]}. Use a batch_size that divides {samples}, such as {gcd(samples, sizes[0])}, or a checkpoint "
                    "from the end of an epoch."
                )
        return start

    def resume(self, position: Mapping[str, Any], start: int) -> None:
        """Let iterables that have a state go on from that of the position, whose :meth:`start_of` is ``start``."""
        if position["iterable"] is not None:
            for trail in self._stream.trails():
                trail.resume(start, position["iterable"])

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from micro-batch ``start`` on; nothing before it is fetched from a map-style dataset."""
        self._given = self._window_start = start
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
            self._given = m + 1
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
            self._given = m + 1
            if window.first:
                self._window_start = m
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
