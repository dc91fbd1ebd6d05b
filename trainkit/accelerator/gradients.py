"""The accumulation window and its gradients: which micro-batch is current, how much it counts, what a step needs."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.accelerator.prepared_models import PreparedObjects
from trainkit.console import quantity
from trainkit.data.micro_batches import WHOLE_WINDOW, MicroBatch, MicroBatchKind
from trainkit.data.windows import check_weight
from trainkit.distributed.collective_checks import CollectiveChecks
from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, OptimizerError, UnsupportedArgumentError
from trainkit.module.overridable_hooks import is_overridden
from trainkit.optim.joint_optimizer import optimizers_in
from trainkit.optim.parameter_names import foreign_parameters, parameter_names, shape_of
from trainkit.optim.torch_step import StepGuard, step_of
from trainkit.precision import Precision
from trainkit.strategy import Strategy

if TYPE_CHECKING:
    from trainkit.accelerator.accelerator import Accelerator

__all__ = ["AccumulationState", "CallWindow", "Gradients", "Place", "Snapshot", "StepChecks", "parameters_of", "plain_verbs"]

Verb = tuple[Callable[..., Any], tuple[Any, ...]]  # The function that the loop has called, and its arguments.

# The line to write, without and with your own training loop.
_FIX = {
    False: "Replace layers in __init__ or configure_model, or return a new optimizer from configure_optimizers: "
    "torch.optim.{}(self.parameters()).",
    True: "Replace layers first: optimizer = torch.optim.{0}(model.parameters()); model, optimizer = "
    "accelerator.prepare(model, optimizer). Prepare the other model too, if it is one: accelerator.prepare(model, other, "
    "optimizer).",
}


class Place(NamedTuple):
    """Where the loop reads: what `accumulate` must know of the batch that was read last.

    Attributes:
        loader: The id of its loader.
        read: Number of this iteration over the loader; no other has it.
        start: Index of the first batch of this iteration.
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
    ahead: int
    queue: tuple[MicroBatch, ...]


