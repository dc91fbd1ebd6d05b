"""Where an iterable that can be resumed was after each of its last batches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

from trainkit.console import notice

__all__ = ["Trail"]


class Trail:
    """The states of an iterable with ``state_dict`` and ``load_state_dict``, by the number of the batches read.

    Batches are fetched before they are worked on (a window at a time, one ahead for CUDA), so the state of the moment is not
    the one to save: the states of the last few batches are kept, and the one that fits is asked for by number.

    Args:
        owner: what is iterated.
        readable: its state in this process is that of the iteration (not so with worker processes).
    """

    def __init__(self, owner: Any, readable: bool) -> None:
        self._owner = owner
        has_state = callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))
        self.active = has_state and readable
        self._unreadable = has_state and not readable
        self._states: deque[tuple[int, Any]] = deque(maxlen=4)
        self._resumed: tuple[int, Any] | None = None
        self._running = False

    def keep(self, batches: int) -> None:
        """Keep the states of at least so many batches."""
        if batches > (self._states.maxlen or 0):
            self._states = deque(self._states, maxlen=batches)

    def stop(self) -> None:
        """Keep no states: nobody will ask."""
        self.active = False

    def at(self, batches: int) -> Any | None:
        """The state after so many batches of the epoch, ``None`` if it is not known."""
        if not self.active:
            return None
        if self._resumed is not None and self._resumed[0] == batches:
            return self._resumed[1]
        if batches == 0 and not self._running:  # between two epochs it may go on where it is
            return copy.deepcopy(self._owner.state_dict())
        return next((state for number, state in self._states if number == batches), None)

    def resume(self, batches: int, state: Any) -> None:
        """The next iteration goes on from this state, which is that after ``batches`` batches."""
        if self.active:
            self._resumed = batches, state

    def resumes(self, start: int) -> bool:
        """Whether an iteration that begins at batch ``start`` has nothing to skip."""
        return self._resumed is not None and self._resumed[0] == start

    def begin(self, start: int) -> int:
        """An iteration begins at batch ``start``; returns how many batches have to be read and thrown away."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed[0] == start:
            self._owner.load_state_dict(copy.deepcopy(resumed[1]))
            return 0
        if start:
            why = "its state lies in worker processes; it can be kept with num_workers=0" if self._unreadable else ""
            why = why or ("the checkpoint has no state of it" if self.active else "it has no state_dict")
            notice(f"{type(self._owner).__name__} cannot start in the middle, as {why}: skipping through {start} batches.")
        return start

    def follow(self, batches: Iterator[Any], start: int) -> Iterator[Any]:
        """The batches, of which ``start`` is the first, their states kept on the way."""
        if not self.active:
            yield from batches
            return
        self._states.clear()
        self._states.append((start, copy.deepcopy(self._owner.state_dict())))
        self._running = True
        try:
            for number, batch in enumerate(batches, start + 1):
                self._states.append((number, copy.deepcopy(self._owner.state_dict())))
                yield batch
        finally:
            self._running = False
