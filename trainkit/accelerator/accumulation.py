"""The state of gradient accumulation: which micro-batch is current, and the accumulation window that is open."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from trainkit.data.micro_batch import WHOLE_WINDOW, MicroBatch

__all__ = ["AccumulationState", "CallWindow", "Place", "Snapshot"]


Verb = tuple[Callable[..., Any], tuple[Any, ...]]  # what the loop has called, and its arguments


class Place(NamedTuple):
    """Where the loop reads: what `accumulate` must know of the batch that was read last.

    Attributes:
        loader: identifies its loader.
        read: number of this iteration over the loader; no other has it.
        start: index of the first batch of this iteration.
    """

    loader: int
    read: int
    start: int


class Snapshot(NamedTuple):
    """What `AccumulationState.restore` needs: the state before another loader was read."""

    current: MicroBatch
    pending: MicroBatch | None
    delivered: bool
    planned: MicroBatch
    arrived: MicroBatch | None
    arrival: int
    window: CallWindow | None


class CallWindow:
    """The window of some models, if the loop calls `accumulate` for them several times with one batch, or skips batches that
    it calls it for with other models.

    Each call is a micro-batch, and counts with the weight of its batch. How many calls a batch has is known after it only, so
    that of the last one is taken to be the number that each batch before had.

    Args:
        models: that `accumulate` is called with.

    Attributes:
        models: as above.
        several: there were several calls for a batch, or none; otherwise the loader's windows are the models' windows.
        skips: there was none for a batch that others had calls for.
        entered: number of the batch of the last call, among those that `accumulate` was called for with any models.
        open: number of calls in the open window.
        done: the sum of their shares.
        factor: what the gradients of a complete window are multiplied by, so that its shares add up to 1.
        unsure: the last call may turn out to be the last of its window.
        calls: number of calls for the current batch.
        usual: number of calls for each batch so far; 0: unknown; `None`: they differ.
        counted: calls for batches of loaders that were not prepared.
        place: where the loop read at the last call.
        at: index of the batch of that call.
        begin: index of the batch in which the open window begins, and the iteration over the loader that has it.
        verbs: what the loop has called since the last backward pass, to step: repeated if the window ends later.
        full: the same of the last complete window.
    """

    def __init__(self, models: Sequence[nn.Module], entered: int) -> None:
        self.models, self.entered = tuple(models), entered
        self.several = self.skips = self.unsure = False
        self.usual: int | None = 0
        self.calls = self.counted = self.arrival = self.at = 0
        self.place: Place | None = None
        self.begin = (0, 0)
        self.full: list[Verb] = []
        self._expected = self._typical = 1.0
        self.drop()

    def drop(self) -> None:
        """Drop the open window."""
        self.open, self.done, self.factor = 0, 0.0, 1.0
        self._followed = 0, 0.0  # as `open` and `done`, in the window of the loader
        self.verbs: list[Verb] = []

    def arrive(self, arrival: int) -> bool:
        """Note a call for a batch; returns whether it has had one before."""
        again = arrival == self.arrival
        if not again:
            if self.calls:
                self.usual = self.calls if self.usual in (0, self.calls) else None
            self.arrival, self.calls = arrival, 0
        self.calls += 1
        return again

    def follow(self, place: Place, micro: MicroBatch, share: float, expected: float) -> None:
        """Note a call in the window of the loader: the share of its batch, and the weight that a share of 1 has."""
        opened, done = self._followed
        if not opened:
            self.begin = micro.index, place.read
        self._followed = (0, 0.0) if micro.last else (opened + 1, done + share)
        self._expected = expected

    def leave_loader(self, skips: bool) -> None:
        """From now on calls are counted. Until now the windows were those of the loader, of which one may be open."""
        self.several, self.skips = True, skips
        self.open, self.done = self._followed

    def count(self, arrived: MicroBatch, place: Place, left: int | None, size: int) -> MicroBatch:
        """The micro-batch of a call.

        Args:
            arrived: the batch, as the loader has yielded it.
            place: where the loop reads.
            left: number of batches of the epoch that follow; `None`: unknown.
            size: calls in a window.
        """
        entry, opens, usual = arrived.entry, self.open == 0, self.usual
        assert entry is not None
        self._typical = entry.weight or self._typical
        self.at = arrived.index
        if opens:
            self.full = self.verbs or self.full
            self.drop()
            self.begin = arrived.index, place.read
            wanted = size
            if usual and left is not None:
                wanted = min(size, max(1, usual - self.calls + 1) + left * usual)
            self._expected = self._typical * wanted
        self.place, share = place, entry.weight / self._expected
        self.open, self.done = self.open + 1, self.done + share
        last = self.open >= size or (left == 0 and self.calls == usual)
        self.unsure = not last and not left
        micro = arrived._replace(first=opens, last=last, share=entry.alone * share, empty=self.done <= 0.0)
        return self._complete(micro) if last else micro

    def close(self, uneven: bool) -> MicroBatch:
        """The loader has ended inside the window: the micro-batch that ends it, which has no loss of its own."""
        self.unsure = False
        micro = MicroBatch(None, self.at, False, True, 0.0, uneven=uneven, alike=False, empty=self.done <= 0.0)
        return self._complete(micro)

    def _complete(self, micro: MicroBatch) -> MicroBatch:
        exact = self.done <= 0.0 or math.isclose(self.done, 1.0, rel_tol=1e-9)
        self.factor = 1.0 if exact else 1.0 / self.done
        self.open = 0
        return micro

    def note_backward(self) -> None:
        """A backward pass begins: what the loop calls from now on is to step."""
        self.verbs = []

    def resumes_at(self, place: Place) -> int | None:
        """Index of the batch from which a resumed run must repeat; `None`: nothing is unfinished, or it would repeat many."""
        if not self.several or self.skips or self.place is None or self.place.loader != place.loader:
            return None
        if self.open:
            return self.begin[0] if self.begin[1] == place.read else place.start
        return self.at if self.usual and self.calls < self.usual else None


class AccumulationState:
    """Which micro-batch is current and, in your own training loop, which window is open.

    In a `Trainer` each micro-batch of the loader becomes current unchanged. In your own training loop micro-batches make up
    a window only inside `accumulate`: one that a loader yields is *pending* until `accumulate` enters it, and until then
    it is a window of its own. If `accumulate` is called with the same models for the same batch again, that is another
    micro-batch, and these models have a `CallWindow`.

    Args:
        size: micro-batches in a window.
        begin: called with each micro-batch that becomes current, and again if its facts change.

    Attributes:
        size: as above; may be changed.
        own_loop: the state of your own training loop and not of a `Trainer`.
        current: the current micro-batch.
        pending: the micro-batch that a loader has yielded and `accumulate` has not entered.
        delivered: a loader has yielded `current`, and `accumulate` has not been called for it.
        arrived: the micro-batch as the loader yielded it, if those of its epoch make up windows, without its batch.
        window: what the last call of `accumulate` counts in, if its models have several for a batch.
        key: ids of its models.
        entered: number of micro-batches that `accumulate` has entered.
        open: number of micro-batches in the open window; 0: none is open. A window stays open when the loop leaves an epoch,
            and the next epoch completes it.
        fresh: there has been no backward pass for the current micro-batch.
        by_hand: the loop calls `backward` outside of `accumulate`; `None`: unknown yet.
        worked: number of micro-batches so far.
    """

    def __init__(self, size: int, begin: Callable[[MicroBatch], None]) -> None:
        self.size, self.own_loop, self._begin = size, False, begin
        self.current = WHOLE_WINDOW
        self._clear()

    def _clear(self) -> None:
        self.worked = self.entered = self._arrival = self._arrivals = 0
        self._begun = 0  # `entered` at the first call for any models
        self.by_hand: bool | None = None
        self.delivered = False
        self.arrived: MicroBatch | None = None
        self.window: CallWindow | None = None
        self.key: tuple[int, ...] = ()
        self._windows: dict[tuple[int, ...], CallWindow] = {}  # by the ids of the models
        self._restored: list[tuple[int | None, int]] = []  # of models that `accumulate` has not been called with yet
        self._close()

    def _close(self) -> None:
        self.open, self._done, self._expected = 0, 0.0, 1.0
        self._scale, self._part, self._next = 1.0, 0.0, (0, 0, 0)
        self.pending: MicroBatch | None = None
        self._planned = self.current
        self.fresh = True
        for window in self._windows.values():
            window.drop()

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
        self.current, self.arrived = micro, None
        self.worked += 1
        self.delivered = True
        self._begin(micro)

    def collects(self) -> bool:
        """Whether the micro-batches of a loader are pending until `accumulate` enters them."""
        return self.own_loop and (self.size > 1 or self.open > 0 or any(window.open for window in self._windows.values()))

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
        self._arrivals += 1
        self.arrived, self._arrival = micro._replace(batch=None), self._arrivals

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
        self._part = entry.whole * self._scale
        self._done += self._part
        if self._part > 0.0:
            self._expected = entry.weight / self._part
        empty = self._done <= 0.0
        self.open += 1
        if micro.last:
            self.open, self._done = 0, 0.0
        self.entered += 1
        self.pending = None
        self._become(micro._replace(first=opens, share=micro.share * self._scale, empty=empty))
        self._planned = self.current._replace(batch=None)

    def call(self, models: Sequence[nn.Module], place: Place | None, left: Callable[[], int | None]) -> None:
        """`accumulate` is called: its micro-batch becomes current.

        Args:
            models: that it is called with.
            place: where the loop reads; `None`: no prepared loader.
            left: returns the number of batches of the epoch that follow; `None`: unknown.
        """
        self.key = tuple(map(id, models))
        window = self._windows.get(self.key)
        if window is None:
            window = self._windows[self.key] = self._new_window(models)
        if self.arrived is None:
            self.window = None
            if place is None and not self.delivered:
                self._count(window)
            return
        assert place is not None
        again, entered, before = window.arrive(self._arrival), self.pending is not None, self.window
        number = self.entered + entered
        if not window.several and (again or number - window.entered > 1):
            window.leave_loader(skips=not again)
        window.entered, self.window = number, window if window.several else None
        if entered:
            self.enter(place.loader)
        if self.window is not None:
            self.worked += not entered
            self._become(window.count(self.arrived, place, left(), self.size))
            return
        if before is not None and not entered:  # the last call was of other models
            self._become(self._planned)
        window.follow(place, self.current, self._part, self._expected)

    def _new_window(self, models: Sequence[nn.Module]) -> CallWindow:
        if not self._windows:
            self._begun = self.entered
        window = CallWindow(models, self._begun)
        if self._restored:
            window.usual, window.counted = self._restored.pop(0)
            window.several = window.usual not in (0, 1)
        return window

    def start_body(self) -> None:
        """The body of `accumulate` begins."""
        self.delivered, self.fresh, self.by_hand = False, True, False

    def _count(self, window: CallWindow) -> None:
        """The next of `size` equal micro-batches becomes current: for loops whose loader was not prepared."""
        place = window.counted % self.size
        window.counted += 1
        self.begin(MicroBatch(None, place, place == 0, place == self.size - 1, 1.0 / self.size))

    def counts(self) -> list[tuple[int | None, int]]:
        """For a checkpoint: `usual` and `counted` of each window, in the order of their first calls."""
        usual = [window.calls if window.usual == 0 else window.usual for window in self._windows.values()]
        counted = [window.counted for window in self._windows.values()]
        return [*zip(usual, counted, strict=True), *self._restored]

    def restore_counts(self, counts: Sequence[tuple[int | None, int]]) -> None:
        """Continue counting where a checkpoint was, given its `counts`."""
        self._windows, self.window, self._restored = {}, None, [*counts]

    def ending(self, loader: int) -> list[CallWindow]:
        """The windows that are open where a loader ends."""
        return [one for one in self._windows.values() if one.open and one.place is not None and one.place.loader == loader]

    def end_late(self, window: CallWindow, uneven: bool) -> None:
        """A window ends with its last backward pass, which was not known to be its last.

        Args:
            window: it.
            uneven: no backward pass has averaged its gradients.
        """
        self.window, self.key = window, tuple(map(id, window.models))
        self._become(window.close(uneven))

    def resumes_at(self, place: Place) -> int | None:
        """Index of the batch from which a resumed run must repeat what windows of calls have not finished; `None`: none."""
        found = [window.resumes_at(place) for window in self._windows.values()]
        return min((index for index in found if index is not None), default=None)

    @property
    def unsure(self) -> bool:
        """Whether the current micro-batch may turn out to be the last of its window."""
        return self.window is not None and self.window.unsure

    @property
    def trained(self) -> tuple[nn.Module, ...] | None:
        """The models whose gradients the current window has; `None`: all."""
        return self._windows[self.key].models if len(self._windows) > 1 and self.key else None

    @property
    def follows_loader(self) -> bool:
        """Whether the loader's windows are those of some models, or nothing is known yet."""
        return not self._windows or any(not window.several for window in self._windows.values())

    @property
    def unfinished(self) -> bool:
        """Whether a window is open."""
        return (self.open > 0 and self.follows_loader) or any(window.open for window in self._windows.values())

    def note_backward(self) -> None:
        """A backward pass of the current micro-batch begins."""
        self.fresh = False
        if self.window is not None:
            self.window.note_backward()

    def note_verb(self, verb: Callable[..., Any], *args: Any) -> None:
        """The loop calls a verb after a backward pass: if the window turns out to have ended there, it is called again."""
        if self.window is not None and not self.fresh:
            self.window.verbs.append((verb, args))

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
        self.delivered = False
        self.pending = self.arrived = self.window = None
        self._become(self.current._replace(batch=None, kind=WHOLE_WINDOW.kind, uneven=False))

    def leave(self) -> None:
        """No loader is being read any more. A window that is not complete stays open."""
        if self.unfinished:
            self._become(self.current._replace(first=False, last=False))

    def snapshot(self) -> Snapshot:
        """The state to which `restore` returns."""
        current = self.current._replace(batch=None)
        return Snapshot(current, self.pending, self.delivered, self._planned, self.arrived, self._arrival, self.window)

    def restore(self, snapshot: Snapshot) -> None:
        """The micro-batch that was current at the snapshot is current again."""
        current, self.pending, self.delivered, self._planned, self.arrived, self._arrival, self.window = snapshot
        self._become(current)

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