class CallWindow:
    """The window of some models, if the loop calls `accumulate` for them several times with one batch, or skips batches that
    it calls it for with other models.

    Each call is a micro-batch, and counts with the weight of its batch. How many calls a batch has is known after it only, so
    that of the last one is taken to be the number that each batch before had.

    Attributes:
        models: The models that `accumulate` is called with.
        counts_calls: There were several calls for a batch, or none; otherwise the windows are those of the loader.
        skips: There was no call for a batch that other models had calls for.
        entered: Number of the batch of the last call, among those that `accumulate` was called for with any models.
        open: Number of calls in the open window.
        done: The sum of their shares.
        factor: The factor for the gradients of a complete window, so that its shares add up to 1.
        unsure: The last call may turn out to be the last of its window.
        calls: Number of calls for the current batch.
        usual: Number of calls for each batch so far; 0: unknown; `None`: they differ.
        counted: Calls for batches of loaders that were not prepared.
        place: Where the loop read at the last call.
        at: Index of the batch of that call.
        begin: Index of the batch in which the open window begins, and the iteration over the loader that has it.
        verbs: What the loop has called since the last backward pass, to step: repeated if the window ends later.
        full: The same of the last complete window.
    """

    def __init__(self, models: Sequence[nn.Module], entered: int) -> None:
        self.models = tuple(models)
        self.entered = entered
        self.counts_calls = self.skips = self.unsure = False
        self.usual: int | None = 0
        self.calls = self.counted = self.arrival = self.at = 0
        self.place: Place | None = None
        self.begin = (0, 0)
        self.full: list[Verb] = []
        self._expected = self._typical = 1.0
        self.drop()

    def drop(self) -> None:
        """Drop the open window."""
        self.open = 0
        self.done = 0.0
        self.factor = 1.0
        self._followed = 0, 0.0  # `open` and `done` in the window of the loader.
        self.verbs: list[Verb] = []

    def arrive(self, arrival: int) -> bool:
        """Note a call for a batch; returns whether it has had one before."""
        again = arrival == self.arrival
        if not again:
            if self.calls:
                self.usual = self.calls if self.usual in (0, self.calls) else None
            self.arrival = arrival
            self.calls = 0
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
        self.counts_calls = True
        self.skips = skips
        self.open, self.done = self._followed

    def count(self, arrived: MicroBatch, place: Place, left: int | None, size: int) -> MicroBatch:
        """The micro-batch of a call for the batch `arrived`; `left` is the number of batches that follow, `None`: unknown."""
        entry, opens, usual = arrived.entry, self.open == 0, self.usual
        assert entry is not None
        self._typical = entry.weight or self._typical
        self.at = arrived.index
        if opens:
            self.full = self.verbs or self.full
            self.drop()
            self.begin = arrived.index, place.read
            length = size
            if usual and left is not None:
                length = min(size, max(1, usual - self.calls + 1) + left * usual)
            self._expected = self._typical * length
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
        if not self.counts_calls or self.skips or self.place is None or self.place.loader != place.loader:
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
        size: Number of micro-batches in a window.
        begin: Called with each micro-batch that becomes current, and again if it changes.
        own_loop: It is the state of your own training loop and not of a `Trainer`.

    Attributes:
        size: Number of micro-batches in a window; may be changed.
        current: The current micro-batch.
        pending: The micro-batch that a loader has yielded and `accumulate` has not entered.
        delivered: A loader has yielded `current`, and `accumulate` has not been called for it.
        arrived: The micro-batch as the loader yielded it, if those of its epoch make up windows, without its batch.
        window: The window of the last call of `accumulate`, if its models have several calls for a batch.
        key: Ids of its models.
        entered: Number of micro-batches that `accumulate` has entered.
        open: Number of micro-batches in the open window; 0: none is open. A window stays open when the loop leaves an epoch,
            and the next epoch completes it.
        ahead: Number of micro-batches that the loop read before `accumulate` entered the first of them; 0: it reads one by one.
        queue: Those of them that `accumulate` has not entered.
        fresh: There has been no backward pass for the current micro-batch.
        by_hand: The loop calls `backward` outside of `accumulate`; `None`: unknown yet.
        worked: Number of micro-batches so far.
        backward_passes: Number of backward passes so far, in your own training loop.
    """

    def __init__(self, size: int, begin: Callable[[MicroBatch], None], own_loop: bool = False) -> None:
        self.size = size
        self.own_loop = own_loop
        self._begin = begin
        self.current = WHOLE_WINDOW
        self._clear()

    def _clear(self) -> None:
        self.worked = self.entered = self._arrival = self._arrivals = self.backward_passes = 0
        self._begun = 0  # `entered` at the first call for any models
        self.by_hand: bool | None = None
        self.delivered = False
        self.arrived: MicroBatch | None = None
        self.window: CallWindow | None = None
        self.key: tuple[int, ...] = ()
        self._windows: dict[tuple[int, ...], CallWindow] = {}  # The keys are the ids of the models.
        self._restored: list[tuple[int | None, int]] = []  # Windows of models that `accumulate` has not been called with yet.
        self._close()

    def _close(self) -> None:
        self.open = 0
        self._done = 0.0
        self._expected = 1.0
        self._scale = 1.0
        self._part = 0.0
        self._next = (0, 0, 0)
        self.ahead = 0
        self.queue: deque[MicroBatch] = deque()
        self.pending: MicroBatch | None = None
        self._planned = self.current
        self.fresh = True
        for window in self._windows.values():
            window.drop()

    def _set_current(self, micro: MicroBatch) -> None:
        self.current = micro
        self._begin(micro)

    def reset(self) -> None:
        """Return to the state before the first micro-batch."""
        self._clear()
        self._set_current(WHOLE_WINDOW)

    def forget_window(self) -> None:
        """Drop the open window: the next micro-batch begins one."""
        self._close()
        self._set_current(self.current._replace(first=True, last=True))

    def begin(self, micro: MicroBatch) -> None:
        """A micro-batch becomes current unchanged."""
        self.current = micro
        self.arrived = None
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
        self.ahead = 0
        self.queue.clear()
        self.pending = micro
        self.fresh = True
        self.begin(micro._replace(first=alone, last=alone, share=entry.alone / self.size, empty=entry.whole <= 0.0))
        self._arrivals += 1
        self.arrived = micro._replace(batch=None)
        self._arrival = self._arrivals

    def line_up(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The loop has read all micro-batches of a window: `accumulate` enters them in this order."""
        self.ahead = len(micro_batches)
        self.queue.extend(micro_batches)
        self._take_next()

    def _leave_entered(self, window: CallWindow) -> None:
        """If these models have had a call for the current one of the micro-batches that were read ahead, take the next."""
        if self.ahead and window.arrival == self._arrival:
            self._take_next()

    def _take_next(self) -> None:
        """The next micro-batch that was read ahead is pending."""
        if not self.queue:
            raise ConfigurationError(
                f"accumulate() was called more often than for the {self.ahead} batches that have been read ahead of it, so "
                "it is unclear which of them the loss belongs to. Call it once for each batch, in the order in which they "
                "were read."
            )
        self.pending = self.arrived = self.queue.popleft()
        self._arrivals += 1
        self._arrival = self._arrivals

    def enter(self, loader: int) -> None:
        """`accumulate` enters the pending micro-batch: it becomes a part of the open window, or opens one.

        The shares of a window add up to 1, also where a loop enters it in the middle or completes one that it left before.
        `loader` is the id of the loader that has yielded it.
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
        self._set_current(micro._replace(first=opens, share=micro.share * self._scale, empty=empty))
        self._planned = self.current._replace(batch=None)

    def call(self, models: Sequence[nn.Module], place: Place | None, left: Callable[[], int | None]) -> None:
        """`accumulate` is called: its micro-batch becomes current.

        Args:
            models: The models that it is called with.
            place: Where the loop reads; `None`: no prepared loader.
            left: Returns the number of batches of the epoch that follow; `None`: unknown.
        """
        self.key = tuple(map(id, models))
        window = self._windows.get(self.key)
        if window is None:
            window = self._windows[self.key] = self._new_window(models)
        self._leave_entered(window)
        if self.arrived is None:
            self.window = None
            if place is None and not self.delivered:
                self._count(window)
            return
        assert place is not None
        again, entered, before = window.arrive(self._arrival), self.pending is not None, self.window
        number = self.entered + entered
        if not window.counts_calls and (again or number - window.entered > 1):
            window.leave_loader(skips=not again)
        window.entered = number
        self.window = window if window.counts_calls else None
        if entered:
            self.enter(place.loader)
        if self.window is not None:
            self.worked += not entered
            self._set_current(window.count(self.arrived, place, left(), self.size))
            return
        if before is not None and not entered:  # the last call was of other models
            self._set_current(self._planned)
        window.follow(place, self.current, self._part, self._expected)

    def _new_window(self, models: Sequence[nn.Module]) -> CallWindow:
        if not self._windows:
            self._begun = self.entered
        window = CallWindow(models, self._begun)
        if self._restored:
            window.usual, window.counted = self._restored.pop(0)
            window.counts_calls = window.usual not in (0, 1)
        return window

    def start_body(self) -> None:
        """The body of `accumulate` begins."""
        self.delivered = False
        self.fresh = True
        self.by_hand = False

    def _count(self, window: CallWindow) -> None:
        """The next of `size` equal micro-batches becomes current: for loops whose loader was not prepared."""
        place = window.counted % self.size
        window.counted += 1
        self.begin(MicroBatch(None, place, place == 0, place == self.size - 1, 1.0 / self.size))

    def counts(self) -> list[tuple[int | None, int]]:
        """For a checkpoint: `usual` and `counted` of each window, in the order of their first calls."""
        usual = [window.calls if window.usual == 0 else window.usual for window in self._windows.values()]
        quantity = [window.counted for window in self._windows.values()]
        return [*zip(usual, quantity, strict=True), *self._restored]

    def restore_counts(self, counts: Sequence[tuple[int | None, int]]) -> None:
        """Continue counting where a checkpoint was, given its `counts`."""
        self._windows = {}
        self.window = None
        self._restored = [*counts]

    def ending(self, loader: int) -> list[CallWindow]:
        """The windows that are open where a loader ends."""
        return [one for one in self._windows.values() if one.open and one.place is not None and one.place.loader == loader]

    def end_late(self, window: CallWindow, uneven: bool) -> None:
        """A window ends with its last backward pass, not known to be its last; `uneven`: none has averaged its gradients."""
        self.window = window
        self.key = tuple(map(id, window.models))
        self._set_current(window.close(uneven))

    def resumes_at(self, place: Place) -> int | None:
        """Index of the batch from which a resumed run must repeat what windows of calls have not finished; `None`: none."""
        indices = [window.resumes_at(place) for window in self._windows.values()]
        return min((index for index in indices if index is not None), default=None)

    @property
    def unsure(self) -> bool:
        """Whether the current micro-batch may turn out to be the last of its window."""
        return self.window is not None and self.window.unsure

    @property
    def window_models(self) -> tuple[nn.Module, ...] | None:
        """The models whose gradients the current window has; `None`: all."""
        return self._windows[self.key].models if len(self._windows) > 1 and self.key else None

    @property
    def follows_loader(self) -> bool:
        """Whether the loader's windows are those of some models, or nothing is known yet."""
        return not self._windows or any(not window.counts_calls for window in self._windows.values())

    @property
    def has_open_window(self) -> bool:
        """Whether a window is open."""
        return (self.open > 0 and self.follows_loader) or any(window.open for window in self._windows.values())

    def note_backward(self) -> None:
        """A backward pass of the current micro-batch begins."""
        self.fresh = False
        self.backward_passes += 1
        if self.window is not None:
            self.window.note_backward()

    def note_verb(self, verb: Callable[..., Any], *args: Any) -> None:
        """The loop calls a verb after a backward pass: if the window turns out to have ended there, it is called again."""
        if self.window is not None and not self.fresh:
            self.window.verbs.append((verb, args))

    def note_by_hand(self) -> bool:
        """`backward` was called outside of `accumulate`; returns whether that is new."""
        known, self.by_hand = self.by_hand, True
        if self.pending is None:  # The batch is from a loader that was not prepared.
            self._set_current(self.current._replace(share=1.0 / self.size))
        return known is None

    def count_equally(self) -> None:
        """Let the loss count as each one does in Accelerate: the loop has divided it by what is in all batches of the step."""
        self._set_current(self.current._replace(share=1.0 / self.size))

    def mark_empty(self, empty: bool) -> None:
        """Set whether the current window makes no optimizer step, as the weights given to `backward` determine."""
        self._set_current(self.current._replace(empty=empty))

    def take_whole_window(self) -> None:
        """The loss of a closure is that of the whole window, and not of its last micro-batch."""
        self._set_current(self.current._replace(share=1.0))

    def end_loader(self) -> None:
        """A loader has yielded its last micro-batch."""
        self.delivered = False
        self.pending = self.arrived = self.window = None
        self._set_current(self.current._replace(batch=None, kind=WHOLE_WINDOW.kind, uneven=False))

    def leave(self) -> None:
        """No loader is being read any more. A window that is not complete stays open."""
        if self.has_open_window:
            self._set_current(self.current._replace(first=False, last=False))

    def snapshot(self) -> Snapshot:
        """The state to which `restore` returns."""
        current = self.current._replace(batch=None)
        places = self.pending, self.delivered, self._planned, self.arrived, self._arrival, self.window
        return Snapshot(current, *places, self.ahead, tuple(self.queue))

    def restore(self, snapshot: Snapshot) -> None:
        """The micro-batch that was current at the snapshot is current again."""
        current, self.pending, self.delivered, self._planned, self.arrived, self._arrival, self.window, self.ahead, queue = (
            snapshot
        )
        self.queue = deque(queue)
        self._set_current(current)

    @contextmanager
    def suspend_steps(self) -> Iterator[None]:
        """Within it no optimizer step is due and no gradients are averaged: `no_sync`."""
        before = self.current.last
        self._set_current(self.current._replace(last=False))
        try:
            yield
        finally:
            self._set_current(self.current._replace(last=before))

    @property
    def clears(self) -> bool:
        """Whether `zero_grad` acts: before the first backward pass of a window, or after its last."""
        first, last = self.current.first, self.current.last
        if not self.own_loop:
            return last
        return (first and self.fresh) or (last and (first or not self.fresh))


