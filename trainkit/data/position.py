"""The position of a loader in its epoch: what a checkpoint keeps of it, and where it leads on any number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from trainkit.console import counted, notice, warn
from trainkit.data.stream import Stream
from trainkit.data.window import Window
from trainkit.distributed import World
from trainkit.errors import StateMismatchError

__all__ = ["Positions"]


class Positions:
    """The part of :class:`trainkit.data.PreparedLoader` that knows where it is.

    Rows are what this run counts: a micro-batch for each of its devices. A position is in samples and in micro-batches of
    all, so that a run of another number of processes can go on from it.
    """

    source: Any
    limit: int | None
    micro_limit: int | None
    given: int
    _world: World
    _stream: Stream
    _window: Window | None
    _window_start: int
    _epoch: int
    _next_epoch: int
    _next_start: int
    _begun: bool
    _resumed: tuple[int, int, int]

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of an epoch over all processes, ``None`` if only its end tells."""
        length, end = self._stream.length, self._end
        return length if length is None or end is None else min(length, end)

    @property
    def even(self) -> bool:
        """Whether it is certain that each process has as many micro-batches of an epoch as the others."""
        if self._world.size == 1:
            return True
        return self._stream.exact and self.micro_batches is not None and self.micro_batches % self._world.size == 0

    @property
    def total_batch_size(self) -> int:
        """The samples of a full row: those of a batch, of all processes together.

        Raises:
            AttributeError: the loader does not say how many a batch has.
        """
        from trainkit.data.sources import batch_size_of  # which needs this module

        whole = getattr(getattr(self.source, "batch_sampler", None), "size_of_all", None)  # of batches that are split
        if whole is not None:
            return int(whole)
        size = batch_size_of(self.source)
        if size is None:
            raise AttributeError(f"{type(self.source).__name__} does not say how many samples a batch has")
        return size * self._world.width

    @property
    def total_dataset_length(self) -> int:
        """The samples of the dataset, of all processes together: what it says of its ``total_length``, or its length."""
        dataset = self.source.dataset
        return int(getattr(dataset, "total_length", None) or len(dataset))

    @property
    def length(self) -> int | None:
        """Rows of an epoch, ``None`` if only its end tells."""
        length = self.micro_batches
        if length is None or self._world.width == 1:
            return length
        row, begin = self._resumed[1:] if self._resumed[0] == self._epoch else (0, 0)
        return row + -(-max(0, length - begin) // self._world.width)

    @property
    def _end(self) -> int | None:
        """The micro-batch at which the limits end an epoch."""
        limit = None if self.limit is None else self.limit * self._world.width
        return limit if self.micro_limit is None else self.micro_limit if limit is None else min(limit, self.micro_limit)

    def state_dict(self) -> dict[str, Any]:
        """The position of a loop that reads this loader: the epoch, and the samples and micro-batches whose windows are full.

        What has been fetched ahead does not count, nor does a window that is being worked on: it is repeated whole.
        """
        if not self._begun:
            return self.position(self._next_epoch, self._next_start)
        done = self.given
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

    def position(self, epoch: int, rows: int) -> dict[str, Any]:
        """What a checkpoint keeps of a position: after ``rows`` rows of ``epoch``.

        Returns:
            ``epoch``; ``batches``: micro-batches of all processes; ``samples`` (``None`` where only the batches themselves tell
            their sizes); ``complete``: those were all batches of the epoch; ``dataset``: the number of samples there are;
            ``iterable``: the state of an iterable that has one. Of several devices also ``processes`` (so many micro-batches
            are a row), ``rank`` (whose ``iterable`` it is) and ``splits`` (each has a stream of its own); see :meth:`gathered`.
        """
        sizes, length, world = self._stream.sizes, self._stream.length, self._world
        batches = whole = self._micro_batch(epoch, rows)
        if length is not None and self._stream.exact:
            batches = min(batches, length)  # the last row may have fewer
        if self.micro_limit is not None:
            batches = min(batches, self.micro_limit)
        samples = None
        if sizes is not None:
            samples = batches * sizes[0] - (sizes[0] - sizes[1] if batches and batches == length else 0)
        states = [trail.at(whole) for trail in self._stream.trails()]
        found = {
            "epoch": epoch,
            "batches": batches,
            "samples": samples,
            "complete": 0 < batches == length,
            "dataset": self._stream.samples,
            "iterable": next((state for state in states if state is not None), None),
        }
        if world.width > 1:
            found |= {"processes": world.width, "rank": world.rank, "splits": self._stream.splits}
        return found

    def gathered(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position with the states of the iterables of all processes, for a checkpoint. Collective."""
        if self._world.size == 1 or not any(trail.active for trail in self._stream.trails()):
            return position
        states = self._world.exchange_objects(position["iterable"])
        # of one stream that all read, one state is enough
        kept = states if self._stream.splits else next((state for state in states if state is not None), None)
        return {**position, "iterable": kept, "rank": None}

    def start_of(self, position: Mapping[str, Any]) -> int:
        """The row that follows a position, in micro-batches of the size that this loader's have.

        Raises:
            StateMismatchError: the position lies inside a micro-batch.
        """
        there, here = position["dataset"], self._stream.samples
        if position["batches"] and None not in (there, here) and there != here:
            warn(
                f"the dataset has {here} samples, and had {there} when the checkpoint was written: the rest of the epoch comes "
                "from another order, in which samples that were seen may come again. From the next epoch on all is regular."
            )
        return -(-self._start_in(position) // self._world.width)

    def _start_in(self, position: Mapping[str, Any]) -> int:
        """The micro-batch that follows a position."""
        start, samples, sizes = int(position["batches"]), position["samples"], self._stream.sizes
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
        """Let the epoch of a position go on there, and iterables from their state; its :meth:`start_of` is ``start``."""
        micro_batch, self._epoch = self._start_in(position), int(position["epoch"])
        self._resumed = self._epoch, start, micro_batch
        state, splits = position["iterable"], bool(position.get("splits", False))
        if splits and position["processes"] != self._world.size:
            state = None
            if position["batches"]:
                notice(
                    f"the checkpoint is of {counted(position['processes'], 'process')}, each of which read a part of the data "
                    f"that it chose itself; for {self._world.size} they are others. The epoch goes on after as many "
                    "batches of them."
                )
        elif splits and state is not None:
            rank = position["rank"]
            state = state[self._world.rank] if rank is None else state if rank == self._world.rank else None
        self._stream.resume(splits and self._world.size > 1)
        if state is not None:
            for trail in self._stream.trails():
                trail.resume(micro_batch, state)

    def _micro_batch(self, epoch: int, row: int) -> int:
        """The number of the micro-batch that a row begins with. The first row after a resume begins where that was."""
        resumed, first, begin = self._resumed
        if epoch == resumed and row >= first:
            return begin + (row - first) * self._world.width
        return row * self._world.width
