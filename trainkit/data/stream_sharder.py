"""Ends the batches of a stream where its length says, shards them over processes, and keeps their positions.

All processes read the same stream, or each one has its own part.

It cannot be known from outside whether an iterable selects its part by rank. So at the start of an epoch the processes compare
their first batches by content. The keys that seed the generators do not contain the rank, so a stream without parts is the same
on all. A stream that all processes read is compared further as training continues, and one of which each process reads its own
is compared at the end of its first epoch: then the processes must not have read the same samples.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple
from weakref import finalize

from trainkit.console import notice, quantity, warn
from trainkit.data.combined import begins_again
from trainkit.data.comparison import BatchDigest, ReadRecord, digest, overlap
from trainkit.data.order import CYCLE
from trainkit.distributed.world import World
from trainkit.errors import DataError

__all__ = ["Resumption", "StateHistory", "StreamSharder", "has_state", "notice_unsaved", "rewind"]

_AFTER_END = "state after the end of the epoch"
# Id → the state before its first evaluation, and the object, which keeps the id valid.
_evaluated: dict[int, tuple[Any, Any]] = {}


def has_state(owner: Any) -> bool:
    """Whether an iterable or a sampler has `state_dict` and `load_state_dict`."""
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def rewind(owner: Any) -> None:
    """Before an evaluation: restore the state from before the first one, as a limit may have ended the last one early.

    The sanity check is an evaluation too, with a loader of its own. The state is asked for only once: some iterables return
    that of their last iteration until the next one has begun, even after another state was loaded.
    """
    if not has_state(owner) or begins_again(owner):
        return
    if id(owner) in _evaluated:
        owner.load_state_dict(copy.deepcopy(_evaluated[id(owner)][0]))
        return
    alive = None
    try:
        finalize(owner, _evaluated.pop, id(owner))
    except TypeError:  # An object with slots may not allow weak references.
        alive = owner
    _evaluated[id(owner)] = copy.deepcopy(owner.state_dict()), alive


def notice_unsaved(name: str, why: str) -> None:
    """Print a notice that a resumed run begins where the uninterrupted one may have continued from a state."""
    notice(
        f"{name} has a state, {why}: this run reads it from its beginning. If it continues in an epoch where it stopped in the "
        "one before, the data that follows is not what it would have been without the interruption. To resume exactly, let it "
        "begin again in each epoch."
    )


class _Entry(NamedTuple):
    number: int  # Number of batches that were read.
    state: Any
    last: BatchDigest | str | None  # Digest of the last one of them.


class Resumption(NamedTuple):
    """Where an iterable continues, and what shows whether it does.

    Attributes:
        batches: number of batches that were read.
        state: the state after them; `None`: it has none.
        last: digest of the last of them; `None`: unknown.
        before: the number and the state of an earlier position, from which that batch is read again; `None`: none is known.
        origin: the state at the beginning of the epoch, if it is known.
    """

    batches: int
    state: Any
    last: str | None = None
    before: tuple[int, Any] | None = None
    origin: Any = None


class StateHistory:
    """The states of an iterable with `state_dict` and `load_state_dict`, by the number of the batches read.

    Batches are fetched before they are used (a whole window, and one in advance for CUDA), so the current state is not the one
    to save. The states after the last few batches are kept, and a checkpoint asks for one by number.

    The last batch may be read together with the end of the epoch: a short one, or one that only some ranks have. The state is
    then that at the beginning of the next epoch, and is marked as such.

    Args:
        owner: the iterable.
        readable: its state in this process is that of the iteration; False if workers iterate it.

    Attributes:
        at_end: the iteration continues from a state after the end of its epoch, so there is nothing left to read.
        active: it has a state that is saved.
        kept: digests of batches, and states if there are any, are kept; an evaluation keeps none.
        resumed: what the running iteration has resumed from.
    """

    def __init__(self, owner: Any, readable: bool) -> None:
        self._owner = owner
        self.active = has_state(owner) and readable
        self.kept = True
        self._rewinds = False
        self._unreadable = has_state(owner) and not readable
        self._entries: deque[_Entry] = deque(maxlen=5)
        self._waiting: Resumption | None = None
        self.resumed: Resumption | None = None
        self._origin: Any = None
        self._fresh: Any = None
        self._read_ahead: tuple[Any, bool] | None = None
        self._running = False
        self.at_end = False

    @property
    def name(self) -> str:
        """The class of the iterable."""
        return type(self._owner).__name__

    @property
    def continues(self) -> bool:
        """Whether an iteration may begin where the one before stopped."""
        return self.active and not begins_again(self._owner)

    def keep(self, batches: int) -> None:
        """Keep the states of at least `batches` batches, and of the one before them."""
        if batches + 1 > (self._entries.maxlen or 0):
            self._entries = deque(self._entries, maxlen=batches + 1)

    def stop(self) -> None:
        """Keep no states, because none will be saved: this is an evaluation, and each one reads the same batches."""
        self._rewinds = self.active
        self.active = False
        self.kept = False

    def rewind(self) -> None:
        """Before an evaluation: see the function."""
        if self._rewinds:
            rewind(self._owner)

    def at(self, batches: int) -> Resumption | None:
        """What a checkpoint after `batches` batches of the epoch contains; `None` if nothing was kept."""
        if not self.kept:
            return None
        if self._waiting is not None and self._waiting.batches == batches:
            return self._waiting
        if self.active and batches == 0 and not self._running:  # Between two epochs the iterable may continue where it is.
            return Resumption(0, self._state())
        earlier: _Entry | None = None
        for entry in self._entries:
            if entry.number == batches:
                last = entry.last.text() if isinstance(entry.last, BatchDigest) else entry.last
                before = None if earlier is None or last is None else (earlier.number, earlier.state)
                return Resumption(batches, entry.state, last, before if self.active else None, self._origin)
            earlier = entry
        return None

    def resume(self, resumption: Resumption) -> None:
        """Let the next iteration continue there."""
        if self.kept:
            self._waiting = resumption

    def begin(self, start: int) -> int:
        """An iteration begins at batch `start`; returns the number of the batch from which the iterable now reads."""
        resumed, self._waiting = self._waiting, None
        self.at_end = False
        self.resumed = None
        self._origin = None
        ended = resumed is not None and isinstance(resumed.state, Mapping) and set(resumed.state) == {_AFTER_END}
        if resumed is not None and resumed.batches == start and not ended:
            self.resumed = resumed
        # at the start of the next epoch: nothing was left to do in that one
        if resumed is not None and self._has_state(resumed) and (resumed.batches == start or (ended and start == 0)):
            return self._restore(resumed, start, ended)
        if start:
            why = "its state lies in worker processes; it can be kept with num_workers=0" if self._unreadable else ""
            why = why or ("the checkpoint has no state of it" if self.active else "it has no state_dict")
            notice(
                f"{type(self._owner).__name__} cannot start in the middle, as {why}: skipping through "
                f"{quantity(start, 'batch')}."
            )
        return 0

    def _has_state(self, resumed: Resumption) -> bool:
        return self.active and resumed.state is not None

    def _restore(self, resumed: Resumption, start: int, ended: bool) -> int:
        """Restore a state; returns the number of the batch from which the iterable now reads."""
        state = copy.deepcopy(resumed.state)
        self.at_end = ended and start > 0
        self._origin = resumed.origin
        if resumed.origin is None:  # torchdata's Loader ignores what is loaded after its state was asked for, so only then
            self._fresh = self._state()
        if start and not ended and resumed.before is not None:  # the last batch is read again, and compared
            start, state = resumed.before[0], copy.deepcopy(resumed.before[1])
        self._owner.load_state_dict(state[_AFTER_END] if ended else state)
        return start

    def restart(self) -> None:
        """Restore the state at the beginning of the epoch, to read it from there."""
        assert self.resumed is not None
        origin = self._fresh if self.resumed.origin is None else copy.deepcopy(self.resumed.origin)
        self._owner.load_state_dict(origin)

    def _state(self) -> Any:
        return copy.deepcopy(self._owner.state_dict())

    @property
    def saw_end(self) -> bool | None:
        """Whether the end was seen with the present batch, if that was read ahead; `None`: it was not."""
        return None if self._read_ahead is None else self._read_ahead[1]

    def read_ahead(self, batches: Iterator[Any], count: int, seen: Callable[[], bool]) -> tuple[list[Any], Iterator[Any]]:
        """Read `count` batches now; returns them, and all batches, which come with the states that they were read with."""
        head = []
        for batch in islice(batches, count):
            head.append((batch, (self._state() if self.active else None, seen())))

        def replay() -> Iterator[Any]:
            for batch, self._read_ahead in head:
                yield batch
            self._read_ahead = None
            yield from batches

        return [batch for batch, _ in head], replay()

    def mark(self, start: int, last: str | None = None) -> None:
        """The present state is that before batch `start`.

        Args:
            start: the number of the batch.
            last: digest of the batch before it, if that was read.
        """
        self._entries.clear()
        resumed = self.resumed
        if resumed is not None and resumed.batches == start:
            if resumed.before is not None:
                self._entries.append(_Entry(*resumed.before, None))
            last = resumed.last
        self._keep(start, self.at_end, last)
        if start == 0 and self.active:
            self._origin = self._entries[-1].state

    def _keep(self, number: int, ended: bool, last: BatchDigest | str | None) -> None:
        state = None
        if self.active:
            state = self._state() if self._read_ahead is None else self._read_ahead[0]
            state = {_AFTER_END: state} if ended else state
        self._entries.append(_Entry(number, state, last))

    def follow(
        self,
        batches: Iterator[Any],
        start: int,
        step: int = 1,
        ended: Callable[[], bool] = lambda: False,
        last: Callable[[], BatchDigest | None] = lambda: None,
    ) -> Iterator[Any]:
        """The batches, their states kept on the way.

        Args:
            batches: those of this process.
            start: the number of the first of them; of several processes, that at which their first row begins.
            step: batches in a row, one of which is given.
            ended: whether the end of the epoch has been read.
            last: digest of the last batch that was read.
        """
        if not self.kept:
            yield from batches
            return
        self._running = True
        try:
            for number, batch in enumerate(batches, 1):
                self._keep(start + number * step, ended(), last())
                yield batch
        finally:
            self._running = False
            for entry in self._entries:
                if isinstance(entry.last, BatchDigest):
                    entry.last.text()  # After an epoch no batch is held.


_COMPARED = 4  # batches that are compared before the first one is used
_ONE_PROCESS = World()
_LIST = 32  # Places of a list at which batches are compared: it is in memory.
_SAME = 0.25  # share of equal samples from which on two processes read the same data: duplicates in it are fewer
_END = "the end of the stream"


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
        resampled: the stream draws its samples with replacement, so it repeats them on purpose.

    Attributes:
        compares_later: batches after the first ones are compared too; False inside a `CombinedLoader`.
        splits: each process has its own stream, whose batch i is number i·W + rank of all; the process reads all of it.
        last_length: number of batches in the last epoch that was read to its end.
        record: what this process has read of the epoch, by content.
        spare: the first batch that was read, until this process has one of its own; see `padding`.
        ended: nothing is left to read of the epoch.
    """

    def __init__(
        self,
        world: World,
        name: str,
        length: int | None = None,
        samples: int | None = None,
        extra: int = 0,
        seen: Callable[[], bool] = lambda: False,
        whole: bool = False,
        resampled: bool = False,
    ) -> None:
        self._seen = seen
        self._world = world
        self._name = name
        self._whole_dataset = whole
        self._resampled = resampled
        self._samples = samples
        self._own = length
        self._extra = extra
        self._stated = self._agree_on_length(length)
        self._decided = self._overlaps_checked = resampled
        self._said_where_it_ends = False
        self.record = ReadRecord()
        self.compares_later = True
        self.splits = resampled and world.size > 1
        self.last_length = 0
        self.spare: Any = None
        self._lent: Any = None
        self.ended = False
        if self.splits:
            notice(
                f"{name} draws its samples with replacement, on each process others: an epoch ends when the draws of all "
                "processes have ended."
            )

    @classmethod
    def for_separate_datasets(cls, world: World, name: str) -> StreamSharder:
        """For a map-style dataset of which each process has its own part: at the end of an epoch the parts are compared."""
        sharder = cls(_ONE_PROCESS, name)
        sharder._world = world
        sharder._decided = True
        sharder.splits = True
        return sharder

    def record_samples(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of such a part."""
        self.record.begin()
        for batch in batches:
            if not self._overlaps_checked:
                self.record.add_samples(batch)
            yield batch

    def restate(self, length: int | None, samples: int | None = None) -> None:
        """Set the stated lengths, after they have changed; arguments as of the constructor. Collective."""
        self._stated = self._agree_on_length(length)
        self._own = length
        self._samples = samples
        self._said_where_it_ends = False

    @property
    def padding(self) -> Any:
        """A batch for a process that has none of its own: the first one that was read, or one of another process."""
        return self._lent if self.spare is None else self.spare

    @property
    def has_length(self) -> bool:
        """Whether this process's stream has a stated length, which is not 0."""
        return bool(self._own)

    @property
    def length(self) -> int | None:
        """Stated number of batches of an epoch over all processes."""
        return self._stated * self._world.size if self._stated is not None and self.splits else self._stated

    def _agree_on_length(self, own_length: int | None) -> int | None:
        """The largest length over all processes; `None` if one of them has no length. Collective."""
        if self._world.size == 1:
            return own_length
        lengths: list[int | None] = self._world.exchange(own_length)
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def place(self, start: int, step: int) -> int:
        """The number of batch `start` of all processes, in the stream that this process reads."""
        return start // step if self.splits else start

    def ready(self, batches: Sequence[Any]) -> None:
        """Compare lists of batches. Collective."""
        if self._world.size == 1:
            return
        places = sorted({len(batches) * place // _LIST for place in range(_LIST)} | {len(batches) - 1}) if batches else []
        for place in places:
            self.record.add_samples(batches[place])
        by_rank = self._decide([digest(batches[place]) for place in places] + [str(len(batches))])
        self._share([len(theirs) > 1 for theirs in by_rank], batches[:1])

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
        self,
        batches: Iterator[Any],
        history: StateHistory,
        epoch: int,
        first: int,
        start: int,
        step: int,
        limit: int | None,
    ) -> Iterator[Any]:
        """The batches of an epoch, after the processes have compared the first ones. Collective.

        Args:
            batches: the batches of the stream.
            history: the history of its states.
            epoch: the epoch with its cycle; later cycles are sharded like the first one.
            first: the number of the first batch, in the stream that this process reads.
            start: the number of the first batch to yield, counted over all processes.
            step: batches in a row, one for each process.
            limit: largest number of batches in the epoch, over all processes.
        """
        if first == self.place(start, step):
            history.mark(start)
        if epoch >= CYCLE:
            return batches
        # not more than the last process uses if each has its own stream, and the same number on all
        most = self.reads(first, limit, step - 1, step, splits=True)
        count = 1 if self._decided else _COMPARED if most is None else max(1, min(most, _COMPARED))
        head, batches = history.read_ahead(batches, count, self._seen)
        if not self._decided:
            self.record.begin()
            for batch in head:
                self.record.add_samples(batch)
        by_rank = self._decide([None if batch is None else digest(batch) for batch in head])
        self._share([bool(theirs) for theirs in by_rank], head)
        return batches

    def _share(self, has: list[bool], head: Sequence[Any]) -> None:
        """Give a batch of the first process that has one to those that have none, for the steps of the others. Collective."""
        self._lent = head[0] if head else None  # A rank takes its own batch, as a resumed epoch may skip all that it has.
        if any(has) and not all(has):
            batch = self._world.broadcast_user_object(self._lent, has.index(True))
            self._lent = head[0] if head else batch

    def _decide(self, digests: Sequence[str | None]) -> list[list[str | None]]:
        """Determine from the digests of some batches whether each process has its own stream. Collective.

        A batch that is `None` says nothing, and equal batches do not contradict earlier ones that differed.

        Returns:
            The digests of all processes.
        """
        answers = self._world.exchange([list(digests), None if self._decided else self.record.sketch()])
        read = [theirs for theirs, _ in answers]
        columns = [
            {theirs[place] if place < len(theirs) else _END for theirs in read} - {None} for place in range(max(map(len, read)))
        ]
        differ = any(len(column) > 1 for column in columns)
        if differ and self._decided and not self.splits:
            raise self.different_streams()
        if any(columns) and not self._decided:
            self._decided = True
            self.splits = differ
            self._tell(len(columns))
            if differ:
                self._warn_of_overlap([sketch for _, sketch in answers])
        return read

    def _tell(self, compared: int) -> None:
        """Print a notice of how the stream is sharded."""
        if self.splits and self._whole_dataset:
            notice(
                f"{self._name} yields different batches on each process, and none of its samplers selects a part by rank: "
                "unless its __iter__ does, each process reads the whole dataset in an order of its own, and samples are "
                f"repeated, up to {self._world.size} times in an epoch. To read each sample once, use torch's DataLoader, or "
                "seed all processes alike before the loader is made: trainkit.seed_everything(0)"
            )
        elif self.splits:
            notice(
                f"{self._name} yields different batches on each process: each process reads its own stream to the end. A run "
                f"resumes exactly only on {self._world.size} processes."
            )
        else:
            notice(
                f"{self._name} yields the same batches on every process ({quantity(compared, 'batch')} compared"
                f"{', and later ones too' if self.compares_later else ''}): each process reads all of them and uses one in "
                f"{self._world.size}. To save the extra reading, let the dataset yield only the part of its rank "
                "(torch.distributed.get_rank()); nothing else has to change."
            )

    def different_streams(self) -> DataError:
        """The error for a stream that began with the same batches on each process, and then had others."""
        return DataError(
            f"{self._name} yielded the same batches on every process at first, and different ones later, so the data cannot be "
            "sharded: each process would use only one in "
            f"{self._world.size} of its own batches. If each process reads its own part, let the parts differ from the first "
            f"{_COMPARED} batches on: remove headers, padding and None at their beginning. If all read the same data, give "
            "its shuffle a seed that is the same on all processes."
        )

    def _warn_of_overlap(self, sketches: Sequence[list[str] | None]) -> None:
        """Warn if processes that should have parts have read the same samples."""
        share = overlap(sketches)
        if share >= _SAME and not self._overlaps_checked:
            self._overlaps_checked = True
            warn(
                f"{self._name} yields the same samples on each process, in different orders ({share:.0%} of the compared "
                f"samples are equal): each sample is used up to {self._world.size} times in an epoch. Give its shuffle a seed "
                "that is the same on all processes, such as shuffle(seed=0) or random.Random(0), so that trainkit shards "
                "it; or let each process read only the part of its rank (torch.distributed.get_rank())."
            )

    @property
    def chain(self) -> int | None:
        """A number that must be equal on all processes, as they read the same stream; `None`: each has its own."""
        return None if self.splits or self._world.size == 1 else self.record.chain

    def end_epoch(self) -> None:
        """Compare what the processes have read of an epoch; call it when all have read it to its end. Collective.

        Raises:
            DataError: they should have read the same.
        """
        if self._world.size == 1 or (self.splits and self._overlaps_checked):
            return
        chains, sketches = zip(*self._world.exchange([self.chain, self.record.sketch()]), strict=True)
        if len(set(chains)) > 1:
            raise self.different_streams()
        if self.splits:
            self._warn_of_overlap(sketches)
            self._overlaps_checked = True

    def rows(
        self,
        batches: Iterator[Any],
        history: StateHistory,
        first: int,
        start: int,
        limit: int | None,
        turn: int,
        step: int,
        reopen: Callable[[], Iterator[Any]],
    ) -> Iterator[Any]:
        """This process's batches, from `start` on: one of each row of `step` batches.

        A row of a common stream is read to its end before its batch is yielded, so that the state of the stream is that at the
        end of the row on every process.

        Args:
            batches: the batches of the stream.
            history: the history of its states.
            first: the number of the first of them, in the stream that this process reads.
            start: the number of the batch that the first row begins with, counted over all processes.
            limit: largest number of batches in the epoch, over all processes.
            turn: the position of this process in a row.
            step: batches in a row, one for each process; 1: this is the only process.
            reopen: returns the batches of the epoch from its beginning.
        """
        self.ended = False
        begin = self.place(start, step)
        if step == 1 and first == begin:
            history.mark(start)
        batches, reached = self._skip(batches, history, first, begin, start, reopen)
        count = self.reads(begin, limit, turn, step, extra=self._extra)
        if reached < begin:
            self.last_length = reached * (step if self.splits else 1)
            if step == 1:
                self._finish(reached, reached, self.reads(reached, limit, 0, 1), self._own)
        elif step == 1 or self.splits:
            yield from self._parts(batches, history, begin, count, step)
        else:
            yield from self._whole(batches, begin, count, turn, step)

    def _skip(
        self, batches: Iterator[Any], history: StateHistory, first: int, begin: int, start: int, reopen: Callable[[], Any]
    ) -> tuple[Iterator[Any], int]:
        """Skip the batches before number `begin`; returns the others, and the number that was reached.

        The last one of them is compared with that of the run that is resumed. If it is another one and the iterable has
        continued from a state, that state was not exact, and the epoch is read from its beginning instead.
        """
        self.record.begin()
        number, last = self._skip_to(batches, first, begin)
        resumed = history.resumed
        if number > first and number == begin and resumed is not None and None not in (resumed.last, last):
            exact = last == resumed.last
            if not exact and first > 0:
                history.restart()
                batches = reopen()
                number, last = self._skip_to(batches, 0, begin)
                exact = last == resumed.last
                if exact:
                    notice(
                        f"{self._name} did not continue where its state_dict was saved, so the epoch was read from its "
                        f"beginning: {quantity(number, 'batch')} skipped."
                    )
            if not exact:
                self._warn_of_other_data(begin)
        if number > first:
            history.mark(start, last)
        return batches, number

    def _skip_to(self, batches: Iterator[Any], first: int, begin: int) -> tuple[int, str | None]:
        """Read batches from number `first` to `begin`; returns the number that was reached, and the digest of the last one."""
        last = deque(enumerate(islice(batches, max(begin - first, 0)), first + 1), maxlen=1)
        return (first, None) if not last else (last[0][0], BatchDigest(last[0][1], now=True).text())

    def _warn_of_other_data(self, batches: int) -> None:
        if self._resampled:
            notice(f"{self._name} draws its samples with replacement: the resumed epoch continues with other draws.")
            return
        warn(
            f"{self._name} does not continue where the checkpoint was saved: batch {batches} of the epoch differs from the one "
            f"that was trained on. In this epoch, data of the first {quantity(batches, 'batch')} may be repeated, and as much "
            "other data may be skipped; the next epoch is not affected. To resume exactly, give its shuffle a seed, such as "
            "shuffle(seed=0) or random.Random(0), or draw from the global generators (torch, numpy, random) in __iter__, which "
            "trainkit seeds.",
            everywhere=self.splits,
        )

    def _parts(self, batches: Iterator[Any], history: StateHistory, begin: int, count: int | None, step: int) -> Iterator[Any]:
        self.last_length, number = begin * step, begin
        for number, batch in enumerate(islice(batches, count), begin + 1):
            self.last_length += step
            self.ended = number == self._own
            if history.kept:
                self.record.add_own(batch)
            if step > 1 and not self._overlaps_checked:
                self.record.add_samples(batch)
            yield batch
        self._finish(number, begin, count, self._own)

    def _whole(self, batches: Iterator[Any], begin: int, count: int | None, turn: int, step: int) -> Iterator[Any]:
        place, mine, number = 0, None, begin
        self.spare = None
        for number, batch in enumerate(islice(batches, count), begin + 1):
            self.record.add(batch)
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
        self.last_length = number
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
                f"{self._name} ended after {quantity(number, 'batch')}, but its __len__ states {stated}: the epoch ends there.",
                everywhere=self.splits,
            )
        else:
            notice(
                f"{self._name} states {quantity(self._samples, 'sample')} in its __len__, so each epoch ends after "
                f"{quantity(number, 'batch')}, and nothing is read after them. If it has more, correct __len__ or remove it.",
                everywhere=self.splits,
            )
