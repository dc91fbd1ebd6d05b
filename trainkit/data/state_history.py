"""The positions of an iterable after each of its last batches, and whether a resumed one continues where it was saved."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple
from weakref import finalize

from trainkit.console import counted, notice
from trainkit.data.loader_collections import begins_again

__all__ = ["Resumption", "StateHistory", "has_state", "notice_unsaved", "rewind"]

_AFTER_END = "state after the end of the epoch"
_evaluated: dict[int, tuple[Any, Any]] = {}  # by identity: the state before its first evaluation, and what keeps it alive


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
    except TypeError:  # of a class with slots
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
    number: int  # of batches that were read
    state: Any
    last: str | None  # digest of the last of them


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
        self._rewinds, self.active, self.kept = self.active, False, False

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
        if self.active and batches == 0 and not self._running:  # between two epochs it may continue where it is
            return Resumption(0, self._state())
        earlier: _Entry | None = None
        for entry in self._entries:
            if entry.number == batches:
                before = None if earlier is None or entry.last is None else (earlier.number, earlier.state)
                return Resumption(batches, entry.state, entry.last, before if self.active else None, self._origin)
            earlier = entry
        return None

    def resume(self, resumption: Resumption) -> None:
        """Let the next iteration continue there."""
        if self.kept:
            self._waiting = resumption

    def begin(self, start: int) -> int:
        """An iteration begins at batch `start`; returns the number of the batch from which the iterable now reads."""
        resumed, self._waiting = self._waiting, None
        self.at_end, self.resumed, self._origin = False, None, None
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
                f"{counted(start, 'batch')}."
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
    def seen_end(self) -> bool | None:
        """Whether the end was seen with the present batch, if that was read ahead; `None`: it was not."""
        return None if self._read_ahead is None else self._read_ahead[1]

    def read_ahead(self, batches: Iterator[Any], count: int, seen: Callable[[], bool]) -> tuple[list[Any], Iterator[Any]]:
        """Read `count` batches now; returns them, and all batches, which come with the states that they were read with."""
        head = []
        for batch in islice(batches, count):
            head.append((batch, (self._state() if self.active else None, seen())))

        def replayed() -> Iterator[Any]:
            for batch, self._read_ahead in head:
                yield batch
            self._read_ahead = None
            yield from batches

        return [batch for batch, _ in head], replayed()

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

    def _keep(self, number: int, ended: bool, last: str | None) -> None:
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
        last: Callable[[], str | None] = lambda: None,
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