class WindowWeights:
    """The weights of the current window, and the correction of its gradients.

    The sum of a window's weights is known at its last micro-batch. Until then losses are scaled by an estimate from the first
    micro-batch of each rank, and the gradients are corrected at the end, so that float16 holds no larger values than usual.

    Attributes:
        weighed: Whether the micro-batches of the window have weights; `None`: none has been trained on.
        factor: The factor for the gradients of a complete window.
    """

    def __init__(self, accumulation: AccumulationState, world: World, strategy: Strategy, checks: CollectiveChecks) -> None:
        if strategy.accumulates_in_engine and accumulation.size > 1:
            raise UnsupportedArgumentError(
                "backward(weight=) with gradient_accumulation_steps > 1 needs gradients that are not sharded, but this "
                "strategy shards them. Set the weight when the batch is read: accelerator.prepare(loader, "
                "batch_weight=lambda batch: float((batch['labels'] != -100).sum()))"
            )
        self._accumulation = accumulation
        self._world = world
        self._checks = checks
        self.weighed: bool | None = None
        self._emptied = False  # the window was marked as having weight 0
        self._at = -1  # the micro-batch that was weighed last
        self._sum = 0.0
        self._expected = 1.0
        self.factor = 1.0

    def share(self, weight: float | Tensor | None) -> float:
        """What the loss of the current micro-batch is multiplied by. Collective at the first and the last of a window."""
        state, has_weight = self._accumulation, weight is not None
        micro = state.current
        if micro.first:
            self.weighed = has_weight
            self._sum = 0.0
        elif has_weight is not self.weighed:
            raise ConfigurationError(
                "backward(weight=) was called for some micro-batches of a window and not for others, so they cannot be "
                "compared. Pass the weight of each micro-batch."
            )
        self.factor = 1.0
        if weight is None:
            if self._emptied:  # the current micro-batch may be the same one
                self._emptied = False
                state.mark_empty(False)
            return micro.share
        accumulates = state.size > 1 and state.by_hand is not True
        if accumulates and self._at == state.worked:
            raise ConfigurationError(
                "backward(weight=) was called twice for a micro-batch, which can have one weight only. Add the losses: "
                "accelerator.backward(loss1 + loss2, weight=count)"
            )
        self._at = state.worked
        mine = 0.0 if micro.kind is not MicroBatchKind.DATA else check_weight(weight, "backward(weight=) must be", "weight=")
        self._sum += mine
        total = 0.0
        if micro.first:
            total = self._over_all(mine)
            self._expected = (total or 1.0) * state.size
        if micro.last:
            self._end(self._over_all(self._sum) if accumulates else total)
        return mine * self._world.size / self._expected

    def end_late(self) -> None:
        """The window ends with its last backward pass, which was not known to be its last. Collective."""
        if self.weighed:
            self._end(self._over_all(self._sum))

    def _end(self, total: float) -> None:
        self._emptied = total <= 0.0
        self._accumulation.mark_empty(self._emptied)
        self.factor = self._expected / total if total > 0.0 and self._accumulation.by_hand is not True else 1.0

    def _over_all(self, value: float) -> float:
        """The sum over the processes, added in the order of the ranks. Raises if a process passes no weight."""
        return float(sum(self._checks.exchange("backward(weight=)", value)))


