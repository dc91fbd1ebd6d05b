"""Shards the batches of a stream over processes: all processes read the same stream, or each one has its own part.

It cannot be known from outside whether an iterable selects its part by rank. So at the start of an epoch the processes compare
their first batches. The keys that seed the generators do not contain the rank, so a stream without parts is the same on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from trainkit.console import notice
from trainkit.data.digest import digest
from trainkit.data.sampling import CYCLE
from trainkit.data.state_history import StateHistory
from trainkit.distributed.world import World

__all__ = ["StreamSharder"]


class StreamSharder:
    """Shards the batches of a stream.

    Args:
        world: the processes.
        name: of the stream, for messages.

    Attributes:
        splits: each process has its own stream, whose batch i is number i·W + rank of all; the process reads all of it.
        counted: number of batches in the last epoch that was read to its end.
        spare: the first batch that was read, until this process has one of its own.
        ended: the end of a common stream has been read, in an incomplete row.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self._reported: bool | None = None
        self.splits = False
        self.counted = 0
        self.spare: Any = None
        self.ended = False

    def length(self, own: int | None) -> int | None:
        """Number of batches of an epoch over all processes, if this process's stream has the length `own`."""
        return own * self._world.size if own is not None and self.splits else own

    def agreed(self, own: int | None) -> int | None:
        """The largest length over all processes; `None` if one of them has no length. Collective."""
        if self._world.size == 1:
            return own
        lengths: list[int | None] = self._world.exchange(own)
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def place(self, start: int, step: int) -> int:
        """The number of batch `start` of all processes, in the stream that this process reads."""
        return start // step if self.splits else start

    def ready(self, batches: Sequence[Any]) -> int:
        """Compare lists of batches; returns the length of the longest. Collective."""
        found = self._world.exchange([digest(batches[0]) if batches else None, len(batches)])
        if any(other != found[0] for other in found):
            self._set_splits(True)
        longest: int = max(length for _, length in found)
        return longest

    def begin(
        self, batches: Iterator[Any], history: StateHistory, epoch: int, first: int, start: int, step: int
    ) -> Iterator[Any]:
        """The batches of an epoch, after the processes have compared the first ones. Collective.

        Args:
            batches: the batches of the stream.
            history: the history of its states.
            epoch: the epoch with its cycle; later cycles are sharded like the first one.
            first: the number of the first batch, in the stream that this process reads.
            start: the number of the first batch to yield, counted over all processes.
            step: batches in a row, one for each process.
        """
        if first == self.place(start, step):
            history.mark(start)
        if epoch >= CYCLE:
            return batches
        head = list(islice(batches, 1))
        found = self._world.exchange(digest(head[0]) if head else None)
        if any(other is not None for other in found):  # otherwise the stream has ended, and there is nothing to compare
            self._set_splits(any(other != found[0] for other in found))
        return chain(head, batches)

    def _set_splits(self, splits: bool) -> None:
        """Set whether each process has its own stream; prints a notice when that changes."""
        self.splits = splits
        if splits == self._reported:
            return
        self._reported = splits
        if splits:
            notice(
                f"{self._name} yields different batches on each process: each process reads its own stream to the end, and "
                f"every sample counts once. A run resumes exactly only on {self._world.size} processes."
            )
        else:
            notice(
                f"{self._name} yields the same batches on every process: each process reads all of them and uses one in "
                f"{self._world.size}, so that each batch counts once. To save the extra reading, let the dataset yield only "
                "the part of its rank (torch.distributed.get_rank()); nothing else has to change."
            )

    def rows(self, batches: Iterator[Any], first: int, start: int, limit: int | None, turn: int, step: int) -> Iterator[Any]:
        """This process's batches, from `start` on: one of each row of `step` batches.

        A row of a common stream is read to its end before its batch is yielded, so that the state of the stream is that at the
        end of the row on every process.

        Args:
            batches: the batches of the stream.
            first: the number of the first of them, in the stream that this process reads.
            start: the number of the batch that the first row begins with, counted over all processes.
            limit: largest number of batches in the epoch, over all processes.
            turn: the position of this process in a row.
            step: batches in a row, one for each process.
        """
        self.ended = False
        begin = self.place(start, step)
        skipped = sum(1 for _ in islice(batches, max(begin - first, 0)))
        if skipped < begin - first:
            self.counted = (first + skipped) * (step if self.splits else 1)
        elif self.splits:
            yield from self._parts(batches, begin, limit, turn, step)
        else:
            yield from self._whole(batches, begin, limit, turn, step)

    def _parts(self, batches: Iterator[Any], begin: int, limit: int | None, turn: int, step: int) -> Iterator[Any]:
        self.counted = begin * step
        count = None if limit is None else len(range(begin * step + turn, limit, step))
        for batch in islice(batches, count):
            self.counted += step
            yield batch

    def _whole(self, batches: Iterator[Any], begin: int, limit: int | None, turn: int, step: int) -> Iterator[Any]:
        place, mine, number = 0, None, begin
        count = None if limit is None else max(limit - begin, 0)
        self.spare = None
        for number, batch in enumerate(islice(batches, count), begin + 1):
            if place == turn:
                mine, self.spare = batch, None
            elif number == begin + 1:
                self.spare = batch
            place += 1
            if place == step:
                yield mine
                place, mine = 0, None
        self.ended = count is None or number < begin + count
        if place > turn:
            yield mine
        self.counted = number
