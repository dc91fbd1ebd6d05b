"""Unit tests of `AccumulationState`, without a training loop, a loader or a strategy."""

from __future__ import annotations

import pytest

from trainkit.accelerator.gradients import AccumulationState
from trainkit.data.micro_batches import WindowEntry
from trainkit.micro_batch import WHOLE_WINDOW, MicroBatch, MicroBatchKind


def own(size: int) -> tuple[AccumulationState, list[MicroBatch]]:
    """An `AccumulationState` of your own training loop, and the list of micro-batches that it passes to the strategy."""
    told: list[MicroBatch] = []
    state = AccumulationState(size, told.append)
    state.own_loop = True
    return state, told


def window(size: int, begin: int = 0) -> list[MicroBatch]:
    """The micro-batches of one accumulation window on one rank, all of equal weight."""
    return [
        MicroBatch(None, begin + i, i == 0, i == size - 1, 1 / size, entry=WindowEntry(begin, 1 / size, (size - i) / size, 1.0))
        for i in range(size)
    ]


def test_outside_of_a_loop_each_step_is_due() -> None:
    """Before any micro-batch, each backward is a whole accumulation window, and `zero_grad` clears."""
    state, told = own(4)
    assert (state.current, told, state.clears) == (WHOLE_WINDOW, [], True)


def test_a_trainers_micro_batch_becomes_current_as_it_is() -> None:
    told: list[MicroBatch] = []
    state = AccumulationState(2, told.append)
    micros = window(2)
    for micro in micros:
        state.begin(micro)
        assert state.current is micro
    assert told == micros
    assert not state.collects()


def test_a_micro_batch_is_pending_until_accumulate_enters_it() -> None:
    state, told = own(2)
    assert state.collects()
    seen = []
    for micro in window(2):
        state.receive(micro)
        assert state.pending is micro
        before = state.current
        state.enter(1)
        state.start_body()
        seen.append((before.last, before.share, state.current.first, state.current.last, state.current.share))
    assert seen == [(True, 0.5, True, False, 0.5), (False, 0.5, False, True, 0.5)]
    assert (state.open, state.entered, state.pending) == (0, 2, None)
    assert told[-1] is state.current


def test_shares_add_up_to_one_where_a_loop_enters_in_the_middle() -> None:
    state, _ = own(4)
    shares = []
    for micro in window(4)[1:]:
        state.receive(micro)
        state.enter(1)
        shares.append(state.current.share)
    assert shares == pytest.approx([1 / 3] * 3)
    assert state.current.last


def test_a_window_that_is_left_open_is_completed() -> None:
    state, _ = own(4)
    for micro in window(4)[:2]:
        state.receive(micro)
        state.enter(1)
    state.leave()
    assert (state.open, state.current.first, state.current.last) == (2, False, False)
    for micro in window(2):
        state.receive(micro)
        state.enter(1)
    assert (state.open, state.current.last, state.current.share) == (0, True, pytest.approx(0.25))


def test_a_forgotten_window_is_not_completed() -> None:
    """After `forget_window`, the next micro-batch begins a new window."""
    state, _ = own(4)
    state.receive(window(4)[0])
    state.enter(1)
    state.forget_window()
    assert (state.open, state.current.first, state.current.last) == (0, True, True)


def test_an_inner_loader_leaves_the_state_as_it_was() -> None:
    state, told = own(2)
    state.receive(window(2)[0])
    state.enter(1)
    before = state.snapshot()
    state.receive(window(2)[1])
    state.end_loader()
    state.restore(before)
    assert state.snapshot() == before
    assert told[-1] == state.current


@pytest.mark.parametrize("size", [1, 2, 5])
def test_micro_batches_of_an_unprepared_loader_are_counted(size: int) -> None:
    state, _ = own(size)
    found = []
    for _ in range(2 * size):
        state.call((), None, lambda: None)
        state.start_body()
        found.append((state.current.first, state.current.last, state.current.share))
    assert found[:size] == found[size:] == [(i == 0, i == size - 1, 1 / size) for i in range(size)]
    state.restore_counts([(0, 1)])
    state.call((), None, lambda: None)
    assert state.current.first is (size == 1)
    assert state.counts() == [(0, 2)]


def test_by_hand_a_loss_is_divided_by_the_size_of_a_window() -> None:
    """`note_by_hand`, for `backward` outside of `accumulate`, returns True the first time only."""
    state, _ = own(4)
    assert state.note_by_hand()
    assert not state.note_by_hand()
    assert state.current.share == 0.25


def test_no_sync_holds_the_step() -> None:
    """Inside `no_sync` no optimizer step is due; after it, one is due again."""
    state, told = own(1)
    with state.suspend_steps():
        assert not state.current.last
        assert not state.clears or state.fresh
    assert [micro.last for micro in told] == [False, True]


def test_after_the_last_micro_batch_of_a_loader_no_padding_is_current() -> None:
    state, _ = own(1)
    state.begin(MicroBatch("batch", 0, True, True, 0.0, MicroBatchKind.PADDING, uneven=True))
    state.end_loader()
    assert (state.current.kind, state.current.uneven, state.current.batch) == (MicroBatchKind.DATA, False, None)


def test_gradients_are_cleared_before_the_first_and_after_the_last_backward_of_a_window() -> None:
    state, _ = own(2)
    found = []
    for micro in window(2):
        state.receive(micro)
        state.enter(1)
        state.start_body()
        found.append(state.clears)
        state.note_backward()
        found.append(state.clears)
    assert found == [True, False, False, True]


def test_weights_tell_that_a_window_is_empty() -> None:
    """`mark_empty` marks a window whose total weight is 0; `reset` returns to the initial state."""
    state, _ = own(1)
    state.mark_empty(True)
    assert state.current.empty
    state.reset()
    assert state.current is WHOLE_WINDOW
