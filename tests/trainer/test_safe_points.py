"""`SafePoints`: actions are requested, agreed on by all ranks, and carried out. There is no Trainer, and ranks are threads."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
from helpers.patience import PATIENCE
from helpers.runs.bare import make_run
from helpers.worlds.threaded import ThreadStrategy, run_threads

from trainkit.distributed.world import World
from trainkit.errors import ConfigurationError, Preempted
from trainkit.trainer.progress import Stop
from trainkit.trainer.run import Run
from trainkit.trainer.safe_points import SafePoints, step_interval


def safe_points(run: Run) -> tuple[SafePoints, list[bool]]:
    """A `SafePoints`, and the list of its reports of failed saves."""
    reports: list[bool] = []
    return SafePoints(run, reports.append, lambda: None), reports


def steps(points: SafePoints, run: Run, number: int) -> None:
    """Make optimizer steps, each followed by its safe point as in the training loop."""
    for _ in range(number):
        run.progress.global_step += 1
        points.agree()
        if run.progress.safe_point_due or run.progress.global_step >= run.progress.next_save_step:
            points.carry_out()


# --------------------------------------------------------------------------------------------------------------- requests


def test_a_request_is_carried_out_once_and_at_the_next_safe_point() -> None:
    run, done = make_run(), []
    points, _ = safe_points(run)
    points.request(lambda: done.append(run.progress.global_step))
    assert (run.progress.safe_point_due, done) == (True, [])
    steps(points, run, 3)
    assert (run.progress.safe_point_due, done) == (False, [1])


def test_what_is_requested_while_requests_are_carried_out_waits_for_the_next_safe_point() -> None:
    run, done = make_run(), []
    points, _ = safe_points(run)
    points.request(lambda: points.request(lambda: done.append(run.progress.global_step)))
    steps(points, run, 3)
    assert done == [2]


@pytest.mark.parametrize(
    "first, expected", [(0, [(2, 2), (3, 3), (4, 2), (6, 2), (6, 3)]), (2, [(3, 3), (4, 2), (6, 2), (6, 3)])]
)
def test_every_n_steps(first: int, expected: list[tuple[int, int]]) -> None:
    """In a fit that begins at step `first`, nothing is due at that step."""
    run, done = make_run(), []
    run.progress.global_step = run.progress.first_step = first
    points, _ = safe_points(run)
    for n in (2, 3):
        points.every_n_steps(n, lambda n=n: done.append((run.progress.global_step, n)))  # type: ignore[misc]
    points.carry_out()
    steps(points, run, 7 - first)
    assert done == expected
    assert run.progress.next_save_step == 8


def test_what_acts_after_each_step_may_end_training_with_it() -> None:
    """The loop calls it before the step is validated; closing forgets it."""
    run, done = make_run(), []
    points, _ = safe_points(run)
    points.after_each_step(lambda: done.append(run.progress.global_step))
    points.after_each_step(points.stop_now)
    for act in points.step_acts:
        act()
    assert done == [0]
    assert (run.progress.should_stop, run.progress.stop) == (True, Stop.STOPPING)
    points.agree()
    assert run.progress.stop is Stop.STOPPING
    points.close()
    assert points.step_acts == []


def test_a_timer_fires_again_after_each_interval() -> None:
    run = make_run()
    points, _ = safe_points(run)
    fired = 0

    def act() -> None:
        nonlocal fired
        fired += 1

    points.every(timedelta(milliseconds=5), act)
    woken = threading.Event()
    run.request_safe_point = woken.set  # type: ignore[method-assign]
    for expected in (1, 2):
        assert woken.wait(PATIENCE)
        woken.clear()
        points.carry_out()
        assert fired == expected
    points.close()


def test_closing_forgets_everything() -> None:
    run, done = make_run(), []
    points, _ = safe_points(run)
    points.request(lambda: done.append("request"))
    points.every_n_steps(1, lambda: done.append("steps"))
    points.every(timedelta(days=1), lambda: done.append("time"))
    (timer,) = points._timers.values()
    points.close()
    assert not timer.is_alive()  # a thread that is only told to end would still be counted after the run
    steps(points, run, 2)
    points.carry_out()
    assert done == []


def test_failed_saves_are_reported_at_the_next_safe_point() -> None:
    run = make_run()
    points, reports = safe_points(run)
    points.save_failed()
    assert (run.progress.safe_point_due, reports) == (True, [])
    steps(points, run, 2)
    assert reports == [False], "polled; nothing needs to be waited for"


def test_complete_saves_are_reported_at_the_next_safe_point() -> None:
    run, reports = make_run(), []
    points = SafePoints(run, lambda wait: None, lambda: reports.append(run.progress.global_step))
    points.note_save()
    steps(points, run, 2)
    assert reports == [1]


# ---------------------------------------------------------------------------------------------------------------- signals


def test_a_signal_ends_the_fit_after_what_was_requested() -> None:
    run, done = make_run(), []
    points, _ = safe_points(run)
    points.request(lambda: done.append("saved"))
    run.signals.received = signal.SIGTERM
    run.progress.global_step = 7
    with pytest.raises(Preempted, match="SIGTERM at step 7"):
        points.carry_out()
    assert done == ["saved"]


def test_without_a_signal_nothing_ends() -> None:
    run = make_run()
    safe_points(run)[0].obey_signal()


# --------------------------------------------------------------------------------------------------------------- stopping


def test_a_stop_request_acts_one_step_later() -> None:
    """This is the same as on several ranks, where the other ranks learn about it one step later."""
    run = make_run()
    points, _ = safe_points(run)
    run.progress.should_stop = True
    steps(points, run, 1)
    assert run.progress.stop is Stop.REQUESTED
    steps(points, run, 1)
    assert run.progress.stop is Stop.STOPPING


def test_a_stop_request_that_is_withdrawn_does_not_act() -> None:
    run = make_run(min_steps=3)
    points, _ = safe_points(run)
    run.progress.should_stop = True
    steps(points, run, 1)
    run.progress.should_stop = False
    steps(points, run, 1)
    assert run.progress.stop is Stop.RUNNING


def test_a_stop_request_waits_for_min_steps() -> None:
    run = make_run(min_steps=3)
    points, _ = safe_points(run)
    run.progress.should_stop = True
    seen = []
    for _ in range(4):
        steps(points, run, 1)
        seen.append(run.progress.stop)
    assert seen == [Stop.REQUESTED, Stop.REQUESTED, Stop.STOPPING, Stop.STOPPING]


# ---------------------------------------------------------------------------------------------------------- several ranks


class Reduction:
    def __init__(self, found: list[int]) -> None:
        self._found = found

    def wait(self) -> list[int]:
        return self._found


def ranks(work: Any) -> list[Any]:
    """The results of `work(points, run, reports)` on two ranks."""

    def on(world: World) -> Any:
        run = make_run(strategy=ThreadStrategy(world))
        world.begin_largest = lambda values: Reduction(  # type: ignore[attr-defined, method-assign]
            [max(own) for own in zip(*world.exchange([int(value) for value in values]), strict=True)]
        )
        points, reports = safe_points(run)
        return work(points, run, reports)

    return run_threads(2, on)


def test_a_stop_that_one_rank_requests_acts_on_both_after_the_same_step() -> None:
    def work(points: SafePoints, run: Run, reports: list[bool]) -> list[Stop]:
        seen = []
        for step in range(4):
            run.progress.should_stop = step >= 1 and run.strategy.rank == 1
            steps(points, run, 1)
            seen.append(run.progress.stop)
        return seen

    first, second = ranks(work)
    assert first == second == [Stop.RUNNING, Stop.RUNNING, Stop.STOPPING, Stop.STOPPING]


@pytest.mark.parametrize(
    "ranks, steps_between", [(1, 1), (2, 1), (64, 1), (65, 2), (128, 2), (129, 3), (512, 4), (1024, 5), (4096, 7)]
)
def test_how_often_ranks_exchange_depends_on_their_number_only(ranks: int, steps_between: int) -> None:
    assert step_interval(ranks) == steps_between


@pytest.mark.parametrize("accumulation", [1, 2])
def test_many_ranks_act_one_step_after_the_next_exchange(monkeypatch: pytest.MonkeyPatch, accumulation: int) -> None:
    """Requested in step 4, exchanged in step 6, acts in step 7; in a resumed run also, since only the position counts."""
    monkeypatch.setattr("trainkit.trainer.safe_points.step_interval", lambda ranks: 3)

    def from_step(first: int) -> Any:
        def work(points: SafePoints, run: Run, reports: list[bool]) -> list[tuple[int, Stop]]:
            seen, sent, begin = [], [], run.strategy.world.begin_largest
            run.strategy.world.begin_largest = lambda values: (sent.append(step), begin(values))[1]  # type: ignore[method-assign]
            run.accumulation = accumulation
            for step in range(first, 9):
                run.progress.batch_idx = accumulation * step - 1
                run.progress.should_stop = step >= 4 and run.strategy.rank == 1
                steps(points, run, 1)
                seen.append((step, run.progress.stop))
            assert sent == [3, 6][first > 3 :]
            return seen

        return work

    whole, other = ranks(from_step(1))
    assert whole == other
    assert whole == [(step, Stop.STOPPING if step >= 7 else Stop.RUNNING) for step in range(1, 9)]
    assert ranks(from_step(5))[0] == whole[4:]


def test_at_once_both_ranks_know_of_a_stop_request() -> None:
    def work(points: SafePoints, run: Run, reports: list[bool]) -> bool:
        run.progress.should_stop = run.strategy.rank == 0
        points.agree_now()
        return run.progress.should_stop

    assert ranks(work) == [True, True]


def test_a_signal_to_one_rank_ends_both_after_the_same_step() -> None:
    def work(points: SafePoints, run: Run, reports: list[bool]) -> str:
        if run.strategy.rank == 1:
            run.signals.received = signal.SIGUSR1
        with pytest.raises(Preempted) as ended:
            steps(points, run, 5)
        return str(ended.value)

    assert ranks(work) == ["SIGUSR1 at step 2"] * 2


def test_a_save_that_failed_on_the_main_process_is_waited_for_on_the_other() -> None:
    def work(points: SafePoints, run: Run, reports: list[bool]) -> list[bool]:
        if run.strategy.rank == 0:
            points.save_failed()
        steps(points, run, 3)
        return reports

    assert ranks(work) == [[True], [True]]


def test_ranks_with_different_numbers_of_optimizer_steps_are_an_error() -> None:
    def work(points: SafePoints, run: Run, reports: list[bool]) -> str:
        run.accelerator.updates = 3 + run.strategy.rank
        with pytest.raises(ConfigurationError, match="skip_update") as raised:
            points.agree_now()
        return str(raised.value)

    first, second = ranks(work)
    assert first == second
    assert "4 optimizer steps" in first
    assert "another one 3" in first


def test_the_ranks_exchange_once_a_step() -> None:
    def work(points: SafePoints, run: Run, reports: list[bool]) -> int:
        sent, begin = [], run.strategy.world.begin_largest
        run.strategy.world.begin_largest = lambda values: (sent.append(values), begin(values))[1]  # type: ignore[method-assign]
        steps(points, run, 5)
        return len(sent)

    assert ranks(work) == [5, 5]
