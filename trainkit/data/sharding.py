"""Ends the batches of a stream where its length says, and shards them over processes.

All processes read the same stream, or each one has its own part.

It cannot be known from outside whether an iterable selects its part by rank. So at the start of an epoch the processes compare
their first batches. The keys that seed the generators do not contain the rank, so a stream without parts is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from trainkit.console import counted, notice
from trainkit.data.digest import digest
from trainkit.data.sampling import CYCLE
from trainkit.data.state_history import StateHistory
from trainkit.distributed.world import World

__all__ = ["StreamSharder"]


class StreamSharder:
    """Shards the batches of a stream, which ends at its stated length: a stream is never asked for more than is used.

    Args:
        world: the processes.
        name: of the stream, for messages.
        own: the stated length of this process's stream; `None`: it has none.
        samples: number of samples that an iterable dataset states, from which `own` follows.
        extra: number of batches that may follow because earlier ones were short.
        seen: whether the last batch showed that the stream has ended.
        whole: what each process reads if it is not the same: the whole dataset, not a part.

    Attributes:
        splits: each process has its own stream, whose batch i is number i·W + rank of all; the process reads all of it.
        counted: number of batches in the last epoch that was read to its end.
        spare: the first batch that was read, until this process has one of its own.
        ended: nothing is left to read of the epoch.
    """

    def __init__(
        self,
        world: World,
        name: str,
        own: int | None = None,
        samples: int | None = None,
        extra: int = 0,
        seen: Callable[[], bool] = lambda: False,
        whole: bool = False,
    ) -> None:
        self._seen = seen
        self._world, self._name, self._whole_dataset = world, name, whole
        self._samples, self._own, self._extra = samples, own, extra
        self._stated = self._agreed(own)
        self._reported: bool | None = None
        self._said_where_it_ends = False
        self.splits = False
        self.counted = 0
        self.spare: Any = None
        self.ended = False

    @property
    def sized(self) -> bool:
        """Whether this process's stream has a stated length, which is not 0."""
        return bool(self._own)

    @property
    def length(self) -> int | None:
        """Stated number of batches of an epoch over all processes."""
        return self._stated * self._world.size if self._stated is not None and self.splits else self._stated

    def _agreed(self, own: int | None) -> int | None:
        """The largest length over all processes; `None` if one of them has no length. Collective."""
        if self._world.size == 1:
            return own
        lengths: list[int | None] = self._world.exchange(own)
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def place(self, start: int, step: int) -> int:
        """The number of batch `start` of all processes, in the stream that this process reads."""
        return start // step if self.splits else start

    def ready(self, batches: Sequence[Any]) -> None:
        """Compare lists of batches. Collective."""
        if self._world.size == 1:
            return
        found = self._world.exchange([digest(batches[0]) if batches else None, len(batches)])
        if any(other != found[0] for other in found):
            self._set_splits(True)

    def reads(
        self, first: int, limit: int | None, turn: int, step: int, splits: bool | None = None, extra: int = 0
    ) -> int | None:
        """Number of batches that this process reads from `first` on, at most; `None`: until its stream ends.

        Args:
            first: the number of a batch in the stream that this process reads.
            limit: largest number of batches in the epoch, over all processes.
            turn: the position of this process in a row.
            step: batches in a row, one for each process.
            splits: as if `splits` were this.
            extra: number of batches that may follow those of the stated length.
        """
        stated = self._own if step == 1 else self._stated
        if step > 1 and (self.splits if splits is None else splits):
            stated, limit = self._own, None if limit is None else len(range(turn, limit, step))
        ends = [end for end in (limit, None if stated is None else stated + extra) if end is not None]
        return max(0, min(ends) - first) if ends else None

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
        if splits and self._whole_dataset:
            notice(
                f"{self._name} yields different batches on each process, and none of its samplers selects a part by rank: "
                "unless its __iter__ does, each process reads the whole dataset in an order of its own, and samples are "
                f"repeated, up to {self._world.size} times in an epoch. To read each sample once, use torch's DataLoader, or "
                "seed all processes alike before the loader is made: trainkit.seed_everything(0)"
            )
        elif splits:
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
        count = self.reads(begin, limit, turn, step, extra=self._extra)
        if skipped < begin - first:
            self.counted = (first + skipped) * (step if self.splits else 1)
        elif self.splits:
            yield from self._parts(batches, begin, count, step)
        else:
            yield from self._whole(batches, begin, count, turn, step)

    def alone(self, batches: Iterator[Any], first: int, start: int, limit: int | None) -> Iterator[Any]:
        """The batches for the only process, from `start` on.

        Args:
            batches: the batches of the stream.
            first: the number of the first of them.
            start: the number of the first batch to yield.
            limit: largest number of batches in the epoch.
        """
        self.ended = False
        number = begin = first + sum(1 for _ in islice(batches, max(start - first, 0)))
        count = self.reads(begin, limit, 0, 1, extra=self._extra)
        for number, batch in enumerate(islice(batches, count), begin + 1):
            self.ended = number == self._own
            yield batch
        self._finish(number, begin, count, self._own)

    def _parts(self, batches: Iterator[Any], begin: int, count: int | None, step: int) -> Iterator[Any]:
        self.counted, number = begin * step, begin
        for number, batch in enumerate(islice(batches, count), begin + 1):
            self.counted += step
            self.ended = number == self._own
            yield batch
        self._finish(number, begin, count, self._own)

    def _whole(self, batches: Iterator[Any], begin: int, count: int | None, turn: int, step: int) -> Iterator[Any]:
        place, mine, number = 0, None, begin
        self.spare = None
        for number, batch in enumerate(islice(batches, count), begin + 1):
            if place == turn:
                mine, self.spare = batch, None
            elif number == begin + 1:
                self.spare = batch
            place += 1
            if place == step:
                self.ended = number == self._stated
                yield mine
                place, mine = 0, None
        self.ended = count is None or number < begin + count or number == self._stated
        if place > turn:
            yield mine
        self.counted = number
        self._finish(number, begin, count, self._stated)

    def _finish(self, number: int, begin: int, count: int | None, stated: int | None) -> None:
        """Say once if the epoch ended where the stated length was wrong, or may be.

        Args:
            number: that of the last batch.
            begin: that of the first one.
            count: number of batches that were expected.
            stated: the stated length.
        """
        if stated is None or count is None or self._said_where_it_ends:
            return
        early = number < min(begin + count, stated)
        if not early and (self._samples is None or number < stated or self._seen()):
            return
        self._said_where_it_ends = True
        if early or self._samples is None:
            notice(
                f"{self._name} ended after {counted(number, 'batch')}, but its __len__ states {stated}: the epoch ends there.",
                everywhere=self.splits,
            )
        else:
            notice(
                f"{self._name} states {counted(self._samples, 'sample')} in its __len__, so each epoch ends after "
                f"{counted(number, 'batch')}, and nothing is read after them. If it has more, correct __len__ or remove it.",
                everywhere=self.splits,
            )
