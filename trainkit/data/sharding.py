"""One stream that several processes read: the same for all, of which each takes its batches, or for each its own part.

It cannot be seen from outside whether an iterable takes its part by rank. So at the start of an epoch the processes compare
what they have read first: the keys that seed generators do not contain the rank, so a stream that takes no part is the same.
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
        splits: each process has a stream of its own, whose batch i is number i·W + rank of all; it is read whole.
        counted: the batches that an epoch had that was read to its end.
        spare: the first batch that was read, as long as none of this process has come.
        ended: the end of a common stream has been read, in a row that is not full.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self._said: bool | None = None
        self.splits = False
        self.counted = 0
        self.spare: Any = None
        self.ended = False

    def length(self, said: int | None) -> int | None:
        """The number of batches of an epoch over all processes, if this process's stream reports `said`."""
        return said * self._world.size if said is not None and self.splits else said

    def agreed(self, said: int | None) -> int | None:
        """What the processes can count on where each stream says its length: the longest, if all do. Collective."""
        if self._world.size == 1:
            return said
        lengths: list[int | None] = self._world.exchange(said)
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def place(self, start: int, step: int) -> int:
        """The number, in the stream as this process reads it, of batch `start` of all processes."""
        return start // step if self.splits else start

    def ready(self, batches: Sequence[Any]) -> int:
        """Compare lists of ready batches; returns the batches of the longest. Collective."""
        said = self._world.exchange([digest(batches[0]) if batches else None, len(batches)])
        if any(other != said[0] for other in said):
            self._settle(True)
        longest: int = max(length for _, length in said)
        return longest

    def begin(
        self, batches: Iterator[Any], history: StateHistory, epoch: int, first: int, start: int, step: int
    ) -> Iterator[Any]:
        """The batches of an epoch, when the processes have compared the first of them. Collective.

        Args:
            batches: of the stream.
            history: of its states.
            epoch: with the number of the cycle in it; a later cycle is what the first one was.
            first: the number of the first batch, in the stream as this process reads it.
            start: the number, among those of all processes, of the batch that is wanted first.
            step: batches in a row.
        """
        if first == self.place(start, step):
            history.mark(start)
        if epoch >= CYCLE:
            return batches
        head = list(islice(batches, 1))
        said = self._world.exchange(digest(head[0]) if head else None)
        if any(other is not None for other in said):  # else it has ended, and does not tell
            self._settle(any(other != said[0] for other in said))
        return chain(head, batches)

    def _settle(self, splits: bool) -> None:
        """Whether each process has a stream of its own; said once."""
        self.splits = splits
        if splits == self._said:
            return
        self._said = splits
        if splits:
            notice(
                f"{self._name} gives each process a stream of its own. Each is read whole, and every sample in it counts once. "
                f"A run resumes exactly on {self._world.size} processes only."
            )
        else:
            notice(
                f"{self._name} gives every process the same stream: each reads all of it and works on one in "
                f"{self._world.size} batches, so that each batch counts once. A dataset that gives only the part of its rank "
                "(torch.distributed.get_rank()) saves that reading; nothing else has to be changed."
            )

    def rows(self, batches: Iterator[Any], first: int, start: int, limit: int | None, turn: int, step: int) -> Iterator[Any]:
        """This process's batches, from `start` on one of each row of `step`.

        A row of a common stream is read to its end before its batch is given, so that the state of what is read belongs to the
        end of the row in every process.

        Args:
            batches: of the stream.
            first: the number of the first of them, counted in the stream as this process reads it.
            start: the number, among those of all processes, of the one that the first row begins with.
            limit: the number of batches of all processes in the epoch, at most.
            turn: the place in a row.
            step: batches in a row.
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