class Gradients:
    """The gradients of a window, before the optimizer step: their weights, and their average over the processes.

    Attributes:
        averages_in_step: No backward pass averages the gradients over the processes; `average` does.
        averaged: Ids of the optimizers whose gradients are averaged already.
    """

    def __init__(
        self, strategy: Strategy, state: AccumulationState, checks: CollectiveChecks, prepared: PreparedObjects
    ) -> None:
        self._strategy = strategy
        self._state = state
        self._checks = checks
        self._prepared = prepared
        self.averages_in_step = strategy.averages_in_step and strategy.world.size > 1
        self.averaged: set[int] = set()
        self.weights: dict[tuple[int, ...], WindowWeights] = {}  # The keys are the ids of the models of `accumulate`.

    def share(self, weight: float | Tensor | None) -> float:
        """The factor for the loss of the current micro-batch, given the weight that `backward` got."""
        state = self._state
        weights = self.weights.get(state.key)
        if weights is None:
            if weight is None:
                return state.current.share
            if any(loader.weighs for loader in self._prepared.loaders):
                raise ConfigurationError("backward(weight=) and prepare(batch_weight=) set the same thing. Give one of them.")
            weights = WindowWeights(state, self._strategy.world, self._strategy, self._checks)
            self.weights[state.key] = weights
        return weights.share(weight)

    def end_late(self) -> None:
        """The window has ended with its last backward pass, which was not known to be its last. Collective."""
        weights = self.weights.get(self._state.key)
        if weights is not None:
            weights.end_late()
        self.correct()

    def correct(self) -> None:
        """At the end of a window, multiply the gradients so that the shares of its micro-batches add up to 1."""
        state = self._state
        weights = self.weights.get(state.key)
        factor = 1.0 if state.window is None else state.window.factor
        if weights is not None and weights.weighed:
            factor = weights.factor
        if factor != 1.0:
            trained = [p for optimizer in self._prepared.stepped for p in parameters_of(optimizer)]
            models, others = (self._prepared.models, trained) if state.window_models is None else (state.window_models, [])
            parameters = {id(p): p for p in [*(p for model in models for p in model.parameters()), *others]}
            self._strategy.scale_gradients(parameters.values(), factor)

    def average_in_step(self) -> None:
        """From now on no backward pass averages the gradients: under manual optimization, each step does."""
        self.averages_in_step = self._strategy.data_world.size > 1

    def average(self, optimizers: Iterable[Optimizer]) -> None:
        """Average the gradients over the processes if the backward passes have not: once for each optimizer."""
        micro = self._state.current
        if not (micro.last and (micro.uneven or self.averages_in_step)):
            return
        for optimizer in optimizers:
            if id(optimizer) not in self.averaged:
                self.averaged.add(id(optimizer))
                self._strategy.reduce_gradients(parameters_of(optimizer), micro)

    def averaging(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that averages its loss and gradients: an optimizer that decides by them decides the same everywhere."""

        def run_closure() -> Any:
            loss = closure()
            self.averaged.discard(id(optimizer))
            self.average([optimizer])
            if not isinstance(loss, Tensor):
                return loss
            share = self._state.current.share
            return self._strategy.mean(loss.detach() * share if share else torch.zeros_like(loss))

        return run_closure

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        """Average the gradients of these optimizers, and divide them by the loss scale."""
        self.average(optimizers)
        if self._strategy.precision.scaler is not None:
            for optimizer in optimizers:
                self._strategy.unscale(optimizer)

    def owners(self, parameters: Iterable[Tensor]) -> list[Optimizer]:
        """The optimizers of these parameters, if their gradients must be averaged or unscaled before they are read."""
        if self._strategy.precision.scaler is None and not (self._state.current.uneven or self.averages_in_step):
            return []
        ids = {id(parameter) for parameter in parameters}
        return [one for one in self._prepared.stepped if any(id(p) in ids for p in parameters_of(one))]


class StepChecks:
    """Finds what would silently go wrong in an optimizer step: parameters of replaced layers, gradients of `loss.backward()`.

    Attributes:
        models: The modules whose parameters are trained: the prepared ones, or that of a `Trainer`.
        checked: Ids of the optimizers whose parameters have been checked.
    """

    def __init__(self, strategy: Strategy, state: AccumulationState, gradients: Gradients, prepared: PreparedObjects) -> None:
        self._strategy = strategy
        self._state = state
        self._gradients = gradients
        self._prepared = prepared
        self.models: Sequence[nn.Module] = prepared.models
        self.checked: set[int] = set()
        self._passes_at_step: dict[int, int] = {}  # Id of an optimizer → number of backward passes at its last step.
        self._hooks = ExitStack()  # Hooks of the optimizers that were passed to prepare.

    def train(self, module: nn.Module) -> None:
        """From now on the optimizers train the parameters of this module."""
        self.models = (module,)
        self._prepared.known.clear()
        self.note_prepared()

    def close(self) -> None:
        """Forget all optimizers, and remove the hooks of those that were passed to `prepare`."""
        self.checked.clear()
        self._passes_at_step.clear()
        self._hooks.close()

    def note_prepared(self) -> None:
        """Remember which parameters of the optimizers the models have: one that is missing later has been replaced."""
        self._prepared.known.note(self._prepared.torch_optimizers, parameter_names(self.models))

    def watch(self, optimizer: Optimizer, accelerator: Accelerator) -> None:
        """Refuse `step` of an optimizer that was passed to `prepare`, if only `step` of what it returned is right."""
        # The user's optimizer must not keep an accelerator alive.
        to_checks, to_accelerator = weakref.ref(self), weakref.ref(accelerator)

        def refuse(optimizer: Optimizer) -> None:
            checks, accelerator = to_checks(), to_accelerator()
            if checks is not None and accelerator is not None and not accelerator.updating and checks.are_needed:
                raise ConfigurationError(
                    f"{type(optimizer).__name__}.step() was called on the optimizer that was passed to prepare, which ignores "
                    "gradient accumulation, the loss scale and the strategy. Use what prepare returned: model, optimizer = "
                    "accelerator.prepare(model, optimizer)"
                )

        self._hooks.callback(optimizer.register_step_pre_hook(StepGuard(refuse)).remove)

    @property
    def are_needed(self) -> bool:
        """Whether an optimizer step needs more than torch's own `loss.backward()` and `optimizer.step()`."""
        strategy = self._strategy
        return (
            self._state.size > 1
            or strategy.precision.scaler is not None
            or strategy.accumulates_in_engine
            or self._gradients.averages_in_step
        )

    def check_backward(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
        """Gradients of `loss.backward()` are not scaled to their share of the window, and ZeRO does not see them."""
        before = self._passes_at_step.get(id(optimizer), 0)
        self._passes_at_step[id(optimizer)] = self._state.backward_passes
        if closure is not None or before < self._state.backward_passes or not self.are_needed:
            return
        # without gradients a step changes nothing; under ZeRO they cannot be seen
        if self._strategy.accumulates_in_engine or any(p.grad is not None for p in parameters_of(optimizer)):
            raise ConfigurationError(
                "step: there has been no accelerator.backward(loss) since the last step of this optimizer. Call "
                "accelerator.backward(loss) instead of loss.backward(): it scales the loss and passes the gradients to the "
                "strategy. If a batch has nothing to learn from: accelerator.backward(None)."
            )

    def check_parameters(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that trains parameters of a layer that has been replaced."""
        self.checked.add(id(optimizer))
        for one in optimizers_in(optimizer):
            self._check_parameters(one)

    def _check_parameters(self, optimizer: Optimizer) -> None:
        self._prepared.known.note_trained(optimizer)
        foreign = foreign_parameters(optimizer, self.models)
        if foreign:
            replaced = self._prepared.known.replaced(optimizer, parameter_names(self.models))
            foreign = [p for p in foreign if id(p) not in replaced]
        if not foreign:
            return
        own_loop = self._state.own_loop
        if own_loop:  # your own training loop may also train what no prepared model has, if it does not save that
            mixed = len(foreign) < len(parameters_of(optimizer)) and any(isinstance(p, nn.Parameter) for p in foreign)
            if not mixed and not any(p in self._prepared.known for p in foreign):
                return
        name, shape = type(optimizer).__name__, shape_of(foreign[0])
        raise OptimizerError(
            f"{name} trains {quantity(len(foreign), 'parameter')} that the model does not have (the first of shape {shape}): "
            "no output of the model depends on them, and no checkpoint can hold their state. They belong to a layer that was "
            "replaced after the optimizer was created, or to another model. Expected an optimizer of the model's parameters. "
            f"{_FIX[own_loop].format(name)} To change a layer later, copy into it: "
            "model.layer.load_state_dict(new.state_dict())"
        )


def plain_verbs(accelerator: Accelerator, checked: Set[int]) -> tuple[Callable[..., None], Callable[..., bool]]:
    """`backward` and `step` of an accelerator, as the loop of a `Trainer` calls them.

    In one process, in plain precision and with a strategy that overrides nothing of it, these are shorter functions with the
    same effect: a step of a small network takes no longer than a few dozen calls in Python. They call the accelerator where
    anything is unusual.

    Args:
        accelerator: The accelerator.
        checked: Ids of the optimizers whose parameters have been checked.
    """
    state, strategy = accelerator.accumulation, accelerator.strategy
    precision = strategy.precision
    overridden = [is_overridden(strategy, name, Strategy) for name in ("backward", "optimizer_step")]
    overridden += [is_overridden(precision, name, Precision) for name in ("scale", "optimizer_step")]
    plain = precision.scaler is None and precision.autocast_dtype is None and strategy.world.size == 1
    if any(overridden) or not plain or state.own_loop or accelerator.before_step is not None:
        return accelerator.backward, accelerator.step
    run_backward: Callable[..., None] = Tensor.backward

    def backward(loss: Tensor | None, **kwargs: Any) -> None:
        micro = state.current
        if loss is None or kwargs or micro.share != 1.0:
            accelerator.backward(loss, **kwargs)
            return
        run_backward(loss)
        accelerator.step_pending = micro.last

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        micro = state.current
        unusual = closure is not None or accelerator.skip_requested or micro.empty or not micro.last
        if unusual or id(optimizer) not in checked:
            return accelerator.step(optimizer, closure)
        accelerator.updating = True  # stays so if an error leaves the parameters between two steps
        step_of(optimizer)()
        accelerator.updating = accelerator.step_pending = False
        accelerator.note_update(optimizer, True)
        return True

    return backward, step


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]
