"""The state of gradient accumulation: which micro-batch is current, and the accumulation window that is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from trainkit.micro_batch import WHOLE_WINDOW, MicroBatch

__all__ = ["AccumulationState", "Snapshot"]


class Snapshot(NamedTuple):
    """What `AccumulationState.restore` needs: the state before another loader was read."""

    current: MicroBatch
    pending: MicroBatch | None
    delivered: bool


class AccumulationState:
    """Which micro-batch is current and, in your own training loop, which window is open.

    In a `Trainer` each micro-batch of the loader becomes current unchanged. In your own training loop micro-batches make up
    a window only inside `accumulate`: one that a loader yields is *pending* until `accumulate` enters it, and until then
    it is a window of its own.

    Args:
        size: micro-batches in a window.
        begin: called with each micro-batch that becomes current, and again if its facts change.

    Attributes:
        size: as above; may be changed.
        own_loop: the state of your own training loop and not of a `Trainer`.
        current: the current micro-batch.
        pending: the micro-batch that a loader has yielded and `accumulate` has not entered.
        delivered: a loader has yielded `current`, and `accumulate` has not been called for it.
        entered: number of micro-batches that `accumulate` has entered.
        open: number of micro-batches in the open window; 0: none is open. A window stays open when the loop leaves an epoch,
            and the next epoch completes it.
        fresh: there has been no backward pass for the current micro-batch.
        by_hand: the loop calls `backward` outside of `accumulate`; `None`: unknown yet.
        counted: micro-batches of loaders that were not prepared.
        worked: number of micro-batches so far.
    """

    def __init__(self, size: int, begin: Callable[[MicroBatch], None]) -> None:
        self.size, self.own_loop, self._begin = size, False, begin
        self.current = WHOLE_WINDOW
        self._clear()

    def _clear(self) -> None:
        self.counted = self.worked = self.entered = 0
        self.by_hand: bool | None = None
        self.delivered = False
        self._close()

    def _close(self) -> None:
        self.open, self._done = 0, 0.0
        self._scale, self._next = 1.0, (0, 0, 0)
        self.pending: MicroBatch | None = None
        self.fresh = True

    def _become(self, micro: MicroBatch) -> None:
        self.current = micro
        self._begin(micro)

    def reset(self) -> None:
        """Return to the state before the first micro-batch."""
        self._clear()
        self._become(WHOLE_WINDOW)

    def forget_window(self) -> None:
        """Drop the open window: the next micro-batch begins one."""
        self._close()
        self._become(self.current._replace(first=True, last=True))

    def begin(self, micro: MicroBatch) -> None:
        """A micro-batch becomes current unchanged."""
        self.current = micro
        self.worked += 1
        self.delivered = True
        self._begin(micro)

    def collects(self) -> bool:
        """Whether the micro-batches of a loader are pending until `accumulate` enters them."""
        return self.own_loop and (self.size > 1 or self.open > 0)

    def receive(self, micro: MicroBatch) -> None:
        """A loader has yielded a micro-batch of a window to your own training loop.

        Until `accumulate` enters it, it is a window of its own unless one is open. As in Accelerate, its loss is divided by
        the number of micro-batches in a window anyway.
        """
        entry = micro.entry
        assert entry is not None
        alone = self.open == 0
        self.pending, self.fresh = micro, True
        self.begin(micro._replace(first=alone, last=alone, share=entry.alone / self.size, empty=entry.whole <= 0.0))

    def enter(self, loader: int) -> None:
        """`accumulate` enters the pending micro-batch: it becomes a part of the open window, or opens one.

        The shares of a window add up to 1, also where a loop enters it in the middle or completes one that it left before.

        Args:
            loader: identifies the loader that has yielded it.
        """
        micro, opens = self.pending, self.open == 0
        if micro is None or micro.entry is None:
            return
        entry, place = micro.entry, (loader, micro.entry.begin, micro.index)
        if opens or place != self._next:
            self._scale = (1.0 - self._done) / entry.remaining if entry.remaining > 0.0 else 0.0
        self._next = loader, entry.begin, micro.index + 1
        self._done += entry.whole * self._scale
        empty = self._done <= 0.0
        self.open += 1
        if micro.last:
            self.open, self._done = 0, 0.0
        self.entered += 1
        self.pending = None
        self._become(micro._replace(first=opens, share=micro.share * self._scale, empty=empty))

    def start_body(self) -> None:
        """The body of `accumulate` begins."""
        self.delivered, self.fresh, self.by_hand = False, True, False

    def count(self) -> None:
        """The next of `size` equal micro-batches becomes current: for loops whose loader was not prepared."""
        place = self.counted % self.size
        self.counted += 1
        self.begin(MicroBatch(None, place, place == 0, place == self.size - 1, 1.0 / self.size))

    def restore_count(self, counted: int) -> None:
        """Continue counting where a checkpoint was."""
        self.counted = counted

    def note_backward(self) -> None:
        """A backward pass of the current micro-batch begins."""
        self.fresh = False

    def note_by_hand(self) -> bool:
        """`backward` was called outside of `accumulate`; returns whether that is new."""
        known, self.by_hand = self.by_hand, True
        if self.pending is None:  # of a loader that was not prepared
            self._become(self.current._replace(share=1.0 / self.size))
        return known is None

    def mark_empty(self, empty: bool) -> None:
        """Set whether the current window makes no optimizer step, as the weights given to `backward` determine."""
        self._become(self.current._replace(empty=empty))

    def take_whole_window(self) -> None:
        """The loss of a closure is that of the whole window, and not of its last micro-batch."""
        self._become(self.current._replace(share=1.0))

    def end_loader(self) -> None:
        """A loader has yielded its last micro-batch."""
        self.delivered, self.pending = False, None
        self._become(self.current._replace(batch=None, kind=WHOLE_WINDOW.kind, uneven=False))

    def leave(self) -> None:
        """No loader is being read any more. A window that is not complete stays open."""
        if self.open:
            self._become(self.current._replace(first=False, last=False))

    def snapshot(self) -> Snapshot:
        """The state to which `restore` returns."""
        return Snapshot(self.current._replace(batch=None), self.pending, self.delivered)

    def restore(self, snapshot: Snapshot) -> None:
        """The micro-batch that was current at the snapshot is current again."""
        current, self.pending, self.delivered = snapshot
        self._become(current._replace(last=current.last and not self.open))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it no optimizer step is due and no gradients are averaged: `no_sync`."""
        before = self.current.last
        self._become(self.current._replace(last=False))
        try:
            yield
        finally:
            self._become(self.current._replace(last=before))

    @property
    def clears(self) -> bool:
        """Whether `zero_grad` acts: before the first backward pass of a window, or after its last."""
        first, last = self.current.first, self.current.last
        if not self.own_loop:
            return last
        return (first and self.fresh) or (last and (first or not self.fresh))
