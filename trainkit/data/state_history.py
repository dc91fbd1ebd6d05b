"""The positions of a resumable iterable after each of its last batches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainkit.console import counted, notice

__all__ = ["StateHistory"]

_AFTER_END = "state after the end of the epoch"


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
    """

    def __init__(self, owner: Any, readable: bool) -> None:
        self._owner = owner
        has_state = callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))
        self.active = has_state and readable
        self._unreadable = has_state and not readable
        self._states: deque[tuple[int, Any]] = deque(maxlen=4)
        self._resumed: tuple[int, Any] | None = None
        self._running = False
        self.at_end = False

    def keep(self, batches: int) -> None:
        """Keep the states of at least `batches` batches."""
        if batches > (self._states.maxlen or 0):
            self._states = deque(self._states, maxlen=batches)

    def stop(self) -> None:
        """Keep no states, because none will be saved."""
        self.active = False

    def at(self, batches: int) -> Any | None:
        """The state after `batches` batches of the epoch; `None` if it was not kept."""
        if not self.active:
            return None
        if self._resumed is not None and self._resumed[0] == batches:
            return self._resumed[1]
        if batches == 0 and not self._running:  # between two epochs it may continue where it is
            return copy.deepcopy(self._owner.state_dict())
        return next((state for number, state in self._states if number == batches), None)

    def resume(self, batches: int, state: Any) -> None:
        """Let the next iteration continue from this state, which is that after `batches` batches."""
        if self.active:
            self._resumed = batches, state

    def resumes(self, start: int) -> bool:
        """Whether an iteration that begins at batch `start` has nothing to skip."""
        return self._resumed is not None and self._resumed[0] == start

    def begin(self, start: int) -> int:
        """An iteration begins at batch `start`; returns how many batches have to be read and thrown away."""
        resumed, self._resumed = self._resumed, None
        self.at_end = False
        if resumed is not None:
            state = copy.deepcopy(resumed[1])
            ended = isinstance(state, Mapping) and set(state) == {_AFTER_END}
            if resumed[0] == start or (ended and start == 0):  # 0: the next epoch; nothing was left to do in that one
                self.at_end = ended and start > 0
                self._owner.load_state_dict(state[_AFTER_END] if ended else state)
                return 0
        if start:
            why = "its state lies in worker processes; it can be kept with num_workers=0" if self._unreadable else ""
            why = why or ("the checkpoint has no state of it" if self.active else "it has no state_dict")
            notice(
                f"{type(self._owner).__name__} cannot start in the middle, as {why}: skipping through "
                f"{counted(start, 'batch')}."
            )
        return start

    def mark(self, start: int) -> None:
        """The present state is that before batch `start`."""
        self._states.clear()
        if self.active:
            self._keep(start, self.at_end)

    def _keep(self, number: int, ended: bool) -> None:
        state = copy.deepcopy(self._owner.state_dict())
        self._states.append((number, {_AFTER_END: state} if ended else state))

    def follow(
        self,
        batches: Iterator[Any],
        start: int,
        step: int = 1,
        skipped: bool = False,
        ended: Callable[[], bool] = lambda: False,
    ) -> Iterator[Any]:
        """The batches, their states kept on the way.

        Args:
            batches: those of this process.
            start: the number of the first of them; of several processes, that at which their first row begins, which has been
                marked.
            step: batches in a row, one of which is given.
            skipped: others are read before them, so that the present state is not the one at `start`.
            ended: whether the end of the epoch has been read.
        """
        if not self.active:
            yield from batches
            return
        if skipped:
            self._states.clear()
        elif step == 1:
            self.mark(start)
        self._running = True
        try:
            for number, batch in enumerate(batches, 1):
                self._keep(start + number * step, ended())
                yield batch
        finally:
            self._running = False
