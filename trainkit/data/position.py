"""The position of a loader in its epoch: what a checkpoint contains of it, and where another number of processes resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import gcd
from typing import Any, Protocol

from trainkit.console import counted, notice, warn
from trainkit.data.state_history import Resumption
from trainkit.data.stream import Stream
from trainkit.distributed.world import World
from trainkit.errors import StateMismatchError
from trainkit.micro_batch import MicroBatch
from trainkit.rng import KeyStream, Purpose

__all__ = ["Positions", "Reader"]


_REPLAY = ("last", "before", "origin")


def _known(state: Any) -> bool:
    return state[0] is not None or state[1] is not None


class Reader(Protocol):
    """Your own training loop, as a loader sees it: it iterates over the loader and may leave a window open."""

    def open_window(self) -> int:
        """Number of micro-batches in the window that the next epoch completes; 0: none is open."""

    def read(self, loader: Any, micro_batches: Iterator[MicroBatch]) -> Iterator[Any]:
        """The batches of an epoch."""

    def completed(self, loader: Any) -> int:
        """Number of micro-batches of the epoch that belong to complete windows."""


class Positions:
    """The part of `trainkit.data.PreparedLoader` that records its position.

    An index counts the micro-batches of one rank. A position counts samples and the micro-batches of all ranks, so that a run
    on another number of processes can resume from it.

    Attributes:
        exhausted: your own training loop has read the epoch to its end.
        last_position: the position in a checkpoint that was loaded, and its `start_of` (`None`: inside a micro-batch), until
            this loader is read: it begins the epoch at its beginning, unless `resume_at` is called.
    """

    source: Any
    limit: int | None
    micro_limit: int | None
    given: int
    _world: World
    _stream: Stream
    _reader: Reader | None
    _window_start: int  # index of the first micro-batch in the window of the last one yielded
    _inside_window: bool = False  # it is not the last of its window
    _seed: int
    _stage: int
    _epoch: int
    _next_epoch: int
    _next_start: int
    _begun: bool
    _resumed: tuple[int, int, int]
    exhausted: bool = False
    last_position: tuple[Mapping[str, Any], int | None] | None = None

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of an epoch over all processes; `None` if the length is unknown."""
        length, end = self._stream.length, self._end
        return length if length is None or end is None else min(length, end)

    @property
    def even(self) -> bool:
        """Whether all processes certainly have the same number of micro-batches in an epoch."""
        if self._world.size == 1:
            return True
        return self._stream.exact and self.micro_batches is not None and self.micro_batches % self._world.size == 0

    @property
    def total_batch_size(self) -> int:
        """The samples of a batch of all ranks together, unless it is short.

        Raises:
            AttributeError: the loader has no batch size.
        """
        from trainkit.data.sources import batch_size_of  # which needs this module

        whole = getattr(getattr(self.source, "batch_sampler", None), "size_of_all", None)  # of batches that are split
        if whole is not None:
            return int(whole)
        size = batch_size_of(self.source)
        if size is None:
            raise AttributeError(f"{type(self.source).__name__} has no batch_size")
        return size * self._world.width

    @property
    def total_dataset_length(self) -> int:
        """Number of samples of the dataset over all processes: its `total_length`, or its length."""
        dataset = self.source.dataset
        return int(getattr(dataset, "total_length", None) or len(dataset))

    @property
    def length(self) -> int | None:
        """Micro-batches of this rank in an epoch; `None` if unknown."""
        length = self.micro_batches
        if length is None or self._world.width == 1:
            return length
        index, begin = self._resumed[1:] if self._resumed[0] == self._epoch else (0, 0)
        return index + -(-max(0, length - begin) // self._world.width)

    @property
    def _end(self) -> int | None:
        """The micro-batch at which the limits end an epoch."""
        limit = None if self.limit is None else self.limit * self._world.width
        return limit if self.micro_limit is None else self.micro_limit if limit is None else min(limit, self.micro_limit)

    @property
    def exact(self) -> bool:
        """Whether the length is certain; otherwise it is what the user's dataset or sampler returns."""
        return self._stream.exact

    @property
    def epoch(self) -> int:
        """The current epoch, or the last one."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration yields this epoch, from its first batch unless a checkpoint was loaded in the middle of it."""
        if epoch != self._next_epoch:
            self._next_start = 0
        self._next_epoch, self._begun = epoch, False

    def start_at(self, index: int) -> None:
        """The next iteration yields its epoch from index `index` on."""
        self._next_start, self._begun = index, False

    def state_dict(self) -> dict[str, Any]:
        """The position of a loop that reads this loader: the epoch, and the samples and micro-batches whose windows are full.

        Batches fetched in advance do not count, nor does an incomplete window: a resumed run repeats the whole window.
        """
        if not self._begun:
            left = None if self.last_position is None else self.last_position[0]
            if left is not None and left["iterable"] is None and (left["epoch"], 0) == (self._next_epoch, self._next_start):
                return dict(left)  # nothing has been read since it was loaded
            return self.position(self._next_epoch, self._next_start)
        done = self.given
        if self._reader is not None:
            done = self._reader.completed(self)
        elif self._inside_window:
            done = self._window_start
        # the length may only be known at the end of the epoch
        if (self.exhausted and done == self.given) or (done and done == self.length):
            return self.position(self._epoch + 1, 0)
        return self.position(self._epoch, done)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration continue at the position in `state_dict`.

        Raises:
            StateMismatchError: the position is not the start of a micro-batch of this loader.
        """
        self.resume_at(state_dict, self.start_of(state_dict))

    def resume_at(self, position: Mapping[str, Any], start: int) -> None:
        """Let the next iteration begin at a position, whose `start_of` is `start`."""
        self._next_epoch = self._epoch = int(position["epoch"])
        self._next_start, self._begun, self.last_position = start, False, None
        self.resume(position, start)

    def restart_epoch(self, position: Mapping[str, Any]) -> None:
        """Let the next iteration yield the epoch of a position from its beginning, or the next one if it was complete.

        `last_position` then contains the arguments of `resume_at`, to continue in the middle of the epoch instead.
        """
        if not position["batches"]:
            self.resume_at(position, 0)
            return
        index = None
        with suppress(StateMismatchError):
            index = -(-self._start_in(position) // self._world.width)
        if position["complete"]:
            self.resume(position, index or 0)  # an iterable may need its state to begin the next epoch
        else:
            self.last_position = position, index
        self._next_epoch = self._epoch = int(position["epoch"]) + bool(position["complete"])
        self._next_start, self._begun, self._resumed = 0, False, (-1, 0, 0)

    def position(self, epoch: int, index: int) -> dict[str, Any]:
        """The position after `index` micro-batches of each rank in `epoch`, for a checkpoint.

        Returns:
            `epoch`; `batches`: micro-batches of all processes; `samples` (`None` if unknown); `complete`: whether
            the epoch is complete; `dataset`: number of samples of the dataset; `iterable`: the state of an iterable that
            has one. In the middle of a stream also `replay`: what `Resumption` has of it. With several devices also
            `processes` (number of micro-batches with the same index), `rank` (of the process whose `iterable` it is) and
            `splits` (each process has its own stream); see `gathered`.
        """
        sizes, length, world = self._stream.sizes, self._stream.length, self._world
        batches = whole = self._micro_batch(epoch, index)
        if length is not None and self._stream.exact:
            batches = min(batches, length)  # not all ranks may have one at the last index
        if self.micro_limit is not None:
            batches = min(batches, self.micro_limit)
        samples = None
        if sizes is not None:
            samples = batches * sizes[0] - (sizes[0] - sizes[1] if batches and batches == length else 0)
        kept = next((entry for history in self._stream.histories() if (entry := history.at(whole)) is not None), None)
        found: dict[str, Any] = {
            "epoch": epoch,
            "batches": batches,
            "samples": samples,
            "complete": 0 < batches == length,
            "dataset": self._stream.samples,
            "iterable": None if kept is None else kept.state,
        }
        if kept is not None and kept.last is not None and not found["complete"]:
            found["replay"] = {"last": kept.last, "before": kept.before, "origin": kept.origin}
        if world.width > 1:
            found |= {"processes": world.width, "rank": world.rank, "splits": self._stream.splits}
        return found

    def gathered(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position with the states of the iterables of all processes, for a checkpoint. Collective."""
        active = any(history.active for history in self._stream.histories())
        if self._world.size == 1 or not (active or self._stream.splits):
            return position
        states = self._world.exchange_state([position["iterable"], position.get("replay")])
        # if all processes read the same stream, one state is enough
        iterable, replay = zip(*(states if self._stream.splits else [max(states, key=_known)]), strict=True)
        kept = {"iterable": list(iterable), "replay": list(replay)}
        if not self._stream.splits:
            kept = {"iterable": iterable[0], "replay": replay[0]}
        return {**position, **kept, "rank": None}

    def start_of(self, position: Mapping[str, Any]) -> int:
        """The index at which a position continues, in micro-batches of this loader's batch size.

        Raises:
            StateMismatchError: the position lies inside a micro-batch.
        """
        there, here = position["dataset"], self._stream.samples
        if position["batches"] and there is not None and here is not None and there != here:
            warn(
                f"the dataset has {here} samples, but had {there} when the checkpoint was saved: the rest of this epoch is in "
                "a different order and may repeat samples. The next epoch is not affected."
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
                    f"the checkpoint was saved after {samples} samples of the epoch, which is inside a micro-batch of "
                    f"{sizes[0]}. Use a batch_size that divides {samples}, such as {gcd(samples, sizes[0])}, or a checkpoint "
                    "from the end of an epoch."
                )
        return start

    def resume(self, position: Mapping[str, Any], start: int) -> None:
        """Continue the epoch at a position, whose `start_of` is `start`, and iterables from their state."""
        micro_batch, self._epoch = self._start_in(position), int(position["epoch"])
        self._resumed = self._epoch, start, micro_batch
        state, replay, splits = position["iterable"], position.get("replay"), bool(position.get("splits", False))
        if splits and position["processes"] != self._world.size:
            state = replay = None
            if position["batches"]:
                notice(
                    f"the checkpoint was saved by {counted(position['processes'], 'process')}, each with its own stream of "
                    f"data; on {counted(self._world.size, 'process')} the streams differ. The epoch continues after the same "
                    "number of batches of the new streams."
                )
        elif splits:
            state, replay = (self._of_this_rank(value, position["rank"]) for value in (state, replay))
        self._stream.resume(splits and self._world.size > 1, self._epoch, self._end is not None)
        if state is not None or replay is not None:
            last, before, origin = (None, None, None) if replay is None else (replay[name] for name in _REPLAY)
            for history in self._stream.histories():
                history.resume(Resumption(micro_batch, state, last, None if before is None else tuple(before), origin))

    def _of_this_rank(self, value: Any, rank: int | None) -> Any:
        """This rank's part of what a position has for each rank, or for `rank` alone."""
        if value is None or rank not in (None, self._world.rank):
            return None
        return value[self._world.rank] if rank is None else value

    def forward_key(self, index: int) -> int:
        """The key of the random numbers of this rank's forward at an index of the current epoch."""
        m = self._micro_batch(self._epoch, index) + self._world.rank
        return KeyStream(self._seed, self._stage, Purpose.FORWARD, self._epoch)(m)

    def _micro_batch(self, epoch: int, index: int) -> int:
        """The first rank's micro-batch at an index. After a resume, indices count from the position that was resumed."""
        resumed, first, begin = self._resumed
        if epoch == resumed and index >= first:
            return begin + (index - first) * self._world.width
        return index * self._world.width
